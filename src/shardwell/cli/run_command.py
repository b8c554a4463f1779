"""`shardwell run`: starts the ranks of a script."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwell.cli.launch import Place, ending_as_the_ranks_do, launch
from shardwell.errors import ShardwellError


def run(
    script: Annotated[
        list[str],
        typer.Argument(metavar="SCRIPT [ARGS]...", help="The script and its own arguments.", show_default=False),
    ],
    num_ranks: Annotated[
        int | None, typer.Option("-n", "--ranks", min=1, help="Ranks on this node.  [default: one per GPU, or one]")
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module.")] = False,
    nnodes: Annotated[int, typer.Option(min=1, help="Nodes; run this command once on each.")] = 1,
    node_rank: Annotated[int, typer.Option(min=0, help="Which of the nodes this is.")] = 0,
    master_addr: Annotated[str, typer.Option(help="Host name of node 0, for more than one node.")] = "",
    master_port: Annotated[int, typer.Option(min=1, max=65535, help="A free port on node 0.")] = 29500,
) -> None:
    """Run SCRIPT on several ranks. When one fails, all end, and the first failing rank's error is printed."""
    _check(script[0], module, nnodes, node_rank, master_addr)
    place = Place(num_ranks or _one_per_gpu(), nnodes, node_rank, master_addr, master_port)
    with ending_as_the_ranks_do():
        launch(["-m", *script] if module else script, place)


def _check(script: str, module: bool, nnodes: int, node_rank: int, master_addr: str) -> None:
    if not module and not Path(script).is_file():
        raise ShardwellError(f"there is no script '{script}'. To run an installed module: shardwell run -m {script}")
    if nnodes > 1 and not master_addr:
        raise ShardwellError(f"{nnodes} nodes need to know where to meet: pass --master-addr, the host name of node 0")
    if node_rank >= nnodes:
        raise ShardwellError(f"--node-rank {node_rank} does not exist among {nnodes} node(s): they count from 0")


def _one_per_gpu() -> int:
    import torch

    return max(1, torch.cuda.device_count())
