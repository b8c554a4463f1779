"""The learning-rate schedule of an engine: what the user passed, if the engine can step it, or what a file names."""

from __future__ import annotations

import inspect
from typing import Any

from shardwell.config import SchedulerConfig
from shardwell.errors import ConfigError, ShardwellError
from shardwell.optim import ShardedOptimizer, lr_schedules

_WHERE = "initialize(lr_scheduler=...)"


def schedule_for(given: Any, block: SchedulerConfig | None, optimizer: ShardedOptimizer | None) -> Any:
    """Return the scheduler that was passed, or build it; an argument has precedence over the configuration."""
    if given is None:
        return None if block is None or optimizer is None else lr_schedules.by_name(block, optimizer)
    is_made = hasattr(given, "step") and not isinstance(given, type)
    if not is_made and not callable(given):
        raise ShardwellError(
            f"{_WHERE}: a {type(given).__name__} is no scheduler; expected one with a step(), or a function of the "
            "optimizer that makes one, such as lambda optimizer: StepLR(optimizer, 10)"
        )
    if optimizer is None and not is_made:
        raise ConfigError("there is a learning-rate schedule, but no optimizer for it")
    schedule = given if is_made else given(optimizer)
    _check_step(schedule)
    if optimizer is not None:
        _check_optimizer(schedule, optimizer)
    return schedule


def _check_step(schedule: Any) -> None:
    """Refuse what the engine cannot step: it calls `step()` without arguments after each update."""
    kind, step = type(schedule).__name__, getattr(schedule, "step", None)
    if not callable(step):
        raise ShardwellError(f"{_WHERE}: the function returned a {kind}, which has no step(); return the scheduler")
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):  # not written in Python
        return
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = [one.name for one in parameters if one.default is one.empty and one.kind in kinds]
    if needed:
        raise ShardwellError(
            f"{_WHERE}: {kind}.step() needs {', '.join(needed)}, which the engine does not know after an update. Leave "
            "the scheduler out of initialize, and call its step() yourself"
        )


def _check_optimizer(schedule: Any, optimizer: ShardedOptimizer) -> None:
    """Refuse a scheduler of torch's whose optimizer is not the engine's: it would change rates that nobody uses."""
    groups = getattr(getattr(schedule, "optimizer", None), "param_groups", None)
    own = {id(group) for group in optimizer.param_groups}
    if type(schedule).__module__.startswith("torch.") and groups and not any(id(group) in own for group in groups):
        raise ShardwellError(
            f"{_WHERE}: the {type(schedule).__name__} was made for an optimizer that is not the engine's, so that no "
            "rate would change. Make it for the optimizer that is passed to initialize, or pass a function: "
            "lambda optimizer: StepLR(optimizer, 10)"
        )
