"""`load`: a user's file, text or mapping becomes a typed `Config`, and all its problems one error.

The steps: read, translate old names, screen the keys (unknown, unsupported, "auto"), validate the values, check them
against one another, resolve the batch sizes. Nothing here knows torch or processes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from shardwell.config import optimizers, schedules
from shardwell.config.block import ConfigBlock, admits_auto, block_of, leaves, may_be_absent
from shardwell.config.deepspeed_keys import REMOVED_OPTIMIZERS
from shardwell.config.field_types import is_auto, number
from shardwell.config.foreign_keys import NOT_AUTO, take_foreign
from shardwell.config.problems import Findings, sentence_of, show
from shardwell.config.schema import Config
from shardwell.config.source import read
from shardwell.config.suggestions import PARAMS
from shardwell.config.translate import translated
from shardwell.errors import ConfigError

Source = str | os.PathLike[str] | Mapping[str, Any] | Config | None

TRAIN, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
BATCH = (TRAIN, MICRO, ACCUMULATION)

STAGE = "zero_optimization.stage"
RATIO, PLACEMENT = "zero_optimization.offload_optimizer.ratio", "shardwell.placement"
_SIZE = "shardwell's default"
# Keys that may be "auto", and why they resolve as they do: each one then counts as absent.
AUTO: dict[str, str] = {
    **dict.fromkeys(BATCH, "as if absent"),
    "gradient_clipping": "off",
    STAGE: "until initialize chooses it",
    "bf16.enabled": "the model's own dtype decides",
    "fp16.enabled": "the model's own dtype decides",
    "zero_optimization.offload_optimizer.device": "off",
    "zero_optimization.offload_param.device": "off",
    "zero_optimization.offload_optimizer.nvme_path": "none",
    "zero_optimization.offload_param.nvme_path": "none",
    "pipeline.stages": "no pipeline",
    "tensor_parallel.autotp_size": "no tensor parallelism",
    "sequence_parallel_size": "no sequence parallelism",
    "shardwell.memory.device": _SIZE,
    "shardwell.memory.host": _SIZE,
    "shardwell.memory.disk": _SIZE,
    "zero_optimization.stage3_max_live_parameters": _SIZE,
    "zero_optimization.stage3_max_reuse_distance": _SIZE,
    "zero_optimization.stage3_prefetch_bucket_size": _SIZE,
    "zero_optimization.stage3_model_persistence_threshold": _SIZE,
}


def load(
    source: Source,
    *,
    world_size: int | None = None,
    optimizer_given: bool = False,
    scheduler_given: bool = False,
    axes: Mapping[str, int] | None = None,
) -> Config:
    """Return the effective configuration of a JSON file, JSON text, mapping or `Config`.

    With `world_size` all three batch sizes are ints; without it, those that depend on it are None. If the caller has
    its own optimizer (`optimizer_given`) or schedule (`scheduler_given`), the one in the file is not checked. `axes`
    are the ranks along the axes pipe, sequence and tensor, as far as a mesh or the model says how many there are.
    Raise one `ConfigError` that lists every problem.
    """
    if world_size is not None and (isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1):
        raise ConfigError(f"world_size: expected a whole number of at least 1, found {world_size!r}")
    if isinstance(source, Config):
        found = Findings("Config")
        config = source if optimizer_given else _check_optimizer(source, found)
        found.auto = {key for key, origin in source.origins.items() if _is_auto(origin)}
        config = config if scheduler_given else _check_scheduler(config, found)
        return _finish(config, found, dict(source.origins), world_size, axes)
    where, origin, raw = read(source)
    try:
        spoken = translated(raw)
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply to be a configuration") from None
    found = Findings(where, spoken.problems, notes=spoken.notes)
    clean = _screen(spoken.content, Config, "", found)
    config = _validate(clean, found).with_notes(found.notes, found.inert)
    if not optimizer_given:
        config = _check_optimizer(config, found)
    if not scheduler_given:
        config = _check_scheduler(config, found)
    return _finish(config, found, _origins(config, found, origin), world_size, axes)


def _check_optimizer(config: Config, found: Findings) -> Config:
    """Return the configuration with the optimizer's arguments checked."""
    block = config.optimizer
    if block is None or block.type.lower() in REMOVED_OPTIMIZERS or found.broken("optimizer.params"):
        return config
    params, problems = optimizers.checked(block.type, block.params)
    found.problems.extend(problem for problem in problems if not found.broken(problem[0]))
    return config.with_block("optimizer", block.model_copy(update={"params": params}))


