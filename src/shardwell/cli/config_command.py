"""`shardwell config FILE`: shows the effective configuration, or the problems of the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from shardwell.config import load, remarks, table, told
from shardwell.errors import ConfigError

_WIDTH_IN_A_PIPE = 160  # wide enough for the longest key; a terminal has its own width


def show(
    file: Annotated[Path, typer.Argument(help="The JSON configuration file.")],
    world_size: Annotated[
        int | None, typer.Option("--world-size", min=1, help="Ranks to resolve the batch sizes for.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the effective configuration as JSON.")] = False,
) -> None:
    """Show every value in force with its origin, and notes about keys that have no effect or another meaning."""
    try:
        config = load(file, world_size=world_size)
    except ConfigError as error:
        message = Text.assemble(("error: ", "bold red"), str(error))
        Console(stderr=True).print(message, soft_wrap=True)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps(config.to_dict(), indent=2))
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH_IN_A_PIPE)
    console.print(table(config))
    hurting, rest = told(remarks(config))
    for sentence in hurting:
        console.print(Text.assemble(("note: ", "bold yellow"), sentence))
    for sentence in rest:
        console.print(Text.assemble(("note: ", "bold"), sentence))
