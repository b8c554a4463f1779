"""Checks of the values of a checkpoint: an engine takes all of them, or stays unchanged.

A manifest with a correct checksum may still hold values that no engine has written. Values of a known form are compared
with it. Objects whose state only they understand (schedules, modules with extra state, random generators) load their
value, and then get their own state back.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardwell.checkpoint.described_values import check_counters
from shardwell.checkpoint.parsing import show
from shardwell.engine.checkpoint_groups import check_order, check_schedule
from shardwell.engine.checkpoint_values import (
    SWITCHES,
    module_of_extra,
    random_state,
    restore_schedule,
    set_random_state,
)
from shardwell.errors import CheckpointError
from shardwell.optim import ShardedOptimizer
from shardwell.sharding.tensor_part import part_of

if TYPE_CHECKING:
    from shardwell.engine.engine import Engine

_MOST = 2**62  # of a counter
_MOST_RANGES = 4096  # of a tensor that one part is packed of


def check_values(
    engine: Engine, where: str, values: Mapping[str, Any], with_optimizer: bool, with_scheduler: bool
) -> None:
    """Raise unless `restore_values` can take all values. Afterwards the engine is unchanged."""
    try:
        _check_values(engine, values, with_optimizer, with_scheduler)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from error


def _check_values(engine: Engine, values: Mapping[str, Any], with_optimizer: bool, with_scheduler: bool) -> None:
    check_counters(values.get("counters", {}))
    for key in ("extra", "client"):
        if not isinstance(values.get(key, {}), dict):
            raise CheckpointError(f"values.{key}: expected an object, found {show(values[key])}")
    optimizer = engine.optimizer if with_optimizer else None
    if optimizer is not None and values.get("optimizer"):
        _check_groups(optimizer, values["optimizer"])
    has_schedule = with_scheduler and engine.lr_scheduler is not None and bool(values.get("scheduler"))
    if engine.optimizer is not None and (with_optimizer or has_schedule):
        check_order(engine.optimizer, values.get("optimizer"))
    if engine._precision.loss_scale.is_on and values.get("loss_scale"):
        _check_scale(values["loss_scale"])
    if has_schedule:
        with _schedule_kept(engine), _naming("scheduler"):
            now = engine.lr_scheduler.state_dict()
            _check_numbers(now, values["scheduler"])
            if engine.optimizer is not None:
                check_schedule(now, values["scheduler"], len(engine.optimizer.param_groups))
            restore_schedule(engine.lr_scheduler, copy.deepcopy(values["scheduler"]), warns=False)
    for key, state in values.get("extra", {}).items():
        _try_extra(engine, key, state)
    name = f"rng/{engine.global_rank}"
    if values.get(name) is not None:
        before = random_state(engine)
        try:
            with _naming(name):
                _check_random_state(values[name])
                set_random_state(engine, values[name])
        finally:
            set_random_state(engine, before)


def check_names(values: Mapping[str, Any], where: str) -> None:
    """Raise unless the aliases of parameters are names."""
    aliases = values.get("aliases", {})
    if not isinstance(aliases, Mapping) or not all(isinstance(name, str) for name in aliases.values()):
        raise CheckpointError(f"{where}: values.aliases: expected an object of names, found {show(aliases)}")


def check_scalars(values: Mapping[str, Any], prefix: str, where: str) -> None:
    """Raise unless scalars of the optimizer's state are numbers."""
    for name, value in values.items():
        is_one = name.startswith(prefix) and not isinstance(value, dict)
        if is_one and not (_is_number(value) and (value >= 0 or not name.endswith("/step"))):
            raise CheckpointError(f"{where}: values.{name}: expected a number, found {show(value)}")


@contextlib.contextmanager
def _naming(what: str) -> Iterator[None]:
    """Turn any error into an error of the checkpoint."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"values.{what}: {error}") from error
    except Exception as error:
        raise CheckpointError(f"values.{what}: cannot be taken over ({type(error).__name__}: {error})") from error


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf


def _check_numbers(now: Any, then: Any, where: str = "") -> None:
    """Raise if a saved value is true or false where a schedule has a number: Python would count with it."""
    if isinstance(now, Mapping) and isinstance(then, Mapping):
        for key in now.keys() & then.keys():
            _check_numbers(now[key], then[key], f"{where}.{key}" if where else str(key))
    elif isinstance(now, (list, tuple)) and isinstance(then, (list, tuple)):
        for one, other in zip(now, then, strict=False):
            _check_numbers(one, other, where)
    elif _is_number(now) and isinstance(then, bool):
        raise CheckpointError(f"{where}: expected a number, found {show(then)}")


def _check_scale(saved: Any) -> None:
    state = saved if isinstance(saved, Mapping) else {}
    if not _is_number(state.get("value")) or state["value"] <= 0:
        raise CheckpointError(f"values.loss_scale: expected a value above 0, found {show(state.get('value'))}")
    for key, least in (("left", 0), ("clean", -1), ("updates", 0), ("last_overflow", -1)):
        count = state.get(key, 0)
        if not isinstance(count, int) or isinstance(count, bool) or not least <= count < _MOST:
            raise CheckpointError(f"values.loss_scale.{key}: expected a count, found {show(count)}")


def _check_groups(optimizer: ShardedOptimizer, saved: Any) -> None:
    """Check that options have the types that the optimizer's have, and that its constructor would take them."""
    groups = saved.get("param_groups", []) if isinstance(saved, Mapping) else None
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        raise CheckpointError("values.optimizer.param_groups: expected a list of objects")
    if len(groups) != len(optimizer.param_groups):
        return  # then the options are not loaded, and a warning says so
    for index, (now, then) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        for key, value in then.items():
            where = f"values.optimizer.param_groups[{index}].{key}"
            is_right = value is None or isinstance(value, bool) if key in SWITCHES else True
            if key in now and key != "params" and not (is_right and _is_alike(now[key], value)):
                raise CheckpointError(f"{where}: expected a value such as {now[key]!r}, found {str(value)[:80]!r}")
        _check_options(optimizer, now, then, f"values.optimizer.param_groups[{index}]")


