"""The version that DeepSpeed's names report: the one whose behaviour these are, and shardwell's."""

from __future__ import annotations

from datetime import timedelta

from shardwell.version import __version__

LIKE = "0.19.8"
VERSION = f"{LIKE}+shardwell.{__version__}"
PROCESS_GROUP_TIMEOUT = timedelta(minutes=30)
torch_info = {"version": "0.0", "cuda_version": "0.0", "nccl_version": "0.0", "hip_version": "0.0"}  # nothing is built
