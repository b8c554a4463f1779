"""The engine as its own formula: steps of a model on the meta device, on a simulated machine, and what they took."""

from __future__ import annotations

import contextlib
import copy
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils._python_dispatch import _disable_current_modes

import shardwell
from shardwell import checkpointing, virtual_time
from shardwell.config import Config
from shardwell.engine import Engine
from shardwell.errors import ShardwellError
from shardwell.memory import Tier
from shardwell.memory.device import observed_statistics
from shardwell.memory.machine import SimulatedMachine, simulated
from shardwell.optim.executor import InlineExecutor
from shardwell.optim.param_slices import ParamSlice
from shardwell.parallel.grid import Grid
from shardwell.pipeline.operations import Operation, Pass
from shardwell.plan.decoder import Decoder
from shardwell.plan.fused_kernels import FusedKernels
from shardwell.plan.instants import Instants
from shardwell.plan.live_tensors import LiveTensors
from shardwell.plan.recording import ReceivedBytes, Recording

MOMENTS = ("forward", "backward", "step")
LAST_BACKWARD = "last backward"  # of a stage of a pipeline: after it gradients are reduced
_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
FEWEST_STEPS, STEPS = 2, 3  # the first allocates state; the third must take what the second took

ROUNDED = 4096  # bytes: a few blocks of the allocator

Numbers = dict[str, int]


@dataclass(frozen=True)
class StepCosts:
    """The bytes that a rank holds between steps and at the peaks of a step, and those that it moves in one."""

    num_parameters: int
    num_trainable: int
    rest: Numbers  # "state tier": bytes between steps
    peaks: Numbers  # "moment tier": bytes
    at_peak: Numbers  # by state, and "activations": the device at its highest peak
    at_moments: dict[str, Numbers]  # the same, at the peak of each moment
    at_step: int  # bytes of the device when the step begins
    largest_unit: tuple[str, int]  # its name and its bytes when it is unsharded
    traffic: Numbers  # "kind hop": bytes received in a step
    calls: Numbers  # by kind: collectives in a step
    copies: Numbers  # "to host", "to device", "disk read", "disk written": bytes in a step
    kept: tuple[str, ...] = ()  # units whose optimizer state stays on the device although it is offloaded
    updated: tuple[int, ...] = ()  # the elements of each unit that a rank steps
    updates_on_device: bool = False  # all of them
    bundle: int = 1  # the most blocks that are one unit: fewer do not tell of all
    instants: dict[tuple[str, int, Tier], Instants] = field(default_factory=dict, compare=False, repr=False)
    # by moment, number of the micro-step and tier: where peaks may be


@dataclass(frozen=True)
class BlockModel:
    """A model of identical blocks that can be built with any number of them, on the meta device."""

    name: str
    layers: int
    build: Callable[[int], nn.Module]
    inputs: tuple[Any, ...]
    hidden: int = 0  # the numbers that a block gives on for each token, of a model that a pipeline divides
    experts: tuple[int, int] = (0, 0)  # parameters of all experts, and of those that a token meets
    assumed: tuple[str, ...] = ()  # what reports say that a plan of it does not count


def along(one: StepCosts, other: StepCosts, number: Callable[[int, int], int]) -> StepCosts:
    """Return the costs of which each number follows from those of two others; the largest unit is left out.

    Peaks of both are taken to be at the same instants.
    """

    def numbers(first: Numbers, second: Numbers) -> Numbers:
        return {key: number(first.get(key, 0), second.get(key, 0)) for key in {**first, **second}}

    peaks = numbers(one.peaks, other.peaks)
    moments = {
        name: numbers(states, other.at_moments[name])
        for name, states in one.at_moments.items()
        if name in other.at_moments
    }
    return StepCosts(
        number(one.num_parameters, other.num_parameters),
        number(one.num_trainable, other.num_trainable),
        numbers(one.rest, other.rest),
        peaks,
        moments.get(highest_moment(peaks), {}),
        moments,
        number(one.at_step, other.at_step),
        one.largest_unit if one.largest_unit == other.largest_unit else ("", 0),
        numbers(one.traffic, other.traffic),
        numbers(one.calls, other.calls),
        numbers(one.copies, other.copies),
        one.kept if one.kept == other.kept else ("",) * max(len(one.kept), len(other.kept)),
        bundle=max(one.bundle, other.bundle),
    )


