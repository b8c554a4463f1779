"""`shardwell run`: starts the ranks of a script."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from shardwell.cli.failures import Restarts, exit_like_ranks
from shardwell.cli.launch import LaunchTopology, launch
from shardwell.cli.rank import LOCAL_RANK_ARGUMENT
from shardwell.errors import ShardwellError
from shardwell.spans import PROFILE_FOLDER


def run(
    script: Annotated[
        list[str],
        typer.Argument(metavar="SCRIPT [ARGS]...", help="The script and its own arguments.", show_default=False),
    ],
    num_ranks: Annotated[
        int | None, typer.Option("-n", "--ranks", min=1, help="Ranks on this node; one per GPU, or one, if not given.")
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module.")] = False,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="How often all ranks may be started again after one failed.")
    ] = 0,
    min_ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Go on with fewer ranks, down to so many, if restarts keep failing early. One node."),
    ] = None,
    min_uptime: Annotated[
        float, typer.Option(min=0, help="Seconds; two failures in a row before that mean one rank less.")
    ] = 30.0,
    nnodes: Annotated[
        str, typer.Option(metavar="N or MIN:MAX", help="Nodes; run the same command once on each.")
    ] = "1",
    master_addr: Annotated[str, typer.Option(help="Host name of the node where the others meet.")] = "",
    master_port: Annotated[int, typer.Option(min=1, max=65535, help="A free port on that node.")] = 29500,
    join_time: Annotated[int, typer.Option(min=1, help="Seconds to wait for more nodes once there are MIN.")] = 30,
    as_deepspeed: Annotated[
        bool, typer.Option("--as-deepspeed", help="In the ranks, `import deepspeed` means shardwell.")
    ] = False,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Record two steps of each rank, as a page, a picture and a trace in DIR."),
    ] = None,
    pass_local_rank: Annotated[
        bool, typer.Option("--pass-local-rank", help="Pass --local_rank=N to SCRIPT, as DeepSpeed's launcher does.")
    ] = False,
) -> None:
    """Run SCRIPT on several ranks. When one fails, all are ended, and the first failing rank's error is printed.

    With --max-restarts they are restarted; a script that calls engine.load_checkpoint at its start resumes.
    """
    fewest, most = parse_nodes(nnodes)
    local_world_size = num_ranks or _one_per_gpu()
    _check(script[0], module, most, master_addr, local_world_size, min_ranks)
    place = LaunchTopology(local_world_size, fewest, most, master_addr, master_port, join_time)
    if as_deepspeed:
        from shardwell.compat.deepspeed_api.children import inherit

        inherit()
    if profile is not None:
        os.environ[PROFILE_FOLDER] = str(profile.resolve())
    if pass_local_rank:
        os.environ[LOCAL_RANK_ARGUMENT] = "1"
    with exit_like_ranks():
        launch(["-m", *script] if module else script, place, Restarts(max_restarts, min_ranks, min_uptime))


def parse_nodes(text: str) -> tuple[int, int]:
    """Return the smallest and the largest number of nodes, from `2` or `1:4`."""
    parts = text.split(":")
    numbers = [int(part) for part in parts if part.isascii() and part.isdigit()]
    if len(numbers) != len(parts) or len(parts) > 2 or not 1 <= numbers[0] <= numbers[-1]:
        raise ShardwellError(f"--nnodes {text}: expected a number of nodes such as 2, or the least and the most: 1:4")
    return numbers[0], numbers[-1]


def _check(
    script: str, module: bool, max_nodes: int, master_addr: str, local_world_size: int, min_ranks: int | None
) -> None:
    if not module and not Path(script).is_file():
        raise ShardwellError(f"there is no script '{script}'. To run an installed module: shardwell run -m {script}")
    if max_nodes > 1 and not master_addr:
        raise ShardwellError(f"{max_nodes} nodes need to know where to meet: pass --master-addr, the host name of one")
    if min_ranks is not None and max_nodes > 1:
        raise ShardwellError("--min-ranks is for one node; for several nodes use --nnodes MIN:MAX")
    if min_ranks is not None and min_ranks > local_world_size:
        raise ShardwellError(f"--min-ranks {min_ranks} is more than the {local_world_size} rank(s) of this node")


def _one_per_gpu() -> int:
    from shardwell.memory.device import num_gpus

    return max(1, num_gpus())
