"""`estimate`: what a step of a model takes on a machine that need not exist, from the engine's own code.

A model of identical blocks is simulated at three small depths. If the third is what the first two predict, in every
number but for the allocator's rounding, so is any depth: all of the engine's bytes are a constant and an amount for
each unit, which is a block, or several of them that are bundled. Otherwise all blocks are simulated. The third has a
step more than the others, which must take what theirs took. Nothing here depends on the number of ranks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from shardwell.config import load
from shardwell.engine import Engine
from shardwell.errors import ConfigError, NoRoomError, ShardwellError
from shardwell.expert_parallel.layers import takes_experts
from shardwell.memory.machine import SimulatedBlocks, SimulatedMachine
from shardwell.memory.statistics import human
from shardwell.offload.grad_offload import WAITING_SHARE
from shardwell.offload.optimizer_swap import FEWEST_BUFFERS
from shardwell.plan.axes import ranks_along
from shardwell.plan.depths import TwoDepths
from shardwell.plan.pipe_time import time_of_pipe
from shardwell.plan.pipes import Pipe, num_stages
from shardwell.plan.recording import Recording
from shardwell.plan.report import PlanReport
from shardwell.plan.simulation import (
    FEWEST_STEPS,
    STEPS,
    BlockModel,
    StepCosts,
    along,
    naming_inputs,
    on_meta,
    simulate,
)
from shardwell.plan.stages import of_stages
from shardwell.plan.step_time import StepTime, extrapolated, simulate_time
from shardwell.plan.update_chunks import UpdateChunks, with_estimated_step, with_exact_step

_FEWEST = 4  # blocks: fewer have no block that computes while two others are all-gathered ahead of it
_FEWEST_BELOW = 9  # blocks: with state on host or disk all staging buffers are in use

TRAIN, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_FEW_MICRO_STEPS = (3, 4)  # of a step with more of them: the third makes no more state than the second

_MOST_TRIES = 2  # to find depths of which two predict a third
_MOST_DEPTHS = 5  # at which time is simulated before all blocks are
_MOST_TOKENS = 1 << 32  # of a micro-batch: sizes of its tensors are numbers of 64 bits
_SLOW_HOST = 0.05  # share of a step that waits for updates on the host, from which on gradients wait for them, too
_NEAR = 0.0025  # share of a step by which three depths may differ from a line, for each block between them

Inputs = Sequence[Any] | Mapping[str, Any]


def estimate(
    model: nn.Module | BlockModel,
    config: Any,
    machine: SimulatedMachine,
    inputs: Inputs | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    *,
    verified: bool = True,
) -> PlanReport:
    """Return what a step of `model` takes on one rank of `machine`.

    Args:
        model: A module, on any device, of which only sizes are used; or a `BlockModel`.
        config: What `initialize` takes as a configuration.
        machine: A `SimulatedMachine`.
        inputs: The arguments of the model's forward for one micro-step, as a tuple or a dictionary of tensors.
        loss: A function from the model's output to its loss; by default the output, its `loss`, or its first entry.
        verified: Whether a third depth of a `BlockModel` is simulated to see that the first two predict it.
    """
    settings = without_nulls(config) if isinstance(config, Mapping) else config
    batch, number = _micro_steps(settings, machine)
    if number > _FEW_MICRO_STEPS[1]:
        kept = {key: value for key, value in settings.items() if key != TRAIN} | {MICRO: batch}
        found = [
            estimate(model, {**kept, ACCUMULATION: few}, machine, inputs, loss, verified=verified)
            for few in _FEW_MICRO_STEPS
        ]
        if found[0].costs.rest == found[1].costs.rest and found[0].costs.peaks == found[1].costs.peaks:
            return replace(_with_all_micro_steps(found[0], found[1], number), config=dict(settings))
    if isinstance(model, BlockModel):
        stages, time = num_stages(settings), None
        if stages > 1:
            pipe = Pipe.of(model, settings, machine)
            costs, notes = of_stages(pipe, is_below=_is_below(settings), verified=verified)
            if machine.speeds is not None:
                time, more = time_of_pipe(pipe, verified=verified, has_bundles=costs.bundle > 1)
                notes = [*notes, *more]
        else:
            costs, notes = _of_blocks(model, settings, machine, loss, verified)
            if machine.speeds is not None:
                time = _time_of_blocks(model, settings, machine, loss, verified, len(costs.kept), costs.bundle)
        name, inputs = model.name, model.inputs
    else:
        if inputs is None:
            raise ShardwellError(
                "estimate needs the inputs of one micro-step, since activations follow from them: "
                "estimate(model, config, machine, inputs=(tokens,))"
            )
        if num_stages(settings) > 1:
            raise ShardwellError(
                "a pipeline is planned of a preset, a configuration of Hugging Face or a BlockModel, which say what "
                "blocks give on, and this is a module: plan it without --pp (pipeline.stages)"
            )
        costs, notes = _run(on_meta(model), settings, machine, inputs, loss)
        time = None if machine.speeds is None else _time(on_meta(model), settings, machine, inputs, loss)
        name = type(model).__name__
    if time is not None:
        time = replace(time, tokens=time.samples * _tokens_of_sample(inputs) * ranks_along(settings, "sequence"))
    if costs.kept:
        notes = [
            *notes,
            f"optimizer state of the first {len(costs.kept)} units stays on the device, as it does by default",
        ]
    if any(takes_experts(one) for one in (model.build(1) if isinstance(model, BlockModel) else model).modules()):
        notes = [*notes, "every expert of a layer gets as many tokens as any other"]
    notes = [*notes, *_of_secondary_shards(settings, machine)]
    notes = [*notes, *(model.assumed if isinstance(model, BlockModel) else ())]
    if time is not None and _may_wait_on_the_device(settings) and time.bounds.get("host update", 0.0) > _SLOW_HOST:
        most = human(WAITING_SHARE * machine.device_bytes)
        words = f"up to {most} of them ({WAITING_SHARE:.1%} of the device) may wait there beside the planned peak"
        notes = [*notes, f"the host updates more slowly than backward makes gradients: {words}"]
    share = _active_share(model, settings, costs.num_parameters) if isinstance(model, BlockModel) else 1.0
    given = settings if isinstance(settings, dict) else {}
    return PlanReport(name, given, machine, replace(costs, instants={}), tuple(notes), time, share)


def _of_secondary_shards(config: Any, machine: SimulatedMachine) -> list[str]:
    """Say that ranks with secondary shards count as a node, where a node has another number of ranks."""
    zero = config.get("zero_optimization", {}) if isinstance(config, Mapping) else {}
    asked, here = zero.get("zero_hpz_partition_size", 1), machine.local_world_size(machine.ranks.size)
    if not isinstance(asked, int) or asked <= 1 or asked == here or zero.get("stage") != 3:
        return []
    words = "bytes from one such group to another count, and take time, as bytes between nodes"
    return [f"each {asked} ranks count as a node (zero_hpz_partition_size), and a node has {here}: {words}"]


def _micro_steps(config: Any, machine: SimulatedMachine) -> tuple[Any, int]:
    """Return the micro-batch and the micro-steps of a step; of a pipeline, whose plans are of few anyway, 1 of them."""
    if not isinstance(config, Mapping) or num_stages(config) > 1:
        return None, 1
    loaded = load(config, world_size=machine.ranks.size)
    number = loaded.gradient_accumulation_steps
    return loaded.train_micro_batch_size_per_gpu, number if isinstance(number, int) else 1


def _with_all_micro_steps(one: PlanReport, other: PlanReport, number: int) -> PlanReport:
    """Return the plan of so many micro-steps; two plans are of a few, and each more adds the same."""
    first, second = _FEW_MICRO_STEPS
    between, more = second - first, number - first
    costs = along(one.costs, other.costs, lambda few, many: few + (many - few) * more // between)
    costs = replace(other.costs, traffic=costs.traffic, calls=costs.calls, copies=costs.copies)
    time = None
    if one.time is not None and other.time is not None:
        time = extrapolated(one.time, other.time, between, more)
        samples, tokens_of_all = (whole * number // first for whole in (one.time.samples, one.time.tokens))
        time = replace(time, samples=samples, tokens=tokens_of_all)
    said = f"{second} of {number:,} micro-steps were simulated, and each more adds the same"
    return replace(other, costs=costs, time=time, notes=(*other.notes, said))


def without_nulls(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without blocks that are null, which count as absent."""
    return {key: value for key, value in config.items() if value is not None}


