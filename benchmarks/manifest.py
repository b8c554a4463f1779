"""What the manifest of a checkpoint costs, by the number of ranks that wrote it.

    python -m benchmarks.manifest [--size seven] [--ranks 64,1024,16384] [--json PATH]

The layouts of a decoder are those of stage 3, with fp32 masters and two moments, over so many ranks. No tensor is
written: each rank's part of the manifest is made as a save makes it, with checksums that nobody compares. Then rank 0
reads and merges all parts and writes the text (a save), reads it, checks it and makes the index that it sends, and
another rank takes that (a load). Times are those of the processor, of one thread.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.measure import circumstances, command_line, keep, told
from benchmarks.model import PRESETS, SEVEN, Decoder, DecoderConfig
from shardwell.checkpoint.files import FileRecord
from shardwell.checkpoint.manifest import Manifest
from shardwell.checkpoint.manifest_index import index_of, manifest_of
from shardwell.checkpoint.merging import Merger
from shardwell.checkpoint.pieces import FilePiece, TensorRecord
from shardwell.sharding.layout import Layout, TensorSpec, make_layout

SIZES = {**PRESETS, "seven": SEVEN}
KINDS = ("", "exp_avg", "exp_avg_sq")  # masters and states
HEADER, SUM = "0" * 8, "1" * 8
Found = TypeVar("Found")


def layouts(config: DecoderConfig, num_ranks: int) -> list[Layout]:
    """Return the layouts of the blocks and of what is outside of them."""
    with torch.device("meta"):
        model = Decoder(config)
    units: defaultdict[str, list[TensorSpec]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        unit = ".".join(name.split(".")[:2]) if name.startswith("blocks.") else ""
        units[unit].append(TensorSpec(name, tuple(parameter.shape)))
    return [make_layout(specs, num_ranks) for specs in units.values()]


def part_of(rank: int, units: Sequence[Layout]) -> Manifest:
    """Return the manifest of one rank: its slice of each parameter and of its states."""
    file = f"rank-{rank:05d}.safetensors"
    tensors: dict[str, TensorRecord] = {}
    size = 0
    for layout, state in itertools.product(units, KINDS):
        for piece in layout.pieces(rank):
            name = f"{piece.slot.name} {state}" if state else piece.slot.name
            place = FilePiece(file, name, piece.in_parameter, piece.numel)
            kind = f"state:{state}" if state else "parameter"
            tensors[name] = TensorRecord(torch.float32, piece.slot.shape, piece.slot.stride, kind, (place,))
            size += piece.numel * 4
    return Manifest(tensors, {file: FileRecord(size, HEADER, dict.fromkeys(tensors, SUM))} if tensors else {})


def timed(call: Callable[[], Found]) -> tuple[float, Found]:
    """Return the processor seconds of a call, and its result."""
    begin = time.process_time()
    found = call()
    return time.process_time() - begin, found


def _merged(texts: Sequence[str]) -> tuple[float, Manifest]:
    def merge() -> Manifest:
        merger = Merger()
        for number, one in enumerate(texts):
            merger.add_text(one, f"part {number}")
        return merger.finish()

    return timed(merge)


def measure(config: DecoderConfig, num_ranks: int) -> dict[str, float]:
    """Return the figures of one number of ranks."""
    units = layouts(config, num_ranks)
    own, first = timed(lambda: part_of(0, units).to_json(part=True))

    merging, whole = _merged([part_of(rank, units).text() for rank in range(num_ranks)])
    writing, text = timed(whole.text)
    num_pieces = sum(len(record.pieces) for record in whole.tensors.values())
    del whole
    reading, known = timed(lambda: Manifest.from_json(text))
    telling, index = timed(partial(index_of, known))
    del known
    taking, _ = timed(lambda: manifest_of(index))
    return {
        "pieces": num_pieces,
        "part_bytes": len(first),
        "bytes": len(text),
        "part_seconds": own,
        "merge_seconds": merging,
        "text_seconds": writing,
        "read_seconds": reading,
        "index_bytes": len(index),
        "tell_seconds": telling,
        "take_seconds": taking,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


ROWS: dict[str, Callable[[dict[str, float]], str]] = {
    "pieces": lambda found: f"{found['pieces']:,.0f}",
    "bytes of the manifest": lambda found: f"{found['bytes'] / 2**20:,.1f} MiB",
    "save: a rank's part, s": lambda found: f"{found['part_seconds']:.3f}",
    "save: rank 0 merges, s": lambda found: f"{found['merge_seconds']:.2f}",
    "save: rank 0 writes, s": lambda found: f"{found['text_seconds']:.2f}",
    "load: rank 0 reads, s": lambda found: f"{found['read_seconds']:.2f}",
    "load: rank 0 makes the index, s": lambda found: f"{found['tell_seconds']:.2f}",
    "bytes of the index": lambda found: f"{found['index_bytes'] / 2**20:,.1f} MiB",
    "load: another rank takes it, s": lambda found: f"{found['take_seconds']:.2f}",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table, and keep the raw figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=sorted(SIZES), default="seven")
    parser.add_argument("--ranks", default="64,1024,16384", help="numbers of ranks, with commas")
    parser.add_argument("--json", help="where the raw figures go; '-': nowhere")
    args = parser.parse_args(argv)
    config = SIZES[args.size]
    found: dict[int, Any] = {size: measure(config, size) for size in map(int, args.ranks.split(","))}
    table = Table(title=f"{config.num_parameters:,} parameters, masters and two moments", title_justify="left")
    table.add_column("ranks")
    for size in found:
        table.add_column(f"{size:,}", justify="right")
    for words, cell in ROWS.items():
        table.add_row(words, *map(cell, found.values()))
    report = {
        **circumstances(command_line("manifest", argv), "cpu"),
        "found": {str(n): one for n, one in found.items()},
    }
    console = Console()
    console.print(table)
    console.print(told(report))
    if (path := keep(report, "manifest", args.json)) is not None:
        console.print(f"raw results: {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
