"""`deepspeed.checkpoint.ds_to_universal` on checkpoints of shardwell and of DeepSpeed.

A checkpoint of shardwell's own loads at any number of ranks without a conversion. This one is for DeepSpeed, and for
scripts that convert as a matter of course: shardwell reads the universal format as well.

    python -m shardwell.compat.deepspeed_api.universal --input_folder run/global_step10 --output_folder run/universal
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from shardwell.checkpoint.export import to_universal
from shardwell.checkpoint.sources import is_deepspeed, open_source
from shardwell.checkpoint.sources.universal import FOLDER, OPTIMIZER, latest_universal
from shardwell.errors import ShardwellError

__all__ = ["convert", "latest_universal", "main", "parse_arguments"]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the arguments of the command, with DeepSpeed's names."""
    parser = argparse.ArgumentParser(prog="ds_to_universal", description="Write a checkpoint in the universal format.")
    parser.add_argument("--input_folder", required=True, help="the directory of a checkpoint, or a folder of them")
    parser.add_argument("--output_folder", required=True, help="the directory to write")
    for name in ("--num_extract_workers", "--num_merge_workers"):
        parser.add_argument(name, type=int, default=1, help="accepted; one process streams the tensors")
    for name in ("--keep_temp_folder", "--inject_missing_state"):
        parser.add_argument(name, action="store_true", help="accepted; there is nothing of this kind to do")
    parser.add_argument("--no_strict", dest="strict", action="store_false", help="accepted; all checks are done")
    return parser.parse_args(arguments)


def convert(input_folder: str | os.PathLike[str], output_folder: str | os.PathLike[str]) -> None:
    """Write a checkpoint in the universal format; an earlier conversion in the same place is replaced."""
    before = Path(output_folder)
    is_another = os.path.realpath(input_folder) != os.path.realpath(output_folder)
    if is_another and is_deepspeed(before) and (before / FOLDER / OPTIMIZER).is_file():
        shutil.rmtree(before)
    with closing(open_source(input_folder)) as source:
        to_universal(source, output_folder)


def main(args: Any = None) -> None:
    """Run the conversion; `args` are what `parse_arguments` returns, as in DeepSpeed."""
    given = parse_arguments() if args is None else args
    convert(given.input_folder, given.output_folder)


if __name__ == "__main__":
    try:
        main()
    except (ShardwellError, OSError) as error:
        sys.exit(f"ds_to_universal: {error}")
