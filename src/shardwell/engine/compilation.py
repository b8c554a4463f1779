"""torch.compile for the forwards of units, with unshard and reshard outside of the graphs; and around an engine."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shardwell.sharding import Unit


def compile_units(units: Sequence[Unit], originals: dict[nn.Module, Any], options: dict[str, Any]) -> None:
    """Compile each unit's own forward, kept in `originals`; units that contain other units are not compiled."""
    names = [unit.name for unit in units]
    for unit in units:
        inside = unit.name + "." if unit.name else ""
        if not any(name != unit.name and name.startswith(inside) for name in names):
            originals.setdefault(unit.module, unit.module.forward)
            unit.module.forward = torch.compile(originals[unit.module], **options)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def uncompiled(engine: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an engine inside `torch.compile` without compilation, because all-gathers cannot be in a graph."""
    if engine not in _told:
        _told.add(engine)
        logging.getLogger("shardwell").warning(
            "torch.compile around an engine that releases its parameters compiles nothing. Call engine.compile(), "
            "which compiles each unit."
        )
    return engine.forward(*args, **kwargs)


_told: weakref.WeakSet[nn.Module] = weakref.WeakSet()
