"""What the commands on checkpoints share: opening, verifying, progress, and where they print."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn
from rich.text import Text

from shardwell.errors import printable

if TYPE_CHECKING:
    from shardwell.checkpoint.sources import Source
    from shardwell.checkpoint.sources.reading import Progress as Told

_WIDTH_IN_A_PIPE = 160

CheckpointPath = Annotated[
    Path, typer.Argument(metavar="PATH", help="A checkpoint of any kind, or a folder of checkpoints.")
]
CheckpointTag = Annotated[str | None, typer.Option("--tag", help="Which one of a folder; without it, the latest.")]


def shown(text: str, style: str = "") -> Text:
    """Return text with names from files as one line that can do nothing to a terminal."""
    return Text(printable(text, one_line=True), style=style)


@contextmanager
def opened(path: Path, tag: str | None) -> Iterator[Source]:
    from shardwell.checkpoint.sources import open_source

    with printing_warnings():
        source = open_source(path, tag)
    try:
        yield source
    finally:
        source.close()


def check_own(path: Path, tag: str | None) -> str | None:
    """End the command if a checkpoint of shardwell's own is damaged; return None for any other checkpoint."""
    from shardwell.checkpoint.manifest import read_manifest
    from shardwell.checkpoint.sources import locate_own
    from shardwell.checkpoint.verify import damages

    own = locate_own(path, tag)
    if own is None:
        return None
    where = own[0].path(own[1])
    manifest = read_manifest(where)
    with bar("verify", sum(record.size for record in manifest.files.values())) as told:
        end_if_damaged(list(damages(where, manifest, told)))
    return f"{where}: {len(manifest.tensors)} tensors in {len(manifest.files)} files match their checksums"


def end_if_damaged(found: list[str]) -> None:
    for one in found:
        Console(stderr=True).print(shown(f"damaged: {one}", "red"), soft_wrap=True)
    if found:
        raise typer.Exit(1)


@contextmanager
def printing_warnings() -> Iterator[None]:
    """Print each warning once, on its own line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    for message in dict.fromkeys(str(one.message) for one in caught):
        Console(stderr=True).print(shown(f"warning: {message}", "yellow"), soft_wrap=True)


@contextmanager
def bar(what: str, total: int) -> Iterator[Told]:
    """Return a progress bar on stderr, if that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda num_bytes: progress.advance(task, num_bytes)


def num_bytes(source: Source, prefix: str = "") -> int:
    return sum(one.numel * one.dtype.itemsize for name, one in source.tensors.items() if name.startswith(prefix))


def console_of_stdout() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH_IN_A_PIPE)
