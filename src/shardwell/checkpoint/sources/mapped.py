"""Copies of tensors in memory-mapped files, with an error where a file has become shorter since it was mapped.

A process that touches a page behind the end of such a file is killed by SIGBUS. The kernel, asked to copy that page,
answers with an error.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwell.errors import CheckpointError

_PIECE = 2**30  # bytes; the kernel copies at most 2 GiB at once
_REFUSED = (errno.ENOSYS, errno.EPERM)  # by an old sandbox for processes


class _Span(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def copy_mapped(mapped: Tensor, copy: Tensor) -> None:
    """Copy a tensor that may be memory-mapped into another one of its shape and dtype; both are contiguous."""
    call, done, total = _copy_call(), 0, mapped.numel() * mapped.itemsize
    while done < total:
        size = min(total - done, _PIECE)
        ours, theirs = _Span(copy.data_ptr() + done, size), _Span(mapped.data_ptr() + done, size)
        copied = -1 if call is None else call(os.getpid(), ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0)
        if copied > 0:
            done += copied
        elif call is None or ctypes.get_errno() in _REFUSED:
            copy.copy_(mapped)
            return
        else:
            reason = os.strerror(ctypes.get_errno())
            raise CheckpointError(f"a file became shorter, or unreadable, while a tensor was read from it ({reason})")


def number_in(mapped: Tensor) -> Any:
    """Return the number in a tensor without dimensions."""
    copy = torch.empty_like(mapped)
    copy_mapped(mapped, copy)
    return copy.item()


@functools.cache
def _copy_call() -> Callable[..., int] | None:
    """Return Linux's `process_vm_readv`; None on other systems."""
    try:
        call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (AttributeError, OSError):
        return None
    unsigned = ctypes.c_ulong
    call.argtypes = (ctypes.c_int, ctypes.c_void_p, unsigned, ctypes.c_void_p, unsigned, unsigned)
    call.restype = ctypes.c_ssize_t
    return call
