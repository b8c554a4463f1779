"""Errors that a handler of a signal raises in the middle of a wait: they say nothing about other ranks.

torch's DataLoader has such a handler, which raises a RuntimeError where a worker was killed: collectives and the store
tell that a peer is gone by the same class of error.
"""

from __future__ import annotations

import signal
from types import CodeType
from typing import Any


def is_from_signal(error: BaseException) -> bool:
    """Return whether a handler of a signal of this process raised an error."""
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            return True
        trace = trace.tb_next
    return False


def _code_of(handler: Any) -> CodeType | None:
    """Return the code of a function, a method or an object that can be called; None of what Python did not install."""
    function = getattr(handler, "__func__", handler)
    if not hasattr(function, "__code__"):
        function = vars(type(function)).get("__call__")
    found = getattr(function, "__code__", None)
    return found if isinstance(found, CodeType) else None
