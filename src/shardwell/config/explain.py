"""The values in force and their origins, as data and as a table for the terminal."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from shardwell.config.block import leaves
from shardwell.config.schema import Config


class UnsetValue(str):
    """A text that says whose default holds for an argument that is "auto"."""


@dataclass(frozen=True)
class ExplainLine:
    """One key of the effective configuration."""

    key: str  # dotted
    value: Any
    origin: str


def explain(config: Config) -> list[ExplainLine]:
    """Return every key in the order of the schema, then keys without effect and arguments that "auto" left open."""
    values = dict(leaves(config))
    lines = [ExplainLine(key, value, config.origins.get(key, "default")) for key, value in values.items()]
    for key, origin in config.origins.items():
        if key in config.inert_keys:
            lines.append(ExplainLine(key, config.inert_keys[key], origin))
        elif key not in values:
            lines.append(ExplainLine(key, UnsetValue(f"the {key.partition('.')[0]}'s own default"), origin))
    return lines


def table(config: Config) -> Table:
    """Return the lines of `explain` as a table; values that are not defaults are bold."""
    drawn = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    drawn.add_column("key", no_wrap=True)
    drawn.add_column("value", overflow="fold")
    drawn.add_column("origin", overflow="fold")
    for line in explain(config):
        style = "dim" if line.origin == "default" else "bold"
        value = line.value if isinstance(line.value, UnsetValue) else json.dumps(line.value, default=str)
        drawn.add_row(Text(line.key, style=style), Text(value, style=style), Text(line.origin, style=style))
    return drawn
