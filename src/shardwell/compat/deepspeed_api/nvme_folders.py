"""Folders of states on NVMe, as DeepSpeed takes them: it makes a folder that is not there."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwell.compat.deepspeed_api.logging import logger
from shardwell.errors import ConfigError

VARIABLE = "SHARDWELL_NVME_PATH"


def with_folders(zero: Mapping[str, Any]) -> dict[str, Any]:
    """Return the block of ZeRO with folders that exist, for what it stores on NVMe.

    `accelerate launch` does not hand the folders of its own configuration on: what arrives is the text "none". Then
    they are the one that the variable names, or the folder for temporary files.
    """
    found = dict(zero)
    for key in ("offload_optimizer", "offload_param"):
        block = found.get(key)
        if isinstance(block, Mapping) and block.get("device") == "nvme" and isinstance(block.get("nvme_path"), str):
            where = block["nvme_path"]
            path = _instead_of_none(key) if where.strip().lower() == "none" else where
            for folder in path.split(","):
                _make(folder.strip(), key)
            found[key] = {**block, "nvme_path": path}
    return found


def _instead_of_none(key: str) -> str:
    if path := os.environ.get(VARIABLE):
        return path
    path = tempfile.gettempdir()
    logger.warning(
        "zero_optimization.%s.nvme_path is the text 'none' (`accelerate launch` hands no folder on): states go to %s. "
        "Set %s to a folder on a local NVMe disk, or name the folder in a DeepSpeed configuration file",
        key,
        path,
        VARIABLE,
    )
    return path


def _make(folder: str, key: str) -> None:
    if not folder or Path(folder).exists():
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"zero_optimization.{key}.nvme_path: {folder} is not there and cannot be made ({error.strerror}); "
            "mount the drive, or name a folder that can be written"
        ) from error
    logger.warning("zero_optimization.%s.nvme_path: made the folder %s, which was not there", key, folder)
