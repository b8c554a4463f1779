"""`shardwell checkpoint`: inspects checkpoints of any kind, and verifies, converts, compares and removes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from shardwell.cli import export_command
from shardwell.cli.checkpoint_console import (
    CheckpointPath,
    CheckpointTag,
    bar,
    check_own,
    console_of_stdout,
    end_if_damaged,
    num_bytes,
    opened,
    shown,
)
from shardwell.cli.examples import Command, Group, epilog
from shardwell.errors import CheckpointError

if TYPE_CHECKING:
    from shardwell.checkpoint.compare import Comparison
    from shardwell.checkpoint.sources import Source

_LEFTOVER_AGE = 3600.0  # seconds without a change after which a directory is not being written

app = typer.Typer(
    cls=Group,
    help="Look into checkpoints, check, convert, compare and remove them.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


app.command("export", cls=Command, epilog=epilog("export"))(export_command.export)
app.command("zero-to-fp32", cls=Command, epilog=epilog("zero-to-fp32"))(export_command.zero_to_fp32)
app.command("ds-to-universal", cls=Command, epilog=epilog("ds-to-universal"))(export_command.ds_to_universal)


@app.command("inspect", cls=Command, epilog=epilog("inspect"))
def inspect(
    path: CheckpointPath,
    tag: CheckpointTag = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    config: Annotated[bool, typer.Option("--config", help="Print the configuration it was trained with.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Show what a checkpoint holds."""
    from shardwell.memory.statistics import human

    with opened(path, tag) as source:
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
    console = console_of_stdout()
    table = Table(title=shown(facts["path"]), show_header=False)
    for key, value in facts.items():
        if key != "path" and value not in (None, []):
            table.add_row(key.replace("_", " "), shown(_words(key, value)))
    console.print(table)
    if tensors:
        table = Table("tensor", "dtype", "shape", "bytes")
        for name, dtype, shape, num_bytes in listed:
            table.add_row(shown(name), dtype, "×".join(map(str, shape)) or "·", human(num_bytes))
        console.print(table)
    if config:
        typer.echo(json.dumps(values.get("config"), indent=2))


@app.command("verify", cls=Command, epilog=epilog("verify"))
def verify(path: CheckpointPath, tag: CheckpointTag = None) -> None:
    """Read every byte and compare it with its checksum. Exit code 1 if anything is damaged; all damages are listed."""
    from shardwell.checkpoint.sources import kind_of
    from shardwell.checkpoint.verify import unreadable

    good = check_own(path, tag)
    if good is None:
        with opened(path, tag) as source:
            with bar("verify", num_bytes(source)) as told:
                end_if_damaged(list(unreadable(source, told)))
            good = f"{path}: {len(source.tensors)} tensors can be read; {kind_of(source)} has no checksums"
    console_of_stdout().print(shown(good), soft_wrap=True)


@app.command("diff", cls=Command, epilog=epilog("diff"))
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

    with opened(first, tag_a) as one, opened(second, tag_b) as two:
        both = sum(
            stored.numel * stored.dtype.itemsize
            for name, stored in one.tensors.items()
            if name in two.tensors and two.tensors[name].shape == stored.shape
        )
        with bar("diff", both) as told:
            found = compare(one, two, tolerance, weights, told)
        _show_comparison(found, one, two)
    if not found.same:
        raise typer.Exit(1)


@app.command("prune", cls=Command, epilog=epilog("prune"))
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
    console = console_of_stdout()
    for name in [*removed, *left]:
        console.print(shown(f"{'would remove' if dry_run else 'removed'} {name}"))
    kept = [tag for tag in folder.tags() if tag not in removed]
    console.print(shown(f"kept {', '.join(kept)}"), soft_wrap=True)


# --- shared by the commands -------------------------------------------------------------------------------------


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
        "bytes": num_bytes(source),
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
    console = console_of_stdout()
    if found.tensors:
        table = Table("tensor", "shape", "dtype", "elements that differ", "largest difference", "relative")
        for tensor in found.tensors:
            numbers = ("", "", "")
            if tensor.shapes[0] == tensor.shapes[1]:
                numbers = (f"{tensor.num_differ:,}", f"{tensor.absolute:.3g}", f"{tensor.relative:.3g}")
            shapes = ["×".join(map(str, shape)) or "·" for shape in tensor.shapes]
            dtypes = [str(dtype).removeprefix("torch.") for dtype in tensor.dtypes]
            table.add_row(shown(tensor.name), _pair(shapes), _pair(dtypes), *numbers)
        console.print(table)
    for names, where in ((found.only_first, one.where), (found.only_second, two.where)):
        for name in names:
            console.print(shown(f"only in {where}: {name}"), soft_wrap=True)
    for key in found.values:
        sides = [json.dumps(side.values[key], default=str) if key in side.values else "nothing" for side in (one, two)]
        sides = [text if len(text) <= 60 else f"{text[:57]}..." for text in sides]
        console.print(shown(f"{key}: {' and '.join(sides)}"), soft_wrap=True)
    console.print(f"{found.num_same} tensors are the same, {len(found.tensors)} differ")


def _pair(sides: list[str]) -> str:
    return sides[0] if sides[0] == sides[1] else " and ".join(sides)
