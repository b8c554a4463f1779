"""The end of an engine: its model becomes an ordinary one again, or goes over to the next engine.

For the next engine, parameters that were sharded stay sharded, as `zero.Init` would have made them: no rank ever holds
more than a unit unsharded. After a failure that all ranks had, the ranks meet again over new links first.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwell.engine import exit_notice
from shardwell.engine.whole_saves import save_as_before
from shardwell.errors import ShardwellError
from shardwell.memory import Tier
from shardwell.optim import ShardedOptimizer
from shardwell.runtime.hooks import UnitHooks
from shardwell.runtime.rebuild import take_apart
from shardwell.runtime.scheduler import Scheduler
from shardwell.sharding import EngineContext, Unit, released
from shardwell.sharding.edits import take_last_edits
from shardwell.sharding.init_parameters import InitRegistry
from shardwell.sharding.parameter_subclasses import has_no_size, own_rules

if TYPE_CHECKING:
    from shardwell.engine.engine import Engine

DESTROYED = "this engine was destroyed: hand its model to initialize again"


class ModelBefore:
    """The dtypes of a model before it was passed to `initialize`."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = {name: parameter.dtype for name, parameter in model.named_parameters()}
        self.buffers = {name: buffer.dtype for name, buffer in model.named_buffers()}


@dataclass
class Teardown:
    """All that is needed to end an engine. Its units hold it, which may outlive the engine with their parameters."""

    model: nn.Module
    before: ModelBefore
    scheduler: Scheduler
    context: EngineContext
    reconnect: Callable[[], None]  # replaces the links between the ranks by new ones
    open_registry: Callable[[Tier], InitRegistry]  # makes owners for parameters that stay sharded
    hooks: UnitHooks
    # the forwards of modules before they were compiled
    compiled: dict[nn.Module, Callable[..., Any]] = field(default_factory=dict)
    has_begun: bool = False  # the engine is ended, or is about to be
    is_closed: bool = False  # links and files are closed
    cut: Any = None  # the `CutModel` or `SharedExperts` of a model whose ranks hold parts of tensors
    sequences: Any = None  # the `SequenceBinding` of a model with a sequence axis

    def end(self, optimizer: ShardedOptimizer | None, *, whole: bool) -> None:
        """Return the model to its former state, unsharded if requested and possible, and free everything else.

        While an exception propagates nothing is all-gathered: the other ranks may not come.
        """
        self._unhook()
        why_not = self._recover() if whole and sys.exc_info()[0] is None else "nothing is gathered here"
        if optimizer is not None:
            optimizer.executor.stop_watching()
        if why_not is None:
            self.scheduler.discard_backward()
            self._give_back(optimizer, None)
            if self.cut is not None:
                self.cut.undo()
            if self.cut is not None or self.sequences is not None:
                save_as_before(self.model)
        else:
            if self.context.roles.agreement.failures.has_failed:
                self.scheduler.abandon_passes()
                if whole and sys.exc_info()[0] is None:
                    logging.getLogger("shardwell").warning("destroy leaves the parameters released: %s", why_not)
            elif sys.exc_info()[0] is None:
                for unit in self.scheduler.units:  # peers may still have to receive what the last step has published
                    left = unit.updates.published
                    if left is not None and (left.is_awaited or self.context.device.is_simulated):
                        left.finish()
            _drop_gradients(self.scheduler, optimizer)
        self._close(optimizer)

    def hand_over(self, optimizer: ShardedOptimizer | None) -> None:
        """Let go of the model for the next engine; what was sharded stays so. All ranks must call it."""
        self._unhook()
        if (why_not := self._recover()) is not None:
            raise ShardwellError(
                f"the model has an engine that cannot give it up: {why_not}. Start again from the last checkpoint, "
                "with a new model."
            )
        if optimizer is not None:
            optimizer.executor.stop_watching()
        if self.sequences is not None and self.cut is None:
            save_as_before(self.model)
        self.scheduler.discard_backward()
        resharding = [group for unit in self.scheduler.units for group in unit.resharding_groups]
        is_sharded = (
            bool(resharding)
            and self.context.roles.shard.rank_group.size > 1
            and not self.context.device.is_meta
            and self.cut is None  # the registry gives all ranks the first one's values, and they hold other parts
        )
        registry = self.open_registry(resharding[0].spec.parameters.tier) if is_sharded else None
        self._give_back(optimizer, registry)
        if registry is not None:
            registry.close()
        self._close(optimizer)

    def _unhook(self) -> None:
        """Remove the hooks, also if other code has removed them before, and the compiled forwards."""
        self.hooks.follow([])
        for module in self.compiled:
            module.__dict__.pop("forward", None)
        self.compiled.clear()

    def _recover(self) -> str | None:
        """Make collectives work again after a failure that all ranks had, or after `destroy`; or say why not."""
        agreement, units = self.context.roles.agreement, self.scheduler.units
        has_failed = agreement.failures.has_failed
        if not has_failed and not self.is_closed:
            return None
        if self.is_closed and self.context.disk is not None:
            return "its values were on disk, in files that its destroy() has deleted"
        if has_failed:
            state = f"{sum(unit.updates.count for unit in units)} updates of units"
            is_updating = any(unit.updates.is_early for unit in units)
            # before ranks meet: what is in flight over links that were cut ends with the failure that is known so far
            self.scheduler.abandon_passes()
            if (why_not := agreement.meet_after_failure(state, is_updating=is_updating)) is not None:
                return why_not
        else:
            agreement.open()
        if not self.is_closed:
            self.context.roles.close()
        self.reconnect()
        self.is_closed = False
        if not has_failed:
            self.scheduler.abandon_passes()
        return None

    @torch.no_grad()
    def _give_back(self, optimizer: ShardedOptimizer | None, registry: InitRegistry | None) -> None:
        """Unshard the parameters, one unit after the other, and drop the optimizer's state. All ranks must call it.

        With a registry it gets those of units that reshard. Parameters that the device has no room for are moved to
        host memory.
        """
        _drop_gradients(self.scheduler, optimizer)
        self.scheduler.end_retention()
        take_last_edits(self.scheduler.units)
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        places = {
            id(parameter): (module, name)
            for module in self.model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        }
        with self.context.roles.agreement.failing_together("destroy"):
            for unit in self.scheduler.units:
                stays_sharded = registry is not None and bool(unit.resharding_groups)
                take_apart(unit, optimizer, keeps_states=False)
                for parameter in unit.sets.parameters:
                    dtype = self.before.parameters.get(names.get(id(parameter), ""), parameter.dtype)
                    fits = parameter.numel() * dtype.itemsize < self.context.device.free_bytes()
                    parameter.data = parameter.data.to(None if fits else self.context.device.host, dtype)
                    is_plain = not has_no_size(parameter) and not own_rules(parameter)
                    if registry is not None and stays_sharded and is_plain and id(parameter) in places:
                        registry.adopt(*places[id(parameter)], parameter)
            for name, buffer in self.model.named_buffers():
                buffer.data = buffer.data.to(self.before.buffers.get(name, buffer.dtype))
        self.scheduler.adopt_units([])

    def _close(self, optimizer: ShardedOptimizer | None) -> None:
        if optimizer is not None:
            optimizer.state.clear()
        for part in (self.cut, self.sequences):
            if part is not None:
                part.close()
        if not self.is_closed:
            self.context.close()
        self.is_closed = True


