"""`shardwell checkpoint`: inspects checkpoints of any kind, and verifies, converts, compares and removes them."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from shardwell.errors import CheckpointError, ShardwellError

if TYPE_CHECKING:
    from shardwell.checkpoint.compare import Comparison
    from shardwell.checkpoint.sources import Source
    from shardwell.checkpoint.sources.reading import Progress as Told

_WIDTH_IN_A_PIPE = 160
_LEFTOVER_AGE = 3600.0  # seconds without a change after which a directory is not being written
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}

app = typer.Typer(
    help="Look into checkpoints, check, convert, compare and remove them.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class ExportFormat(str, Enum):
    safetensors = "safetensors"
    dcp = "dcp"
    shardwell = "shardwell"


class ExportDtype(str, Enum):
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


_Where = Annotated[Path, typer.Argument(metavar="PATH", help="A checkpoint of any kind, or a folder of checkpoints.")]
_Tag = Annotated[str | None, typer.Option("--tag", help="Which one of a folder; without it, the latest.")]


@app.command("inspect")
def inspect(
    path: _Where,
    tag: _Tag = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    config: Annotated[bool, typer.Option("--config", help="Print the configuration it was trained with.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Show what a checkpoint holds."""
    from shardwell.memory.statistics import human

    with _opened(path, tag) as source:
        facts = _facts(path, source)
        listed = [
            (name, str(one.dtype).removeprefix("torch."), list(one.shape), one.numel * one.dtype.itemsize)
            for name, one in source.tensors.items()
        ]
        values = {key: value for key, value in source.values.items() if not key.startswith("scalar/")}
    if as_json:
        keys = ("name", "dtype", "shape", "bytes")
        content = {**facts, "values": values, "tensor_list": [dict(zip(keys, one, strict=True)) for one in listed]}
        typer.echo(json.dumps(content, indent=2, default=str))
        return
    console = _console()
    table = Table(title=Text(facts["path"]), show_header=False)
    for key, value in facts.items():
        if key != "path" and value not in (None, []):
            table.add_row(key.replace("_", " "), Text(_words(key, value)))
    console.print(table)
    if tensors:
        table = Table("tensor", "dtype", "shape", "bytes")
        for name, dtype, shape, num_bytes in listed:
            table.add_row(Text(name), dtype, "×".join(map(str, shape)) or "·", human(num_bytes))
        console.print(table)
    if config:
        typer.echo(json.dumps(values.get("config"), indent=2))


@app.command("verify")
def verify(path: _Where, tag: _Tag = None) -> None:
    """Read every byte and compare it with its checksum. Exit code 1 if anything is damaged; all damages are listed."""
    from shardwell.checkpoint.sources import kind_of
    from shardwell.checkpoint.verify import unreadable

    good = _check_own(path, tag)
    if good is None:
        with _opened(path, tag) as source:
            with _bar("verify", _bytes(source)) as told:
                _end_if_damaged(list(unreadable(source, told)))
            good = f"{path}: {len(source.tensors)} tensors can be read; {kind_of(source)} has no checksums"
    _console().print(Text(good), soft_wrap=True)