def are_alike(predicted: StepCosts, found: StepCosts) -> bool:
    """Return whether all numbers are equal; in peaks, small tensors of a size by depth may be rounded up once more."""
    apart: dict[str, Any] = {
        "peaks": {},
        "at_peak": {},
        "at_moments": {},
        "at_step": 0,
        "largest_unit": ("", 0),
        "updated": (),
        "updates_on_device": False,
        "bundle": 1,
    }
    exact = replace(predicted, **apart) == replace(found, **apart)
    moments = predicted.at_moments, found.at_moments
    pairs = [
        (predicted.peaks | {"": predicted.at_step}, found.peaks | {"": found.at_step}),
        *((ours, moments[1].get(name, {})) for name, ours in moments[0].items()),
    ]
    return exact and all(
        ours.keys() == theirs.keys() and all(abs(ours[key] - theirs[key]) <= ROUNDED for key in ours)
        for ours, theirs in pairs
    )


def on_meta(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose parameters and buffers have sizes and no bytes."""
    memo: dict[int, Any] = {}
    lazy = next((name for name, one in model.named_parameters() if isinstance(one, UninitializedParameter)), None)
    if lazy is not None:
        raise ShardwellError(
            f"the parameter '{lazy}' has no size yet, and a plan is made of sizes: run the lazy module on an input, "
            "or name its sizes."
        )
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().to("meta")
    return copy.deepcopy(model, memo)


def simulate(
    model: nn.Module,
    config: Any,
    machine: SimulatedMachine,
    forward: Callable[[Engine], Tensor],
    recording: Recording | None = None,
    trains: Callable[[Engine], object] | None = None,
    *,
    steps: int = STEPS,
    grid: Grid | None = None,
    touching: int = 0,
) -> StepCosts:
    """Run steps of a model on the meta device as one rank of a machine; `forward` returns the loss of a micro-step.

    The stages of a pipeline have forwards of several micro-steps in flight: `trains` runs a whole step of theirs.
    `grid` are the axes of a job that has them of a mesh, and not of its configuration. In so many first
    steps as `touching` the blocks of a `Decoder` only touch their parameters. The model is of no use afterwards: to
    unshard it would take a collective for each rank.
    """
    observed = observed_statistics(None if recording is None else recording.changed)
    with simulated(machine), observed, torch.compiler.set_stance("force_eager"):  # compiled parts run as they are
        checkpointing.reset()  # what it knows of another machine
        engine = shardwell.initialize(model=model, config=config, mesh=grid).engine  # type: ignore[arg-type]
        try:
            wants_attention = engine._teardown.sequences is not None
            touched = model.touched if isinstance(model, Decoder) and not wants_attention else contextlib.nullcontext
            computes = [touched] * touching + [contextlib.nullcontext] * (steps - touching)
            return _measured(engine, forward, recording, trains, computes)
        finally:
            close(engine)
            checkpointing.reset()


def close(engine: Engine) -> None:
    """End a simulated engine, whose model is of no use afterwards."""
    for unit in engine._scheduler.units:
        if unit.updates.published is not None:
            unit.updates.published.finish()
    if engine._teardown.sequences is not None:  # attention outside of a forward asks for the only one that there is
        engine._teardown.sequences.close()
    engine._context.close()


def _measured(
    engine: Engine,
    forward: Callable[[Engine], Tensor],
    recording: Recording | None,
    trains: Callable[[Engine], object] | None,
    computes: Sequence[Callable[[], AbstractContextManager[None]]],
) -> StepCosts:
    """Run a step in each of these contexts, and return what the last one took."""
    stats, device, disk = engine._context.memory_stats, engine._context.device, engine._context.disk
    live = LiveTensors(stats, device, recording)
    stats.changed = live.changed
    if recording is not None:
        engine._context.roles.all.traffic.received = ReceivedBytes(recording)
        for unit in engine._scheduler.units:
            recording.groups[unit.name] = [(group.layout.numel, len(group.layout.slots)) for group in unit.groups]
    tell_host_updates(engine, live)
    fuse_updates(engine)
    kernels = FusedKernels(engine._precision.autocast, has_gpus=device.has_device_memory)
    found: list[StepCosts] = []
    try:
        with kernels, naming_lines(engine.settings):
            for computing in computes:
                before = (live.to_host, live.to_device, *((disk.num_read, disk.num_written) if disk else (0, 0)))
                if recording is not None:
                    recording.begin_step()
                with computing():
                    peaks = _step(engine, forward, live, trains)
                after = (live.to_host, live.to_device, *((disk.num_read, disk.num_written) if disk else (0, 0)))
                names = ("to host", "to device", "disk read", "disk written")
                copies = {name: b - a for name, a, b in zip(names, before, after, strict=True)}
                found = [*(replace(one, instants={}) for one in found[-1:]), _costs(engine, peaks, copies)]
    finally:
        stats.changed = live.recording = None
    if len(computes) > FEWEST_STEPS and found[-1].rest != found[-2].rest:
        raise ShardwellError("memory still grew in the last simulated step: the plan would be too low")
    return found[-1]


def tell_host_updates(engine: Engine, live: LiveTensors) -> None:
    """Tell optimizer state and gradients in host memory from those on the device: all of them are meta tensors."""
    if engine.optimizer is None:
        return
    device, executor = engine._context.device, engine.optimizer.executor
    inline: Any = getattr(executor, "device", executor)
    for shard in (shard for shards in inline.slices.by_unit.values() for shard in shards):
        if shard.group.spec.optimizer.tier is not Tier.DEVICE:
            for value in inline.inner.state.get(shard.tensor, {}).values():  # made before the first step, as Adagrad's
                if isinstance(value, Tensor) and value.is_meta:
                    device.mark_as_host(value)
    step_slices = inline._step_slices

    def step_where_they_are(shards: list[ParamSlice], clip: Tensor | None) -> None:
        for shard in shards:
            gradients = shard.group.gradients.reduced.tensor
            if gradients is not None and shard.group.spec.optimizer.tier is not Tier.DEVICE:
                live.copied_to_host.add(gradients.untyped_storage())
        step_slices(shards, clip)

    inline._step_slices = step_where_they_are


def fuse_updates(engine: Engine) -> None:
    """Let updates on the device take no memory beside the state, as fused kernels do: torch has none on meta."""
    executor: Any = None if engine.optimizer is None else engine.optimizer.executor
    executor = getattr(executor, "device", executor)
    if executor is None or type(executor.inner) not in _FUSED or executor.inner.defaults.get("foreach"):
        return
    step = executor._step_inner
    for group in executor.inner.param_groups:
        group["fused"] = None  # torch refuses meta tensors where a configuration asks for it

    def fused() -> None:
        stepped = [tensor for group in executor.inner.param_groups for tensor in group["params"]]
        state = executor.inner.state
        with _disable_current_modes():
            if not all(state.get(tensor) for tensor in stepped if tensor.grad is not None):
                step()  # which makes the state; without values there is nothing else to do
            if virtual_time.clock is not None and stepped:
                virtual_time.clock.kernel(sum(_num_bytes(tensor, executor.inner.state[tensor]) for tensor in stepped))
            for state in executor.inner.state.values():
                for value in state.values():
                    if isinstance(value, Tensor) and value.is_meta:
                        engine._context.device.note_counted(value)

    executor._step_inner = fused


def _num_bytes(tensor: Tensor, state: dict[str, Any]) -> int:
    """Return what a fused update of a tensor reads and writes."""
    kept = sum(value.nbytes for value in state.values() if isinstance(value, Tensor) and value.is_meta)
    return 2 * (tensor.nbytes + kept) + (0 if tensor.grad is None else tensor.grad.nbytes)


class _Peaks:
    """The bytes at the peak of each moment of a step."""

    def __init__(self, live: LiveTensors) -> None:
        self._live = live
        self._name = ""  # of the moment that goes on
        self.sizes: Numbers = {}  # "moment tier"
        self.states: dict[str, Numbers] = {}  # of the device, by moment
        self.at_step = 0  # bytes of the device when the last step began
        self.instants: dict[tuple[str, int, Tier], Instants] = {}
        self._ended = Counter[str]()  # moments by name

    @contextlib.contextmanager
    def moment(self, name: str) -> Iterator[None]:
        """Look for the peak of a moment, which may end before."""
        self.begin(name)
        with self._live:
            yield
        self._end()

    def begin(self, name: str) -> None:
        """Begin a moment, and end the one that goes on."""
        if self._name:
            self._end()
        self._name = name
        self._live.begin_moment(name)

    def _end(self) -> None:
        name, number = self._name, self._ended[self._name]
        self._ended[name] += 1
        for tier, instants in self._live.instants.items():
            key = f"{name} {tier.value}"
            size, states = instants.peak()
            if tier is Tier.DEVICE and size > self.sizes.get(key, -1):
                self.states[name] = states
            if tier is Tier.DEVICE and name == MOMENTS[2]:
                self.at_step = instants.totals[0]
            self.sizes[key] = max(self.sizes.get(key, 0), size)
            self.instants[name, number, tier] = instants
        self._name = ""


def highest_moment(peaks: Numbers) -> str:
    """Return the moment at which the device has its highest peak: of several, the first."""
    sizes = {name: peaks.get(f"{name} {Tier.DEVICE.value}") for name in (*MOMENTS, LAST_BACKWARD)}
    return max((size, -place, name) for place, (name, size) in enumerate(sizes.items()) if size is not None)[2]


def _step(
    engine: Engine,
    forward: Callable[[Engine], Tensor],
    live: LiveTensors,
    trains: Callable[[Engine], object] | None,
) -> _Peaks:
    """Run one step; return the bytes at the peak of each moment."""
    peaks = _Peaks(live)
    if trains is not None:
        with peaks.moment(MOMENTS[0]), _noting_operations(engine, peaks):
            trains(engine)
    for _ in range(engine.gradient_accumulation_steps() if trains is None else 0):
        with peaks.moment("forward"):
            loss = forward(engine)
        with peaks.moment("backward"):
            engine.backward(loss)
            del loss
        with peaks.moment("step"):
            engine.step()
    if engine.optimizer is not None:
        engine.optimizer.settle()
    engine._context.device.num_steps += 1
    return peaks


@contextlib.contextmanager
def _noting_operations(engine: Any, peaks: _Peaks) -> Iterator[None]:
    """Let each operation of a pipeline begin a moment, and the update."""
    note, update, last = engine.note, engine._apply_gradients, engine.schedule.last_gradients

    def noted(operation: Operation) -> None:
        peaks.begin(LAST_BACKWARD if operation in last else MOMENTS[operation.kind is not Pass.FORWARD])
        note(operation)

    def updated() -> None:
        peaks.begin(MOMENTS[2])
        update()

    engine.__dict__ |= {"note": noted, "_apply_gradients": updated}
    try:
        yield
    finally:
        del engine.__dict__["note"], engine.__dict__["_apply_gradients"]


def _costs(engine: Engine, peaks: _Peaks, copies: Numbers) -> StepCosts:
    report, traffic = engine.memory(), engine.traffic()
    rest: Counter[str] = Counter()
    for (state, _, tier), size in report.now.items():
        rest[f"{state.value} {tier.value}"] += size
    units = {
        unit.name or "(root)": sum(group.layout.padded * group.precision.compute.itemsize for group in unit.groups)
        for unit in engine._scheduler.units
    }
    numels = [(group.layout.numel, group.trainable) for unit in engine._scheduler.units for group in unit.groups]
    return StepCosts(
        sum(numel for numel, _ in numels),
        sum(numel for numel, trains in numels if trains),
        dict(sorted(rest.items())),
        peaks.sizes,
        peaks.states[highest_moment(peaks.sizes)],
        peaks.states,
        peaks.at_step,
        max(units.items(), key=lambda pair: pair[1], default=("", 0)),
        {f"{kind.value} {hop}": size for (kind, hop), size in traffic.received.items() if size},
        {kind.value: number for kind, number in traffic.calls.items() if number},
        copies,
        engine.offload.kept,
        tuple(sum(group.local_numel for group in unit.trainable) for unit in engine._scheduler.units),
        engine.optimizer is not None and isinstance(engine.optimizer.executor, InlineExecutor),
        _bundle(engine),
        peaks.instants,
    )


def _bundle(engine: Engine) -> int:
    """Return the most blocks that are one unit; as many as there are places, if the root unit has all of them."""
    units = engine._scheduler.units
    if len(units) == 1:
        return max((len(one) for one in engine.module.modules() if isinstance(one, nn.ModuleList)), default=1)
    return max((len(unit.spec.modules) for unit in units), default=1)


_NONZERO = "how many elements are chosen by a mask, are not zero or differ from each other depends on values"
_UNKNOWN_SIZES = ("register_meta function", "no fake impl or Meta kernel")
_KERNELS = ("fused_kernels.py", "meta_kernels.py", "live_tensors.py", "kernel_times.py")  # between a model and torch


@contextlib.contextmanager
def naming_inputs(inputs: Any) -> Iterator[None]:
    """Turn what a model's forward raises, such as TypeErrors and wrong sizes, into an error that names its inputs."""
    try:
        yield
    except Exception as error:
        own, torch_files = shardwell.__file__.rsplit("/", 1)[0], torch.__file__.rsplit("/", 1)[0]
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if not frame.filename.startswith(torch_files) and not frame.filename.endswith(_KERNELS)
        ]
        last = frames[-1]
        is_ours = last.filename.startswith(own) and not last.filename.endswith(("engine/engine.py", "plan/estimate.py"))
        if isinstance(error, ShardwellError) or is_ours or "meta" in str(error).lower():
            raise
        words = " ".join(str(error).split()).rstrip(".")
        where = "" if last.filename.startswith(own) else f" at {last.filename}:{last.lineno} ({last.line})"
        values = inputs.items() if isinstance(inputs, dict) else enumerate(inputs)
        sizes = ", ".join(
            f"{name}: {tuple(one.shape)} of {str(one.dtype).removeprefix('torch.')}"
            for name, one in values
            if isinstance(one, Tensor)
        )
        raise ShardwellError(
            f"the model's forward raised {type(error).__name__}{where}{words and ': '}{words}. Its inputs were "
            f"{sizes or 'none'}; a "
            "function of your own may return (module, inputs) instead of a module"
        ) from error


