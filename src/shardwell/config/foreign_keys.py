"""Checks of keys outside the schema against the rows of `shardwell.config.deepspeed_keys`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import StrictStr, TypeAdapter, ValidationError

from shardwell.config.deepspeed_keys import KEYS, Inert, Limited, Unsupported, ValueType
from shardwell.config.field_types import Count, Flag, Size, TagValidation, flag, is_auto, number
from shardwell.config.problems import MOST_LINES, Findings, sentence_of, show
from shardwell.config.suggestions import COMMENTS, suggest

NOT_AUTO = 'cannot be "auto"; write a value or remove the key'

_TYPES: dict[ValueType, TypeAdapter[Any]] = {
    "flag": TypeAdapter(Flag),
    "count": TypeAdapter(Count),
    "size": TypeAdapter(Size),
    "strings": TypeAdapter(tuple[StrictStr, ...]),
    "flags by name": TypeAdapter(dict[StrictStr, bool]),
    "tag validation": TypeAdapter(TagValidation),
}


def take_foreign(key: str, value: Any, found: Findings) -> None:
    """Accept a key outside the schema if it asks for nothing that is missing here; else note the problem."""
    row = KEYS.get(key)
    if isinstance(row, Unsupported):
        if _asks(row, value):
            found.add(key, row.refusal)
    elif isinstance(row, Inert | Limited):
        _take_row(key, row, value, found)
    elif not key.rpartition(".")[2].startswith(COMMENTS):
        found.num_unknown += 1
        found.add(key, f"unknown key; {suggest(key)}" if found.num_unknown <= MOST_LINES else "unknown key")


def _take_row(key: str, row: Inert | Limited, value: Any, found: Findings) -> None:
    """Check the value of a key that has no effect, and remember it."""
    if value is None:
        return  # as if absent
    if row.type != "any":
        if is_auto(value):
            if isinstance(row, Inert) and row.accepts_auto:
                found.inert[key] = value
                found.inert_auto.add(key)
            else:
                found.add(key, NOT_AUTO)
            return
        try:
            value = _TYPES[row.type].validate_python(value)
        except ValidationError as error:
            if not found.broken(key):  # such as one whose old name contradicts it
                for detail in error.errors():
                    found.add(".".join([key, *map(str, detail["loc"])]), sentence_of(detail))
            return
    if isinstance(row, Limited) and not any(_is_same(value, other) for other in row.allowed):
        found.add(key, f"{show(value)}: {row.refusal}")
    elif row.reason:
        found.inert[key] = value


def _asks(row: Unsupported, value: Any) -> bool:
    """Tell whether a block asks for its feature. As in DeepSpeed, a block without a switch that is on does not."""
    if not isinstance(value, Mapping):
        return not (value is None or flag(value) is False or value == [])
    switches = [_is_on(value.get(name)) for name in row.switches if name in value]
    if row.has_inner_switches:
        switches += [_asks(row, inner) for inner in value.values() if isinstance(inner, Mapping)]
    return any(switches) or (row.any_content_asks and bool(value) and not switches)


def _is_on(value: Any) -> bool:
    """Tell whether a switch asks for its feature; a count does from 2 on, and "auto" does not."""
    value = flag(value)
    if isinstance(value, bool):
        return value
    count = number(value)
    return count > 1 if isinstance(count, int | float) else value not in (None, "auto")


def _is_same(value: Any, other: Any) -> bool:
    """Tell whether a value in a file means `other`."""
    if isinstance(other, bool):
        return flag(value) is other
    if isinstance(other, str):
        return isinstance(value, str) and value.lower() == other
    return bool(number(value) == other)