def _check_scheduler(config: Config, found: Findings) -> Config:
    """Return the configuration with the schedule's arguments checked, except those that are "auto"."""
    block = config.scheduler
    if block is None or found.broken("scheduler.params", "scheduler.type"):
        return config
    later = {key.rpartition(".")[2] for key in found.auto if key.startswith("scheduler.params.")}
    params, problems = schedules.checked(block.type, block.params, later)
    found.problems.extend(problem for problem in problems if not found.broken(problem[0]))
    return config.with_block("scheduler", block.model_copy(update={"params": params}))


def _finish(
    config: Config,
    found: Findings,
    origins: dict[str, str],
    world_size: int | None,
    axes: Mapping[str, int] | None,
) -> Config:
    config = _fold_ratio(config, found, origins)
    _check_built(config, found)
    _check_ranks(config, found, world_size)
    world_size = _data_ranks(config, found, world_size, axes)
    sizes: dict[str, int | None] = {}
    if not found.broken(*BATCH):
        for key, (size, origin) in _resolve_batch(config, origins, world_size, found).items():
            sizes[key] = size
            origins[key] = f"auto -> {show(size)} ({origin})" if _is_auto(origins[key]) else origin
    found.raise_if_any()
    return config.with_origins(origins, sizes)


def _fold_ratio(config: Config, found: Findings, origins: dict[str, str]) -> Config:
    """Return the configuration with placement "auto" in place of `ratio` "auto", which means the same."""
    zero = config.zero_optimization
    if zero.offload_optimizer.ratio != "auto":
        return config
    below = zero.offload_optimizer.model_copy(update={"ratio": 1.0})
    config = config.with_block("zero_optimization", zero.model_copy(update={"offload_optimizer": below}))
    if below.device == "none":  # nothing is offloaded
        return config
    if config.shardwell.placement == "asked" and origins.get(PLACEMENT, "default") != "default":
        found.add(RATIO, f'"auto" contradicts {PLACEMENT} "asked": it means "auto" there; remove one of them')
    origins[PLACEMENT] = f'auto ("auto" of {RATIO} means it)'
    return config.with_block("shardwell", config.shardwell.model_copy(update={"placement": "auto"}))


def leaves_open(config: Config) -> list[str]:
    """Return the keys without which state that is offloaded to the host may stay on the device, and which are absent.

    Written with their defaults they send it to the host.
    """
    is_on_host = config.zero_optimization.offload_optimizer.device == "cpu"
    return [key for key in (RATIO, PLACEMENT) if is_on_host and config.origins.get(key, "default") == "default"]


def stage_is_open(config: Config) -> bool:
    """Return whether the stage is "auto": it is chosen at `initialize`, from the memory that there is."""
    return _is_auto(config.origins.get(STAGE, "default"))


def with_stage(config: Config, stage: int, why: str) -> Config:
    """Return a configuration with a stage in place of "auto"; raise if other keys contradict it."""
    zero = config.zero_optimization.model_copy(update={"stage": stage})
    chosen = config.with_origins({**config.origins, STAGE: f"auto -> {stage} ({why})"}, {"zero_optimization": zero})
    found = Findings(f"stage {stage}")
    found.problems.extend(_contradictions_of_zero(chosen, knows_stage=True).items())
    found.raise_if_any()
    return chosen


# --- keys -------------------------------------------------------------------------------------------------------


def _screen(raw: Mapping[str, Any], block: type[ConfigBlock], prefix: str, found: Findings) -> dict[str, Any]:
    """Return the part of `raw` that `block` can be validated from; note everything else in `found`."""
    for name, times in getattr(raw, "repeated", {}).items():
        found.add(f"{prefix}{name}", f"written {times} times in the same object; keep one")
    clean: dict[str, Any] = {}
    for name, value in raw.items():
        key = f"{prefix}{name}"
        if name not in block.model_fields:
            take_foreign(key, value, found)
            continue
        inner = block_of(block.model_fields[name])
        if value is None and (inner is not None or may_be_absent(block.model_fields[name])):
            continue  # as if absent
        if is_auto(value) and not admits_auto(block.model_fields[name]):
            _take_auto(key, found)
        elif inner is not None:
            if isinstance(value, Mapping):
                clean[name] = _screen(value, inner, f"{key}.", found)
            else:
                found.add(key, f"expected an object, found {_kind(value)}")
        elif key in PARAMS:
            clean[name] = _screen_params(value, key, found)
        else:
            found.given.add(key)
            clean[name] = value
    return clean


