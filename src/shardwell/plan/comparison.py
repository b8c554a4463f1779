"""`engine.plan()`: what a simulation of this job predicts, beside what its statistics and the allocator counted.

The running engine's model is copied to the meta device, whole and without the engine's hooks (`whole_model.py`), and
simulated on a machine with the figures of this one. Nothing of the running job changes.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import shardwell
from shardwell.config import RATIO, Config, OptimizerConfig
from shardwell.engine import Engine
from shardwell.errors import ShardwellError
from shardwell.memory import Tier
from shardwell.memory.machine import SimulatedMachine, SimulatedRanks, simulated
from shardwell.memory.statistics import human, render
from shardwell.parallel.grid import Grid
from shardwell.plan.estimate import Inputs, loss_of
from shardwell.plan.fused_kernels import FusedKernels
from shardwell.plan.simulation import MOMENTS, close, fuse_updates, naming_lines, simulate
from shardwell.plan.whole_model import check_copyable, whole_model
from shardwell.sequence_parallel.binding import without

_STEPS = 3  # the first allocates state; of the last the peak is read
_STAGE = "zero_optimization.stage"
_ARGUMENTS = ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov", "amsgrad")


@dataclass(frozen=True)
class TierComparison:
    """The bytes of one tier: predicted and counted between steps and at the peak, and the allocator's peak."""

    tier: Tier
    rest: int  # predicted, between steps
    counted_rest: int
    peak: int  # predicted: the engine's own buffers
    counted_peak: int  # by the statistics, since the engine was built
    allocated: int | None = None  # predicted, with activations; of the device
    counted_allocated: int | None = None  # by CUDA's allocator; None where there is none


