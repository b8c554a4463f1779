"""The folder that a user names for checkpoints: which names are valid, and the message if it has no checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator
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
    if _is_there(path, argument) and not os.path.isdir(path):
        raise CheckpointError(f"{argument}={path!r}: is a file; expected the path of a folder for checkpoints")
    return path


def _is_there(path: str, argument: str) -> bool:
    """Return whether a path exists; raise if that cannot be known, because training would begin from scratch."""
    try:
        os.stat(path)
    except FileNotFoundError:
        link = next((part for part in _with_parents(path) if os.path.islink(part) and not os.path.exists(part)), None)
        if link is None:
            return False
        raise CheckpointError(
            f"{argument}={path!r}: {link} is a link to {os.readlink(link)}, which is not there. Mount or make that "
            "folder, or remove the link"
        ) from None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{argument}={path!r}: cannot be looked at ({why})") from None
    return True


def _with_parents(path: str) -> Iterator[str]:
    """Yield a path and the folders above it."""
    while path and path != (above := os.path.dirname(path)):
        yield path
        path = above


def nothing_in(root: str) -> str:
    """Return the message for a folder without a checkpoint to resume from."""
    found = "holds no checkpoint" if os.path.isdir(root) else "does not exist"
    return f"load_checkpoint: {os.path.abspath(root)} {found}, so nothing was loaded"