@contextlib.contextmanager
def naming_lines(settings: Config) -> Iterator[None]:
    """Turn the error of a model that asks for values, which do not exist, into one that names its line.

    Layers that a plan of the configuration cuts may not fit together, which torch says in sizes.
    """
    try:
        yield
    except (NotImplementedError, RuntimeError, TypeError) as error:
        if isinstance(error, ShardwellError):
            raise
        words = " ".join(str(error).split()).rstrip(".!")
        if "meta" not in words.lower():
            if isinstance(settings.tensor_parallel.plan, dict) and isinstance(error, RuntimeError):
                raise ShardwellError(
                    f"tensor_parallel.plan: layers that are cut by it do not fit together: {words}. What reads the "
                    'output of a "colwise" layer is "rowwise", or the layer is "colwise_gather_output".'
                ) from error
            raise
        own = torch.__file__.rsplit("/", 1)[0], shardwell.__file__.rsplit("/", 1)[0]
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(own)]
        where = f"{frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})" if frames else "the model"
        if "SparseMeta" in str(error):
            raise ShardwellError(
                "a sparse gradient has as many rows as there are different values in the inputs, and a plan has sizes "
                "only: plan the embedding with sparse=False, which needs at least as much."
            ) from error
        if "expected device meta" in str(error):
            raise ShardwellError(
                f"{where} uses a tensor that is on another device than the model: register it as a buffer, or make it "
                "on the device of an input."
            ) from error
        words = _NONZERO if any(one in words for one in _UNKNOWN_SIZES) else words
        raise ShardwellError(
            f"{where} asks for the value of a tensor, and a plan has sizes only: {words}. Let the forward not depend "
            "on values, or plan with a function that leaves that part out."
        ) from error
