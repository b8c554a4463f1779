"""Optimizer state that rests on disk, and the seats in host memory where units are updated.

    reader   | read 3 | read 2      | read 1      | read 3, for the next step ...
    worker            | update 3    | update 2    | update 1    |
    drive                           | write 3     | write 2     | write 1 |

Masters are in chests of their groups, as are parameters that rest on disk too, state in one chest for each unit. A
seat holds all of that for one unit. There are a few of them, so that the next unit is read and the last one written
while this one is updated. When nothing is left to read, all but one of them are filled for the updates that come first
in the next step: masters and state only, because parameters are needed elsewhere until then.
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
from shardwell.memory.device import AllOf
from shardwell.offload.cpu_kernels import HostKernel
from shardwell.offload.disk import DiskTier, DiskTransfer
from shardwell.offload.disk_file import rounded
from shardwell.offload.staging import AlignedAllocator, StagingPool
from shardwell.offload.swapped_tensors import SwappedTensors
from shardwell.optim.param_slices import ParamSlice, ParamSlices, is_elementwise
from shardwell.sharding import EngineContext, ShardedGroup, Unit

FEWEST_SEATS = 3  # one being read, one updated, one written


@dataclass(frozen=True)
class UpdateBuffer:
    """Where a unit's masters and state are while it is updated."""

    memory: Tensor
    chests: list[SwappedTensors] = field(default_factory=list)
    reads: list[DiskTransfer] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)  # of what each chest has of the memory
    used_up: set[SwappedTensors] = field(default_factory=set)  # chests that nobody reads again

    def wait(self) -> None:
        """Until everything is there; raises what went wrong on the way."""
        for read in self.reads:
            read.wait()


