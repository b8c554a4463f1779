"""Manifests that are changed by hand and have the right checksum all the same."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from typing import Any

CRC = "0123abcd"


def sign(content: dict[str, Any]) -> str:
    """The text of a content, right or wrong, with the right checksum."""
    content.pop("checksum", None)
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return json.dumps({**content, "checksum": f"{zlib.crc32(text.encode()):08x}"})


def put(*path: Any) -> Callable[[dict[str, Any]], None]:
    """Sets the last of `path` at the place that the others name."""

    def change(content: Any) -> None:
        for key in path[:-2]:
            content = content[key]
        content[path[-2]] = path[-1]

    return change
