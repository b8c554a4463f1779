"""The base of all blocks of the configuration, and what can be asked of any block: its fields, keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo


class ConfigBlock(BaseModel):
    """One JSON object of the configuration; it is frozen, and refuses keys that it does not list."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def block_of(field: FieldInfo) -> type[ConfigBlock] | None:
    """Return the block class that a field holds, or None if it holds a plain value."""
    for candidate in (field.annotation, *get_args(field.annotation)):
        if isinstance(candidate, type) and issubclass(candidate, ConfigBlock):
            return candidate
    return None


def admits_auto(field: FieldInfo) -> bool:
    """Tell whether "auto" is a value of the field itself."""
    candidates = (field.annotation, *get_args(field.annotation))
    return any("auto" in get_args(candidate) for candidate in candidates)


def may_be_absent(field: FieldInfo) -> bool:
    """Tell whether null means that the field is absent: it has a default, and null is not one of its values."""
    return not field.is_required() and type(None) not in get_args(field.annotation)


def leaves(block: ConfigBlock, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every (dotted key, value) of the block in the order of the classes; arguments in params are keys, too."""
    for name in type(block).model_fields:
        key, value = prefix + name, getattr(block, name)
        if isinstance(value, ConfigBlock):
            yield from leaves(value, f"{key}.")
        elif isinstance(value, dict):
            yield from ((f"{key}.{inner}", item) for inner, item in value.items())
        else:
            yield key, value


def keys_set(block: ConfigBlock, prefix: str = "") -> set[str]:
    """Return the dotted keys that the caller has set, in Python or by a file, whatever their values."""
    keys: set[str] = set()
    for name in block.model_fields_set:
        value = getattr(block, name)
        if isinstance(value, ConfigBlock):
            keys |= keys_set(value, f"{prefix}{name}.")
        elif isinstance(value, dict):
            keys |= {f"{prefix}{name}.{inner}" for inner in value}
        else:
            keys.add(prefix + name)
    return keys


def plain_values(value: Any) -> Any:
    """Return a block, or a value of one, as plain JSON values."""
    if isinstance(value, ConfigBlock):
        return {name: plain_values(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, Mapping):
        return {str(key): plain_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_values(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)
