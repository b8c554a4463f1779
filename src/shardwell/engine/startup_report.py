"""The report of rank 0 at startup: what may do harm as warnings, the rest at level INFO.

It says where every byte is stored, which parameters stay unsharded, which keys of the configuration have no effect or
another one than in DeepSpeed, and what was decided where the configuration was open or contradictory. Only what applies
is reported.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwell.config import Config, Note, remarks, told
from shardwell.kernels import describe as describe_kernels
from shardwell.memory import StateKind, Tier
from shardwell.memory.statistics import MemoryReport, human
from shardwell.runtime.precision import mixed_dtype
from shardwell.sharding.model_states import OffloadPlan

if TYPE_CHECKING:
    from shardwell.engine.engine import Engine

_UNTIL = "gradients and secondary shards until the step"


@dataclass(frozen=True)
class UserArguments:
    """A record of what was passed to `initialize` beside the configuration: an optimizer, a schedule."""

    optimizer: bool
    schedule: bool


def announce(engine: Engine, given: UserArguments) -> str:
    """Log the report on rank 0, and return it."""
    hurting, rest = told(_notes(engine, given))
    if engine.global_rank == 0:
        logger = logging.getLogger("shardwell")
        for level, sentences in ((logging.WARNING, hurting), (logging.INFO, rest)):
            if sentences:
                logger.log(level, "shardwell:%s", "".join(f"\n  - {sentence}" for sentence in sentences))
    return "\n".join([*hurting, *rest])


def _notes(engine: Engine, given: UserArguments) -> Iterator[Note]:
    config, offload = engine.settings, engine.offload
    yield Note(startup_line(engine))
    yield from _said_twice(config, given, has_optimizer=engine.optimizer is not None)
    yield from remarks(config)
    yield from _numbers_left_open(engine)
    if offload.states.formula.num_ranks == 1 and config.zero_optimization.stage:
        yield Note(f"one rank: stage {config.zero_optimization.stage} has no other rank to shard over")
    yield from _unsharded(engine)
    yield from _narrow(engine)
    yield from _unreached(config, offload)
    yield _stored(engine.memory(), offload)
    if offload.commits or config.shardwell.placement == "auto":
        yield Note(str(offload))
    if offload.kept:
        yield _kept(offload)


def _said_twice(config: Config, given: UserArguments, *, has_optimizer: bool) -> Iterator[Note]:
    if given.optimizer and config.optimizer is not None:
        yield Note(
            f"optimizer: the one that was passed to initialize holds, not {config.optimizer.type} of the file", True
        )
    if given.schedule and config.scheduler is not None:
        yield Note(
            f"scheduler: the one that was passed to initialize holds, not {config.scheduler.type} of the file", True
        )
    elif config.scheduler is not None and not has_optimizer:
        yield Note(f"scheduler {config.scheduler.type}: there is no optimizer, so it is left out", True)


def _numbers_left_open(engine: Engine) -> Iterator[Note]:
    """Report the arguments that "auto" left to the optimizer."""
    prefix = "optimizer.params."
    names = [key.removeprefix(prefix) for key, origin in engine.settings.origins.items() if key.startswith(prefix)]
    names = [name for name in names if engine.settings.origins[prefix + name].startswith("auto ->")]
    if engine.optimizer is not None and names:
        group: dict[str, Any] = engine.optimizer.param_groups[0]
        yield Note(f"optimizer: {', '.join(f'{name} {group.get(name)}' for name in names)}", hurts=True)


def _unsharded(engine: Engine) -> Iterator[Note]:
    """Report the parameters that are not sharded at stage 3 because they are small."""
    zero = engine.settings.zero_optimization
    units = engine.offload.states.units
    if zero.stage != 3:
        return
    sizes: Counter[bool] = Counter()
    for kinds in units.values():
        for kind, numel in kinds.items():
            sizes[kind.persistent] += numel
    key, threshold = "stage3_param_persistence_threshold", zero.stage3_param_persistence_threshold
    if sizes[True] and not sizes[False]:
        yield Note(
            f"stage 3, but all parameters are below {key} {threshold}: they stay unsharded on every rank, and nothing "
            "is all-gathered. Lower it, or remove it",
            hurts=True,
        )
    elif sizes[True]:
        share = 100 * sizes[True] / sizes.total()
        yield Note(
            f"small parameters ({sizes[True]:,} elements, {share:.2g}% of the model) stay unsharded on every rank, as "
            f"{key} {threshold} says"
        )


def _narrow(engine: Engine) -> Iterator[Note]:
    """Report 16-bit parameters without wider master weights: small updates are rounded away."""
    kinds = {kind for kinds in engine.offload.states.units.values() for kind in kinds if kind.trains}
    narrow = sorted({str(k.precision.compute).removeprefix("torch.") for k in kinds if k.precision.master.itemsize < 4})
    if engine.optimizer is not None and narrow and mixed_dtype(engine.settings) is None:
        yield Note(
            f"parameters are {' and '.join(narrow)} and neither bf16 nor fp16 is enabled: there are no fp32 masters, "
            "and updates that are too small for 16 bits are lost",
            hurts=True,
        )


def _unreached(config: Config, offload: OffloadPlan) -> Iterator[Note]:
    """Report tiers that were asked for and are not used."""
    param = config.zero_optimization.offload_param
    places = offload.places.values()
    if param.device == "nvme" and config.shardwell.placement == "asked":
        held = sum(offload.states.shares().values())
        if not any(place.parameters is Tier.DISK for place in places):
            yield Note(
                'offload_param.device is "nvme", but no parameter is stored on disk: offload_param.max_in_cpu keeps '
                f"up to {param.max_in_cpu:,} elements of each rank on the host, and this one has {held:,}. Set it to 0 "
                "for all on disk",
                hurts=True,
            )
        elif any(place.parameters is Tier.HOST for place in places):
            yield Note(
                f"offload_param.max_in_cpu keeps up to {param.max_in_cpu:,} of {held:,} elements of each rank on the "
                "host"
            )


def _stored(memory: MemoryReport, offload: OffloadPlan) -> Note:
    """Report where every byte is stored."""
    sizes: Counter[tuple[str, Tier]] = Counter()
    names = {StateKind.PARAMETERS: "parameters", StateKind.OPTIMIZER: "optimizer state"}
    for (state, _, tier), size in memory.now.items():
        if state in names:
            sizes[names[state], tier] += size
    states, formula = offload.states, offload.states.formula
    for name, kinds in states.units.items():
        for kind, numel in kinds.items():
            row = formula.spec(kind, offload.places[name])
            own = formula.share(numel) if row.optimizer.axis is not None else numel
            sizes["optimizer state", row.optimizer.tier] += formula.moments(own, kind, row.optimizer.tier) * kind.trains
            waiting = formula.needs(kind, numel, offload.places[name]) - formula.stored_bytes(
                kind, numel, offload.places[name]
            )
            for tier, size in waiting.items():
                sizes[_UNTIL, tier] += size
    parts = []
    for what in ("parameters", "optimizer state", _UNTIL):
        found = [f"{human(sizes[what, tier])} {tier.words}" for tier in Tier if sizes[what, tier]]
        parts += [f"{what} {', '.join(found)}"] if found else []
    return Note(f"on each rank: {'; '.join(parts)}")


def _kept(offload: OffloadPlan) -> Note:
    """Report the optimizer state that is on the device although it is offloaded, and why."""
    trained = offload.states.trained()
    share = sum(trained[name] for name in offload.kept) / max(1, sum(trained.values()))
    names = [name or "(root)" for name in offload.kept]
    shown = f"'{names[0]}'" if len(names) == 1 else f"'{names[0]}' to '{names[-1]}'"
    return Note(
        f"optimizer state of the first {len(names)} units ({shown}, {share:.0%} of the trained parameters) stays on "
        f"the device, where it takes {human(offload.kept_bytes())} with the gradients that wait for the step: backward "
        "brings their gradients last, and the next forward needs them first. "
        'zero_optimization.offload_optimizer "ratio": 1.0 sends all of it to the host'
    )


def startup_line(engine: Engine) -> str:
    """Return what is trained and how, in one line."""
    config, states = engine.settings, engine.offload.states
    sizes: Counter[bool] = Counter()
    for kinds in states.units.values():
        for kind, numel in kinds.items():
            sizes[kind.trains] += numel
    frozen = f" ({sizes[True]:,} trainable)" if sizes[False] else ""
    mixed = mixed_dtype(config)
    precision = "autocast" if config.torch_autocast.enabled else str(mixed).removeprefix("torch.") if mixed else "fp32"
    below = {place.optimizer for place in engine.offload.places.values()} - {Tier.DEVICE}
    kernels = f", host kernels: {describe_kernels()}" if below else ""
    return (
        f"{type(engine.module).__name__}: {sizes.total():,} parameters{frozen} in {len(states.units)} units on "
        f"{engine.world_size} rank{'s' * (engine.world_size > 1)} ({engine.device.type}), stage "
        f"{config.zero_optimization.stage}, {_tiers(engine.offload)}, {precision}{_batch(engine)}{kernels}"
    )


def _batch(engine: Engine) -> str:
    """Return the batch of a step; nothing if the script reads its own batches and no file says how large they are."""
    if "default" in engine.settings.origins["train_micro_batch_size_per_gpu"]:
        return ""
    micro, steps = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    return f", batch {engine.train_batch_size()} = {micro} x {steps} x {engine.world_size}"


def _tiers(offload: OffloadPlan) -> str:
    """Return on which tiers parameters and optimizer state are stored."""
    places = offload.places.values()
    found = []
    for what, tiers in (("parameters", {p.parameters for p in places}), ("optimizer", {p.optimizer for p in places})):
        found.append(f"{what} on {' and '.join(tier.value for tier in Tier if tier in tiers)}")
    return ", ".join(found)
