"""Checkpoints as files: tensors, the manifest that says where each element lies, and the folder that commits them.

Files and CPU tensors only. This package knows no engine, no process group and no device.
"""

from shardwell.checkpoint.files import Entry, FileRecord, stream, write
from shardwell.checkpoint.folder import Folder
from shardwell.checkpoint.manifest import VERSION, FileExtent, FilePiece, Manifest, TensorRecord, plan
from shardwell.checkpoint.parsing import DTYPES
from shardwell.checkpoint.reader import Reader

__all__ = [
    "DTYPES",
    "VERSION",
    "Entry",
    "FileExtent",
    "FilePiece",
    "FileRecord",
    "Folder",
    "Manifest",
    "Reader",
    "TensorRecord",
    "plan",
    "stream",
    "write",
]
