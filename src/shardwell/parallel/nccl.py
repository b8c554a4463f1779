"""NCCL's communicators when a rank fails: torch must not end the process, and hung kernels must be ended.

A rank that waits for another one waits on the device, and its host waits for the device at some time, in code of the
user's as likely as not. Only an abort of the communicators ends such a wait. Torch's watchdog aborts them when a
connection breaks, and by default ends the process as well, with a text that does not say why. So the engine's groups
are made with the handling that only aborts. The engine's thread (`heartbeat.py`) aborts them when a rank has failed
whose connections are intact. The next call of the engine then raises the first cause.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist

_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_ABORT_ONLY = "2"  # torch's CleanUpOnly: abort the communicators, do not end the process
_LONGEST = 10.0  # seconds that an abort may keep the caller


@contextlib.contextmanager
def keeping_the_process() -> Iterator[None]:
    """Make process groups inside that do not end the process on an error, unless the user has chosen a handling."""
    if _HANDLING in os.environ:
        yield
        return
    os.environ[_HANDLING] = _ABORT_ONLY
    try:
        yield
    finally:
        os.environ.pop(_HANDLING, None)


def abort_groups(groups: Sequence[Any]) -> None:
    """Abort the communicators of these process groups, all at the same time; their kernels end with garbage.

    An abort frees memory of the device, which waits for all kernels on it, also for those of communicators that are not
    aborted yet. One abort after the other would so wait for its time limit, and torch makes each in a thread of its
    own, where NCCL does not see that they form a group.

    It may be called by any thread while others wait for the device. An abort that hangs itself is left behind.
    """
    found = list(dict.fromkeys(group for group in groups if group is not None))
    if not found or not dist.is_initialized():
        return
    threads = [threading.Thread(target=_abort, args=(group,), name="shardwell aborts", daemon=True) for group in found]
    for thread in threads:
        thread.start()
    _threads.extend(threads)
    _join(threads)


def _abort(group: Any) -> None:
    with contextlib.suppress(Exception):  # it may be aborted already, and the first cause is known
        group.abort()


def _join(threads: Sequence[threading.Thread]) -> None:
    end = time.monotonic() + _LONGEST
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


_threads: list[threading.Thread] = []
atexit.register(_join, _threads)  # a thread inside torch when Python ends would end the process by a signal
