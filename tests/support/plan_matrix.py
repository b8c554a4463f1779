"""Stages × tiers × codecs × precision × models: what an engine counts in real ranks, and as a simulated one.

`drawn` are by chance of all combinations that an engine accepts, `pairwise` a few in which every two choices meet.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwell
from shardwell.memory import StateKind, Tier
from shardwell.memory.machine import SimulatedMachine, SimulatedRanks, simulated
from shardwell.plan.fused_kernels import FusedKernels
from tests.support.internals import (
    autocast_of,
    disk_or_none,
    end_simulated_step,
    memory_stats_of,
    staging_pools,
    wait_as_if_slow,
)

STEPS = 3
_PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 8.0}},  # a fixed scale: no step is skipped
    "autocast": {"torch_autocast": {"enabled": True}},
}
_CODECS: dict[str, dict[str, Any]] = {
    "exact": {},
    "qwZ": {"zero_quantized_weights": True},
    "qgZ": {"zero_quantized_gradients": True},
    "hpZ": {"zero_hpz_partition_size": 2},
    "ZeRO++": {"zero_quantized_weights": True, "zero_quantized_gradients": True, "zero_hpz_partition_size": 2},
    "frozen": {"zero_quantized_nontrainable_weights": True},
}


@dataclass(frozen=True)
class PlanCase:
    """One configuration on a number of ranks; 4 ranks are two nodes."""

    ranks: int
    stage: int
    states: str = "none"  # where optimizer state is: "none" (the device), "cpu" or "nvme"
    parameters: str = "none"
    codec: str = "exact"
    precision: str = "bf16"
    model: str = "all"  # what is trained: "all", or adapters ("lora")
    accumulation: int = 1
    recomputes: bool = False
    commit: str = "auto"
    moments: str = "fp32"
    gradients: str = "auto"
    clip: float = 0.0

    def __str__(self) -> str:
        plain = {one.name: one.default for one in fields(PlanCase)}
        return ", ".join(f"{name} {value}" for name, value in asdict(self).items() if value != plain[name])

    @property
    def per_node(self) -> int:
        """The ranks of a node."""
        return 2 if self.ranks == 4 else self.ranks

    @property
    def is_possible(self) -> bool:
        """Whether an engine accepts it, and no choice is without effect."""
        zero, is_below = _CODECS[self.codec], self.states != "none"
        return (
            (self.parameters == "none" or self.stage == 3)
            and (self.stage > 0 or not is_below)
            and ("zero_quantized_gradients" not in zero or self.stage >= 2)
            and (self.stage == 3 or not set(zero) - {"zero_quantized_gradients"})
            and (self.codec == "exact" or self.ranks > 1)
            and (self.codec != "frozen" or self.model == "lora")
            and (self.commit != "at_once" or not (self.clip or self.precision == "fp16"))
            and (is_below or (self.commit == "auto" and self.moments == "fp32"))
            and (self.gradients == "auto" or self.states == "nvme")
        )

    def config(self, folder: str) -> dict[str, Any]:
        """Return what `initialize` gets; state on disk is in `folder`."""
        zero: dict[str, Any] = {"stage": self.stage, "stage3_param_persistence_threshold": 0, **_CODECS[self.codec]}
        for key, device in (("offload_optimizer", self.states), ("offload_param", self.parameters)):
            if device != "none":
                zero[key] = {"device": device, **({"nvme_path": folder} if device == "nvme" else {})}
        if self.parameters == "nvme":
            zero["offload_param"]["max_in_cpu"] = 0
        return {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clip,
            "zero_optimization": zero,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "shardwell": {"commit": self.commit, "moments": self.moments, "gradients": self.gradients},
            **_PRECISIONS[self.precision],
        }


_CHOICES: dict[str, Sequence[Any]] = {
    "ranks": (1, 2, 4),
    "stage": (0, 1, 2, 3),
    "states": ("none", "cpu", "nvme"),
    "parameters": ("none", "cpu", "nvme"),
    "codec": tuple(_CODECS),
    "precision": tuple(_PRECISIONS),
    "model": ("all", "lora"),
    "accumulation": (1, 2),
    "recomputes": (False, True),
    "commit": ("auto", "after_norm", "at_once", "shadow"),
    "moments": ("fp32", "8bit"),
    "gradients": ("auto", "host", "disk"),
    "clip": (0.0, 1.0),
}


def drawn(count: int, seed: int) -> Iterator[PlanCase]:
    """Yield so many cases by chance."""
    rng = random.Random(seed)
    while count:
        case = PlanCase(*(rng.choice(values) for values in _CHOICES.values()))
        if case.is_possible:
            count -= 1
            yield case


def pairwise(seed: int = 57, of: int = 4000) -> list[PlanCase]:
    """Return a few of many cases, in which every two choices meet that meet in any of them; few of them on 4 ranks.

    Of the first 60 seeds whose cases have all 686 such pairs, 57 gives those that are run soonest.
    """
    numbers: dict[Any, int] = {}
    masks = {
        case: sum(1 << numbers.setdefault(pair, len(numbers)) for pair in _pairs(case)) for case in drawn(of, seed)
    }
    missing, found = (1 << len(numbers)) - 1, []
    while missing:
        best = max(masks, key=lambda case: (masks[case] & missing).bit_count() / (1 + case.ranks))
        missing &= ~masks[best]
        found.append(best)
    return sorted(found, key=lambda case: (case.ranks, str(case)))


def _pairs(case: PlanCase) -> Iterator[Any]:
    return itertools.combinations(((name, getattr(case, name)) for name in _CHOICES), 2)


# ---------------------------------------------------------------------------------------------------------- models


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.add(x, self.down(F.gelu(self.up(self.norm(x)))))


class _Adapted(_Block):
    """A block whose weights are frozen, beside which a product of two small matrices is trained."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.requires_grad_(False)
        self.lora_a, self.lora_b = nn.Linear(width, 4, bias=False), nn.Linear(4, 4 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return torch.add(x, self.down(F.gelu(self.up(y) + self.lora_b(self.lora_a(y)))))


class SmallNet(nn.Module):
    def __init__(self, kind: str, *, recomputes: bool, width: int = 32, blocks: int = 4) -> None:
        super().__init__()
        block = _Adapted if kind == "lora" else _Block
        self.embed = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 50)
        self._recomputes = recomputes
        if kind == "lora":
            self.embed.requires_grad_(False)
            self.head.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self._recomputes else block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())


