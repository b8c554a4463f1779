"""Checkpoints as files: tensors, the manifest that says where each element is, and the folder that commits them.

This package handles files and CPU tensors. It knows no engine, process group or device.
"""

from shardwell.checkpoint.files import Entry, FileRecord, stream, write
from shardwell.checkpoint.folder import Folder
from shardwell.checkpoint.manifest import VERSION, Manifest
from shardwell.checkpoint.parsing import DTYPES
from shardwell.checkpoint.pieces import BoxPiece, FileExtent, FilePiece, TensorRecord, plan
from shardwell.checkpoint.reader import Reader

__all__ = [
    "DTYPES",
    "VERSION",
    "BoxPiece",
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
