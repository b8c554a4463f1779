"""The memory of the host: pinned memory, freed pages that malloc keeps, pages that are populated ahead of their use."""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_KEEP_BYTES = 1 << 30
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's mallopt keys
_SMALL_PIECE = 1 << 16  # bytes: smaller shards do not matter
_MOST_BY_ITSELF = 1 << 25  # to which glibc raises its own threshold as large blocks are freed, if it is not set
_MADV_POPULATE_WRITE = 23  # of Linux, since 5.14
_PAGE, _WORTH_IT = 4096, 1 << 21

_keeps_pages = False  # malloc was told to keep freed pages
_pinned: dict[int, weakref.finalize[..., Any]] = {}  # by address: unpins the memory, at the latest when it is freed


def pin(memory: Tensor) -> Tensor:
    """Pin this memory for CUDA, until it is freed or unpinned; return it."""
    num_bytes = memory.numel() * memory.element_size()
    if num_bytes:
        runtime: Any = torch.cuda.cudart()
        torch.cuda.check_error(int(runtime.cudaHostRegister(memory.data_ptr(), num_bytes, 0)))
        _pinned[memory.data_ptr()] = weakref.finalize(memory.untyped_storage(), _unregister, runtime, memory.data_ptr())
    return memory


def unpin(memory: Tensor) -> None:
    """Unpin memory that `pin` has pinned, before its bytes are freed under a storage that stays."""
    if memory.numel() and (unregister := _pinned.get(memory.data_ptr())) is not None:
        unregister()


def _unregister(runtime: Any, address: int) -> None:
    _pinned.pop(address, None)
    runtime.cudaHostUnregister(address)


def keep_freed_pages() -> None:
    """Make malloc keep freed pages instead of returning them to the kernel immediately.

    Stage 3 frees and allocates every unit's buffer twice a step; with glibc's defaults each allocation faults its pages
    in again, which costs five times the copy that fills them. `Device.trim` returns the pages on demand.
    """
    global _keeps_pages
    if (libc := _glibc()) is not None:
        _keeps_pages = True
        libc.mallopt(_M_MMAP_THRESHOLD, _KEEP_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES)


@contextlib.contextmanager
def returning_freed_pages(where: torch.device) -> Iterator[None]:
    """Make malloc return large blocks to the kernel as soon as they are freed inside, and all free ones at the end.

    Blocks that are freed between others that stay allocated would otherwise remain with the process.
    """
    libc = _glibc() if where.type == "cpu" else None
    if libc is None:
        yield
        return
    libc.mallopt(_M_MMAP_THRESHOLD, _SMALL_PIECE)
    libc.mallopt(_M_TRIM_THRESHOLD, _SMALL_PIECE)
    try:
        yield
    finally:
        for key, by_itself in ((_M_MMAP_THRESHOLD, _MOST_BY_ITSELF), (_M_TRIM_THRESHOLD, 2 * _MOST_BY_ITSELF)):
            libc.mallopt(key, _KEEP_BYTES if _keeps_pages else by_itself)
        libc.malloc_trim(0)


def prefault(memory: Tensor) -> Tensor:
    """Let the kernel populate all pages of new host memory in one call, which is cheaper than one fault per page.

    This is a hint: where the kernel does not support it, nothing happens.
    """
    begin = -(-memory.data_ptr() // _PAGE) * _PAGE
    size = (memory.data_ptr() + memory.numel() * memory.element_size() - begin) // _PAGE * _PAGE
    if size >= _WORTH_IT and (libc := _glibc()) is not None:
        libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), _MADV_POPULATE_WRITE)
    return memory


def return_freed_pages() -> None:
    """Return the free pages of malloc to the kernel."""
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    try:
        libc = ctypes.CDLL("libc.so.6")
        return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None
    except OSError:
        return None