@app.command("export")
def export(
    path: _Where,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The directory to write; it must not exist, or be empty.")],
    tag: _Tag = None,
    form: Annotated[
        ExportFormat,
        typer.Option(
            "--format",
            help="safetensors: for from_pretrained; dcp: torch.distributed.checkpoint; shardwell: shardwell's own.",
        ),
    ] = ExportFormat.safetensors,
    dtype: Annotated[
        ExportDtype | None, typer.Option(help="Of floating tensors, for safetensors; without it, as stored.")
    ] = None,
    max_file_size: Annotated[str, typer.Option(help="Larger models are split over several files.")] = "5GB",
    check: Annotated[bool, typer.Option("--verify/--no-verify", help="Compare with the checksums first.")] = True,
    merge: Annotated[
        bool, typer.Option("--merge", help="Adapters of peft become a part of the base model's weights (safetensors).")
    ] = False,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="A folder with the tokenizer's files, for safetensors; else the base model's, if it is here."
        ),
    ] = None,
) -> None:
    """Convert a checkpoint. In shardwell's own format it is FOLDER/TAG, and becomes the latest of the folder.

    Adapters of peft are written as peft reads them, without their base model, unless they are merged into it.
    """
    import torch

    from shardwell.checkpoint.export import to_dcp, to_own, to_safetensors
    from shardwell.checkpoint.sources.base import MODEL

    dtypes = {ExportDtype.fp32: torch.float32, ExportDtype.bf16: torch.bfloat16, ExportDtype.fp16: torch.float16}
    if dtype is not None and form is not ExportFormat.safetensors:
        raise CheckpointError(f"--dtype {dtype.value}: only for safetensors; {form.value} keeps the stored dtypes")
    if form is not ExportFormat.safetensors and (merge or tokenizer is not None):
        raise CheckpointError(f"--merge and --tokenizer: only for safetensors, not for {form.value}")
    limit = _parse_size(max_file_size)
    if check:
        _check_own(path, tag)
    with _opened(path, tag) as source, _printing_warnings():
        prefix = MODEL if form is ExportFormat.safetensors else ""
        with _bar("export", _bytes(source, prefix)) as told:
            if form is ExportFormat.safetensors:
                kind = dtypes[dtype] if dtype is not None else None
                to_safetensors(source, out, kind, limit, told, merges=merge, tokenizer=tokenizer)
            elif form is ExportFormat.dcp:
                to_dcp(source, out, told)
            else:
                to_own(source, out.resolve().parent, out.resolve().name, limit, told)
    _console().print(Text(f"written: {out}"), soft_wrap=True)


@app.command("diff")
def diff(
    first: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint of any kind, or a folder of checkpoints.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="The one to compare it with.")],
    tag_a: Annotated[str | None, typer.Option(help="Which one of folder A.")] = None,
    tag_b: Annotated[str | None, typer.Option(help="Which one of folder B.")] = None,
    tolerance: Annotated[
        float,
        typer.Option(min=0, help="Differences up to this, absolute or relative, do not count; nor do dtypes then."),
    ] = 0.0,
    weights: Annotated[bool, typer.Option("--weights", help="Compare only the model's tensors.")] = False,
) -> None:
    """Compare two checkpoints. Exit code 0 if they hold the same, 1 if not."""
    from shardwell.checkpoint.compare import compare

    with _opened(first, tag_a) as one, _opened(second, tag_b) as two:
        both = sum(
            stored.numel * stored.dtype.itemsize
            for name, stored in one.tensors.items()
            if name in two.tensors and two.tensors[name].shape == stored.shape
        )
        with _bar("diff", both) as told:
            found = compare(one, two, tolerance, weights, told)
        _show_comparison(found, one, two)
    if not found.same:
        raise typer.Exit(1)


