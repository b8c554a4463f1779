"""A configuration as DeepSpeed reads it: where it may come from, and DeepSpeed's defaults where they differ."""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Mapping
from typing import Any

from shardwell.config import Config
from shardwell.config.source import read
from shardwell.errors import ConfigError


def as_dictionary(source: Any) -> Any:
    """Return the user's own dictionary: the same object if it is one, or what the file, text or base64 text holds."""
    if isinstance(source, Mapping | Config):
        return source
    if isinstance(source, str) and not os.path.exists(source):
        decoded = _from_base64(source)
        if decoded is not None:
            return dict(read(decoded)[2])
    return dict(read(source)[2])


def _from_base64(text: str) -> str | None:
    """Return the JSON text that a base64 text holds, or None."""
    if text.lstrip().startswith("{"):
        return None
    try:
        found = base64.urlsafe_b64decode(text).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return None
    return found if found.lstrip().startswith("{") else None


def as_deepspeed_reads(source: Any) -> Any:
    """Return a copy with DeepSpeed's defaults for keys that are absent, where shardwell's own differ.

    Gradients are clipped to a norm of 1, and a step whose gradients are not finite is skipped instead of raised.
    """
    found = as_dictionary(source)
    if isinstance(found, Config):
        return found
    read_as = dict(found)
    if read_as.get("gradient_clipping") is None:
        read_as["gradient_clipping"] = 1.0
    own = read_as.get("shardwell", {})
    if not isinstance(own, Mapping):
        raise ConfigError(f"shardwell: expected an object, found {type(own).__name__}")
    read_as["shardwell"] = {"nonfinite": "skip", **own}
    return read_as
