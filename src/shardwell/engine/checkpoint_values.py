"""The values that an engine saves besides tensors: options of its optimizer, schedules, counters, random states.

The module also restores them. It neither communicates with other ranks nor reads files.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardwell.checkpoint.sources import Source
from shardwell.engine.checkpoint_groups import warn_of_moved
from shardwell.errors import CheckpointError
from shardwell.json_values import encode
from shardwell.optim import ShardedOptimizer
from shardwell.optim.elementwise import kind_by_step
from shardwell.sharding import Unit

if TYPE_CHECKING:
    from shardwell.engine.engine import Engine

_EXTRA = "_extra_state"  # the name that torch appends to a module's name

SWITCHES = ("foreach", "fused", "capturable", "differentiable")  # how a step is computed; the optimizer keeps its own


def restore_values(engine: Engine, values: dict[str, Any], with_optimizer: bool, with_scheduler: bool) -> None:
    """Set the counters, options, schedules and random states of an engine from a checkpoint."""
    counters = values.get("counters", {})
    engine.global_steps = int(counters.get("global_steps", 0))
    engine.global_samples = int(counters.get("global_samples", 0))
    steps = int(counters.get("micro_steps", 0)) // int(counters.get("accumulation_steps", 1) or 1)
    engine.micro_steps = steps * engine.gradient_accumulation_steps()
    if engine.optimizer is not None:
        engine.optimizer.resume_at(engine.global_steps, int(counters.get("skipped_steps", 0)))
        if with_optimizer and values.get("optimizer"):
            _restore_groups(engine.optimizer, values["optimizer"])
    if with_scheduler and engine.lr_scheduler is not None and values.get("scheduler"):
        restore_schedule(engine.lr_scheduler, values["scheduler"])
    elif with_scheduler and engine.lr_scheduler is not None and engine.global_steps:
        warnings.warn(
            f"the checkpoint of step {engine.global_steps} holds nothing of a schedule: "
            f"{type(engine.lr_scheduler).__name__} stays at its place, and does not begin at that step",
            stacklevel=2,
        )
    if engine._precision.loss_scale.is_on and values.get("loss_scale"):
        engine._precision.loss_scale.load_state_dict(values["loss_scale"])
    if engine.training_dataloader is not None and values.get("loader"):
        engine.training_dataloader.load_state_dict(values["loader"])
    for key, state in values.get("extra", {}).items():
        module_of_extra(engine.module, key).set_extra_state(state)
    state = values.get(f"rng/{engine.global_rank}")
    if state is not None:
        set_random_state(engine, state)
    if engine.monitor is not None:
        engine.monitor.begin_anew()


def module_of_extra(model: nn.Module, key: str) -> nn.Module:
    """Return the module whose extra state has this name."""
    return model.get_submodule(key.removesuffix(_EXTRA).rstrip("."))


def of_optimizer(optimizer: ShardedOptimizer | None, model: nn.Module, put: Callable[[Tensor], str]) -> Any:
    """Return the optimizer's class name, and the options of its parameter groups with the names of their parameters."""
    if optimizer is None:
        return None
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    kept = [what_can_be_saved(group, f"optimizer.param_groups[{i}]", put) for i, group in enumerate(groups)]
    labels = {name: optimizer.shards.labels[name] for name in optimizer.shards.numbers}
    names = in_order_of_model(labels, model)
    for index, group in enumerate(kept):
        group["params"] = [name for name in names if labels[name] == index]
    return {"kind": kind_by_step(type(optimizer.inner)).__name__, "param_groups": kept}


def frozen_names(units: Sequence[Unit], model: nn.Module) -> list[str]:
    """Return the names of the parameters that are not trained."""
    groups = [group for unit in units for group in unit.groups if not group.trainable]
    return in_order_of_model([slot.name for group in groups for slot in group.layout.slots], model)


def in_order_of_model(names: Iterable[str], model: nn.Module) -> list[str]:
    """Return names in the order in which the model lists its parameters; ranks and stages have orders of their own."""
    place = {name: index for index, (name, _) in enumerate(model.named_parameters(remove_duplicate=False))}
    return sorted(names, key=lambda name: place.get(name, len(place)))


def what_can_be_saved(state: dict[str, Any], where: str, put: Callable[[Tensor], str]) -> dict[str, Any]:
    """Leave out entries that cannot be saved (functions): the object that loads the state has its own."""
    kept = {}
    for key, value in state.items():
        try:
            kept[key] = encode(value, f"{where}.{key}", put)
        except CheckpointError as error:
            warnings.warn(f"left out of the checkpoint: {error}", stacklevel=2)
    return kept


def check_kind(optimizer: ShardedOptimizer | None, source: Source) -> None:
    """Raise if the checkpoint holds the state of another class of optimizer."""
    saved = source.values.get("optimizer")
    kind = saved.get("kind") if isinstance(saved, dict) else None
    if optimizer is None or kind is None:
        return
    mine = kind_by_step(type(optimizer.inner)).__name__
    if kind != mine and {kind, mine} != {"Adam", "AdamW"}:
        raise CheckpointError(
            f"{source.where}: holds the state of {kind}, and this engine's optimizer is {mine}. "
            "To load the model alone, pass load_optimizer_states=False."
        )


def _restore_groups(optimizer: ShardedOptimizer, saved: dict[str, Any]) -> None:
    groups = saved.get("param_groups", [])
    if len(groups) != len(optimizer.param_groups):
        warnings.warn(
            f"the checkpoint has {len(groups)} parameter group(s), the optimizer {len(optimizer.param_groups)}: "
            "learning rates and other settings stay as they are",
            stacklevel=2,
        )
        return
    warn_of_moved(optimizer, saved)
    for group, values in zip(optimizer.param_groups, groups, strict=True):
        group.update({key: value for key, value in values.items() if key != "params" and key not in SWITCHES})


def restore_schedule(schedule: Any, saved: dict[str, Any], *, warns: bool = True) -> None:
    """Load the state of a schedule, or warn if it is that of another schedule."""
    if not isinstance(saved, dict):
        raise CheckpointError(f"expected the state of a schedule, found a {type(saved).__name__}")
    if not set(saved) & set(schedule.state_dict()):
        if warns:
            warnings.warn(
                f"the checkpoint holds the state of another schedule than {type(schedule).__name__}", stacklevel=2
            )
        return
    schedule.load_state_dict(saved)


def random_state(engine: Engine) -> dict[str, Any]:
    """Return the random states of Python, torch, NumPy and the device."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    on_device = engine._context.device.random_state()
    if on_device is not None:
        state["cuda"] = on_device
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    return state


def set_random_state(engine: Engine, state: dict[str, Any]) -> None:
    """Set the random states of Python, torch, NumPy and the device."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        engine._context.device.set_random_state(state["cuda"])
    if "numpy" in sys.modules and "numpy" in state:
        sys.modules["numpy"].random.set_state(state["numpy"])
