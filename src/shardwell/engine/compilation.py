"""torch.compile for the forwards of units, with unshard and reshard outside of the graphs; and around an engine."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shardwell.engine.teardown import Teardown
from shardwell.errors import ShardwellError
from shardwell.sharding import Unit


def compile_units(units: Sequence[Unit], teardown: Teardown, options: dict[str, Any]) -> None:
    """Compile each unit's own forward, which the teardown keeps; units that contain other units are not compiled."""
    if why_not := getattr(teardown.cut, "uncompilable", ""):
        raise ShardwellError(f"compile: {why_not}. Hand the whole model over, with a tensor_parallel.plan.")
    originals = teardown.compiled
    names = [unit.name for unit in units]
    for unit in units:
        inside = unit.name + "." if unit.name else ""
        if not any(name != unit.name and name.startswith(inside) for name in names):
            for module in unit.spec.modules:
                originals.setdefault(module, module.forward)
                module.forward = torch.compile(originals[module], **options)


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