# --------------------------------------------------------------------------------------------------------- counting

Counts = dict[str, int]


@dataclass(frozen=True)
class Counted:
    """What an engine counted after each of some steps; staging in host memory depends on time, and is apart."""

    rest: list[Counts]  # "state unit tier"
    peaks: list[Counts]  # by tier
    staging: list[int]  # bytes in host memory
    disk: list[tuple[int, int]]  # read and written
    traffic: Counts  # "kind hop"
    pools: list[tuple[int, bool, int]]  # of staging buffers in host memory, as of `staging_pools`


def counted(case: PlanCase, folder: str, device: str) -> Counted:
    """Run steps on this rank, or on the simulated one."""
    torch.manual_seed(0)
    with torch.device(device):
        model = SmallNet(case.model, recomputes=case.recomputes, blocks=3)
        tokens = torch.zeros(2, 8, dtype=torch.long)
    engine = shardwell.initialize(model=model, config=case.config(folder), device=device).engine
    if device != "meta":
        wait_as_if_slow(engine)
    disk, found = disk_or_none(engine), Counted([], [], [], [], {}, [])
    kernels = FusedKernels(autocast_of(engine), has_gpus=False) if device == "meta" else contextlib.nullcontext()
    for _ in range(STEPS):
        memory_stats_of(engine).reset_peak()
        before = (disk.num_read, disk.num_written) if disk is not None else (0, 0)
        with kernels:
            for _ in range(case.accumulation):
                engine.backward(engine(tokens))
                engine.step()
        engine.optimizer.settle()
        if (queue := getattr(engine.optimizer.executor, "queue", None)) is not None:
            queue.bytes_in_advance()  # waits for what is read for the next step
        end_simulated_step(engine)
        after = (disk.num_read, disk.num_written) if disk is not None else (0, 0)
        report = engine.memory()
        staging = report.total(StateKind.STAGING, tier=Tier.HOST)
        rest = {
            f"{state.value} {unit} {tier.value}": size
            for (state, unit, tier), size in report.now.items()
            if size and (state, tier) != (StateKind.STAGING, Tier.HOST)
        }
        found.rest.append(rest)
        found.peaks.append({tier.value: report.total(tier=tier, at_peak=True) for tier in Tier})
        found.staging.append(staging)
        found.disk.append((after[0] - before[0], after[1] - before[1]))
    found.pools.extend(staging_pools(engine))
    received = engine.traffic().received
    found.traffic.update({f"{kind.value} {hop}": size for (kind, hop), size in received.items() if size})
    engine.destroy(whole=False)
    return found