def _take_auto(key: str, found: Findings) -> None:
    if key in AUTO:
        found.auto.add(key)
    else:
        found.add(key, NOT_AUTO)


def _screen_params(params: Any, prefix: str, found: Findings) -> Any:
    """Leave out arguments that are "auto": the default of the optimizer or schedule then holds."""
    if params is None:
        return {}
    if not isinstance(params, Mapping):
        return params  # validation reports the problem
    for name, times in getattr(params, "repeated", {}).items():
        found.add(f"{prefix}.{name}", f"written {times} times in the same object; keep one")
    for name, value in params.items():
        (found.auto if is_auto(value) else found.given).add(f"{prefix}.{name}")
    return {name: _argument(value) for name, value in params.items() if not is_auto(value)}


def _argument(value: Any) -> Any:
    """Return the number or flag that a string such as "1e-3" stands for; return anything else unchanged."""
    if isinstance(value, list):
        return [_argument(item) for item in value]
    words = {"true": True, "false": False}
    found = words.get(value.lower(), number(value)) if isinstance(value, str) else value
    return value if isinstance(found, float) and not math.isfinite(found) else found


# --- values -----------------------------------------------------------------------------------------------------


def _validate(clean: dict[str, Any], found: Findings) -> Config:
    """Return a `Config` of the valid values; each invalid one becomes a problem and gets its default."""
    try:
        return Config.model_validate(clean)
    except ValidationError as error:
        for detail in error.errors():
            key = ".".join(str(part) for part in detail["loc"])
            if not found.broken(key):  # a required key that was "auto" is missing by now: one sentence is enough
                found.add(key, sentence_of(detail))
            _drop(clean, detail["loc"])
    return _validate(clean, found)


def _drop(content: dict[Any, Any], path: tuple[int | str, ...]) -> None:
    """Remove the value at `path`, or the innermost object around it if it is missing."""
    first, rest = path[0], path[1:]
    inner = content.get(first)
    if rest and isinstance(inner, dict) and rest[0] in inner:
        _drop(inner, rest)
    else:
        content.pop(first, None)


def _check_built(config: Config, found: Findings) -> None:
    """Note values that have the right type but are not supported, or contradict one another."""
    refused: dict[str, str] = {}
    if config.optimizer is not None and config.optimizer.type.lower() in REMOVED_OPTIMIZERS:
        kind = config.optimizer.type
        refused["optimizer.type"] = f"{show(kind)}: {REMOVED_OPTIMIZERS[kind.lower()]}"
    refused |= _contradictions(config)
    refused |= _contradictions_of_zero(config, knows_stage=not found.broken(STAGE) and STAGE not in found.auto)
    found.problems.extend(refused.items())


def _contradictions(config: Config) -> dict[str, str]:
    """Return keys about precision that contradict one another, with the reasons."""
    refused: dict[str, str] = {}
    halves = [f"{name}.enabled" for name in ("bf16", "fp16") if getattr(config, name).enabled]
    if len(halves) == 2:
        refused["fp16.enabled"] = "contradicts bf16.enabled, both are true; keep one"
    if halves and config.torch_autocast.enabled:
        refused["torch_autocast.enabled"] = (
            f"contradicts {' and '.join(halves)}: autocast is for weights that stay fp32; keep one"
        )
    narrow = ("bf16_master_weights_and_grads", "bf16_optimizer_states")
    given = [name for name in narrow if getattr(config.bf16, name)]
    if len(given) == 1:
        (missing,) = set(narrow) - set(given)
        refused[f"bf16.{given[0]}"] = (
            f"true contradicts bf16.{missing} false: optimizer states have the dtype of the master weights; set both "
            "to true, or none"
        )
    if config.pipeline.stages > 1 and not config.managed_gradient_accumulation:
        refused["managed_gradient_accumulation"] = (
            "false contradicts pipeline.stages: train_batch() runs all micro-batches of a step; use true"
        )
    if config.prescale_gradients and config.gradient_predivide_factor != 1.0:
        refused["gradient_predivide_factor"] = (
            f"{show(config.gradient_predivide_factor)} contradicts prescale_gradients, which already divides by the "
            "number of ranks before the sum; use 1.0 or remove it"
        )
    return refused


