"""What tests look at inside an engine where nothing public says it: the one place that knows the private names.

`engine.units`, `engine.memory()`, `engine.traffic()` and `engine.record()` come first. What is here is for claims about
shards, flat buffers and staging themselves, and for faults that are put where users cannot reach.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import shardwell
from shardwell.checkpoint import Folder
from shardwell.memory import Device, TemporaryBuffers
from shardwell.offload.disk import DiskTier
from shardwell.offload.grad_offload import GradientOffloader
from shardwell.offload.param_swap import ReadBuffers
from shardwell.offload.staging import StagingPool
from shardwell.optim.param_access import ParamAccess
from shardwell.parallel import Collectives, MeshRoles
from shardwell.parallel.rank_store import RankStore
from shardwell.parallel.traffic import TrafficReport
from shardwell.sharding import ShardedGroup, Unit
from shardwell.sharding.gradients import Gradients


def place_of_part(parameter: Any) -> tuple[int, tuple[int, ...]]:
    """Return where this rank's part of a parameter begins in it (0 if it has none), and the parameter's strides."""
    access = ParamAccess(parameter)
    return 0 if access._piece is None else access._piece.in_parameter, access._slot.stride


def units_of(engine: shardwell.Engine) -> Sequence[Unit]:
    """Return the units themselves, in the order of `engine.units`."""
    return engine._scheduler.units


def groups_of(engine: shardwell.Engine) -> list[ShardedGroup]:
    """Return the groups of all units, frozen ones too."""
    return [group for unit in units_of(engine) for group in unit.groups]


def trainable_groups_of(engine: shardwell.Engine) -> list[ShardedGroup]:
    """Return the groups of all units that get gradients."""
    return [group for unit in units_of(engine) for group in unit.trainable]


def collectives_of(engine: shardwell.Engine) -> Collectives:
    """Return the collectives over all ranks."""
    return roles_of(engine).all


def gather_ahead(engine: shardwell.Engine, most: int, bucket: int, *, bounds_forward: bool = True) -> None:
    """Let an engine all-gather so many units ahead, as it does with NCCL, if they have no more elements than that."""
    prefetch = engine._scheduler.prefetch
    prefetch.limits = replace(prefetch.limits, most_ahead=most, bucket=bucket, bounds_forward=bounds_forward)


def collect_apart(engine: shardwell.Engine) -> None:
    """Let each group of a unit have a collective of its own."""
    for unit in units_of(engine):
        unit.sets = replace(unit.sets, joins_gathers=False, joins_reductions=False)


def board_of(engine: shardwell.Engine) -> RankStore:
    """Return the store through which the engine's ranks agree, as its steps ask it; heartbeats have a connection."""
    return roles_of(engine).agreement._board


def roles_of(engine: shardwell.Engine) -> MeshRoles:
    """Return what the engine uses its groups of ranks for."""
    return engine._context.roles


def device_of(engine: shardwell.Engine) -> Device:
    """Return the device with which the engine allocates."""
    return engine._context.device


def temporary_buffers_of(engine: shardwell.Engine) -> TemporaryBuffers:
    """Return what hands out memory that lives for less than a step."""
    return engine._context.temporary


def is_of_simulation(buffers: TemporaryBuffers) -> bool:
    """Return whether an engine's ranks and device do not exist, so that nothing is in flight between them."""
    return buffers._device.is_simulated


def handed_out(buffers: TemporaryBuffers) -> dict[int, Any]:
    """Return what was allocated and not freed: tensor, state and unit, by the tensor's `id`."""
    return buffers._out


def staging_pools(engine: shardwell.Engine) -> list[tuple[int, bool, int]]:
    """Return of each pool of an engine's staging buffers the bytes of a buffer, whether one thread takes them and gives
    them back, and how many were allocated.
    """
    pools = [one for one in _objects_in(engine) if isinstance(one, StagingPool)]
    return sorted((pool._num_bytes, pool._in_order, pool._num_made) for pool in pools)


def wait_as_if_slow(engine: shardwell.Engine) -> None:
    """Let nothing in an engine's memory depend on time that a simulation counts otherwise.

    Parameters are read ahead as far as with a slow drive. A backward goes on when gradients of a micro-step are added
    to their sums in host memory: those of a GPU are free once they are copied, and those of CPU ranks once they are
    added, by a thread.
    """

    def adds(accumulate: Callable[[Unit], None], offloader: GradientOffloader, unit: Unit) -> None:
        accumulate(unit)
        for ticket in list(offloader._adding.values()):
            ticket.wait()

    for one in list(_objects_in(engine)):
        if isinstance(one, ReadBuffers):
            one.pace._is_simulated = True
        if isinstance(one, GradientOffloader):
            one.accumulate = partial(adds, one.accumulate, one)  # type: ignore[method-assign]


