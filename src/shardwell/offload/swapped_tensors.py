"""Tensors that rest on the disk tier: they keep identity, shape and dtype, and their memory comes and goes.

A tensor that is away is one number, repeated: NaN, so that whoever forgets to fetch it will notice, or what it was
filled with when it was made, as long as nothing else was written.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwell.errors import ShardwellError
from shardwell.kernels.io import SECTOR
from shardwell.memory.statistics import MemoryStats, StateKind, Tier
from shardwell.offload.disk import DiskExtent, DiskTier, DiskTransfer, aligned
from shardwell.offload.disk_file import rounded

_PATIENCE = 0.002  # seconds


@dataclass(eq=False)
class _Item:
    tensor: Tensor  # 1D
    extent: DiskExtent
    stand_in: Tensor  # the number that it is while it is away
    is_written: bool = False

    @property
    def num_bytes(self) -> int:
        return self.extent.num_bytes


class SwappedTensors:
    """Some tensors that come and go together: into memory of its own (`open`), or into somebody else's (`fetch`).

    Who wants them while somebody else has them waits; who has them only in case he needs them is asked to let go.
    """

    def __init__(
        self, tier: DiskTier, account: MemoryStats, unit: str, on_move: Callable[[], None] = lambda: None
    ) -> None:
        """`on_move` is called when the tensors have other memory: who has views of them must cut them anew."""
        self._tier, self._account, self._unit, self._on_move = tier, account, unit, on_move
        self._items: list[_Item] = []
        self._writes: list[DiskTransfer] = []  # may still be on their way
        self._is_free = threading.Semaphore()
        self.reclaim: Callable[[], None] | None = None  # has who only expects to need the tensors let go of them
        self._holders = 0
        self._is_changed = False
        self._opened = 0  # bytes of its own memory

    @property
    def num_bytes(self) -> int:
        """Of the memory that the tensors need."""
        return sum(rounded(item.num_bytes) for item in self._items)

    @property
    def is_busy(self) -> bool:
        """Who wants the tensors now would wait."""
        if not self._is_free.acquire(blocking=False):
            return True
        self._is_free.release()
        return not all(transfer.has_passed for transfer in self._writes)

    def register(self, tensors: Sequence[Tensor]) -> None:
        """These are the contents from now on. New ones are written, unless they are a number, repeated.

        Those that the chest had and that are not among them are forgotten.
        """
        wanted = {id(tensor): tensor for tensor in tensors if tensor.numel()}
        if wanted.keys() == {id(item.tensor) for item in self._items}:
            return
        if self._holders:
            self._is_changed = bool(self._exchange(wanted)) or self._is_changed
            return
        self._acquire()
        try:
            self._finish_writes()
            self._move_in(self._exchange(wanted))
        finally:
            self._is_free.release()
        self._on_move()

    def _exchange(self, wanted: dict[int, Tensor]) -> list[_Item]:
        """Forget what is not wanted; returns what is new, all of it or none."""
        self._forget([item for item in self._items if id(item.tensor) not in wanted])
        known = {id(item.tensor) for item in self._items}
        new: list[_Item] = []
        try:
            for tensor in (tensor for name, tensor in wanted.items() if name not in known):
                new.append(self._item(tensor))
                self._items.append(new[-1])
        except BaseException:
            self._forget(new)
            raise
        return new

    def _move_in(self, new: Sequence[_Item]) -> None:
        """Write tensors that still have their memory, and take it; if some cannot be written, all keep theirs."""
        try:
            for item in new:
                if not is_one_number(item.tensor):
                    self._write(item).wait()
        except BaseException:
            self._forget(new)
            raise
        for item in new:
            _send_away(item)

    def swap_in_to(
        self, memory: Tensor, *, blank: bool = False, urgent: bool = False, waits: bool = True
    ) -> list[DiskTransfer]:
        """Begin to bring the tensors into aligned memory of at least `num_bytes`; they are there when all ended.

        With `blank` nothing is read: all of it will be overwritten. Who does not wait gets an error if they are in use.
        """
        if waits:
            self._acquire()
        elif not self._is_free.acquire(blocking=False):
            raise ShardwellError(f"{self._unit}: in use")
        reads: list[DiskTransfer] = []
        try:
            self._finish_writes(in_vain=blank)
            if memory.numel() < self.num_bytes:  # others came first, and changed what it holds
                raise ShardwellError(f"{self._unit}: {memory.numel()} bytes, expected {self.num_bytes} or more")
            start = 0
            for item in self._items:
                place = memory[start : start + item.num_bytes]
                start += rounded(item.num_bytes)
                if item.is_written and not blank:
                    reads.append(self._tier.read(item.extent, 0, place, urgent=urgent))
                item.tensor.data = place.view(item.tensor.dtype)
                if not item.is_written and not blank:
                    item.tensor.fill_(item.stand_in[0])
            self._on_move()
            return reads
        except BaseException:
            for transfer in reads:
                transfer.end()  # nobody else knows of them
            self._leave()
            raise

    def swap_out(self, *, changed: bool) -> list[DiskTransfer]:
        """Send the tensors away; what changed is being written: their memory is free when all of that has ended."""
        self._writes = []
        try:
            for item in self._items if changed else ():
                self._writes.append(self._write(item))
        except BaseException:
            for transfer in self._writes:
                transfer.end()  # nobody else knows of them
            raise
        finally:
            self._leave()
        return self._writes

    def open(self) -> None:
        """Bring the tensors into memory of the chest's own. May be nested."""
        if not self._holders:
            memory = aligned(self.num_bytes)
            reads = self.swap_in_to(memory)
            try:
                for transfer in reads:
                    transfer.wait()
            except BaseException:
                self._leave()
                raise
            self._opened, self._is_changed = memory.numel(), False
            self._account.add(StateKind.STAGING, self._unit, Tier.HOST, self._opened)
        self._holders += 1

    def close(self, *, changed: bool) -> None:
        """Undo an `open`; returns when what changed is on the disk."""
        assert self._holders, f"{self._unit}: closed, but not open"
        self._is_changed = self._is_changed or changed
        self._holders -= 1
        if self._holders:
            return
        try:
            for item in self._items if self._is_changed else ():
                self._writes.append(self._write(item))
                self._writes[-1].wait()
        finally:
            self._leave()
            self._account.remove(StateKind.STAGING, self._unit, Tier.HOST, self._opened)

    @contextlib.contextmanager
    def swapped_in(self, *, changes: bool) -> Iterator[None]:
        """Have the tensors in memory; what changes there counts."""
        self.open()
        try:
            yield
        finally:
            self.close(changed=changes)

    def restore(self) -> None:
        """Leave the tensors in ordinary memory for good, and forget them."""
        self.open()
        for item in self._items:
            item.tensor.data = item.tensor.data.clone()
        self._account.remove(StateKind.STAGING, self._unit, Tier.HOST, self._opened)
        self._holders = 0
        self.free()
        self._on_move()
        self._is_free.release()

    def free(self) -> None:
        """Forget the tensors, as they are."""
        if self.reclaim is not None:
            self.reclaim()
        self._forget(self._items)

    def _acquire(self) -> None:
        while not self._is_free.acquire(timeout=_PATIENCE):
            if (reclaim := self.reclaim) is not None:
                reclaim()

    def _item(self, tensor: Tensor) -> _Item:
        extent = self._tier.allocate(tensor.numel() * tensor.element_size())
        stand_in = tensor[:1].clone() if is_one_number(tensor) else _alarm(tensor.dtype)
        return _Item(tensor, extent, stand_in)

    def _write(self, item: _Item) -> DiskTransfer:
        values = item.tensor.data.contiguous().as_strided(item.tensor.shape, (1,))  # one number may have any stride
        source = values.view(torch.uint8)
        if source.data_ptr() % SECTOR:
            source = aligned(item.num_bytes).copy_(source)
        transfer = self._tier.write(item.extent, 0, source)
        item.stand_in, item.is_written = _alarm(item.tensor.dtype), True
        return transfer

    def _finish_writes(self, *, in_vain: bool = False) -> None:
        """`in_vain`: nobody wants what was written, and it is no matter if that failed."""
        for transfer in self._writes:
            if not (in_vain and transfer.end()):
                transfer.wait()
        self._writes = []

    def _leave(self) -> None:
        for item in self._items:
            _send_away(item)
        self._on_move()
        self._is_free.release()

    def _forget(self, items: Sequence[_Item]) -> None:
        self._items = [item for item in self._items if item not in items]
        for item in items:
            self._tier.free(item.extent)


def is_one_number(tensor: Tensor) -> bool:
    """Whether it is a number, repeated, in the memory of one."""
    return tensor.numel() > 1 and tensor.stride() == (0,)


def _send_away(item: _Item) -> None:
    item.tensor.data = item.stand_in.expand(item.tensor.numel())


def _alarm(dtype: torch.dtype) -> Tensor:
    number = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
    return torch.full((1,), number, dtype=dtype, device="cpu")
