"""The folder that a user names for checkpoints: which names are valid, and the message if it has no checkpoint."""

from __future__ import annotations

import os
from typing import Any

from shardwell.errors import CheckpointError


def folder_named(given: Any, argument: str) -> str:
    """Return the path of a folder of checkpoints, which need not exist yet."""
    if not isinstance(given, (str, bytes, os.PathLike)) or not os.fsdecode(given).strip():
        raise CheckpointError(
            f"{argument}={given!r}: expected the path of a folder for checkpoints, such as 'checkpoints' ('.' is the "
            "working directory)"
        )
    path = os.fsdecode(given)
    if os.path.exists(path) and not os.path.isdir(path):
        raise CheckpointError(f"{argument}={path!r}: is a file; expected the path of a folder for checkpoints")
    return path


def nothing_in(root: str) -> str:
    """Return the message for a folder without a checkpoint to resume from."""
    found = "holds no checkpoint" if os.path.isdir(root) else "does not exist"
    return f"load_checkpoint: {os.path.abspath(root)} {found}, so nothing was loaded"
