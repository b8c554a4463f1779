"""Translates old names and other spellings of keys into the keys of the schema.

The translation works on the file's content before anything else is checked: it moves values, and reads only flags and
old memory budgets. Every translation becomes a note.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwell.config.block import ConfigBlock, block_of
from shardwell.config.deepspeed_keys import KEYS, Inert, Limited, Renamed, Switch
from shardwell.config.field_types import count_or_auto, flag, plain, real
from shardwell.config.notes import Note
from shardwell.config.old_budgets import OLD_BUDGETS
from shardwell.config.problems import show
from shardwell.config.schema import Config
from shardwell.config.text import Object

_NAMED = ("optimizer", "scheduler")  # blocks that must have a type, if they are present

RENAMED: dict[str, str] = {old: row.new for old, row in KEYS.items() if isinstance(row, Renamed)}
SWITCHES: dict[str, tuple[str, Any]] = {
    old: (row.new, row.value) for old, row in KEYS.items() if isinstance(row, Switch)
}


@dataclass
class Translation:
    """The content of a file in the keys of the schema."""

    content: dict[str, Any]
    notes: list[Note] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)  # (dotted key, sentence)

    def _say(self, old: str, new: str, *, is_own: bool = False) -> None:
        self.notes.append(Note(f"{old} is read as {new}", is_own=is_own))

    def open_dots(self) -> None:
        """Move dotted keys at the top level into the blocks that they name; a value in the block itself wins."""
        for key in [key for key in self.content if "." in key and _is_known(key)]:
            value = self.content.pop(key)
            if _get(self.content, key) is None:
                self._put(key, value)
                self._say(f'"{key}"', f"the key {key.rpartition('.')[2]} of the block {key.rpartition('.')[0]}")
            else:
                self.notes.append(Note(f'"{key}" at the top has no effect: the value in its block holds'))

    def switch_blocks(self) -> None:
        """Replace true and false where a block belongs."""
        if self.content.get("gradient_clipping") is False:
            self.content["gradient_clipping"] = 0.0
        stages = {"zero_optimization": {"stage": 1}}  # as it was before there were stages
        for key, block in _blocks(Config, ""):
            value = flag(_get(self.content, key))
            if value is False:
                self._put(key, {})
            if key in _NAMED and _get(self.content, key) == {}:
                del self.content[key]
            elif value is True and ("enabled" in block.model_fields or key in stages):
                meaning = stages.get(key, {"enabled": True})
                self._put(key, dict(meaning))
                self._say(f"{key} true", str(meaning).replace("'", '"').replace("True", "true"))

    def rename(self) -> None:
        """Move the values of old names to the keys of today."""
        for old, new in RENAMED.items():
            value = _take(self.content, old)
            if value is not None:
                self._move(old, value, new, value)
        for old, (new, meaning) in SWITCHES.items():
            value = flag(_take(self.content, old))
            if value is True:
                self._move(f"{old} true", value, new, meaning)
            elif value not in (False, None):
                self.problems.append((old, f"expected true or false, found {value!r}; better write {new}"))

    def rename_budgets(self) -> None:
        """Move the old memory budgets into their block."""
        in_bytes: set[str] = set()  # tiers
        for old, row in OLD_BUDGETS.items():
            value = _take(self.content, old)
            if value is None:
                continue
            try:
                meaning = _bytes(value) if row.meaning == "bytes" else _share_used(value)
            except ValueError as error:
                self.problems.append((old, f"{error}, found {show(value)}"))
                continue
            if row.meaning == "share left free" and row.tier in in_bytes:
                text = f"{old} has no effect: shardwell.{row.tier}_memory limits the same memory in bytes"
                self.notes.append(Note(text, is_own=True))
            elif meaning != "auto":
                in_bytes.add(row.tier)
                self._move(old, value, row.new, meaning, is_own=True)

    def _move(self, old: str, value: Any, new: str, meaning: Any, *, is_own: bool = False) -> None:
        before = _get(self.content, new)
        if before is None or before == meaning:
            self._put(new, meaning)
            self._say(old, new if value is meaning else f"{new}: {show(meaning)}", is_own=is_own)
        else:
            self.problems.append((new, f"contradicts {old}, which is the old spelling of it; keep one"))

    def _put(self, key: str, value: Any) -> None:
        inner = self.content
        *blocks, name = key.split(".")
        for block in blocks:
            if not isinstance(inner.get(block), dict):
                inner[block] = {}
            inner = inner[block]
        inner[name] = value


def translated(raw: Mapping[str, Any]) -> Translation:
    """Return a translated copy of `raw`."""
    found = Translation(_copied(raw))
    found.open_dots()
    found.switch_blocks()
    found.rename()
    found.rename_budgets()
    found.switch_blocks()  # whose old names are gone now
    return found


def _copied(value: Any) -> Any:
    """Return a deep copy with plain values; its dictionaries remember which keys were written twice."""
    if isinstance(value, ConfigBlock):
        value = value.model_dump(exclude_unset=True)
    if isinstance(value, list):
        return [_copied(item) for item in value]
    if not isinstance(value, Mapping):
        return plain(value)
    copy = Object([(str(key), _copied(item)) for key, item in value.items()])
    copy.repeated = dict(getattr(value, "repeated", {}))
    return copy


def _bytes(value: Any) -> Any:
    """Read an old budget in bytes; 1 byte is none, because 1 is all that is free today."""
    found = count_or_auto(value)
    return 0 if found == 1 else found


def _share_used(value: Any) -> float:
    """Read an old budget that says which share of the free memory is left."""
    found = real(value)
    if found < 0:
        raise ValueError("expected at least 0")
    if found >= 1:
        raise ValueError("expected less than 1")
    return float(1 - found)


def _get(content: Mapping[str, Any], key: str) -> Any:
    inner: Any = content
    for name in key.split("."):
        inner = inner.get(name) if isinstance(inner, Mapping) else None
    return inner


def _take(content: Mapping[str, Any], key: str) -> Any:
    """Remove a key and return its value, or None if there is none."""
    block, _, name = key.rpartition(".")
    inner = _get(content, block) if block else content
    return inner.pop(name, None) if isinstance(inner, dict) else None


def _is_known(key: str) -> bool:
    """Tell whether a dotted key is one of the schema, or one without effect whose type is checked."""
    row = KEYS.get(key)
    if key in OLD_BUDGETS or (isinstance(row, Inert | Limited) and row.type != "any"):
        return True
    block: type[ConfigBlock] | None = Config
    for name in key.split("."):
        if block is None or name not in block.model_fields:
            return False
        block = block_of(block.model_fields[name])
    return True


def _blocks(block: type[ConfigBlock], prefix: str) -> list[tuple[str, type[ConfigBlock]]]:
    found = []
    for name, info in block.model_fields.items():
        inner = block_of(info)
        if inner is not None:
            found += [(prefix + name, inner), *_blocks(inner, f"{prefix}{name}.")]
    return found
