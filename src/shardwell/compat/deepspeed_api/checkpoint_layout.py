"""DeepSpeed's own file layout, on request: `shardwell checkpoint export --format deepspeed`, and these functions.

Saving through the engine writes shardwell's own format, which loads at any number of ranks and is checked to the byte.
Programs that open DeepSpeed's files themselves get them from a conversion, for any stage and number of ranks.
"""

from __future__ import annotations

import os
from contextlib import closing

from shardwell.checkpoint.export import to_deepspeed
from shardwell.checkpoint.sources import open_source
from shardwell.compat.deepspeed_api.zero_to_fp32 import write_scripts


def write_deepspeed_layout(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    tag: str | None = None,
    ranks: int | None = None,
    stage: int | None = None,
) -> None:
    """Convert a checkpoint to DeepSpeed's files, with `latest` and the scripts that write weights beside them."""
    with closing(open_source(checkpoint_dir, tag)) as source:
        to_deepspeed(source, output_dir, ranks, stage)
    write_scripts(output_dir)
