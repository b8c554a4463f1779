"""torch.compile for the forwards of units, with unshard and reshard outside of the graphs; around parts of the model
that the user compiled; and around an engine."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch
from torch import nn

from shardwell.engine.teardown import Teardown
from shardwell.errors import ShardwellError
from shardwell.runtime.hooks import keep_out_of_graphs
from shardwell.runtime.scheduler import Scheduler


def compile_units(scheduler: Scheduler, teardown: Teardown, options: dict[str, Any]) -> None:
    """Compile each unit's own forward, which the teardown keeps; units that contain other units are not compiled."""
    units = scheduler.units
    if why_not := getattr(teardown.cut, "uncompilable", ""):
        raise ShardwellError(f"compile: {why_not}. Hand the whole model over, with a tensor_parallel.plan.")
    scheduler.graph.around = scheduler.reducer.views.hidden
    originals = teardown.compiled
    names = [unit.name for unit in units]
    for unit in units:
        inside = unit.name + "." if unit.name else ""
        if not any(name != unit.name and name.startswith(inside) for name in names):
            for module in unit.spec.modules:
                originals.setdefault(module, module.forward)
                module.forward = torch.compile(originals[module], **options)


def follow_compiled_parts(model: nn.Module, scheduler: Scheduler) -> None:
    """Train a model of which the user has compiled parts, or all of it, with `torch.compile` or `module.compile()`."""
    if any(module._compiled_call_impl is not None or hasattr(module, "_orig_mod") for module in model.modules()):
        keep_out_of_graphs()
        scheduler.graph.around = scheduler.reducer.views.hidden


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
