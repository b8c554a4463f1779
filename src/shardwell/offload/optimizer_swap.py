"""Optimizer state that is stored on disk, and the update buffers in host memory where units are updated.

    reader   | read 3 | read 2      | read 1      | read 3, for the next step ...
    worker            | update 3    | update 2    | update 1    |
    disk                            | write 3     | write 2     | write 1 |

Each group has swapped tensors for its master weights and for parameters that are stored on disk too; each unit has
swapped tensors for its optimizer state. An update buffer holds all of that for one unit. There are a few buffers, so
that the next unit is read and the last one written while this one is updated. When nothing is left to read, all but one
buffer are filled for the first updates of the next step: with master weights and state only, because parameters are
needed elsewhere until then.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from shardwell.kernels import Moment8bit
from shardwell.memory.timing import AllOf
from shardwell.memory.virtual_streams import gate
from shardwell.offload.cpu_kernels import HostKernel
from shardwell.offload.disk import DiskTier, DiskTransfer
from shardwell.offload.disk_file import rounded
from shardwell.offload.staging import AlignedAllocator, StagingPool
from shardwell.offload.storage import swapped_masters, swapped_shard, swapped_tensors
from shardwell.offload.swapped_tensors import SwappedTensors
from shardwell.optim.param_slices import ParamSlice, ParamSlices, is_elementwise
from shardwell.sharding import EngineContext, ShardedGroup, Unit

FEWEST_BUFFERS = 3  # one to read into, one to update, one to write from


@dataclass(frozen=True)
class UpdateBuffer:
    """The memory that holds a unit's master weights and state during its update."""

    memory: Tensor
    all_swapped: list[SwappedTensors] = field(default_factory=list)
    reads: list[DiskTransfer] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)  # bytes of the memory that each of `all_swapped` takes
    used_up: set[SwappedTensors] = field(default_factory=set)  # swapped tensors that are not needed again

    def wait(self) -> None:
        """Wait until everything is read, and raise the error of a failed read."""
        for read in self.reads:
            read.wait()