def _active_share(model: BlockModel, config: Any, num_parameters: int) -> float:
    """Return the parameters that a token meets over those of a rank, which holds some of the experts."""
    experts, met = model.experts
    tensor, expert = (ranks_along(config, axis) for axis in ("tensor", "expert"))
    others = num_parameters * tensor - experts / expert
    return (others + met) / (num_parameters * tensor) if experts and others > 0 else 1.0


def _of_blocks(
    model: BlockModel,
    config: Any,
    machine: SimulatedMachine,
    loss: Callable[[Any], Tensor] | None,
    verified: bool,
) -> tuple[StepCosts, list[str]]:
    if isinstance(config, Mapping) and config.get("zero_optimization", {}).get("stage") == "auto":
        raise ConfigError(
            'zero_optimization.stage "auto" is chosen from the memory of all blocks, and a plan simulates few: name a '
            "stage, or let shardwell plan --auto choose"
        )
    fewest, num_kept, tries, bundle = fewest_blocks(config), 0, 0, 1
    while tries < _MOST_TRIES:  # with more blocks the peak may be at another moment
        first = num_kept + (tries + 1) * fewest
        depths = tuple((first + more) * bundle + model.layers % bundle for more in range(3))
        if sum(depths) >= model.layers:
            break
        runs = [_at(model, depths[0], config, machine, loss, FEWEST_STEPS)]
        if runs[0][0].bundle > bundle:  # there may be more in it, if it has all blocks
            bundle = runs[0][0].bundle
            continue
        if len(runs[0][0].kept) > num_kept:  # beside units that are kept on the device there must be as many others
            num_kept = len(runs[0][0].kept)
            continue
        tries += 1
        runs.append(_at(model, depths[1], config, machine, loss, FEWEST_STEPS))
        if verified:  # with a step more, which is compared
            runs.append(_at(model, depths[2], config, machine, loss))
        found = [costs for costs, _ in runs]
        chunks, units = UpdateChunks(first, found[0].updated, found[1].updated), model.layers // bundle
        is_plain = not found[0].updates_on_device or chunks.is_plain(units)
        two = TwoDepths.of(found[0], found[1])
        if verified and not two.is_confirmed(found[2], 2, units - first, with_step=is_plain):
            continue
        if verified or found[0].kept == found[1].kept:
            whole = replace(two.at(units - first), largest_unit=found[-1].largest_unit)
            same = f"{depths[0]}, {depths[1]} and {depths[2]} of {model.layers} identical blocks were simulated"
            bound = None if is_plain else with_estimated_step(whole, found[0], chunks, units)
            if bound is not None:
                whole = bound
                same += "; the device's peak in the step alone, less than half of its highest, is an estimate"
            elif not is_plain:
                at = functools.partial(_touched_at, model, config, machine, loss, bundle)
                whole = with_exact_step(whole, chunks, units, at)
            return whole, [*runs[-1][1], *([same] if verified else [])]
    return _at(model, model.layers, config, machine, loss)


