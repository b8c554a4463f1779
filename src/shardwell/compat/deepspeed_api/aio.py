"""`AsyncIOBuilder().load()`: DeepSpeed's handle for files, by threads that read and write blocks.

The engine's own offload does not use it: that has the queues of `kernels/io.py`. Buffers on a GPU go through host
memory. A file that is opened by name goes through the page cache; a descriptor of the caller's is used as it is, also
with `O_DIRECT`, for which `new_cpu_locked_tensor` aligns memory.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from shardwell.errors import ShardwellError


class AioError(ShardwellError, OSError):
    """A file could not be read or written."""


class aio_handle:  # noqa: N801 - DeepSpeed's name
    """Reads and writes of tensors, of which each is cut into blocks for several threads."""

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        if min(block_size, queue_depth, intra_op_parallelism) < 1:
            raise ShardwellError("aio_handle: block_size, queue_depth and intra_op_parallelism must be at least 1")
        self._options = block_size, queue_depth, bool(single_submit), bool(overlap_events), intra_op_parallelism
        self._threads = ThreadPoolExecutor(intra_op_parallelism, thread_name_prefix="aio")
        self._pending: list[_Transfer] = []
        self._locked: dict[int, Tensor] = {}

    def get_block_size(self) -> int:
        return self._options[0]

    def get_queue_depth(self) -> int:
        return self._options[1]

    def get_single_submit(self) -> bool:
        return self._options[2]

    def get_overlap_events(self) -> bool:
        return self._options[3]

    def get_intra_op_parallelism(self) -> int:
        return self._options[4]

    def get_alignment(self) -> int:
        """Return what addresses, offsets and sizes must be multiples of for a descriptor with `O_DIRECT`."""
        return mmap.PAGESIZE

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: Tensor) -> Tensor:
        """Return a tensor in host memory that begins at a page, pinned where there is a GPU."""
        size = num_elem * example_tensor.element_size()
        if torch.cuda.is_available():
            made = torch.zeros(num_elem, dtype=example_tensor.dtype, pin_memory=True)
        else:
            made = torch.frombuffer(mmap.mmap(-1, max(size, 1)), dtype=torch.uint8)[:size].view(example_tensor.dtype)
        self._locked[made.data_ptr()] = made
        return made

    def free_cpu_locked_tensor(self, tensor: Tensor) -> bool:
        """Let go of a tensor of `new_cpu_locked_tensor`; return whether it was one."""
        return self._locked.pop(tensor.data_ptr(), None) is not None

    def is_pinned(self, buffer: Tensor) -> bool:
        """Return whether a tensor is one of `new_cpu_locked_tensor`, or pinned."""
        return buffer.data_ptr() in self._locked or bool(torch.cuda.is_available() and buffer.is_pinned())

    def sync_pread(self, buffer: Tensor, filename: str, file_offset: int = 0) -> int:
        """Fill a tensor from a file; return 1."""
        return _Transfer(self, buffer, filename, file_offset, is_write=False).wait()

    def sync_pwrite(self, buffer: Tensor, filename: str, file_offset: int = 0) -> int:
        """Write a tensor to a file; return 1."""
        return _Transfer(self, buffer, filename, file_offset, is_write=True).wait()

    def async_pread(self, buffer: Tensor, filename: str, file_offset: int = 0) -> int:
        """Begin to fill a tensor, which must not be used before `wait`; return 0."""
        self._pending.append(_Transfer(self, buffer, filename, file_offset, is_write=False))
        return 0

    def async_pwrite(
        self, buffer: Tensor, filename: str | int | None = None, file_offset: int = 0, fd: int | None = None
    ) -> int:
        """Begin to write a tensor, which must not change before `wait`; return 0."""
        where = fd if filename is None else filename
        if where is None:
            raise TypeError("async_pwrite needs a filename or a descriptor fd")
        self._pending.append(_Transfer(self, buffer, where, file_offset, is_write=True))
        return 0

    def wait(self) -> int:
        """Wait for what was begun; return the number of these reads and writes."""
        pending, self._pending = self._pending, []
        return sum(transfer.wait() for transfer in pending)

    def pread(self, buffer: Tensor, filename: str, validate: bool, is_async: bool, file_offset: int = 0) -> int:
        """Read at once or in the background."""
        return (self.async_pread if is_async else self.sync_pread)(buffer, filename, file_offset)

    def pwrite(self, buffer: Tensor, filename: str, validate: bool, is_async: bool, file_offset: int = 0) -> int:
        """Write at once or in the background."""
        return (self.async_pwrite if is_async else self.sync_pwrite)(buffer, filename, file_offset)

    def read(self, buffer: Tensor, filename: str, validate: bool = False, file_offset: int = 0) -> int:
        """Read at once."""
        return self.sync_pread(buffer, filename, file_offset)

    def write(self, buffer: Tensor, filename: str, validate: bool = False, file_offset: int = 0) -> int:
        """Write at once."""
        return self.sync_pwrite(buffer, filename, file_offset)

    def begin(self, move: Callable[[int, int], None], size: int) -> list[Future[None]]:
        """Cut `size` bytes into blocks, and let threads move them."""
        block = self._options[0]
        return [self._threads.submit(move, first, min(first + block, size)) for first in range(0, size, block)]


class _Transfer:
    """One read or write."""

    def __init__(self, handle: aio_handle, buffer: Tensor, where: str | int, offset: int, *, is_write: bool) -> None:
        self._buffer, self._where, self._offset, self._is_write = buffer, where, offset, is_write
        self._is_direct = buffer.device.type == "cpu" and buffer.is_contiguous()
        self._host = buffer.detach() if self._is_direct else buffer.detach().cpu().contiguous()
        self._bytes = memoryview(self._host.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        flags = os.O_WRONLY | os.O_CREAT if is_write else os.O_RDONLY
        self._owns = not isinstance(where, int)
        self._file = where if isinstance(where, int) else os.open(where, flags, 0o644)
        self._blocks = handle.begin(self._move, len(self._bytes))

    def _move(self, first: int, last: int) -> None:
        name = "write" if self._is_write else "read"
        call: Any = os.pwritev if self._is_write else os.preadv
        while first < last:
            done = call(self._file, [self._bytes[first:last]], self._offset + first)
            if done == 0:
                raise AioError(f"{self._where}: {name} at {self._offset + first}: the file ends there")
            first += done

    def wait(self) -> int:
        """Wait for all blocks, and return 1; raise the first error."""
        errors = [error for block in self._blocks if (error := block.exception()) is not None]
        if self._owns:
            os.close(self._file)
        if errors:
            raise errors[0]
        if not self._is_write and not self._is_direct:
            self._buffer.data.copy_(self._host)
        return 1