def on_rank(cases: Sequence[PlanCase], folder: str) -> list[tuple[Counted, Counted | None]]:
    """Return for each case what this rank counts, and what it counts as a simulated one: the first or last, in turn."""
    rank, size, found = dist.get_rank(), dist.get_world_size(), []
    for number, case in enumerate(cases):
        os.environ.update(LOCAL_WORLD_SIZE=str(case.per_node), LOCAL_RANK=str(rank % case.per_node))
        place = os.path.join(folder, str(number))
        os.makedirs(place, exist_ok=True)
        real = counted(case, place, "cpu")
        machine = SimulatedMachine(has_gpus=False, ranks=SimulatedRanks(rank, size, case.per_node, "gloo"))
        plan = None
        if rank == (0, size - 1)[number % 2]:  # shards of those between them are as long as those of the first
            with simulated(machine):
                plan = counted(case, place, "meta")
        found.append((real, plan))
    return found


def differences(case: PlanCase, real: Counted, plan: Counted) -> Iterator[str]:
    """Yield in words where a plan is not what a rank counted."""
    for what in ("traffic", "disk"):
        if getattr(real, what) != getattr(plan, what):
            yield f"{what}: {getattr(real, what)} were counted, {getattr(plan, what)} planned"
    if plan.rest[-1] != plan.rest[-2]:
        yield f"memory of the plan grows: {plan.rest[-2]}, then {plan.rest[-1]}"
    if real.rest[-1] != real.rest[-2]:
        yield f"memory grows: {real.rest[-2]}, then {real.rest[-1]}"
    for step, (its, mine) in enumerate(zip(real.rest, plan.rest, strict=True)):
        wrong = {key: (its.get(key, 0), mine.get(key, 0)) for key in {**its, **mine} if its.get(key) != mine.get(key)}
        if wrong:
            yield f"at rest after step {step + 1} (counted, planned): {wrong}"
    for step, (its, mine) in enumerate(zip(real.peaks, plan.peaks, strict=True)):
        if its["device"] != mine["device"] or its["disk"] != mine["disk"] or its["host"] > mine["host"]:
            yield f"peaks of step {step + 1}: {its} were counted, {mine} planned"
    for its, mine in zip(real.staging, plan.staging, strict=True):
        if its > mine:
            yield f"staging in host memory: {its} were counted, {mine} planned"
    # A unit speculates only if a worker begins before the norm is known, and then has its states once more.
    late = sum(size for key, size in plan.rest[-1].items() if key.endswith(" host")) if case.commit == "shadow" else 0
    yield from _wrong_pools(real, plan, late)


def _wrong_pools(real: Counted, plan: Counted, late: int) -> Iterator[str]:
    """Yield where host memory is planned higher than what a run had no need for in its time explains."""
    if [pool[:2] for pool in real.pools] != [pool[:2] for pool in plan.pools]:
        yield f"pools of staging buffers (bytes, in order, number): {real.pools} were counted, {plan.pools} planned"
        return
    pairs = [
        (size, is_exact, made, pool[2]) for (size, is_exact, made), pool in zip(real.pools, plan.pools, strict=True)
    ]
    more = [(size, planned - made) for size, _, made, planned in pairs]
    if any(made > planned or (is_exact and made < planned) for _, is_exact, made, planned in pairs):
        yield f"staging buffers (bytes, in order, number): {real.pools} were counted, {plan.pools} planned"
    high = plan.peaks[-1]["host"] - real.peaks[-1]["host"]
    explained = late + sum(size * number for size, number in more)
    if high > explained:
        yield f"host memory is planned {high} bytes high, and buffers that were not needed are {explained}: {more}"