def least(model: BlockModel, config: Any, machine: SimulatedMachine) -> PlanReport:
    """Return what a few blocks of a model take, from one simulation: all of them take at least as much of each tier."""
    depth = min(_FEWEST, model.layers)
    part = _with_blocks(machine, depth, model.layers)
    costs, notes = _run(model.build(depth), without_kept(config), part, model.inputs, None, FEWEST_STEPS)
    return PlanReport(model.name, dict(config), machine, costs, tuple(notes))


# ---------------------------------------------------------------------------------------------------------------- time


def _time(
    model: nn.Module, config: Any, machine: SimulatedMachine, inputs: Inputs, loss: Callable[[Any], Tensor] | None
) -> StepTime:
    """Simulate a model with virtual time."""
    forward = _forward(inputs, loss)
    try:
        return simulate_time(model, config, machine, forward)
    except NoRoomError:
        patient, large = _with_more_room(config, machine)
        return simulate_time(model, patient, large, forward)


def _time_of_blocks(
    model: BlockModel,
    config: Any,
    machine: SimulatedMachine,
    loss: Callable[[Any], Tensor] | None,
    verified: bool,
    num_kept: int = 0,
    bundle: int = 1,
) -> StepTime:
    """Simulate few blocks with virtual time; all of them if no three depths agree.

    Below the device blocks go through a few buffers in turns, and all-gathers through two communicators: depths that
    leave the same one for the last are compared. With few blocks a queue may not be full yet, so that a few depths more
    are looked at before all. `num_kept` units more are on the device, with few blocks as with all. Of each `bundle` of
    blocks, which are one unit, all are there.
    """
    fewest, apart = (_FEWEST_BELOW + num_kept, _num_buffers(config)) if _is_below(config) else (_FEWEST, 1)
    if config.get("shardwell", {}).get("gathers_take_turns"):
        fewest += (model.layers // bundle - fewest) % 2
        apart = math.lcm(apart, 2)
    found: list[StepTime] = []
    for number in range(_MOST_DEPTHS if verified else 2):
        depth = (fewest + number * apart) * bundle + model.layers % bundle
        if 2 * depth >= model.layers:
            break
        found.append(_timed_at(model, depth, config, machine, loss))
        if number == 1 and not verified:
            return _from_depths(found[0], found[1], depth, apart * bundle, model.layers)
        if number > 1 and _lies_between(found[-3], found[-1], found[-2], _NEAR * apart):
            return _from_depths(found[-3], found[-1], depth, 2 * apart * bundle, model.layers)
    return _timed_at(model, model.layers, config, machine, loss)


def _from_depths(one: StepTime, last: StepTime, depth: int, between: int, layers: int) -> StepTime:
    """Return the time of all blocks from those of two depths, the second of which is `depth`."""
    whole = extrapolated(one, last, between, layers - depth + between)
    return replace(whole, events=last.events, waits=last.waits, num_blocks=depth)


def _num_buffers(config: Mapping[str, Any]) -> int:
    """Return the number of update buffers."""
    block = config.get("zero_optimization", {}).get("offload_optimizer") or {}
    given = block.get("buffer_count")
    return max(FEWEST_BUFFERS, given) if isinstance(given, int) else 4


def _lies_between(one: StepTime, last: StepTime, middle: StepTime, near: float) -> bool:
    """Return whether the time of the middle one of three depths is halfway between the others, but for a share."""
    return abs(extrapolated(one, last, 2, 1).seconds - middle.seconds) <= near * middle.seconds


def _timed_at(
    model: BlockModel, depth: int, config: Any, machine: SimulatedMachine, loss: Callable[[Any], Tensor] | None
) -> StepTime:
    return _time(model.build(depth), config, _part_of(machine, depth, model.layers), model.inputs, loss)


def _part_of(machine: SimulatedMachine, depth: int, layers: int) -> SimulatedMachine:
    """Return a machine that has some of a model's blocks; its host and drives have that share of their bytes."""
    share = depth / layers
    return replace(
        _with_blocks(machine, depth, layers),
        host_bytes=machine.host_bytes * share,
        disk_bytes=machine.disk_bytes * share,
    )


def _with_blocks(machine: SimulatedMachine, depth: int, layers: int) -> SimulatedMachine:
    return replace(machine, blocks=SimulatedBlocks(depth, layers) if depth < layers else None)


def _tokens_of_sample(inputs: Inputs) -> int:
    """Return the tokens of one sample: those of the first tensor of whole numbers; 0 if there is none."""
    values = inputs.values() if isinstance(inputs, Mapping) else inputs
    for one in values:
        if isinstance(one, Tensor) and not one.is_floating_point() and one.ndim >= 2:
            return one.numel() // one.shape[0]
    return 0


# -------------------------------------------------------------------------------------------------------------- memory


def _at(
    model: BlockModel,
    depth: int,
    config: Any,
    machine: SimulatedMachine,
    loss: Callable[[Any], Tensor] | None,
    steps: int = STEPS,
) -> tuple[StepCosts, list[str]]:
    """Simulate some of the blocks; the host and the drives have that share of their bytes.

    Staging buffers are as large with few blocks as with all: where they do not fit into the share, the host has all.
    """
    part, whole = _part_of(machine, depth, model.layers), _with_blocks(machine, depth, model.layers)
    costs, notes = _run(model.build(depth), config, part, model.inputs, loss, steps)
    return _run(model.build(depth), config, whole, model.inputs, loss, steps) if notes else (costs, notes)


def _touched_at(
    model: BlockModel,
    config: Any,
    machine: SimulatedMachine,
    loss: Callable[[Any], Tensor] | None,
    bundle: int,
    units: int,
) -> StepCosts:
    """Simulate some of the blocks, which compute nothing: all but the peaks of forward and backward is as always."""
    depth = units * bundle + model.layers % bundle
    part = _with_blocks(machine, depth, model.layers)
    return _run(model.build(depth), config, part, model.inputs, loss, FEWEST_STEPS, touching=FEWEST_STEPS)[0]


def _run(
    model: nn.Module,
    config: Any,
    machine: SimulatedMachine,
    inputs: Inputs,
    loss: Callable[[Any], Tensor] | None,
    steps: int = STEPS,
    *,
    touching: int = 0,
) -> tuple[StepCosts, list[str]]:
    """Simulate a model; one that the engine would refuse for want of room is simulated with more."""
    forward = _forward(inputs, loss)
    try:
        return simulate(model, config, machine, forward, steps=steps, touching=touching), []
    except NoRoomError as error:
        patient, large = _with_more_room(config, machine)
        costs = simulate(model, patient, large, forward, steps=steps, touching=touching)
        return costs, [f"the engine would refuse to start: {error}"]


def _forward(inputs: Inputs, loss: Callable[[Any], Tensor] | None) -> Callable[[Engine], Tensor]:
    given = tree_map(lambda one: one.to("meta") if isinstance(one, Tensor) else one, inputs)

    def forward(engine: Engine) -> Tensor:
        with naming_inputs(given):
            output = engine(**given) if isinstance(given, Mapping) else engine(*given)
        return loss_of(output if loss is None else loss(output))

    return forward


def without_kept(config: Any) -> Any:
    """Return a configuration by which no state stays on the device that is offloaded to the host by default."""
    zero, own = config.get("zero_optimization", {}), config.get("shardwell", {})
    block, parameters = zero.get("offload_optimizer") or {}, zero.get("offload_param") or {}
    is_kept = block.get("device") == "cpu" and parameters.get("device", "none") == "none"
    if not is_kept or "ratio" in block or "placement" in own:
        return config
    return {**config, "zero_optimization": {**zero, "offload_optimizer": {**block, "ratio": 1.0}}}


def _with_more_room(config: Any, machine: SimulatedMachine) -> tuple[Any, SimulatedMachine]:
    plain = SimulatedMachine()
    large = replace(machine, device_bytes=plain.device_bytes, host_bytes=plain.host_bytes, disk_bytes=plain.disk_bytes)
    return without_kept({**config, "shardwell": {**config.get("shardwell", {}), "commit": "after_norm"}}), large


def record(
    model: nn.Module,
    config: Any,
    machine: SimulatedMachine,
    inputs: Inputs,
    steps: int = STEPS,
    *,
    touching: int = 0,
) -> tuple[StepCosts, Recording]:
    """Simulate a model that is on the meta device; return its buffers, too. Arguments are as of `simulate`."""
    recording = Recording()

    def forward(engine: Engine) -> Tensor:
        return loss_of(engine(**inputs) if isinstance(inputs, Mapping) else engine(*inputs))

    costs = simulate(model, config, machine, forward, recording, steps=steps, touching=touching)
    return costs, recording


def loss_of(output: Any) -> Tensor:
    """Return the loss in what a forward returned."""
    found = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if found is None and isinstance(output, Mapping):
        found = output.get("loss")
    if found is None and isinstance(output, tuple | list) and output:
        found = output[0]
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise ShardwellError(
            f"the forward returned a {type(output).__name__} in which no loss was found: expected one number, or an "
            "object or a dictionary with a `loss`; or pass estimate(loss=...)"
        )
    return found


def fewest_blocks(config: Any) -> int:
    """Return the blocks from which on each more adds the same."""
    return _FEWEST_BELOW if _is_below(config) else _FEWEST


def _may_wait_on_the_device(config: Any) -> bool:
    """Return whether gradients for updates on the host may wait on the device: none does that waits for the norm."""
    own = config.get("shardwell", {}) if isinstance(config, Mapping) else {}
    return _is_below(config) and own.get("commit") != "after_norm"


def _is_below(config: Any) -> bool:
    """Return whether states may be stored below the device."""
    zero = config.get("zero_optimization", {}) if isinstance(config, Mapping) else {}
    blocks = (zero.get("offload_optimizer") or {}, zero.get("offload_param") or {})
    own = config.get("shardwell", {}) if isinstance(config, Mapping) else {}
    return any(block.get("device", "none") != "none" for block in blocks) or own.get("placement") == "auto"


def tokens(micro_batch: int, sequence: int) -> Tensor:
    """Return a batch of tokens without values."""
    if micro_batch < 1 or sequence < 1:
        raise ShardwellError(f"a micro-batch of {micro_batch} sequences of {sequence} tokens: expected 1 or more")
    if micro_batch * sequence > _MOST_TOKENS:
        raise ShardwellError(
            f"a micro-batch of {micro_batch:,} sequences of {sequence:,} tokens: expected at most {_MOST_TOKENS:,} "
            "tokens"
        )
    return torch.empty(micro_batch, sequence, dtype=torch.long, device="meta")
