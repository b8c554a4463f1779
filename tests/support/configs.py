"""Short ways to write a configuration, to look into it, and to hear why it is refused."""

from __future__ import annotations

import json
from operator import attrgetter
from typing import Any

import pytest

from shardwell.config import Config, load
from shardwell.config.load import BATCH
from shardwell.errors import ConfigError


def refusal(source: Any, world_size: int | None = None) -> str:
    """The text of the one error that `source` must raise."""
    with pytest.raises(ConfigError) as caught:
        load(source, world_size=world_size)
    return str(caught.value)


def nested(key: str, value: Any) -> dict[str, Any]:
    """{"a": {"b": value}} of "a.b"."""
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def pairs(text: str) -> list[tuple[str, Any]]:
    """[("a.b", 1), ...] of "a.b 1 ...": a key, then its value as JSON without blanks."""
    words = text.split()
    return [(key, json.loads(value)) for key, value in zip(words[::2], words[1::2], strict=True)]


def at(config: Config, key: str) -> Any:
    """The value of a key, also of one without effect."""
    return config.inert_keys[key] if key in config.inert_keys else attrgetter(key)(config)


def batch(config: Config) -> Any:
    return attrgetter(*BATCH)(config)
