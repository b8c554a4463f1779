"""Leaf modules by name and one by one, beside `set_z3_leaf_modules`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from shardwell import utils
from shardwell.errors import ShardwellError
from shardwell.utils import get_z3_leaf_modules, set_z3_leaf_module


class LeafError(ShardwellError, ValueError):
    """No module is one of those that were named; DeepSpeed raises a ValueError."""


def set_z3_leaf_modules(model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str]) -> list[nn.Module]:
    """Make each module of these classes (or class names) one unit, gathered as a whole; call it before `initialize`."""
    return _found(utils.set_z3_leaf_modules, model, leaf_module_classes)


def unset_z3_leaf_modules(model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str]) -> list[nn.Module]:
    """Take `set_z3_leaf_modules` back."""
    return _found(utils.unset_z3_leaf_modules, model, leaf_module_classes)


def _found(mark: Callable[..., list[nn.Module]], model: nn.Module, classes: Iterable[Any]) -> list[nn.Module]:
    try:
        return mark(model, classes)
    except ShardwellError as error:
        raise LeafError(str(error)) from error


def z3_leaf_module(model: nn.Module) -> bool:
    """Return whether this module is one unit, gathered as a whole."""
    return model in get_z3_leaf_modules(model)


def z3_leaf_parameter(parameter: nn.Parameter) -> bool:
    """Return whether the parameter was marked as one of a leaf module."""
    return bool(getattr(parameter, "_z3_leaf", False))


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Make modules of these full names one unit each; return them, and the names that no module has."""
    known = dict(model.named_modules())
    names = list(module_names)
    return _mark(names, [name for name in names if name in known], known, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Make modules whose names end so one unit each; return them, and the suffixes that no module has."""
    known = dict(model.named_modules())
    suffixes = list(module_name_suffixes)
    found = [name for name in known if any(name == one or name.endswith(f".{one}") for one in suffixes)]
    missing = [one for one in suffixes if not any(name == one or name.endswith(f".{one}") for name in found)]
    return _mark(suffixes, found, known, raise_if_not_found, missing)


def _mark(
    asked: list[str],
    found: list[str],
    known: dict[str, nn.Module],
    raise_if_not_found: bool,
    missing: list[str] | None = None,
) -> tuple[list[nn.Module], list[str]]:
    left = [name for name in asked if name not in found] if missing is None else missing
    if raise_if_not_found and not found:
        raise LeafError(f"the model has no module called {', '.join(asked)}")
    for name in found:
        set_z3_leaf_module(known[name])
    return [known[name] for name in found], left
