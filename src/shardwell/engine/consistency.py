"""What must be alike on all ranks, in words: configuration, versions, model, units, optimizer.

What ranks may honestly differ in is left out: folders on drives, memory of their machines, what only rank 0 prints, and
keys that have no effect.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwell.config import Config, ConfigBlock
from shardwell.optim import OptimizerFactory
from shardwell.optim.factory import NO_LABEL
from shardwell.parallel.consistency import Section
from shardwell.sharding import UnitSpec
from shardwell.version import __version__

if TYPE_CHECKING:
    from shardwell.engine.engine import Engine

# Of a rank alone: its drives, its memory, its patience, what it prints and which old checkpoints it removes.
_OWN = {
    "zero_optimization.offload_optimizer.nvme_path",
    "zero_optimization.offload_param.nvme_path",
    "aio",
    "steps_per_print",
    "shardwell.device_memory",
    "shardwell.host_memory",
    "shardwell.disk_memory",
    "shardwell.device_room",
    "shardwell.host_room",
    "shardwell.divergence_timeout",
    "shardwell.keep_pages",
    "shardwell.keep_last",
}
_HOW = {"params", "foreach", "fused", "capturable", "differentiable"}  # not what is computed
_NO_EFFECT = "No effect"  # as descriptions begin
_BATCH = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
_LATER = {*_BATCH, "optimizer", "scheduler"}  # are compared as they are once built: the code may replace them


def before_building(
    settings: Config, model: nn.Module, cuts: Sequence[UnitSpec], recipe: OptimizerFactory | None
) -> dict[str, Section]:
    """What decides how units are built."""
    return {
        "version of": {"torch": torch.__version__.partition("+")[0], "shardwell": __version__},
        "configuration": _settings(settings),
        "parameter": _parameters(model, recipe),
        "buffer": {name: _kind(buffer) for name, buffer in model.named_buffers()},
        "unit": {repr(one.name or "(root)"): ", ".join(name for name, _ in one.parameters) for one in cuts},
    }


def once_built(engine: Engine) -> dict[str, Section]:
    """What is known only then: batch sizes, which a loader may have set, the optimizer and its schedule."""
    optimizer, schedule = engine.optimizer, engine.lr_scheduler
    return {
        "configuration": {key: str(getattr(engine.config, key)) for key in _BATCH},
        "optimizer's": {"class": "none"} if optimizer is None else optimizer_in_words(optimizer.inner),
        "schedule's": {"class": "none" if schedule is None else type(schedule).__name__},
    }


def at_a_refit(cuts: Sequence[UnitSpec]) -> dict[str, Section]:
    """The model as it is now."""
    return {
        "parameter": {
            repr(
                name
            ): f"{_kind(parameter)}{'' if parameter.requires_grad else ', frozen'} in unit '{one.name or '(root)'}'"
            for one in cuts
            for name, parameter in one.parameters
        }
    }


def at_a_load(engine: Engine, options: Mapping[str, Any]) -> dict[str, Section]:
    """What decides which tensors are read, and where they go."""
    units = {
        repr(group.name): ", ".join(f"{slot.name} {list(slot.shape)}" for slot in group.layout.slots)
        for unit in engine._scheduler.units
        for group in unit.groups
    }
    asked = {name: repr(value) for name, value in options.items()}
    return {**once_built(engine), "unit": units, "argument of load_checkpoint": asked}


def optimizer_in_words(optimizer: Optimizer) -> dict[str, str]:
    """Its class, and what its parameter groups say besides parameters."""
    words = {"class": type(optimizer).__name__}
    for number, group in enumerate(optimizer.param_groups):
        place = f" of parameter group {number}" if len(optimizer.param_groups) > 1 else ""
        names = sorted(group.keys() - _HOW, key=lambda name: (name != "lr", name))
        words |= {f"{name}{place}": _value(group[name]) for name in names}
    return words


def _settings(block: ConfigBlock, prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, field in type(block).model_fields.items():
        key, value = prefix + name, getattr(block, name)
        if key in _OWN or key in _LATER or (field.description or "").startswith(_NO_EFFECT):
            continue
        if isinstance(value, ConfigBlock):
            found |= _settings(value, f"{key}.")
        elif isinstance(value, dict):
            found |= {f"{key}.{inner}": json.dumps(item, default=repr) for inner, item in sorted(value.items())}
        else:
            found[key] = json.dumps(value, default=repr)
    return found


def _parameters(model: nn.Module, recipe: OptimizerFactory | None) -> dict[str, str]:
    found = {}
    for name, parameter in model.named_parameters():
        label = NO_LABEL if recipe is None else recipe.label(parameter)
        group = "" if label == NO_LABEL else f", in parameter group {label}"
        found[repr(name)] = f"{_kind(parameter)}{'' if parameter.requires_grad else ', frozen'}{group}"
    return found


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _value(value: Any) -> str:
    """Numbers and names; of anything else only what it is, because its words may hold an address."""
    if isinstance(value, Tensor):
        return repr(value.tolist()) if value.numel() <= 8 else _kind(value)
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_value, value))})"
    return f"a {type(value).__name__}"
