"""`shardwell run`: starts the ranks of a script."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from shardwell.cli.failures import Restarts, exit_like_ranks
from shardwell.cli.hosts import SSH, read_hosts, run_on_hosts
from shardwell.cli.launch import LaunchTopology, launch
from shardwell.cli.rank import LOCAL_RANK_ARGUMENT
from shardwell.errors import ShardwellError
from shardwell.spans import PROFILE_FOLDER

_MOST_RANKS = 4096  # on one node: each is a process


def run(
    context: typer.Context,
    script: Annotated[
        list[str],
        typer.Argument(metavar="SCRIPT [ARGS]...", help="The script and its own arguments.", show_default=False),
    ],
    num_ranks: Annotated[
        int | None,
        typer.Option(
            "-n", "--ranks", min=1, max=_MOST_RANKS, help="Ranks on this node; one per GPU, or one, if not given."
        ),
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
    hostfile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Start the ranks of all hosts over ssh. Lines of FILE: host slots=N"),
    ] = None,
    ssh: Annotated[str, typer.Option(metavar="PROGRAM", help="The ssh of --hostfile, with options.")] = SSH,
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
    if hostfile is not None:
        raise typer.Exit(_on_hosts(context, hostfile))
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


_ABOUT_HOSTS = ("script", "hostfile", "ssh", "num_ranks", "nnodes", "master_addr")


def _on_hosts(context: typer.Context, hostfile: Path) -> int:
    """Start this command on every host of a file, with the options that are not about hosts; return the exit code."""
    given = context.params
    if given["num_ranks"] is not None or given["nnodes"] != "1":
        option = "-n" if given["num_ranks"] is not None else "--nnodes"
        raise ShardwellError(f"{option} and --hostfile both say where ranks run: give one of them")
    hosts, options = read_hosts(hostfile), []
    for one in context.command.params:
        value = given.get(one.name or "")
        if one.name not in _ABOUT_HOSTS and value not in (None, False) and value != one.default:
            options += [one.opts[0]] if value is True else [one.opts[0], str(value)]
    if len(hosts) > 1:
        options += ["--nnodes", str(len(hosts)), "--master-addr", given["master_addr"] or hosts[0].address]
    return run_on_hosts(hosts, options, given["script"], given["ssh"])


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
    from shardwell.memory.local_gpus import num_gpus

    return max(1, num_gpus())
