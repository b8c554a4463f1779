"""Descriptions of what must be the same on all ranks: configuration, versions, model, units, optimizer.

What may differ between ranks is left out: paths on disks, memory of their machines and output of rank 0 only.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwell.config import Config, ConfigBlock, leaves_open, stage_is_open
from shardwell.config.load import STAGE
from shardwell.optim import OptimizerFactory
from shardwell.optim.factory import NO_LABEL
from shardwell.parallel.consistency import Section
from shardwell.parallel.grid import Grid
from shardwell.pipeline.layers import LayerSpec
from shardwell.pipeline.module import PipelineModule
from shardwell.sharding import UnitSpec
from shardwell.sharding.tensor_part import part_of
from shardwell.version import __version__

if TYPE_CHECKING:
    from shardwell.engine.engine import Engine
    from shardwell.engine.pipeline_setup import DividedModel

# Keys that may differ between ranks: disks, memory, time limits, output, and which old checkpoints are removed.
_OWN = {
    "zero_optimization.offload_optimizer.nvme_path",
    "zero_optimization.offload_param.nvme_path",
    "aio",
    "steps_per_print",
    "wall_clock_breakdown",
    "memory_breakdown",
    "flops_profiler",
    "comms_logger",
    "tensorboard",
    "csv_monitor",
    "wandb",
    "comet",
    "shardwell.memory",
    "shardwell.divergence_timeout",
    "shardwell.keep_pages",
    "shardwell.keep_last",
}
_HOW = {"params", "foreach", "fused", "capturable", "differentiable"}  # how a step is computed, not its result
_ROUNDING = ("fused", "foreach")  # of these, those that change the last bits of a result
_FUNCTIONS = (FunctionType, BuiltinFunctionType)
_BATCH = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
_LATER = {*_BATCH, "optimizer", "scheduler"}  # are compared once they are built, because arguments may replace them


def before_grouping(settings: Config, grid: Grid) -> dict[str, Section]:
    """Describe what all ranks must have alike whatever part of the model is theirs, and how they are laid out."""
    is_open = dict.fromkeys(leaves_open(settings), "left out")
    if stage_is_open(settings):
        is_open[STAGE] = '"auto"'
    return {
        "version of": {"torch": torch.__version__.partition("+")[0], "shardwell": __version__},
        "torch's": _torch_settings(),
        "configuration": {**_settings(settings), **is_open},
        "mesh": {"of ranks": f"{grid}{f' in the order {list(grid.ranks)}' if grid.is_reordered else ''}"},
    }


def _torch_settings() -> dict[str, str]:
    """Describe the settings of torch by which numbers are computed with other precision."""
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    asked: dict[str, Callable[[], Any]] = {
        "default dtype": torch.get_default_dtype,
        "float32 matmul precision": torch.get_float32_matmul_precision,
        "allow_tf32 of matmuls": lambda: cuda.allow_tf32,
        "allow_tf32 of cuDNN": lambda: cudnn.allow_tf32,
        "allow_fp16_reduced_precision_reduction": lambda: cuda.allow_fp16_reduced_precision_reduction,
        "allow_bf16_reduced_precision_reduction": lambda: cuda.allow_bf16_reduced_precision_reduction,
    }
    for kind in ("cpu", "cuda"):
        on = torch.is_autocast_enabled(kind)
        asked[f"autocast on {kind}"] = partial(torch.get_autocast_dtype, kind) if on else (lambda: "off")
    return {name: _answer(ask) for name, ask in asked.items()}


def _answer(ask: Callable[[], Any]) -> str:
    try:
        return str(ask()).removeprefix("torch.")
    except RuntimeError:  # torch refuses to name a setting by its old name where the new one was used
        return "named otherwise"


def before_dividing(divided: DividedModel, borders: Sequence[int]) -> dict[str, Section]:
    """Describe a model that is divided into pipeline stages: its parts must be those of one and the same model."""
    whole = {"borders of stages": str(list(borders))}
    if isinstance(divided, PipelineModule):  # of which each rank builds its own layers only
        return {"layer": dict(_layers_in_words(divided.specs)), "pipeline's": whole}
    return {"parameter": _parameters(divided.model, None), "pipeline's": whole}


def _layers_in_words(specs: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """Yield the number of each layer with its class and its plain arguments."""
    for number, spec in enumerate(specs):
        words = getattr(spec, "class_name", type(spec).__name__)
        if isinstance(spec, LayerSpec):
            named = [f"{name}={_value(value)}" for name, value in spec.module_kwargs.items()]
            words = f"{words}({', '.join([*map(_value, spec.module_args), *named])})"
        yield str(number), words


def before_building(
    settings: Config, model: nn.Module, specs: Sequence[UnitSpec], factory: OptimizerFactory | None
) -> dict[str, Section]:
    """Describe what decides how units are built, on ranks that have the same part of the model."""
    return {
        "configuration": _settings(settings),  # its "auto" are values by now
        "parameter": _parameters(model, factory),
        "buffer": {name: _kind(buffer) for name, buffer in model.named_buffers()},
        "module": dict(_modules_in_words(model)),
        "config": dict(_model_configs(model)),
        "unit": {repr(one.name or "(root)"): ", ".join(name for name, _ in one.parameters) for one in specs},
    }


def once_built(engine: Engine) -> dict[str, Section]:
    """Describe what is known only after building: batch sizes, which a loader may set, optimizer and schedule."""
    optimizer, schedule = engine.optimizer, engine.lr_scheduler
    words = {"class": "none"} if optimizer is None else optimizer_in_words(optimizer.inner)
    if optimizer is not None and _has_replicas(engine):
        words |= {name: str(optimizer.inner.defaults.get(name)) for name in _ROUNDING}
    return {
        "configuration": {key: str(getattr(engine.settings, key)) for key in _BATCH},
        "optimizer's": words,
        "schedule's": {"class": "none" if schedule is None else type(schedule).__name__},
    }


def _has_replicas(engine: Engine) -> bool:
    """Return whether several ranks update their own copies of a parameter, which must stay equal to the bit."""
    roles, units = engine._context.roles, engine._scheduler.units
    is_sharded = all(group.spec.optimizer.axis is not None for unit in units for group in unit.trainable)
    return not is_sharded or roles.all.rank_group.size > roles.shard.rank_group.size


def asked_of_a_load(engine: Engine, options: Mapping[str, Any]) -> dict[str, Section]:
    """Describe what decides what is read of a checkpoint, on all ranks of the job."""
    return {**once_built(engine), "argument of load_checkpoint": {name: repr(value) for name, value in options.items()}}


def units_at_a_load(engine: Engine) -> dict[str, Section]:
    """Describe where tensors are stored, on ranks that have the same part of the model."""
    units = {
        repr(group.name): ", ".join(f"{slot.name} {list(slot.box[0])}" for slot in group.layout.slots)
        for unit in engine._scheduler.units
        for group in unit.groups
    }
    return {"unit": units}


def optimizer_in_words(optimizer: Optimizer) -> dict[str, str]:
    """Describe the class of an optimizer, and the options of its parameter groups."""
    words = {"class": _class_in_words(type(optimizer))}
    for number, group in enumerate(optimizer.param_groups):
        place = f" of parameter group {number}" if len(optimizer.param_groups) > 1 else ""
        names = sorted(group.keys() - _HOW, key=lambda name: (name != "lr", name))
        words |= {f"{name}{place}": _value(group[name]) for name in names}
    return words


def _class_in_words(kind: type[Optimizer]) -> str:
    """Name a class, torch's by its name alone, and others with their module and the code of their step."""
    if kind.__module__.partition(".")[0] in ("torch", "shardwell"):
        return kind.__name__
    place = kind.__module__.replace("__mp_main__", "__main__")  # the script, in a process that multiprocessing started
    code = getattr(inspect.unwrap(kind.step), "__code__", None)
    found = "" if code is None else f" with step {zlib.crc32(repr((code.co_code, code.co_names)).encode()):08x}"
    return f"{place}.{kind.__qualname__}{found}"