@app.command("prune")
def prune(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A folder of shardwell's checkpoints.")],
    keep_last: Annotated[
        int, typer.Option(min=1, help="How many of the newest to keep; the latest stays in any case.")
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the names; remove nothing.")] = False,
) -> None:
    """Remove old checkpoints, and directories that crashes left more than an hour ago."""
    from shardwell.checkpoint import Folder

    folder = Folder(path)
    if not path.is_dir() or not folder.has_any():  # whatever `latest` says: a broken one is no reason not to tidy
        raise CheckpointError(f"{path}: no folder of shardwell's checkpoints")
    removed = folder.prune(keep_last, dry_run)
    left = folder.clean(_LEFTOVER_AGE, dry_run)
    console = _console()
    for name in [*removed, *left]:
        console.print(Text(f"{'would remove' if dry_run else 'removed'} {name}"))
    kept = [tag for tag in folder.tags() if tag not in removed]
    console.print(Text(f"kept {', '.join(kept)}"), soft_wrap=True)


# --- shared by the commands -------------------------------------------------------------------------------------


@contextmanager
def _opened(path: Path, tag: str | None) -> Iterator[Source]:
    from shardwell.checkpoint.sources import open_source

    with _printing_warnings():
        source = open_source(path, tag)
    try:
        yield source
    finally:
        source.close()


def _check_own(path: Path, tag: str | None) -> str | None:
    """End the command if a checkpoint of shardwell's own is damaged; return None for any other checkpoint."""
    from shardwell.checkpoint.manifest import read_manifest
    from shardwell.checkpoint.sources import locate_own
    from shardwell.checkpoint.verify import damages

    own = locate_own(path, tag)
    if own is None:
        return None
    where = own[0].path(own[1])
    manifest = read_manifest(where)
    with _bar("verify", sum(record.size for record in manifest.files.values())) as told:
        _end_if_damaged(list(damages(where, manifest, told)))
    return f"{where}: {len(manifest.tensors)} tensors in {len(manifest.files)} files match their checksums"


def _end_if_damaged(found: list[str]) -> None:
    for one in found:
        Console(stderr=True).print(Text(f"damaged: {one}", style="red"), soft_wrap=True)
    if found:
        raise typer.Exit(1)


@contextmanager
def _printing_warnings() -> Iterator[None]:
    """Print each warning once, on its own line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    for message in dict.fromkeys(str(one.message) for one in caught):
        Console(stderr=True).print(Text(f"warning: {message}", style="yellow"), soft_wrap=True)


@contextmanager
def _bar(what: str, total: int) -> Iterator[Told]:
    """Return a progress bar on stderr, if that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda num_bytes: progress.advance(task, num_bytes)


def _facts(path: Path, source: Source) -> dict[str, Any]:
    from shardwell.checkpoint.sources import MODEL, kind_of, locate_own

    files = _files(Path(source.where))
    own = locate_own(path) if kind_of(source) == "shardwell" else None
    counters = source.values.get("counters") or {}
    return {
        "path": source.where,
        "kind": kind_of(source),
        "step": counters.get("global_steps"),
        "counters": counters or None,
        "world_size": source.values.get("world_size"),
        "versions": source.values.get("versions"),
        "optimizer": (source.values.get("optimizer") or {}).get("kind"),
        "tensors": len(source.tensors),
        "parameters": sum(one.numel for name, one in source.tensors.items() if name.startswith(MODEL)),
        "bytes": _bytes(source),
        "files": len(files),
        "bytes_on_disk": sum(file.stat().st_size for file in files),
        "not_read": list(getattr(source, "ignored", [])),
        "other_checkpoints": [tag for tag in own[0].tags() if tag != Path(source.where).name]
        if own is not None
        else [],
    }


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path] if path.is_file() else []
    return [file for file in path.iterdir() if file.is_file()]


def _bytes(source: Source, prefix: str = "") -> int:
    return sum(one.numel * one.dtype.itemsize for name, one in source.tensors.items() if name.startswith(prefix))


def _words(key: str, value: Any) -> str:
    from shardwell.memory.statistics import human

    if isinstance(value, dict):
        return ", ".join(f"{name} {one}" for name, one in value.items())
    if isinstance(value, list):
        rest = f" and {len(value) - 10} more" if len(value) > 10 else ""
        return ", ".join(map(str, value[:10])) + rest
    if key.startswith("bytes"):
        return human(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def _show_comparison(found: Comparison, one: Source, two: Source) -> None:
    console = _console()
    if found.tensors:
        table = Table("tensor", "shape", "dtype", "elements that differ", "largest difference", "relative")
        for tensor in found.tensors:
            numbers = ("", "", "")
            if tensor.shapes[0] == tensor.shapes[1]:
                numbers = (f"{tensor.num_differ:,}", f"{tensor.absolute:.3g}", f"{tensor.relative:.3g}")
            shapes = ["×".join(map(str, shape)) or "·" for shape in tensor.shapes]
            dtypes = [str(dtype).removeprefix("torch.") for dtype in tensor.dtypes]
            table.add_row(Text(tensor.name), _pair(shapes), _pair(dtypes), *numbers)
        console.print(table)
    for names, where in ((found.only_first, one.where), (found.only_second, two.where)):
        for name in names:
            console.print(Text(f"only in {where}: {name}"), soft_wrap=True)
    for key in found.values:
        sides = [json.dumps(side.values[key], default=str) if key in side.values else "nothing" for side in (one, two)]
        sides = [text if len(text) <= 60 else f"{text[:57]}..." for text in sides]
        console.print(Text(f"{key}: {' and '.join(sides)}"), soft_wrap=True)
    console.print(f"{found.num_same} tensors are the same, {len(found.tensors)} differ")


def _pair(sides: list[str]) -> str:
    return sides[0] if sides[0] == sides[1] else " and ".join(sides)


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH_IN_A_PIPE)


def _parse_size(text: str) -> int:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([KMGT]I?B)?", text.strip().upper())
    size = int(float(match[1]) * _UNITS.get(match[2] or "", 0)) if match is not None else 0
    if size < 1:
        raise ShardwellError(f"--max-file-size {text}: expected a size such as 5GB, 500MB or 2GiB")
    return size
