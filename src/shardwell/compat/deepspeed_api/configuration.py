"""The user's configuration as a dictionary, wherever it comes from; `config_reading.py` has DeepSpeed's defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwell.config import Config
from shardwell.config.source import read


def as_dictionary(source: Any) -> Any:
    """Return the user's own dictionary: the same object if it is one, or what the file or text holds."""
    return source if isinstance(source, Mapping | Config) else dict(read(source)[2])


def as_deepspeed_reads(source: Any) -> Any:
    """Return the configuration for the engine, without its schedule."""
    from shardwell.compat.deepspeed_api.config_reading import for_engine

    return for_engine(as_dictionary(source), lr_scheduler=False).config