def _drop_gradients(scheduler: Scheduler, optimizer: ShardedOptimizer | None) -> None:
    if optimizer is not None:
        optimizer.forget_gradients()
    scheduler.reducer.forget()


def end_engine(engine: Engine, end: Callable[[], None]) -> None:
    """End an engine: wait for what it saves, let `end` take its model apart, and tell the other ranks."""
    if not engine._teardown.has_begun:
        engine._teardown.has_begun = True
        engine.finish_saving()
        if engine.monitor is not None:
            engine.monitor.close()
    end()
    exit_notice.tell(engine._context.roles.agreement, engine.micro_steps)
    engine.trim()


def when_handed_on(engine: Engine) -> Callable[[], None]:
    """Return a function that ends the engine for the next one, also if the user holds the engine no more."""
    reference, teardown = weakref.ref(engine), engine._teardown

    def end() -> None:
        living = reference()
        if living is not None:
            living.hand_over()
        else:
            teardown.hand_over(None)

    return end


def end_engines_of(model: nn.Module) -> None:
    """End the engines that have parameters of a model, in the order of the parameters. All ranks must call it."""
    ends: list[Callable[[], None]] = []
    for parameter in model.parameters():
        unit = released.owner_or_none(parameter)
        if isinstance(unit, Unit) and unit.owner is not None and unit.owner.end not in [None, *ends]:
            ends.append(unit.owner.end)  # type: ignore[arg-type]
    for end in ends:
        end()