def _modules_in_words(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the classes of modules with parameters, and torch's own with options, such as a dropout's probability.

    Others may be on one rank alone, to log what the first rank sees. Of cut layers each rank may have other sizes.
    """
    for name, module in model.named_modules():
        kind, own = type(module), [one for one in module._parameters.values() if one is not None]
        is_torchs = kind.__module__.startswith("torch.nn.") and not kind.__module__.endswith(".container")
        is_whole = all(part_of(parameter) is None for parameter in own)
        if is_torchs or own or not name:
            options = module.extra_repr() if is_torchs and is_whole else ""
            words = [f"{kind.__name__}({options})" if options else kind.__name__, *_functions_in_words(module)]
            yield repr(name or "(root)"), f"{', '.join(words)}{'' if module.training else ' in eval mode'}"


def _functions_in_words(module: nn.Module) -> Iterator[str]:
    """Yield the functions of torch that a module has as attributes, such as its activation."""
    for name, value in vars(module).items():
        if isinstance(value, _FUNCTIONS) and (value.__module__ or "torch").partition(".")[0] == "torch":
            yield f"{name}={value.__name__}"


def _model_configs(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the entries of configurations that modules keep, as those of Transformers do: they name activations."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        config = vars(module).get("config")
        if callable(getattr(config, "to_dict", None)) and id(config) not in seen:
            seen.add(id(config))
            with contextlib.suppress(Exception):  # it is a stranger's
                for key, value in _entries(config.to_dict()):
                    yield f"{repr(name) if name else 'of the model'}: {key}", value


def _entries(content: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the plain values in nested dictionaries, without names of places and versions."""
    for key, value in content.items():
        if str(key).startswith("_") or key in ("name_or_path", "transformers_version"):
            continue
        if isinstance(value, Mapping):
            yield from _entries(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _value(value)


def _settings(block: ConfigBlock, prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name in type(block).model_fields:
        key, value = prefix + name, getattr(block, name)
        if key in _OWN or key in _LATER:
            continue
        if isinstance(value, ConfigBlock):
            found |= _settings(value, f"{key}.")
        elif isinstance(value, dict):
            found |= {f"{key}.{inner}": json.dumps(item, default=repr) for inner, item in sorted(value.items())}
        else:
            found[key] = json.dumps(value, default=repr)
    return found


def _parameters(model: nn.Module, factory: OptimizerFactory | None) -> dict[str, str]:
    found = {}
    for name, parameter in model.named_parameters():
        label = NO_LABEL if factory is None else factory.label(parameter)
        group = "" if label == NO_LABEL else f", in parameter group {label}"
        part = part_of(parameter)
        cut = "" if part is None else f", one of {part.num_parts} parts along dim {part.dim}"
        kind = f"{_kind(parameter, None if part is None else part.shape)}{cut}"
        found[repr(name)] = f"{kind}{'' if parameter.requires_grad else ', frozen'}{group}"
    return found


def _kind(tensor: Tensor, shape: Sequence[int] | None = None) -> str:
    shown = list(tensor.shape if shape is None else shape)  # of a part: that of the whole tensor, for all parts alike
    return f"{str(tensor.dtype).removeprefix('torch.')} {shown}"


def _value(value: Any) -> str:
    """Describe numbers and names; any other value by its type, because its text may hold an address."""
    if isinstance(value, Tensor):
        return repr(value.tolist()) if value.numel() <= 8 else _kind(value)
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_value, value))})"
    return f"a {type(value).__name__}"
