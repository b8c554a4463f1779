"""The form of the values of a checkpoint that describe it: exports and commands go by them, and so does a load.

A manifest with a correct checksum may hold anything. What has another form than an engine writes is refused when the
checkpoint is opened: an empty list in the place of a schedule's state would count as none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shardwell.checkpoint.parsing import show
from shardwell.errors import CheckpointError

_COUNTERS = ("global_steps", "micro_steps", "skipped_steps", "global_samples", "accumulation_steps")
_MOST = 2**62  # of a counter
_NEVER_NULL = ("aliases", "frozen", "frozen_excluded")


def check_described(values: Mapping[str, Any], where: str) -> None:
    """Raise if a value that is there has another form than an engine writes."""
    for key, (has_form, words) in _FORMS.items():
        value = values.get(key)
        is_absent = value is None and (key not in values or key not in _NEVER_NULL)
        if not is_absent and not has_form(value):
            raise CheckpointError(f"{where}: values.{key}: expected {words}, found {show(value)}")
    check_counters({} if values.get("counters") is None else values["counters"], where)
    for key, value in values.items():
        if key.startswith("rng/") and not _is_object(value):  # it would be left as it is
            raise CheckpointError(f"{where}: values.{key}: expected random states, found {show(value)}")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if key.startswith("scalar/") and not (is_number or _is_object(value)):
            raise CheckpointError(f"{where}: values.{key}: expected a number, found {show(value)}")


def check_counters(counters: Any, where: str = "") -> None:
    """Raise unless counters are whole numbers from 0 on."""
    place = f"{where}: values.counters" if where else "values.counters"
    if not isinstance(counters, Mapping):
        raise CheckpointError(f"{place}: expected an object, found {show(counters)}")
    for key in _COUNTERS:
        value = counters.get(key, 0)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _MOST:
            raise CheckpointError(f"{place}.{key}: expected a whole number from 0 on, found {show(value)}")


def _is_object(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_object_of_names(value: Any) -> bool:
    return _is_object(value) and all(map(_is_text, value.values()))


def _is_optimizer(value: Any) -> bool:
    if not _is_object(value):
        return False
    groups = value.get("param_groups") or []
    return isinstance(groups, list) and all(map(_is_object, groups)) and isinstance(value.get("kind", ""), str | None)


def _is_adapters(value: Any) -> bool:
    if not _is_object(value) or not _is_object(value.get("of")):
        return False
    return (
        all(map(_is_adapter, value["of"].values()))
        and _is_names(value.get("active"))
        and _is_names(value.get("trained_beside") or [])
    )


def _is_adapter(value: Any) -> bool:
    if not _is_object(value):
        return False
    return (
        _is_object(value.get("config"))
        and _is_object_of_names(value.get("names"))
        and isinstance(value.get("missing"), str | None)
    )


_OBJECT = _is_object, "an object"
_NAMES = _is_names, "a list of names"
_FORMS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "aliases": (_is_object_of_names, "an object of names"),
    "frozen": _NAMES,
    "buffers": _NAMES,
    "frozen_excluded": (_is_flag, "true or false"),
    "scheduler": _OBJECT,
    "loss_scale": _OBJECT,
    "loader": _OBJECT,
    "optimizer": (_is_optimizer, "an object with a kind and param_groups, a list of objects"),
    "config": _OBJECT,
    "versions": _OBJECT,
    "model_config": _OBJECT,
    "generation_config": _OBJECT,
    "name_or_path": (_is_text, "a text"),
    "adapters": (_is_adapters, "adapters with their configurations and the names of their tensors"),
}
