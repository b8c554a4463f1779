"""Tensors that are stored on the disk tier: they keep identity, shape and dtype while they are swapped in and out.

A tensor that is swapped out is one number, repeated. The number is NaN, so that code that uses the tensor without
swapping it in is noticed, or the value that the tensor was filled with at its creation, as long as nothing else was
written to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwell.errors import ShardwellError
from shardwell.kernels.io import SECTOR
from shardwell.memory import MemoryStats, StateKind, Tier
from shardwell.memory.virtual_streams import gate
from shardwell.offload.disk import DiskExtent, DiskTier, DiskTransfer
from shardwell.offload.disk_file import rounded
from shardwell.offload.worker import is_ended

_TIMEOUT = 0.002  # seconds


@dataclass(eq=False)
class _Item:
    """One tensor with its extent on disk."""

    tensor: Tensor  # 1D
    extent: DiskExtent
    stand_in: Tensor  # the value of the tensor while it is swapped out
    is_written: bool = False

    @property
    def num_bytes(self) -> int:
        return self.extent.num_bytes


class SwappedTensors:
    """Tensors that are swapped in and out together.

    They are swapped into memory of this object (`open`) or of the caller (`swap_in_to`). A caller that wants the
    tensors while another one has them waits. A holder that only expects to need them is asked to release them
    (`reclaim`).
    """

    def __init__(
        self, tier: DiskTier, memory_stats: MemoryStats, unit: str, on_move: Callable[[], None] = lambda: None
    ) -> None:
        """`on_move` is called when the tensors get other memory, so that views of them can be made again."""
        self._tier, self._account, self._unit, self._on_move = tier, memory_stats, unit, on_move
        self._items: list[_Item] = []
        self._writes: list[DiskTransfer] = []  # writes that may still be in flight
        self._is_free = gate()
        self.reclaim: Callable[[], None] | None = None  # has a holder that only read ahead release the tensors
        self._holders = 0
        self._is_changed = False
        self._opened = 0  # bytes of memory of this object

    @property
    def num_bytes(self) -> int:
        """The bytes of memory that the tensors need."""
        return sum(rounded(item.num_bytes) for item in self._items)

    @property
    def is_busy(self) -> bool:
        """Whether a caller that wants the tensors now would wait."""
        if not self._is_free.acquire(blocking=False):
            return True
        self._is_free.release()
        return not all(transfer.has_passed for transfer in self._writes)

    def register(self, tensors: Sequence[Tensor]) -> None:
        """Set the contents. New tensors are written, unless they are one number, repeated.

        Tensors that were registered before and are not among the new ones are forgotten.
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
        """Forget the tensors that are not wanted, and return the new ones; an error adds none of them."""
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
        """Write tensors that still have memory, and release it. If one cannot be written, all keep their memory."""
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
        """Start to read the tensors into aligned memory of at least `num_bytes`, and return the transfers.

        With `blank` nothing is read, because the caller overwrites all of it. With `waits=False` the call raises an
        error if the tensors are in use.
        """
        if waits:
            self._acquire()
        elif not self._is_free.acquire(blocking=False):
            raise ShardwellError(f"{self._unit}: in use")
        reads: list[DiskTransfer] = []
        try:
            self._finish_writes(in_vain=blank)
            if memory.numel() < self.num_bytes:  # another caller was first, and changed the contents
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
                transfer.end()  # no caller knows of them
            self._leave()
            raise

    def swap_out(self, *, changed: bool) -> list[DiskTransfer]:
        """Detach the tensors from their memory, and start to write them if they changed.

        The memory is free when the returned transfers have ended.
        """
        self._writes = []
        try:
            for item in self._items if changed else ():
                self._writes.append(self._write(item))
        except BaseException:
            for transfer in self._writes:
                transfer.end()  # no caller knows of them
            raise
        finally:
            self._leave()
        return self._writes

    def open(self) -> None:
        """Swap the tensors in, into memory of this object. Calls may be nested."""
        if not self._holders:
            memory = self._tier.memory(self.num_bytes)
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
        """Undo an `open`. The call returns when changed tensors are on disk."""
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
        """Return a context in which the tensors are in memory; with `changes` they are written at its end."""
        self.open()
        try:
            yield
        finally:
            self.close(changed=changes)

    def restore(self) -> None:
        """Leave the tensors in ordinary memory permanently, and forget them."""
        self.open()
        for item in self._items:
            item.tensor.data = item.tensor.data.clone()
        self._account.remove(StateKind.STAGING, self._unit, Tier.HOST, self._opened)
        self._holders = 0
        self.free()
        self._on_move()
        self._is_free.release()

    def free(self) -> None:
        """Forget the tensors, and leave them as they are."""
        if self.reclaim is not None:
            self.reclaim()
        self._forget(self._items)

    def _acquire(self) -> None:
        while not self._is_free.acquire(timeout=_TIMEOUT):
            if (reclaim := self.reclaim) is not None:
                reclaim()
            elif is_ended():
                raise ShardwellError(f"{self._unit or '(root)'}: in use, and the engine is gone")

    def _item(self, tensor: Tensor) -> _Item:
        extent = self._tier.allocate(tensor.numel() * tensor.element_size())
        stand_in = tensor[:1].clone() if is_one_number(tensor) else _alarm(tensor)
        return _Item(tensor, extent, stand_in)

    def _write(self, item: _Item) -> DiskTransfer:
        values = item.tensor.data.contiguous().as_strided(item.tensor.shape, (1,))  # one number may have any stride
        source = values.view(torch.uint8)
        if source.data_ptr() % SECTOR:
            source = self._tier.memory(item.num_bytes).copy_(source)
        transfer = self._tier.write(item.extent, 0, source)
        item.stand_in, item.is_written = _alarm(item.tensor), True
        return transfer

    def _finish_writes(self, *, in_vain: bool = False) -> None:
        """Wait for the writes. With `in_vain` their contents are not needed, and a failed write is no error."""
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
    """Return whether the tensor is one number, repeated, in the memory of one element."""
    return tensor.numel() > 1 and tensor.stride() == (0,)


def _send_away(item: _Item) -> None:
    item.tensor.data = item.stand_in.expand(item.tensor.numel())


def _alarm(tensor: Tensor) -> Tensor:
    dtype = tensor.dtype
    number = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
    return torch.full((1,), number, dtype=dtype, device="meta" if tensor.is_meta else "cpu")
