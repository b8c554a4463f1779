"""Sources of checkpoints: shardwell's own format, and formats of other libraries."""

from __future__ import annotations

import os
from pathlib import Path

from shardwell.checkpoint.folder import Folder
from shardwell.checkpoint.manifest import NAME, plain_name
from shardwell.checkpoint.sources import dcp, safetensors
from shardwell.checkpoint.sources.base import MODEL, SCALAR, STATE, Source, StoredTensor
from shardwell.checkpoint.sources.dcp import DcpSource
from shardwell.checkpoint.sources.deepspeed import DeepSpeedSource, is_deepspeed
from shardwell.checkpoint.sources.safetensors import SafetensorsSource
from shardwell.checkpoint.sources.shardwell import ShardwellSource
from shardwell.errors import CheckpointError

__all__ = [
    "MODEL",
    "SCALAR",
    "STATE",
    "DcpSource",
    "DeepSpeedSource",
    "SafetensorsSource",
    "ShardwellSource",
    "Source",
    "StoredTensor",
    "is_deepspeed",
    "is_foreign",
    "kind_of",
    "locate_own",
    "open_source",
]

_KINDS = {
    "ShardwellSource": "shardwell",
    "SafetensorsSource": "safetensors (Hugging Face)",
    "DcpSource": "torch.distributed.checkpoint",
    "DeepSpeedSource": "DeepSpeed",
}


def open_source(path: str | os.PathLike[str], tag: str | None = None) -> Source:
    """Open a checkpoint of any kind. A tag chooses one from a folder; the default is the latest."""
    path = Path(path)
    own = locate_own(path, tag)
    if own is not None:
        folder, chosen = own
        return ShardwellSource(folder.path(chosen), folder.open(chosen))
    if is_deepspeed(path) or _is_tag_of_deepspeed(path, tag):
        return DeepSpeedSource(path, tag)
    if tag is not None:
        raise CheckpointError(
            f"{path}: tag {tag!r}: no folder of checkpoints by shardwell or DeepSpeed, so without tags"
        )
    if (path / dcp.METADATA).is_file():
        return DcpSource(path)
    if safetensors.find(path) is not None:
        return SafetensorsSource(path)
    raise CheckpointError(
        f"{path}: not a checkpoint that is known. Looked for {NAME} in it or in a directory below (shardwell), "
        f"{safetensors.SINGLE} or {safetensors.INDEX} (Hugging Face), {dcp.METADATA} (torch.distributed.checkpoint), "
        "and the files of DeepSpeed"
    )


def locate_own(path: str | os.PathLike[str], tag: str | None = None) -> tuple[Folder, str] | None:
    """Return folder and tag, if a path is a folder of shardwell's checkpoints or one of them."""
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or directory")
    if (path / NAME).is_file():
        if tag not in (None, path.resolve().name):
            raise CheckpointError(f"{path}: is one checkpoint; the tag {tag!r} needs the folder that holds it")
        return Folder(path.resolve().parent), path.resolve().name
    folder = Folder(path)
    if not path.is_dir() or not folder.has_any():
        return None
    named = tag if tag is not None else _named(folder)
    if named is not None and not folder.is_committed(named) and _is_tag_of_deepspeed(path, named):
        return None  # converted checkpoints may be beside their origin
    chosen = tag or folder.latest()
    assert chosen is not None
    return folder, chosen


def _named(folder: Folder) -> str | None:
    """Return the tag that `latest` names; None also if it cannot be read, of which `Folder.latest` tells."""
    try:
        return folder.named()
    except CheckpointError:
        return None


def is_foreign(path: str | os.PathLike[str], tag: str | None = None) -> bool:
    """Tell whether a path, or the tag in it, holds a checkpoint of another library."""
    path = Path(path)
    return (
        _is_tag_of_deepspeed(path, tag)
        or is_deepspeed(path)
        or (path / dcp.METADATA).is_file()
        or safetensors.find(path) is not None
    )


def _is_tag_of_deepspeed(path: Path, tag: str | None) -> bool:
    """Tell whether a tag names a checkpoint of DeepSpeed, also in a folder whose `latest` names another kind."""
    return tag is not None and plain_name(tag) and is_deepspeed(path / tag)


def kind_of(source: Source) -> str:
    """Return the name of the library that wrote a checkpoint."""
    return _KINDS.get(type(source).__name__, type(source).__name__)
