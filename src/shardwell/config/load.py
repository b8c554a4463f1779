"""From what a user wrote to a typed `Config`: parsed once, every problem named at once.

The steps: read -> screen the keys (unknown, removed, "auto") -> validate the values -> check what is
built and what contradicts -> resolve the batch sizes. Knows nothing of torch or of processes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from shardwell.config import optimizers, schedules, unsupported
from shardwell.config.field_types import flag, number
from shardwell.config.notes import Note
from shardwell.config.schema import Config, ConfigBlock, admits_auto, block_of, leaves, may_be_absent
from shardwell.config.source import read
from shardwell.config.suggestions import PARAMS, suggest
from shardwell.config.translate import translated
from shardwell.errors import ConfigError, printable

Source = str | os.PathLike[str] | Mapping[str, Any] | Config | None

TRAIN, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
BATCH = (TRAIN, MICRO, ACCUMULATION)

_MOST_LINES, _MOST_LETTERS = 50, 200  # of problems in a message, of a value
_SIZE = "shardwell's default"
# Keys that may be "auto", and why they resolve as they do: each one then counts as absent.
AUTO: dict[str, str] = {
    **dict.fromkeys(BATCH, "as if absent"),
    "gradient_clipping": "off",
    "bf16.enabled": "the model's own dtype decides",
    "fp16.enabled": "the model's own dtype decides",
    "zero_optimization.offload_optimizer.device": "off",
    "zero_optimization.offload_param.device": "off",
    "zero_optimization.offload_optimizer.nvme_path": "none",
    "zero_optimization.offload_param.nvme_path": "none",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "no effect",
    "zero_optimization.reduce_bucket_size": _SIZE,
    "zero_optimization.allgather_bucket_size": _SIZE,
    "zero_optimization.sub_group_size": _SIZE,
    "zero_optimization.stage3_max_live_parameters": _SIZE,
    "zero_optimization.stage3_max_reuse_distance": _SIZE,
    "zero_optimization.stage3_prefetch_bucket_size": _SIZE,
    "zero_optimization.stage3_model_persistence_threshold": _SIZE,
    "zero_optimization.stage3_module_granularity_threshold": _SIZE,
}


def load(
    source: Source, *, world_size: int | None = None, optimizer_given: bool = False, scheduler_given: bool = False
) -> Config:
    """The effective configuration of a JSON file, JSON text, mapping or `Config`.

    With `world_size` all three batch sizes are ints; without it what depends on it stays None. Where the code has an
    optimizer or a schedule of its own, `optimizer_given` or `scheduler_given`, nobody reads the one of the file.
    Raises one `ConfigError` that lists every problem.
    """
    if world_size is not None and (isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1):
        raise ConfigError(f"world_size: expected a whole number of at least 1, found {world_size!r}")
    if isinstance(source, Config):
        found = Findings("Config")
        config = source if optimizer_given else _check_optimizer(source, found)
        found.auto = {key for key, origin in source.origins.items() if _is_auto(origin)}
        config = config if scheduler_given else _check_scheduler(config, found)
        return _finish(config, found, dict(source.origins), world_size)
    where, origin, raw = read(source)
    try:
        spoken = translated(raw)
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply to be a configuration") from None
    found = Findings(where, spoken.problems, notes=spoken.notes)
    clean = _screen(spoken.content, Config, "", found)
    config = _validate(clean, found).with_notes(found.notes)
    if not optimizer_given:
        config = _check_optimizer(config, found)
    if not scheduler_given:
        config = _check_scheduler(config, found)
    return _finish(config, found, _origins(config, found, origin), world_size)


@dataclass
class Findings:
    """What the walk over one source has come upon so far."""

    where: str  # the file as the user named it
    problems: list[tuple[str, str]] = field(default_factory=list)  # (dotted key, sentence)
    given: set[str] = field(default_factory=set)  # dotted keys that have a value in the source
    auto: set[str] = field(default_factory=set)  # dotted keys that were "auto"
    notes: list[Note] = field(default_factory=list)  # what to tell the user although nothing is wrong
    num_unknown: int = 0  # keys
    _broken: set[str] = field(default_factory=set)  # keys of so many problems
    _num_counted: int = 0

    def add(self, key: str, sentence: str) -> None:
        self.problems.append((key, sentence))

    def broken(self, *keys: str) -> bool:
        while self._num_counted < len(self.problems):
            self._broken.add(self.problems[self._num_counted][0])
            self._num_counted += 1
        return not self._broken.isdisjoint(keys)

    def raise_if_any(self) -> None:
        if self.problems:
            count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
            lines = [f"  {key}: {sentence}" for key, sentence in sorted(self.problems)[:_MOST_LINES]]
            more = [f"  and {len(self.problems) - _MOST_LINES:,} more"] if len(self.problems) > _MOST_LINES else []
            raise ConfigError(printable("\n".join([f"{self.where}: {count} in the configuration", *lines, *more])))


def _check_optimizer(config: Config, found: Findings) -> Config:
    """With arguments as the optimizer takes them."""
    block = config.optimizer
    if block is None or block.type.lower() in unsupported.REMOVED_OPTIMIZERS or found.broken("optimizer.params"):
        return config
    params, problems = optimizers.checked(block.type, block.params)
    found.problems.extend(problem for problem in problems if not found.broken(problem[0]))
    return config.with_block("optimizer", block.model_copy(update={"params": params}))


def _check_scheduler(config: Config, found: Findings) -> Config:
    """With arguments as the schedule takes them; those that are "auto" come later."""
    block = config.scheduler
    if block is None or found.broken("scheduler.params", "scheduler.type"):
        return config
    later = {key.rpartition(".")[2] for key in found.auto if key.startswith("scheduler.params.")}
    params, problems = schedules.checked(block.type, block.params, later)
    found.problems.extend(problem for problem in problems if not found.broken(problem[0]))
    return config.with_block("scheduler", block.model_copy(update={"params": params}))


def _finish(config: Config, found: Findings, origins: dict[str, str], world_size: int | None) -> Config:
    _check_built(config, found)
    _check_ranks(config, found, world_size)
    sizes: dict[str, int | None] = {}
    if not found.broken(*BATCH):
        for key, (size, origin) in _resolve_batch(config, origins, world_size, found).items():
            sizes[key] = size
            origins[key] = f"auto -> {_show(size)} ({origin})" if _is_auto(origins[key]) else origin
    found.raise_if_any()
    return config.with_origins(origins, sizes)


# --- keys -------------------------------------------------------------------------------------------------------


def _screen(raw: Mapping[str, Any], block: type[ConfigBlock], prefix: str, found: Findings) -> dict[str, Any]:
    """The part of `raw` that `block` can be validated from; everything else becomes a finding."""
    for name, times in getattr(raw, "repeated", {}).items():
        found.add(f"{prefix}{name}", f"written {times} times in the same object; keep one")
    clean: dict[str, Any] = {}
    for name, value in raw.items():
        key = f"{prefix}{name}"
        if name not in block.model_fields:
            _take_foreign(key, value, found)
            continue
        inner = block_of(block.model_fields[name])
        if value is None and (inner is not None or may_be_absent(block.model_fields[name])):
            continue  # as if absent
        if value == "auto" and not admits_auto(block.model_fields[name]):
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
        found.add(key, 'cannot be "auto"; write a value or remove the key')


def _screen_params(params: Any, prefix: str, found: Findings) -> Any:
    """Drops the arguments that are "auto": the default of the optimizer or scheduler then holds."""
    if params is None:
        return {}
    if not isinstance(params, Mapping):
        return params  # validation says what is wrong with it
    for name, times in getattr(params, "repeated", {}).items():
        found.add(f"{prefix}.{name}", f"written {times} times in the same object; keep one")
    for name, value in params.items():
        (found.auto if value == "auto" else found.given).add(f"{prefix}.{name}")
    return {name: _argument(value) for name, value in params.items() if value != "auto"}


def _argument(value: Any) -> Any:
    """Numbers are written as strings at times: "1e-3"."""
    if isinstance(value, list):
        return [_argument(item) for item in value]
    words = {"true": True, "false": False}
    found = words.get(value.lower(), number(value)) if isinstance(value, str) else value
    return value if isinstance(found, float) and not math.isfinite(found) else found


def _take_foreign(key: str, value: Any, found: Findings) -> None:
    """A key outside the schema: accepted if it asks for nothing, or for what makes no difference here."""
    if key in unsupported.FEATURES:
        feature = unsupported.FEATURES[key]
        if _asks(feature, value):
            found.add(key, feature.refusal)
    elif key in unsupported.IDLE:
        idle = unsupported.IDLE[key]
        if idle.values is not None and not any(_is_same(value, other) for other in idle.values):
            found.add(key, f"{_show(value)}: {idle.refusal}")
        elif idle.why and value is not None:
            found.notes.append(Note(f"{key} has no effect: {idle.why}", unused=(key, idle.why)))
    elif not key.rpartition(".")[2].startswith(("_", "//", "#")):  # a comment, where JSON has none
        found.num_unknown += 1
        found.add(key, f"unknown key; {suggest(key)}" if found.num_unknown <= _MOST_LINES else "unknown key")


def _asks(feature: unsupported.Feature, value: Any) -> bool:
    """Whether a block asks for its feature. As DeepSpeed has it, one without a switch that is on does not."""
    if not isinstance(value, Mapping):
        return not (value is None or flag(value) is False or value == [])
    switches = [_switch(value.get(name)) for name in feature.switches if name in value]
    if feature.is_deep:
        switches += [_asks(feature, inner) for inner in value.values() if isinstance(inner, Mapping)]
    return any(switches) or (feature.is_asked_by_content and bool(value) and not switches)


def _switch(value: Any) -> bool:
    """Counts ask from 2 on: 1 is what there is anyway, and "auto" is whatever there is."""
    value = flag(value)
    if isinstance(value, bool):
        return value
    count = number(value)
    return count > 1 if isinstance(count, int | float) else value not in (None, "auto")


def _is_same(value: Any, other: Any) -> bool:
    """Whether what was written means `other`."""
    if isinstance(other, bool):
        return flag(value) is other
    if isinstance(other, str):
        return isinstance(value, str) and value.lower() == other
    return bool(number(value) == other)


# --- values -----------------------------------------------------------------------------------------------------


def _validate(clean: dict[str, Any], found: Findings) -> Config:
    """A `Config` of the values that are right; each wrong one becomes a finding and its default stands in."""
    try:
        return Config.model_validate(clean)
    except ValidationError as error:
        for detail in error.errors():
            key = ".".join(str(part) for part in detail["loc"])
            if not found.broken(key):  # a required key that was "auto" is missing by now: one sentence is enough
                found.add(key, _sentence(detail))
            _drop(clean, detail["loc"])
    return _validate(clean, found)


def _drop(content: dict[Any, Any], path: tuple[int | str, ...]) -> None:
    """Removes the value at `path`, or the innermost object around it where it is missing."""
    first, rest = path[0], path[1:]
    inner = content.get(first)
    if rest and isinstance(inner, dict) and rest[0] in inner:
        _drop(inner, rest)
    else:
        content.pop(first, None)


_SENTENCES: dict[str, Callable[[dict[str, Any]], str]] = {
    "greater_than_equal": lambda context: f"expected at least {context['ge']}",
    "greater_than": lambda context: f"expected more than {context['gt']}",
    "less_than": lambda context: f"expected less than {context['lt']}",
    "less_than_equal": lambda context: f"expected at most {context['le']}",
    "literal_error": lambda context: f"expected {context['expected']}".replace("'", '"'),
    "value_error": lambda context: str(context["error"]),
    "string_type": lambda _: "expected a string",
    "tuple_type": lambda _: "expected a list of strings",
    "dict_type": lambda _: "expected an object",
    "string_too_short": lambda _: "expected a name",
}


_EXAMPLES = {"optimizer.type": "AdamW", "scheduler.type": "WarmupLR"}  # the keys that must not be left out


def _sentence(detail: ErrorDetails) -> str:
    if detail["type"] == "missing":
        return f"missing; name it, such as {_show(_EXAMPLES['.'.join(map(str, detail['loc']))])}"
    write = _SENTENCES.get(detail["type"])
    expected = write(detail.get("ctx", {})) if write else detail["msg"]
    return f"{expected}, found {_show(detail['input'])}"


def _check_built(config: Config, found: Findings) -> None:
    """Values that have the right type and cannot be had: not built, or against one another."""
    refused: dict[str, str] = {}
    for key, value in leaves(config):
        only = unsupported.ONLY.get(key)
        if only is not None and value not in only.allowed:
            refused[key] = f"{_show(value)}: {only.why}"
    if config.optimizer is not None and config.optimizer.type.lower() in unsupported.REMOVED_OPTIMIZERS:
        kind = config.optimizer.type
        refused["optimizer.type"] = f"{_show(kind)}: {unsupported.REMOVED_OPTIMIZERS[kind.lower()]}"
    refused |= _contradictions(config)
    refused |= _contradictions_of_zero(config, knows_stage=not found.broken("zero_optimization.stage"))
    found.problems.extend(refused.items())


def _contradictions(config: Config) -> dict[str, str]:
    """Keys of precision that speak against one another, and why."""
    refused: dict[str, str] = {}
    halves = [f"{name}.enabled" for name in ("bf16", "fp16") if getattr(config, name).enabled]
    if len(halves) == 2:
        refused["fp16.enabled"] = "contradicts bf16.enabled, both are true; keep one"
    if halves and config.torch_autocast.enabled:
        refused["torch_autocast.enabled"] = (
            f"contradicts {' and '.join(halves)}: autocast is for weights that stay fp32; keep one"
        )
    if config.prescale_gradients and config.gradient_predivide_factor != 1.0:
        refused["gradient_predivide_factor"] = (
            f"{_show(config.gradient_predivide_factor)} contradicts prescale_gradients, which already divides by the "
            "number of ranks before the sum; use 1.0 or remove it"
        )
    return refused


def _contradictions_of_zero(config: Config, *, knows_stage: bool) -> dict[str, str]:
    """Keys that speak against the stage, or against one another, and why."""
    refused: dict[str, str] = {}
    zero = config.zero_optimization
    if zero.offload_param.device != "none" and zero.stage != 3 and knows_stage:
        refused["zero_optimization.offload_param.device"] = (
            f"{_show(zero.offload_param.device)} contradicts zero_optimization.stage {zero.stage}: "
            'parameters rest sharded, and can be offloaded, only at stage 3; use "none"'
        )
    if config.shardwell.find_unused_parameters and zero.stage == 3 and knows_stage:
        refused["shardwell.find_unused_parameters"] = (
            "true contradicts zero_optimization.stage 3: all ranks bring their part of a module that one of them runs; "
            "use stage 2, or name the module that chooses in zero_optimization.leaf_module"
        )
    copies = zero.zero_hpz_partition_size
    if copies not in (1, "auto") and zero.stage != 3 and knows_stage:
        refused["zero_optimization.zero_hpz_partition_size"] = (
            f"{_show(copies)} contradicts zero_optimization.stage {zero.stage}: only at stage 3 "
            "parameters are split, and gathered from a second copy; use 1"
        )
    for name, below in (("offload_optimizer", zero.offload_optimizer), ("offload_param", zero.offload_param)):
        if below.device == "nvme" and not any(path.strip() for path in (below.nvme_path or "").split(",")):
            refused[f"zero_optimization.{name}.nvme_path"] = (
                f"missing, and {name}.device is \"nvme\"; name a folder on a local drive, or several with ',' between "
                "them"
            )
    for key, name, least in (
        ("zero_quantized_weights", "parameters", 3),
        ("zero_quantized_nontrainable_weights", "parameters", 3),
        ("zero_quantized_gradients", "gradients", 2),
    ):
        if getattr(zero, key) is True and zero.stage < least and knows_stage:
            refused[f"zero_optimization.{key}"] = (
                f"true contradicts zero_optimization.stage {zero.stage}: {name} travel in shards only from stage "
                f"{least} on; use false"
            )
    if config.shardwell.placement == "auto" and zero.stage != 3 and knows_stage:
        refused["shardwell.placement"] = (
            f'"auto" contradicts zero_optimization.stage {zero.stage}: it places units of stage 3; use "asked"'
        )
    if config.shardwell.placement == "auto" and zero.offload_optimizer.ratio != 1.0:
        refused["zero_optimization.offload_optimizer.ratio"] = (
            f'{_show(zero.offload_optimizer.ratio)} contradicts shardwell.placement "auto", which finds out what stays '
            "on the GPU; use 1.0 or remove it"
        )
    return refused


def _check_ranks(config: Config, found: Findings, world_size: int | None) -> None:
    """Values that this many ranks cannot have."""
    key, copies = "zero_optimization.zero_hpz_partition_size", config.zero_optimization.zero_hpz_partition_size
    if world_size == 1 and copies != "auto" and copies > 1 and not found.broken(key):
        found.add(key, f"{copies} ranks are to split a second copy, and there is one rank; use 1, or start more ranks")


# --- origins ----------------------------------------------------------------------------------------------------


def _origins(config: Config, found: Findings, origin: str) -> dict[str, str]:
    origins = {
        key: f"auto -> {_show(value)} ({AUTO[key]})"
        if key in found.auto
        else origin
        if key in found.given
        else "default"
        for key, value in leaves(config)
        if key in AUTO or key not in found.auto
    }
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
    """train = micro x accumulation x ranks: the sizes that were given, and those that follow from them."""
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
    """The missing factor of the train batch size; unknown while the number of ranks is."""
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


def _show(value: Any) -> str:
    words = json.dumps(value, default=str)
    return words if len(words) <= _MOST_LETTERS else f"{words[:_MOST_LETTERS]}..."


def _kind(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "a list"
    return _show(value)
