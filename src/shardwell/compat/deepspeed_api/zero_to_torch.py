"""`deepspeed.utils.zero_to_torch`: the weights of a checkpoint in a chosen dtype, as a command.

python -m shardwell.compat.deepspeed_api.zero_to_torch checkpoint_dir output_dir --dtype bf16
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from shardwell.compat.deepspeed_api import zero_to_fp32
from shardwell.errors import ShardwellError

__all__ = ["main"]


def main(args: Sequence[str] | None = None) -> None:
    """Run the command, with DeepSpeed's options."""
    parser = argparse.ArgumentParser(prog="zero_to_torch", description="Write the weights of a checkpoint in a dtype.")
    parser.add_argument("checkpoint_dir", help="the directory of a checkpoint, or a folder of them")
    parser.add_argument("output_dir", help="the directory to write")
    parser.add_argument("--dtype", required=True, choices=sorted(zero_to_fp32.DTYPES), help="of the written weights")
    parser.add_argument("--max_shard_size", default="5GB", help="the most bytes of a file, such as 5GB")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors files")
    parser.add_argument("-t", "--tag", default=None, help="the tag of the checkpoint; by default the latest")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave frozen parameters out")
    parser.add_argument("-d", "--debug", action="store_true", help="accepted; there is nothing more to say")
    given = vars(parser.parse_args(args))
    del given["debug"]
    zero_to_fp32.convert_zero_checkpoint_to_state_dict(given.pop("checkpoint_dir"), given.pop("output_dir"), **given)


if __name__ == "__main__":
    try:
        main()
    except (ShardwellError, OSError, ValueError) as error:
        sys.exit(f"zero_to_torch: {error}")
