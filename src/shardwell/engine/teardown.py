"""The end of an engine: its model becomes an ordinary one again, unsharded, in the dtypes that it was given in."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import nn

from shardwell.optim import ShardedOptimizer
from shardwell.runtime.rebuild import take_apart
from shardwell.runtime.scheduler import Scheduler
from shardwell.sharding import EngineContext, Unit

DESTROYED = "this engine was destroyed: hand its model to initialize again"


class ModelBefore:
    """The dtypes of a model before it was passed to `initialize`."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {name: parameter.dtype for name, parameter in model.named_parameters()}
        self._buffers = {name: buffer.dtype for name, buffer in model.named_buffers()}

    def end(
        self,
        model: nn.Module,
        scheduler: Scheduler,
        optimizer: ShardedOptimizer | None,
        context: EngineContext,
        *,
        whole: bool,
    ) -> None:
        """Return the model to its former state, unsharded if requested and possible, and free everything else."""
        is_whole = whole and _can_gather(context)
        if optimizer is not None:
            optimizer.executor.stop_watching()
        if is_whole:
            scheduler.discard_backward()
        if optimizer is not None:
            optimizer.forget_gradients()
        scheduler.reducer.forget()
        if is_whole:
            scheduler.end_retention()
            with context.roles.agreement.failing_together("destroy"):
                self._give_back(model, scheduler.units, optimizer, context)
            scheduler.adopt_units([])
        if optimizer is not None:
            optimizer.state.clear()
        context.close()

    @torch.no_grad()
    def _give_back(
        self, model: nn.Module, units: Sequence[Unit], optimizer: ShardedOptimizer | None, context: EngineContext
    ) -> None:
        """Unshard the parameters, one unit after the other, and drop the optimizer's state. All ranks must call it.

        Parameters that the device has no room for are moved to host memory.
        """
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for unit in units:
            parameters = [parameter for group in unit.groups for parameter in group.parameters]
            take_apart(unit, optimizer)
            for parameter in parameters:
                dtype = self._parameters.get(names.get(id(parameter), ""), parameter.dtype)
                fits = parameter.numel() * dtype.itemsize < context.device.free_bytes()
                parameter.data = parameter.data.to(None if fits else "cpu", dtype)
        for name, buffer in model.named_buffers():
            buffer.data = buffer.data.to(self._buffers.get(name, buffer.dtype))


def _can_gather(context: EngineContext) -> bool:
    """Return whether all ranks can be expected to take part: not if one has failed, or this one is about to."""
    return not context.roles.agreement.has_failed and sys.exc_info()[0] is None