def _is_alike(now: Any, then: Any) -> bool:
    """Return whether an option has the type that it has now."""
    if isinstance(now, bool):
        return then is None or isinstance(then, bool)
    if now is None:
        return then is None or isinstance(then, (bool, int, float, str))
    if isinstance(now, (int, float)) or (isinstance(now, Tensor) and now.ndim == 0):
        return _is_number(then) or (isinstance(then, Tensor) and then.ndim == 0 and bool(then.isfinite()))
    if isinstance(now, (list, tuple)):
        if not isinstance(then, (list, tuple)) or len(then) != len(now):
            return False
        return all(_is_alike(mine, its) for mine, its in zip(now, then, strict=True))
    return not isinstance(now, str) or isinstance(then, str)


def _check_options(optimizer: ShardedOptimizer, now: Mapping[str, Any], then: Mapping[str, Any], where: str) -> None:
    """Raise if the constructor of the same optimizer class does. Classes with other arguments are not checked."""
    kind: Callable[..., Any] = type(optimizer.inner)
    known = inspect.signature(kind).parameters
    keys = [key for key in optimizer.inner.defaults if key in known and key in now and key in then]

    def make(options: Mapping[str, Any]) -> None:
        parameter = torch.nn.Parameter(torch.zeros(1, device="cpu"))
        kind([parameter], **{key: options[key] for key in keys if key not in SWITCHES})

    try:
        make(now)
    except Exception:
        return
    try:
        make(then)
    except Exception as error:
        raise CheckpointError(f"{where}: {type(optimizer.inner).__name__} refuses it: {error}") from error


@contextlib.contextmanager
def _schedule_kept(engine: Engine) -> Iterator[None]:
    """Return a context that restores a schedule, and the learning rates that it sets, at its end."""
    schedule: Any = engine.lr_scheduler
    inside = vars(schedule) if hasattr(schedule, "__dict__") else {}
    before, state = dict(inside), schedule.state_dict()
    with contextlib.suppress(Exception):  # some states cannot be copied
        state = copy.deepcopy(state)
    groups = engine.optimizer.param_groups if engine.optimizer is not None else []
    settings = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    rates = [float(group["lr"]) if isinstance(group.get("lr"), Tensor) else None for group in groups]
    try:
        yield
    finally:
        with contextlib.suppress(Exception):  # its own state, which it understands
            schedule.load_state_dict(state)
        inside.clear()
        inside.update(before)
        for group, values, rate in zip(groups, settings, rates, strict=True):
            for key in [key for key in group if key not in values and key != "params"]:
                del group[key]
            group.update(values)
            if rate is not None:
                group["lr"].fill_(rate)


def _try_extra(engine: Engine, key: str, state: Any) -> None:
    with _naming(f"extra[{show(key)}]"):
        module = module_of_extra(engine.module, key)
        before = copy.deepcopy(module.get_extra_state())
        try:
            module.set_extra_state(copy.deepcopy(state))
        finally:
            module.set_extra_state(before)


def _check_random_state(state: Any) -> None:
    if not isinstance(state, Mapping) or not {"python", "torch"} <= state.keys():
        raise CheckpointError("expected random states of python and torch")
    for key in ("torch", "cuda"):
        if key in state and not (isinstance(state[key], Tensor) and state[key].dtype is torch.uint8):
            raise CheckpointError(f"{key}: expected bytes")
    if "numpy" in state and "numpy" in sys.modules and not isinstance(state["numpy"], (tuple, dict)):
        raise CheckpointError("numpy: expected a state")


def check_parts(engine: Engine) -> None:
    """Raise if a parameter is packed of blocks along a late dimension, so that it lies in too many ranges of a file."""
    for name, parameter in engine.module.named_parameters():
        part = part_of(parameter)
        if part is None or not part.blocks:
            continue
        num_ranges = math.prod(part.shape[: part.dim]) * len(part.blocks)
        if num_ranges > _MOST_RANGES:
            raise CheckpointError(
                f"'{name}' {part.shape} is packed of {len(part.blocks)} blocks along dim {part.dim}, which are cut "
                f"over {part.num_parts} ranks: each part would be {num_ranges} ranges of the tensor, and "
                f"checkpoints take {_MOST_RANGES}. Use engine.state_dict() and load_state_dict()."
            )