class OptimizerSwapper:
    """The optimizer state on disk of an engine's units."""

    def __init__(
        self, tier: DiskTier, inner: Optimizer, shards: ParamSlices, context: EngineContext, num_buffers: int
    ) -> None:
        self._tier, self._inner, self._shards, self._context = tier, inner, shards, context
        self._by_unit: dict[int, SwappedTensors] = {}  # by unit
        self._num_buffers = max(FEWEST_BUFFERS, num_buffers)
        self._buffers = StagingPool(AlignedAllocator(context.device, context.memory_stats), self._num_buffers, 0)
        self.free_buffers = gate(self._num_buffers)
        self._ready: dict[int, UpdateBuffer] = {}  # by unit: buffers that were filled ahead
        self._lock = threading.Lock()  # guards `_ready`

    def has(self, unit: Unit) -> bool:
        """Return whether the unit's optimizer state is stored on disk."""
        return any(swapped_masters(group) is not None for group in unit.trainable)

    def needs_buffer(self, unit: Unit) -> bool:
        """Return whether an update of the unit needs an update buffer."""
        return any(swapped_tensors(group) for group in unit.trainable)

    def add(self, unit: Unit) -> None:
        """Store the state that a unit has now. New tensors are written, unless they are blank."""
        if self.has(unit):
            self._swapped_of(unit).register(list(self._tensors(unit)))

    def adopt(self, units: Iterable[Unit]) -> None:
        """Store state that other code gave the optimizer; the tensors of that code keep their memory."""
        for state in self._inner.state.values():
            state.update({key: v.detach() for key, v in state.items() if isinstance(v, Tensor | Moment8bit)})
        for unit in units:
            self.add(unit)

    def copies(self, units: Iterable[Unit]) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Yield each stepped tensor with a copy of its state, for all state on disk."""
        for unit in units:
            with self.swapped_in(unit, changes=False):
                for shard in self._shards.of(unit):
                    if swapped_masters(shard.group) is not None and shard.tensor in self._inner.state:
                        yield shard.tensor, _copied(self._inner.state[shard.tensor])

    @contextlib.contextmanager
    def swapped_in(self, unit: Unit, *, changes: bool) -> Iterator[None]:
        """Return a context in which a unit's state is in memory. It may be nested."""
        if not self.has(unit):
            yield
            return
        swapped = self._swapped_of(unit)
        swapped.open()
        try:
            yield
        finally:
            try:
                if changes:
                    swapped.register(list(self._tensors(unit)))
            finally:
                swapped.close(changed=changes)

    def forget(self, unit: Unit) -> None:
        """Discard a unit's state."""
        swapped = self._by_unit.pop(unit.index, None)
        if swapped is not None:
            swapped.free()

    def _swapped_of(self, unit: Unit) -> SwappedTensors:
        if unit.index not in self._by_unit:
            self._by_unit[unit.index] = SwappedTensors(self._tier, self._context.memory_stats, unit.name)
        return self._by_unit[unit.index]

    def _tensors(self, unit: Unit) -> Iterator[Tensor]:
        for shard in self._shards.of(unit):
            for value in self._inner.state.get(shard.tensor, {}).values():
                if swapped_masters(shard.group) is not None and is_elementwise(value, shard):
                    yield from (value.codes, value.exponents) if isinstance(value, Moment8bit) else (value,)

    # --------------------------------------------------------------------------------------------------- updates

    @property
    def most_ready(self) -> int:
        """The number of update buffers that may be filled ahead: the next update must find a free one."""
        return self._num_buffers - 1

    @property
    def ready_bytes(self) -> int:
        """The bytes that buffers filled ahead hold."""
        with self._lock:
            return sum(sum(buffer.sizes) for buffer in self._ready.values())

    def measure(self, units: list[Unit], kernel: HostKernel) -> None:
        """Size the update buffers for the largest of these units, with its state."""

        def size(group: ShardedGroup) -> int:
            numel = group.local_numel if swapped_masters(group) is not None else 0
            state = [numel, Moment8bit.num_blocks(numel)] if kernel.eight_bits else [4 * numel]
            parameters = sum(swapped.num_bytes for swapped in swapped_tensors(group))
            return parameters + len(kernel.keys) * sum(rounded(part) for part in state)

        self._buffers.at_least(max(sum(size(group) for group in unit.trainable) for unit in units))

    def prefetch(self, unit: Unit) -> None:
        """Start to read a unit's state and master weights ahead, into an update buffer that the caller has acquired."""
        with self._lock:
            is_idle = unit.index in self._ready or len(self._ready) >= self.most_ready
        if is_idle or not self.has(unit):
            self.free_buffers.release()
            return
        all_swapped = self._swapped_state(unit)
        buffer = self._taken(sum(swapped.num_bytes for swapped in all_swapped))
        self._fill(buffer, all_swapped[:1])
        self._fill(buffer, all_swapped[1:], waits=False)  # a holder of these may be waiting for the first
        for swapped in all_swapped:
            swapped.reclaim = partial(self.cancel_prefetch, unit.index)
        with self._lock:
            self._ready[unit.index] = buffer

    def cancel_prefetch(self, index: int) -> None:
        """Release what was read ahead for a unit, because another caller wants it."""
        if (buffer := self._take_prefetched(index)) is not None:
            self.release(buffer, changed=False)

    def cancel_prefetches(self) -> None:
        """Release everything that was read ahead."""
        for index in list(self._ready):
            self.cancel_prefetch(index)

    def _take_prefetched(self, index: int) -> UpdateBuffer | None:
        """Take back a buffer that was filled ahead."""
        with self._lock:
            buffer = self._ready.pop(index, None)
        for swapped in buffer.all_swapped if buffer is not None else ():
            swapped.reclaim = None
        return buffer

    def acquire(self, unit: Unit, shards: list[ParamSlice], gradients: SwappedTensors | None = None) -> UpdateBuffer:
        """Start to read what a unit stores on disk into an update buffer, to update these shards.

        The call waits until a buffer is free. Gradients that wait on disk are read into it too.
        """
        blank = {
            shard.swapped
            for group in unit.trainable
            if (shard := swapped_shard(group)) is not None and group.split_master is None and _all_of(group, shards)
        }  # parameters that are overwritten completely
        state = self._swapped_state(unit)
        pages = [shard.swapped for group in unit.trainable if (shard := swapped_shard(group)) is not None]
        waiting = [gradients] if gradients is not None else []
        size = sum(swapped.num_bytes for swapped in (*state, *pages, *waiting))
        buffer = self._take_prefetched(unit.index)
        if buffer is not None and (
            buffer.sizes != [swapped.num_bytes for swapped in state] or buffer.memory.numel() < size
        ):
            self.release(buffer, changed=False)
            buffer = None
        if buffer is None:
            buffer = self._taken(size)
            self._fill(buffer, state)
        else:
            self.free_buffers.release()  # the caller has acquired another one
        self._fill(buffer, pages, blank)
        buffer.used_up.update(waiting)
        self._fill(buffer, waiting)
        return buffer

    def _swapped_state(self, unit: Unit) -> list[SwappedTensors]:
        """Return the swapped tensors of state and master weights.

        State comes first: code that slices both has the state open, and so no other thread moves its master weights.
        """
        masters = [swapped for group in unit.trainable if (swapped := swapped_masters(group)) is not None]
        return [self._swapped_of(unit), *masters] if self.has(unit) else masters

    def _taken(self, num_bytes: int) -> UpdateBuffer:
        """Return an empty update buffer; the caller has acquired `free_buffers`."""
        try:
            return UpdateBuffer(self._buffers.take(num_bytes))
        except BaseException:
            self.free_buffers.release()
            raise

    def _fill(
        self,
        buffer: UpdateBuffer,
        all_swapped: Iterable[SwappedTensors],
        blank: Collection[SwappedTensors] = (),
        *,
        waits: bool = True,
    ) -> None:
        """Start to swap tensors into the rest of an update buffer; tensors in `blank` are not read."""
        try:
            for swapped in all_swapped:
                start, size = sum(buffer.sizes), swapped.num_bytes
                buffer.reads.extend(
                    swapped.swap_in_to(buffer.memory[start : start + size], blank=swapped in blank, waits=waits)
                )
                buffer.all_swapped.append(swapped)
                buffer.sizes.append(size)
        except BaseException:
            self.release(buffer, changed=False)
            raise

    def release(self, buffer: UpdateBuffer, *, changed: bool) -> None:
        """Swap out what an update buffer holds, and write it if it changed; the buffer is free when that has ended."""
        transfers = list(buffer.reads)

        def put_back(swapped: SwappedTensors) -> None:
            transfers.extend(swapped.swap_out(changed=changed and swapped not in buffer.used_up))

        with contextlib.ExitStack() as last_first:  # all of it, even if a disk fails
            last_first.callback(self.free_buffers.release)
            last_first.callback(lambda: self._buffers.give(buffer.memory, AllOf(transfers)))
            for swapped in buffer.all_swapped:
                last_first.callback(put_back, swapped)


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, Tensor | Moment8bit) else value for key, value in state.items()}


def _all_of(group: ShardedGroup, shards: list[ParamSlice]) -> bool:
    """Return whether shards are all that this rank has of a group, including padding."""
    return sum(shard.tensor.numel() for shard in shards if shard.group is group) == group.local_numel


def blank(state: dict[str, Any], shard: ParamSlice) -> dict[str, Any]:
    """Expand the state of a shard's first element to the shard: equal elements, in the memory of one."""
    numel = shard.tensor.numel()
    spread: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Moment8bit):
            codes, exponents = value.codes.expand(numel), value.exponents.expand(Moment8bit.num_blocks(numel))
            spread[key] = Moment8bit(codes, exponents, value.is_second)
        else:
            spread[key] = value.expand(numel) if isinstance(value, Tensor) and value.ndim else value
    return spread
