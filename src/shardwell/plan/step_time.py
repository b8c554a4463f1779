"""The time of a step: the engine runs on the meta device with virtual time, and its last step is read off the clock."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

import shardwell
from shardwell import checkpointing, virtual_time
from shardwell.engine import Engine
from shardwell.memory import Tier
from shardwell.memory.machine import SimulatedMachine, simulated
from shardwell.monitor.timeline import Span, Timeline
from shardwell.parallel.traffic import TrafficKind
from shardwell.parallel.transport import Work
from shardwell.plan.fused_kernels import FusedKernels
from shardwell.plan.kernel_times import TimedKernels
from shardwell.plan.simulation import fuse_updates, naming_lines
from shardwell.runtime.trace import Trace, TraceAction
from shardwell.virtual_time.virtual_clock import (
    BETWEEN,
    COMPUTE,
    DISK,
    DOWN,
    HOST,
    IDLE,
    INSIDE,
    RESOURCES,
    UP,
    UPDATE,
    Task,
    VirtualClock,
)

# The first makes state. Later ones wait for what the one before has begun, which below the device changes the second.
_STEPS, _STEPS_BELOW = 2, 3
BUBBLE = "bubble"  # of a pipeline: the rank has nothing to do
_GROUPS = {  # what bounds a step, in words
    COMPUTE: "compute",
    INSIDE: "link",
    BETWEEN: "link",
    UP: "PCIe",
    DOWN: "PCIe",
    UPDATE: "host update",
    DISK: "disk",
    HOST: "host",
    IDLE: "host",
    BUBBLE: "pipeline",
}
_KINDS = {
    TrafficKind.ALL_GATHER: "all-gather",
    TrafficKind.PUBLISH: "publish",
    TrafficKind.REDUCE_SCATTER: "reduce-scatter",
}


@dataclass(frozen=True)
class ResourceTime:
    """The seconds of a step in which a resource works, and those in which the step waits for nothing else."""

    busy: float
    exposed: float


@dataclass(frozen=True)
class StepTime:
    """The time of one optimizer step of a rank, with all its micro-steps."""

    seconds: float
    by_resource: dict[str, ResourceTime]  # the exposed seconds of all add up to `seconds`
    events: tuple[Task, ...]  # what a step does when; with few blocks where only few were simulated
    waits: tuple[Task, ...] = ()  # when the training loop's stream does not compute, and what it waits for
    num_bytes: dict[str, int] = field(default_factory=dict)  # by resource
    model_flops: float = 0.0  # of this rank: three times those of the forward; what is recomputed does not count
    peak_flops: float = 0.0  # FLOP/s that the vendor states, in the dtype of most of them; 0: not known
    samples: int = 0  # of all ranks together
    tokens: int = 0  # of all ranks together; 0: the model has none
    num_blocks: int | None = None  # in `events`, where only few were simulated

    @property
    def tokens_per_second(self) -> float | None:
        """The tokens of all ranks; None if the model has none."""
        return self.tokens / self.seconds if self.tokens and self.seconds else None

    @property
    def bounds(self) -> dict[str, float]:
        """The share of the step that goes by for each: compute, link, PCIe, host update, disk, host; largest first."""
        found: defaultdict[str, float] = defaultdict(float)
        for name, one in self.by_resource.items():
            found[_GROUPS[name]] += one.exposed / self.seconds if self.seconds else 0.0
        return {name: share for name, share in sorted(found.items(), key=lambda pair: -pair[1]) if share > 0}

    @property
    def bound(self) -> str:
        """What most of the step goes by for."""
        return next(iter(self.bounds), COMPUTE)

    @property
    def mfu(self) -> float | None:
        """The share of the stated FLOP/s that the model itself needs; None if none is stated."""
        return self.model_flops / self.seconds / self.peak_flops if self.peak_flops and self.seconds else None

    def timeline(self, rank: int = 0, title: str = "a planned step") -> Timeline:
        """Return the step in the form of a recorded one, for pages, pictures and Perfetto."""
        rows = {COMPUTE: "compute", UP: "copy up", DOWN: "copy down", UPDATE: "host update", DISK: "disk"}
        spans = [
            Span(row, task.name, task.begin, task.end, task.num_bytes)
            for task in self.events
            if (row := rows.get(task.resource) or _link_row(task)) is not None
        ]
        spans += [Span("wait", _GROUPS[one.resource], one.begin, one.end) for one in self.waits]
        return Timeline(tuple(spans), max((span.end for span in spans), default=0.0), 1, rank, title)


def extrapolated(one: StepTime, other: StepTime, between: int, blocks: int) -> StepTime:
    """Return the time with `blocks` blocks more than `one` has; `other` has `between` more.

    A step is not shorter than any resource works in it.
    """

    def number(first: float, second: float) -> float:
        return max(0.0, first + (second - first) * blocks / between)

    nothing = ResourceTime(0.0, 0.0)
    found: dict[str, ResourceTime] = {}
    for name in {**one.by_resource, **other.by_resource}:
        first, second = one.by_resource.get(name, nothing), other.by_resource.get(name, nothing)
        found[name] = ResourceTime(number(first.busy, second.busy), number(first.exposed, second.exposed))
    moved, more = one.num_bytes, other.num_bytes
    sizes = {name: round(number(moved.get(name, 0), more.get(name, 0))) for name in {**moved, **more}}
    seconds = number(one.seconds, other.seconds)
    total = sum(time.exposed for time in found.values())  # more, where what is hidden more and more would be below 0
    share = seconds / total if total else 0.0
    found = {name: replace(time, exposed=time.exposed * share) for name, time in found.items()}
    most = max(found, key=lambda name: found[name].busy, default=COMPUTE)
    if found and found[most].busy > seconds:
        found[most] = replace(found[most], exposed=found[most].exposed + found[most].busy - seconds)
        seconds = found[most].busy
    flops = number(one.model_flops, other.model_flops)
    return replace(one, seconds=seconds, by_resource=found, num_bytes=sizes, model_flops=flops)


def _link_row(task: Task) -> str | None:
    if task.resource not in (INSIDE, BETWEEN):
        return None
    return "reduce-scatter" if task.name.startswith(("reduce", "all_to_all")) else "all-gather"


@contextlib.contextmanager
def timed(clock: VirtualClock) -> Iterator[None]:
    """Let engines that are built inside keep virtual time."""
    before, virtual_time.clock = virtual_time.clock, clock
    try:
        yield
    finally:
        virtual_time.clock = before


@dataclass(frozen=True)
class TimedEngine:
    """An engine of a simulation that keeps virtual time."""

    engine: Any
    clock: VirtualClock
    kernels: TimedKernels  # a mode in which the engine's operations take time
    trace: Labels

    @property
    def num_steps(self) -> int:
        """The steps of which the last is like all that follow."""
        is_below = any(self.engine.memory().total(tier=tier) for tier in (Tier.HOST, Tier.DISK))
        return _STEPS_BELOW if is_below else _STEPS

    @property
    def peak_flops(self) -> float:
        """The FLOP/s that the vendor states, in the dtype of most parameters."""
        dtype = {"torch.bfloat16": "bf16", "torch.float16": "fp16"}.get(str(_compute_dtype(self.engine)), "fp32")
        return self.clock.speeds.matmul_in(dtype).peak

    def settle(self) -> None:
        """Do what workers have not done yet of the last step, and is a part of it."""
        if self.engine.optimizer is not None:
            with self.kernels:
                self.engine.optimizer.settle()


@contextlib.contextmanager
def timed_engine(model: nn.Module, config: Any, machine: SimulatedMachine) -> Iterator[TimedEngine]:
    """Build an engine on the meta device as one rank of a machine with speeds."""
    assert machine.speeds is not None
    here = machine.local_world_size(machine.ranks.size)
    clock = VirtualClock(machine.speeds, has_gpus=machine.has_gpus, local_ranks=here)
    with simulated(machine), timed(clock), torch.compiler.set_stance("force_eager"):
        checkpointing.reset()  # what it knows of another machine
        engine = shardwell.initialize(model=model, config=config).engine
        device, trace = engine._context.device, Labels(clock, [unit.name for unit in engine._scheduler.units])
        clock.is_on_device = device.is_on_device if device.has_device_memory else lambda _: True
        engine._context.roles.shard.traffic.observer = _Names(clock)
        fuse_updates(engine)
        kernels = FusedKernels(engine._precision.autocast, has_gpus=device.has_device_memory)
        modes = kernels, naming_lines(engine.settings), engine._scheduler.recording(trace)
        try:
            with modes[0], modes[1], modes[2]:
                yield TimedEngine(engine, clock, TimedKernels(clock, device), trace)
        finally:
            engine._context.close()
            checkpointing.reset()


def simulate_time(
    model: nn.Module, config: Any, machine: SimulatedMachine, forward: Callable[[Engine], Tensor]
) -> StepTime:
    """Run steps of a model on the meta device as one rank of a machine with speeds; return the time of the last."""
    with timed_engine(model, config, machine) as run:
        return _of_last_step(run, forward)


def _of_last_step(run: TimedEngine, forward: Callable[[Engine], Tensor]) -> StepTime:
    engine, clock, kernels = run.engine, run.clock, run.kernels
    ends, moved, flops = [clock.now().time], [Counter(clock.moved)], 0.0
    for _ in range(run.num_steps):
        flops = 0.0
        for _ in range(engine.gradient_accumulation_steps()):
            before = clock.flops
            clock.label = "forward"
            with kernels:
                loss = forward(engine)
            flops += 3 * (clock.flops - before)
            clock.label = "backward"
            with kernels:
                engine.backward(loss)
                del loss
            clock.label = "step"
            with kernels:
                engine.step()
        ends.append(clock.now().time)
        moved.append(Counter(clock.moved))
    run.settle()
    found = replace(read(clock, ends[-2], ends[-1]), num_bytes=dict(moved[-1] - moved[-2]))
    return replace(found, model_flops=flops, peak_flops=run.peak_flops, samples=engine.train_batch_size())


def _compute_dtype(engine: Engine) -> Any:
    sizes: Counter[Any] = Counter()
    for unit in engine._scheduler.units:
        for group in unit.groups:
            sizes[group.precision.compute] += group.layout.numel
    return max(sizes, key=lambda dtype: sizes[dtype], default=None)


def read(clock: VirtualClock, begin: float, end: float) -> StepTime:
    """Return what a clock's rank did between two times."""
    tasks = sorted((task for task in clock.tasks if task.end > begin and task.begin < end), key=lambda one: one.begin)
    busy: defaultdict[str, float] = defaultdict(float)
    for task in tasks:
        busy[task.resource] += min(task.end, end) - max(task.begin, begin)
    exposed: defaultdict[str, float] = defaultdict(float)
    waits = []
    for one, other, reason in clock.compute.reasons(begin, end):
        exposed[HOST if reason == IDLE else reason] += other - one
        if reason != COMPUTE:
            waits.append(Task(reason, HOST if reason == IDLE else reason, one - begin, other - begin))
    busy[HOST] = exposed[HOST]
    found = {name: ResourceTime(busy[name], exposed[name]) for name in RESOURCES if busy[name] or exposed[name]}
    events = tuple(replace(task, begin=task.begin - begin, end=task.end - begin) for task in tasks)
    return StepTime(end - begin, found, events, tuple(waits))