def _objects_in(engine: shardwell.Engine) -> Iterator[Any]:
    """Yield the objects of shardwell that an engine's optimizer, context and scheduler hold."""
    todo: list[Any] = [engine.optimizer.executor, engine._context, engine._scheduler]
    seen: set[int] = set()
    while todo:
        one = todo.pop()
        if isinstance(one, list | tuple | dict):
            todo += one.values() if isinstance(one, dict) else one
        elif type(one).__module__.startswith("shardwell.") and id(one) not in seen:
            seen.add(id(one))
            yield one
            todo += vars(one).values() if hasattr(one, "__dict__") else []


def autocast_of(engine: shardwell.Engine) -> Any:
    """Return what makes the context of autocast in which the engine runs forwards."""
    return engine._precision.autocast


def disk_of(engine: shardwell.Engine) -> DiskTier:
    """Return the NVMe tier of an engine that has one."""
    assert engine._context.disk is not None
    return engine._context.disk


def prefetched_shards_of(engine: shardwell.Engine) -> Any:
    """Return what reads shards of parameters from NVMe in advance, of an engine that does."""
    assert engine._context.tiers is not None
    return engine._context.tiers.read_buffers


def host_updates_of(engine: shardwell.Engine) -> Any:
    """Return the queue of updates in host memory, of an engine that offloads its optimizer."""
    queue = updates_if_any(engine)
    assert queue is not None
    return queue


def saver_of(engine: shardwell.Engine) -> Any:
    """Return what writes checkpoints in the background."""
    return engine._checkpoints._saver


def reducer_of(engine: shardwell.Engine) -> Any:
    """Return what takes gradients in and reduce-scatters them."""
    return engine._scheduler.reducer


def finish_reduces(engine: shardwell.Engine) -> None:
    """Wait for reduce-scatters in flight: the last of a backward may be."""
    reducer_of(engine).finish()


def keep_frozen(engine: shardwell.Engine, numel: int) -> None:
    """Let frozen parameters stay unsharded from now on, up to that many elements."""
    engine._scheduler.keep_frozen(numel)


def finish_backward(engine: shardwell.Engine) -> None:
    """End the backward as a step does that begins now."""
    engine._scheduler.finish_backward()


def end_passes(engine: shardwell.Engine) -> None:
    """End forwards and backwards that are open, without a step."""
    engine._scheduler.end_passes()


def traffic_so_far(engine: shardwell.Engine) -> TrafficReport:
    """Return what this rank received since the last step; `engine.traffic()` reports whole steps."""
    return engine._context.roles.all.traffic.current()


def lifted_shard_of(group: ShardedGroup) -> Any:
    """Return the copy of a group's shard that was brought to the device in advance; None if there is none."""
    return getattr(group.storage, "_on_device", None)


def files_of(tier: DiskTier) -> Any:
    """Return the open files of the NVMe tier, one for each path."""
    return tier._files


def locks_of(folder: Folder) -> dict[str, int]:
    """Return the descriptors of the locks that a folder holds on checkpoints that are being written, by name."""
    return folder._locks


def updates_if_any(engine: shardwell.Engine) -> Any:
    """Return the queue of updates in host memory; None if the engine updates all on the device."""
    return getattr(getattr(engine.optimizer, "executor", None), "queue", None)


def open_calls_of(engine: shardwell.Engine) -> Any:
    """Return the forwards of the engine that have begun and not ended."""
    return engine._scheduler.calls


def loss_scale_of(engine: shardwell.Engine) -> Any:
    """Return what holds the loss scale."""
    return engine._precision.loss_scale


def memory_kept_by(group: ShardedGroup) -> Iterator[Any]:
    """Return the tensors of `TemporaryBuffers` that a group may hold between steps."""
    gradients: Gradients = group.gradients
    yield from (gradients.result, gradients.bucket.flat)
    if gradients.reduced.micro_step is not None:
        yield gradients.reduced.micro_step[0]
    if gradients._residual is not None:
        yield gradients._residual._both
    if group.secondary is not None:
        yield group.secondary._kept
    if (prefetched := lifted_shard_of(group)) is not None:
        yield prefetched[0]


def memory_going_down(engine: shardwell.Engine) -> Iterator[Any]:
    """Return the memory of gradients that are being copied to the host, for its updates."""
    if (queue := updates_if_any(engine)) is not None:
        offloader = queue.offloader
        yield from (memory for _, memory in offloader._leaving)
        for transfer in [*offloader._transfers.values(), *(job.transfer for job in queue._jobs.values())]:
            yield from transfer.gradients.values()


def end_simulated_step(engine: Any) -> None:
    """Tell a simulation that nothing of its step is in flight any more."""
    engine._context.device.num_steps += 1


def disk_or_none(engine: Any) -> Any:
    """The disk tier of an engine; None if nothing is stored on disk."""
    return engine._context.disk


def memory_stats_of(engine: Any) -> Any:
    """The memory statistics of an engine."""
    return engine._context.memory_stats


def pipeline_links(engine: shardwell.Engine) -> Any:
    """Return the channels of a pipeline's engine."""
    plan: Any = getattr(engine, "_plan")  # noqa: B009 (of engines in pipelines only)
    return plan.messages._links