def _contradictions_of_zero(config: Config, *, knows_stage: bool) -> dict[str, str]:
    """Return keys of ZeRO that contradict the stage or one another, with the reasons."""
    refused: dict[str, str] = {}
    zero = config.zero_optimization
    if zero.offload_param.device != "none" and zero.stage != 3 and knows_stage:
        refused["zero_optimization.offload_param.device"] = (
            f"{show(zero.offload_param.device)} contradicts zero_optimization.stage {zero.stage}: "
            'parameters are stored sharded, and can be offloaded, only at stage 3; use "none"'
        )
    if config.shardwell.find_unused_parameters and zero.stage == 3 and knows_stage:
        refused["shardwell.find_unused_parameters"] = (
            "true contradicts zero_optimization.stage 3: a module that one rank runs is all-gathered from the "
            "shards of all ranks; use stage 2, or name the module that chooses in zero_optimization.leaf_module"
        )
    copies = zero.zero_hpz_partition_size
    if copies not in (1, "auto") and zero.stage != 3 and knows_stage:
        refused["zero_optimization.zero_hpz_partition_size"] = (
            f"{show(copies)} contradicts zero_optimization.stage {zero.stage}: only at stage 3 "
            "parameters are sharded, and all-gathered from secondary shards; use 1"
        )
    for name, below in (("offload_optimizer", zero.offload_optimizer), ("offload_param", zero.offload_param)):
        if below.device == "nvme" and not any(path.strip() for path in (below.nvme_path or "").split(",")):
            refused[f"zero_optimization.{name}.nvme_path"] = (
                f'missing, and {name}.device is "nvme"; name a folder on a local NVMe disk, or several '
                "with ',' between them"
            )
    for key, name, least in (
        ("zero_quantized_weights", "parameters", 3),
        ("zero_quantized_nontrainable_weights", "parameters", 3),
        ("zero_quantized_gradients", "gradients", 2),
    ):
        if getattr(zero, key) is True and zero.stage < least and knows_stage:
            refused[f"zero_optimization.{key}"] = (
                f"true contradicts zero_optimization.stage {zero.stage}: {name} are communicated in shards only from "
                f"stage {least} on; use false"
            )
    if config.shardwell.placement == "auto" and zero.offload_optimizer.ratio != 1.0:
        refused["zero_optimization.offload_optimizer.ratio"] = (
            f'{show(zero.offload_optimizer.ratio)} contradicts shardwell.placement "auto", which chooses the state '
            "that stays on the GPU; use 1.0 or remove it"
        )
    return refused


def _check_ranks(config: Config, found: Findings, world_size: int | None) -> None:
    """Note values that this number of ranks cannot have."""
    key, copies = "zero_optimization.zero_hpz_partition_size", config.zero_optimization.zero_hpz_partition_size
    if world_size == 1 and copies != "auto" and copies > 1 and not found.broken(key):
        found.add(
            key, f"{copies} ranks cannot hold secondary shards, because there is one rank; use 1, or start more ranks"
        )


_EXPERTS = "shardwell.expert_parallel_size"