class Labels(Trace):
    """A trace that tells the clock which unit computes, and reads off it when the operations of a pipeline begin."""

    def __init__(self, clock: VirtualClock, unit_names: list[str]) -> None:
        super().__init__(unit_names)
        self._clock = clock
        self.operations: list[tuple[str, float, float]] = []  # of a pipeline: when each begins, after so many FLOPs

    def add(self, action: TraceAction, unit: int, operation: str = "") -> None:
        super().add(action, unit, operation)
        if action is TraceAction.OPERATION:
            self.operations.append((operation, self._clock.now().time, self._clock.flops))
        words = {TraceAction.FORWARD: "forward", TraceAction.BACKWARD: "backward"}.get(action)
        if words is not None:
            self._clock.label = f"{words} {self.unit_names[unit] or '(root)'}"


class _Names:
    """An observer that tells the clock which collective is started."""

    is_inside = False

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock

    def follow(self, token: str | None, kind: TrafficKind, start: Callable[[], Work]) -> Work:
        """Start a collective, and return its work."""
        unit = (token or "").partition(" ")[2].partition("#")[0] or "(root)"
        self._clock.collective = f"{_KINDS.get(kind, kind.value)} {unit}"
        self.is_inside = True
        try:
            return start()
        finally:
            self.is_inside = False
            self._clock.collective = ""
