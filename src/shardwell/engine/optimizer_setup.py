"""The optimizer of an engine, and the choice of the executor that performs its updates."""

from __future__ import annotations

import weakref

from shardwell.engine.engine import Engine
from shardwell.memory import Tier
from shardwell.optim import OptimizerFactory, ShardedOptimizer
from shardwell.optim.executor import InlineExecutor, StepOptions, UpdateExecutor, make_inner
from shardwell.optim.grad_norm import NonfiniteNorm
from shardwell.optim.user_optimizer import redirect
from shardwell.runtime.scheduler import Scheduler
from shardwell.sharding import EngineContext
from shardwell.sharding.spec import CommitPolicy
from shardwell.sharding.tied_copies import CopiesSum


def make_optimizer(
    factory: OptimizerFactory, engine: Engine, scheduler: Scheduler, context: EngineContext
) -> ShardedOptimizer:
    """Return the optimizer of an engine, connected with its scheduler and its units."""
    settings = engine.settings
    options = StepOptions(
        engine._precision.loss_scale,
        settings.gradient_clipping,
        NonfiniteNorm(settings.shardwell.nonfinite),
        settings.zero_optimization.offload_optimizer.buffer_count,
        settings.shardwell.moments == "8bit",
    )
    executor = _executor(factory, scheduler, context, options)
    at_step = scheduler if context.tied is None else _SummingScheduler(scheduler, CopiesSum(context.tied.comm))
    optimizer = engine.optimizer_class(factory, executor, context, options, at_step)
    optimizer.trainer = weakref.ref(engine)
    if factory.given is not None:
        redirect(factory.given, engine)
    for owner in (unit.owner for unit in scheduler.units if unit.owner is not None):
        owner.optimizer = weakref.proxy(optimizer)
    return optimizer


class _SummingScheduler:
    """A scheduler that sums the gradients of tied parameters over pipeline stages once backward is finished."""

    def __init__(self, scheduler: Scheduler, sums: CopiesSum) -> None:
        self._scheduler, self._sums = scheduler, sums
        self.after_update, self.observer = scheduler.after_update, scheduler.observer

    def finish_backward(self) -> None:
        """Finish everything that backward started."""
        self._scheduler.finish_backward()
        self._sums(self._scheduler.units, self._scheduler.reducer.micro_step.scale)


def _executor(
    factory: OptimizerFactory, scheduler: Scheduler, context: EngineContext, options: StepOptions
) -> UpdateExecutor:
    """Choose the executor that performs updates, and connect it with the scheduler."""
    units = [unit for unit in scheduler.units if unit.trainable]
    inner, slices = make_inner(factory, units, context.roles.shard)
    rows = {group.spec for unit in scheduler.units for group in unit.groups}
    is_plain = all(spec.optimizer.tier is Tier.DEVICE and spec.commit is CommitPolicy.AFTER_NORM for spec in rows)
    if is_plain and not options.eight_bit_moments:  # these are for the host
        return InlineExecutor(inner, slices, context, options.scale)
    from shardwell.offload.host_executor import make_executor
    from shardwell.offload.loop_observer import LoopObserver

    executor = make_executor(inner, slices, context, options)
    scheduler.reducer.reduced = executor.reduced
    if executor.auto.is_on:
        scheduler.observer = LoopObserver(executor.auto.backward_begins, executor.auto.begin_step)
    return executor