@dataclass(frozen=True)
class PlanComparison:
    """The predictions of a simulation of a running job, beside what was counted."""

    tiers: tuple[TierComparison, ...]
    traffic: dict[str, tuple[int, int]]  # "kind hop": bytes received in a step, predicted and counted in the last one

    def of(self, tier: Tier) -> TierComparison:
        """Return the bytes of a tier."""
        return next(one for one in self.tiers if one.tier is tier)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as values of JSON."""
        return {
            "tiers": [{**vars(one), "tier": one.tier.value} for one in self.tiers],
            "traffic": {key: {"predicted": one, "counted": other} for key, (one, other) in self.traffic.items()},
        }

    def __str__(self) -> str:
        from rich.table import Table

        table = Table(title="this rank, as planned and as counted")
        for column in ("", "planned", "counted"):
            table.add_column(column, justify="right" if column else "left")
        for one in self.tiers:
            table.add_row(f"{one.tier.value}, between steps", human(one.rest), human(one.counted_rest))
            table.add_row(f"{one.tier.value}, peak of the engine's buffers", human(one.peak), human(one.counted_peak))
            if one.allocated is not None:
                counted = "-" if one.counted_allocated is None else human(one.counted_allocated)
                table.add_row(f"{one.tier.value}, peak of the allocator", human(one.allocated), counted)
        for key, (planned, counted_bytes) in self.traffic.items():
            table.add_row(f"received: {key}", human(planned), human(counted_bytes))
        return render(table)


def compare(engine: Engine, inputs: Inputs, loss: Callable[[Any], Tensor] | None = None) -> PlanComparison:
    """Simulate a step of a running engine with such inputs, and compare it with what was counted.

    Args:
        engine: An engine that has run a step at least.
        inputs: The arguments of one micro-step, as a tuple or a dictionary of tensors; only their sizes are used.
        loss: A function from the model's output to its loss; by default the output, its `loss`, or its first entry.
    """
    check_copyable(engine)
    machine, settings = machine_of(engine), _settings(engine)
    given = tree_map(lambda one: one.to("meta") if isinstance(one, Tensor) else one, inputs)

    def forward(planned: Engine) -> Tensor:
        output = planned(**given) if isinstance(given, Mapping) else planned(*given)
        return loss_of(output if loss is None else loss(output))

    grid = engine._context.roles.grid
    with without(engine._teardown.sequences), _silent():
        costs = simulate(whole_model(engine), settings, machine, forward, grid=grid)
        rest, peaks = _counted(whole_model(engine), settings, machine, forward, grid)
    report, traffic = engine.memory(), engine.traffic()
    has_memory = engine._context.device.has_device_memory
    tiers = []
    for tier in Tier:
        counted = report.total(tier=tier), report.total(tier=tier, at_peak=True)
        highest = max(costs.peaks.get(f"{moment} {tier.value}", 0) for moment in MOMENTS)
        highest += engine._context.device.workspace_bytes()
        is_device = tier is Tier.DEVICE
        tiers.append(
            TierComparison(
                tier,
                *(rest[tier], counted[0], peaks[tier], counted[1]),
                highest if is_device else None,
                engine._context.device.peak_bytes() if is_device and has_memory else None,
            )
        )
    received = {f"{kind.value} {hop}": size for (kind, hop), size in traffic.received.items() if size}
    keys = dict.fromkeys([*costs.traffic, *received])
    moved = {key: (costs.traffic.get(key, 0), received.get(key, 0)) for key in keys}
    return PlanComparison(tuple(one for one in tiers if one.rest or one.peak or one.counted_peak), moved)


def machine_of(engine: Engine) -> SimulatedMachine:
    """Return a simulated machine with the figures of the one that an engine runs on."""
    group, device = engine._context.roles.all.rank_group, engine._context.device
    found, backend = device.machine, "gloo" if group.backend == "gloo" else "nccl"
    ranks = SimulatedRanks(group.rank, group.size, group.local_world_size, backend)
    capacity = device.capacity_bytes() if device.has_device_memory else float(1 << 60)
    return SimulatedMachine(
        capacity,
        host_bytes=found.free_host_bytes(group.local_world_size) + _on_host(engine) * group.local_world_size,
        has_gpus=device.has_device_memory,
        ranks=ranks,
        cores=found.num_cores(),
    )


def _on_host(engine: Engine) -> int:
    return engine.memory().total(tier=Tier.HOST)


def _settings(engine: Engine) -> Config:
    """Return the configuration that the engine was built by: what was chosen is not chosen again."""
    settings = engine.settings.with_origins({**engine.settings.origins, _STAGE: "python", RATIO: "python"})
    if engine.offload.kept:
        zero, trained = settings.zero_optimization, engine.offload.states.trained()
        below = sum(trained.values()) - sum(trained[name] for name in engine.offload.kept)
        ratio = (below + 0.5) / sum(trained.values())  # half an element more: no rounding leaves a unit out
        block = zero.offload_optimizer.model_copy(update={"ratio": ratio})
        settings = settings.with_block("zero_optimization", zero.model_copy(update={"offload_optimizer": block}))
    if engine.optimizer is None:
        raise ShardwellError("engine.plan() compares training steps, and this engine has no optimizer")
    inner = engine.optimizer.inner
    if settings.optimizer is None:
        params = {name: inner.defaults[name] for name in _ARGUMENTS if name in inner.defaults}
        settings = settings.with_block("optimizer", OptimizerConfig(type=type(inner).__name__, params=params))
    return settings


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Let simulated engines not log what this job's engine has said of itself."""
    logger = logging.getLogger("shardwell")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _counted(
    model: nn.Module, settings: Config, machine: SimulatedMachine, forward: Callable[[Engine], Tensor], grid: Grid
) -> tuple[dict[Tier, int], dict[Tier, int]]:
    """Return what the statistics of a simulated engine count between steps, and at the peak of a step."""
    with simulated(machine), torch.compiler.set_stance("force_eager"):
        engine = shardwell.initialize(model=model, config=settings, mesh=grid).engine  # type: ignore[arg-type]
        stats = engine._context.memory_stats
        try:
            fuse_updates(engine)
            with FusedKernels(engine._precision.autocast, has_gpus=machine.has_gpus), naming_lines(settings):
                for _ in range(_STEPS):
                    stats.reset_peak()
                    for _ in range(engine.gradient_accumulation_steps()):
                        engine.backward(forward(engine))
                        engine.step()
                    if engine.optimizer is not None:
                        engine.optimizer.settle()
            report = engine.memory()
        finally:
            close(engine)
    return (
        {tier: report.total(tier=tier) for tier in Tier},
        {tier: report.total(tier=tier, at_peak=True) for tier in Tier},
    )