def _data_ranks(config: Config, found: Findings, world_size: int | None, axes: Mapping[str, int] | None) -> int | None:
    """Return the number of ranks that train on rows of their own, which batch sizes are multiplied by."""
    keys = {
        "pipe": ("pipeline.stages", config.pipeline.stages),
        "sequence": ("sequence_parallel_size", config.sequence_parallel_size),
        "tensor": ("tensor_parallel.autotp_size", config.tensor_parallel.size),
    }
    sizes = {axis: size for axis, (_, size) in keys.items()}
    there = sizes if axes is None else {**sizes, **axes}
    for axis, (key, size) in keys.items():
        if size not in (1, there[axis]):
            found.add(key, f"{size} contradicts the mesh, which has {there[axis]}; remove one of them")
    experts = _EXPERTS, config.shardwell.expert_parallel_size
    shared = math.prod(there.values())
    if world_size is None or shared * experts[1] == 1:
        return world_size
    if world_size % (shared * experts[1]) and not found.broken(_EXPERTS, *(key for key, _ in keys.values())):
        sizes_of = [*keys.values(), *([experts] if experts[1] > 1 else [])]
        terms = " x ".join(f"{size} ({key})" for key, size in sizes_of)
        found.add(
            next((key for key, size in sizes_of if size > 1), _EXPERTS),
            f"{world_size} rank(s) cannot be divided by {terms} = {shared * experts[1]}; start a multiple of that, or "
            "make one of them smaller",
        )
    return max(world_size // shared, 1)


# --- origins ----------------------------------------------------------------------------------------------------


def _origins(config: Config, found: Findings, origin: str) -> dict[str, str]:
    origins = {
        key: f"auto -> {show(value)} ({AUTO[key]})"
        if key in found.auto
        else origin
        if key in found.given
        else "default"
        for key, value in leaves(config)
        if key in AUTO or key not in found.auto
    }
    origins |= {key: "auto -> no effect" if key in found.inert_auto else origin for key in found.inert}
    return origins | {
        key: f"auto -> the {key.partition('.')[0]}'s own default (the file leaves it open)"
        for key in sorted(found.auto - AUTO.keys())
    }


def _is_auto(origin: str) -> bool:
    return origin.startswith("auto ->")


def _is_given(origin: str) -> bool:
    return origin != "default" and not origin.startswith(("auto ->", "derived from"))


# --- batch sizes ------------------------------------------------------------------------------------------------

Sized = tuple[int | None, str]  # a size and its origin


def _resolve_batch(
    config: Config, origins: Mapping[str, str], world_size: int | None, found: Findings
) -> dict[str, Sized]:
    """Return the given sizes, and those that follow from train = micro x accumulation x ranks."""
    given: dict[str, Sized] = {}
    for key in BATCH:
        size = getattr(config, key)
        if size is not None and _is_given(origins[key]):
            given[key] = (size, origins[key])
    if TRAIN not in given:
        micro = given.get(MICRO, (1, "default"))
        accumulation = given.get(ACCUMULATION, (1, "default"))
        train: Sized = (None, "derived from micro x accumulation x ranks, once their number is known")
        if world_size is not None:
            terms = f"{micro[0]} (micro) x {accumulation[0]} (accumulation) x {world_size} (ranks)"
            train = ((micro[0] or 1) * (accumulation[0] or 1) * world_size, f"derived from {terms}")
        return {TRAIN: train, MICRO: micro, ACCUMULATION: accumulation}
    if MICRO in given and ACCUMULATION in given:
        _check_identity(given, world_size, found)
        return given
    if MICRO not in given:
        given.setdefault(ACCUMULATION, (1, "default"))
        return given | {MICRO: _divide(given, ACCUMULATION, world_size, found)}
    return given | {ACCUMULATION: _divide(given, MICRO, world_size, found)}


def _divide(given: Mapping[str, Sized], by: str, world_size: int | None, found: Findings) -> Sized:
    """Return the missing factor of the train batch size; it is unknown while the number of ranks is."""
    train, divisor = given[TRAIN][0] or 1, given[by][0] or 1
    label = "micro" if by == MICRO else "accumulation"
    share, remainder = divmod(train, divisor * (world_size or 1))
    terms = f"{divisor} ({label})" + ("" if world_size is None else f" x {world_size} (ranks)")
    if remainder:
        product = "" if world_size is None else f" = {divisor * world_size}"
        found.add(TRAIN, f"{train} cannot be divided by {terms}{product}; make it a multiple")
    if world_size is None:
        return None, f"derived from {TRAIN} {train}, once the number of ranks is known"
    return share, f"derived from {TRAIN} {train} / ({terms})"


def _check_identity(given: Mapping[str, Sized], world_size: int | None, found: Findings) -> None:
    train, micro, accumulation = (given[key][0] or 1 for key in BATCH)
    terms = f"{micro} (micro) x {accumulation} (accumulation)"
    if world_size is None:
        if train % (micro * accumulation):
            found.add(TRAIN, f"{TRAIN} {train} is no multiple of {terms} = {micro * accumulation}")
    elif train != micro * accumulation * world_size:
        product = f"{terms} x {world_size} (ranks) = {micro * accumulation * world_size}"
        found.add(TRAIN, f"{TRAIN} {train} != {product}; remove one of the three, or correct it")


# --- words ------------------------------------------------------------------------------------------------------


def _kind(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "a list"
    return show(value)