class OptimizerSwapper:
    """The optimizer state of an engine's units on disk."""

    def __init__(
        self, tier: DiskTier, inner: Optimizer, shards: ParamSlices, context: EngineContext, num_seats: int
    ) -> None:
        self._tier, self._inner, self._shards, self._context = tier, inner, shards, context
        self._chests: dict[int, SwappedTensors] = {}  # by unit
        self._num_seats = max(FEWEST_SEATS, num_seats)
        self._seats = StagingPool(AlignedAllocator(context.device, context.account), self._num_seats, 0)
        self.free_seats = threading.Semaphore(self._num_seats)
        self._ready: dict[int, UpdateBuffer] = {}  # that were filled in advance, by unit
        self._lock = threading.Lock()  # over those

    def has(self, unit: Unit) -> bool:
        """Whether its optimizer state rests on disk."""
        return any(group.chest is not None for group in unit.trainable)

    def seats(self, unit: Unit) -> bool:
        """Whether something of it has to be in a seat to be updated."""
        return any(group.swapped_tensors for group in unit.trainable)

    def take_in(self, unit: Unit) -> None:
        """Keep the state that a unit has now. What is new is written, unless it is blank."""
        if self.has(unit):
            self._chest_of(unit).register(list(self._tensors(unit)))

    def take_over(self, units: Iterable[Unit]) -> None:
        """Keep the state that somebody else gave the optimizer; his tensors keep their memory."""
        for state in self._inner.state.values():
            state.update({key: v.detach() for key, v in state.items() if isinstance(v, Tensor | Moment8bit)})
        for unit in units:
            self.take_in(unit)

    def copies(self, units: Iterable[Unit]) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """What is stepped, and a copy of its state, for all that rests on disk."""
        for unit in units:
            with self.opened(unit, changes=False):
                for shard in self._shards.of(unit):
                    if shard.group.chest is not None and shard.tensor in self._inner.state:
                        yield shard.tensor, _copied(self._inner.state[shard.tensor])

    @contextlib.contextmanager
    def opened(self, unit: Unit, *, changes: bool) -> Iterator[None]:
        """Have a unit's state in memory. May be nested."""
        if not self.has(unit):
            yield
            return
        chest = self._chest_of(unit)
        chest.open()
        try:
            yield
        finally:
            try:
                if changes:
                    chest.register(list(self._tensors(unit)))
            finally:
                chest.close(changed=changes)

    def empty(self, unit: Unit) -> None:
        """Leave a unit's state in ordinary memory for good."""
        if self.has(unit):
            self._chest_of(unit).restore()
            del self._chests[unit.index]

    def forget(self, unit: Unit) -> None:
        """Give up a unit's state."""
        chest = self._chests.pop(unit.index, None)
        if chest is not None:
            chest.free()

    def _chest_of(self, unit: Unit) -> SwappedTensors:
        if unit.index not in self._chests:
            self._chests[unit.index] = SwappedTensors(self._tier, self._context.account, unit.name)
        return self._chests[unit.index]

    def _tensors(self, unit: Unit) -> Iterator[Tensor]:
        for shard in self._shards.of(unit):
            for value in self._inner.state.get(shard.tensor, {}).values():
                if shard.group.chest is not None and is_elementwise(value, shard):
                    yield from (value.codes, value.exponents) if isinstance(value, Moment8bit) else (value,)

    # --------------------------------------------------------------------------------------------------- updates

    @property
    def most_ready(self) -> int:
        """Seats that may be filled in advance: whoever comes first must find one."""
        return self._num_seats - 1

    @property
    def ready_bytes(self) -> int:
        """What they hold."""
        with self._lock:
            return sum(sum(seat.sizes) for seat in self._ready.values())

    def measure(self, units: list[Unit], kernel: HostKernel) -> None:
        """Make seats as large as the largest of these units needs, once it has state."""

        def size(group: ShardedGroup) -> int:
            numel = group.own[1] - group.own[0] if group.chest is not None else 0
            state = [numel, Moment8bit.num_blocks(numel)] if kernel.eight_bits else [4 * numel]
            parameters = sum(chest.num_bytes for chest in group.swapped_tensors)
            return parameters + len(kernel.keys) * sum(rounded(part) for part in state)

        self._seats.at_least(max(sum(size(group) for group in unit.trainable) for unit in units))

    def prepare(self, unit: Unit) -> None:
        """Begin to bring state and masters of a unit into a seat that the caller has, for an update that will come."""
        with self._lock:
            is_idle = unit.index in self._ready or len(self._ready) >= self.most_ready
        if is_idle or not self.has(unit):
            self.free_seats.release()
            return
        chests = self._state_chests(unit)
        seat = self._taken(sum(chest.num_bytes for chest in chests))
        self._fill(seat, chests[:1])
        self._fill(seat, chests[1:], waits=False)  # who has those may want the first
        for chest in chests:
            chest.reclaim = partial(self.let_go, unit.index)
        with self._lock:
            self._ready[unit.index] = seat

    def let_go(self, index: int) -> None:
        """Somebody else wants what was brought in advance of a unit."""
        if (seat := self._prepared(index)) is not None:
            self.clear(seat, changed=False)

    def let_all_go(self) -> None:
        for index in list(self._ready):
            self.let_go(index)

    def _prepared(self, index: int) -> UpdateBuffer | None:
        """Take back a seat that was filled in advance."""
        with self._lock:
            seat = self._ready.pop(index, None)
        for chest in seat.chests if seat is not None else ():
            chest.reclaim = None
        return seat

    def seat(self, unit: Unit, shards: list[ParamSlice], gradients: SwappedTensors | None = None) -> UpdateBuffer:
        """Begin to bring what rests on disk of a unit into a seat, to update these shards; waits until one is free.

        So with gradients that wait on disk too.
        """
        blank = {
            group.swapped_shard.chest
            for group in unit.trainable
            if group.swapped_shard is not None and group.split_master is None and _all_of(group, shards)
        }  # parameters that are written anew
        state = self._state_chests(unit)
        pages = [group.swapped_shard.chest for group in unit.trainable if group.swapped_shard is not None]
        waiting = [gradients] if gradients is not None else []
        size = sum(chest.num_bytes for chest in (*state, *pages, *waiting))
        seat = self._prepared(unit.index)
        if seat is not None and (seat.sizes != [chest.num_bytes for chest in state] or seat.memory.numel() < size):
            self.clear(seat, changed=False)
            seat = None
        if seat is None:
            seat = self._taken(size)
            self._fill(seat, state)
        else:
            self.free_seats.release()  # the caller has another one
        self._fill(seat, pages, blank)
        seat.used_up.update(waiting)
        self._fill(seat, waiting)
        return seat

    def _state_chests(self, unit: Unit) -> list[SwappedTensors]:
        """Of state and masters. State first: who cuts both has that open, and nobody moves his masters meanwhile."""
        masters = [group.chest for group in unit.trainable if group.chest is not None]
        return [self._chest_of(unit), *masters] if self.has(unit) else masters

    def _taken(self, num_bytes: int) -> UpdateBuffer:
        """An empty seat; the caller has been let in."""
        try:
            return UpdateBuffer(self._seats.take(num_bytes))
        except BaseException:
            self.free_seats.release()
            raise

    def _fill(
        self,
        seat: UpdateBuffer,
        chests: Iterable[SwappedTensors],
        blank: Collection[SwappedTensors] = (),
        *,
        waits: bool = True,
    ) -> None:
        """Begin to bring chests into the rest of a seat; those that are blank are not read."""
        try:
            for chest in chests:
                start, size = sum(seat.sizes), chest.num_bytes
                seat.reads.extend(
                    chest.swap_in_to(seat.memory[start : start + size], blank=chest in blank, waits=waits)
                )
                seat.chests.append(chest)
                seat.sizes.append(size)
        except BaseException:
            self.clear(seat, changed=False)
            raise

    def clear(self, seat: UpdateBuffer, *, changed: bool) -> None:
        """Send what is in a seat away, and write it if it changed; the seat is free when that has ended."""
        transfers = list(seat.reads)

        def put_back(chest: SwappedTensors) -> None:
            transfers.extend(chest.swap_out(changed=changed and chest not in seat.used_up))

        with contextlib.ExitStack() as last_first:  # all of it, also if a drive fails
            last_first.callback(self.free_seats.release)
            last_first.callback(lambda: self._seats.give(seat.memory, AllOf(transfers)))
            for chest in seat.chests:
                last_first.callback(put_back, chest)


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, Tensor | Moment8bit) else value for key, value in state.items()}


def _all_of(group: ShardedGroup, shards: list[ParamSlice]) -> bool:
    """Whether shards are all that this rank has of a group, padding included."""
    return sum(shard.tensor.numel() for shard in shards if shard.group is group) == group.own[1] - group.own[0]


def blank(state: dict[str, Any], shard: ParamSlice) -> dict[str, Any]:
    """The state of a shard, from that of its first element: the same for all of them, in the memory of one."""
    numel = shard.tensor.numel()
    spread: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Moment8bit):
            codes, exponents = value.codes.expand(numel), value.exponents.expand(Moment8bit.num_blocks(numel))
            spread[key] = Moment8bit(codes, exponents, value.is_second)
        else:
            spread[key] = value.expand(numel) if isinstance(value, Tensor) and value.ndim else value
    return spread
