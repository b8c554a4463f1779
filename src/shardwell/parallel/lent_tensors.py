"""Tensors that are lent to gloo for a sum, whose threads let go of them a little later than a collective is done.

A worker thread that lets go last frees the tensor's Python object, for which it needs Python's lock. If Python is
ending at that moment, the process is aborted ("terminate called without an active exception"). So a tensor is lent as
an alias that is kept here until gloo has let go of it, and the end of the process waits for that. Parameters are not
lent: an alias would look like a view of the user's.
"""

from __future__ import annotations

import atexit
import ctypes
import time

import torch.distributed as dist
from torch import Tensor

_MOMENT = 0.1  # seconds for worker threads whose collectives are done
_LONGEST = 2.0  # seconds that the end of a process waits for collectives that nobody has waited for

_lent: list[tuple[Tensor, int]] = []  # the aliases, and how many owners each has once gloo has let go of it


def lend(tensor: Tensor) -> Tensor:
    """Return an alias of a tensor for a collective of gloo."""
    release()
    alias = tensor.detach()
    _lent.append((alias, _num_owners(alias)))
    return alias


def release() -> None:
    """Forget the aliases that gloo has let go of."""
    if _lent:
        _lent[:] = [(alias, alone) for alias, alone in _lent if _num_owners(alias) > alone]


def _num_owners(tensor: Tensor) -> int:
    return int(tensor._use_count())  # type: ignore[attr-defined]


def await_release(seconds: float) -> None:
    """Wait, so long at most, until gloo has let go of all aliases."""
    deadline = time.monotonic() + seconds
    release()
    while _lent and time.monotonic() < deadline:
        time.sleep(1e-3)
        release()


def _await_workers() -> None:
    """Wait until gloo has let go of all aliases; those that it still holds then are never freed.

    Collectives that other code has started hold tensors, too, of which nothing is known here: gloo gets a moment.
    """
    await_release(_LONGEST)
    if dist.is_initialized() and "gloo" in dist.get_backend():
        time.sleep(_MOMENT)
    for alias, _ in _lent:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(alias))


atexit.register(_await_workers)
