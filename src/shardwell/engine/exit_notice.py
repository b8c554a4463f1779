"""A notice that a rank posts when it exits: other ranks would wait for it without knowing why."""

from __future__ import annotations

import atexit
import sys
import weakref
from typing import TYPE_CHECKING

from shardwell.parallel import Agreement, in_flight
from shardwell.parallel.peer_failures import FINISHED, Departure

if TYPE_CHECKING:
    from shardwell.engine.engine import Engine
    from shardwell.runtime.reducer import StepCounts

_watched: list[tuple[weakref.ref[Engine], Departure, StepCounts]] = []


def watch(engine: Engine) -> None:
    """Post a notice to the other ranks of an engine when this process ends.

    The engine may be gone by then: a loop inside of a function that returns early lets go of it before Python ends.
    """
    if not _watched:
        atexit.unregister(_tell_all)
        atexit.register(_tell_all)
    _watched[:] = [entry for entry in _watched if not entry[1].is_over]
    _watched.append((weakref.ref(engine), engine._context.roles.agreement.failures.departure, engine._loop.counts))


def tell(agreement: Agreement, num_batches: int, *, is_exit: bool = False) -> None:
    """Post that this rank ends, normally or by an uncaught error; with `is_exit`, its process ends, too."""
    agreement.end(_words(num_batches), is_exit=is_exit)


def _words(num_batches: int) -> str:
    error = getattr(sys, "last_value", None)  # set by Python before it exits
    words = str(error)
    how = FINISHED if error is None else f"ended with {type(error).__name__}{f' ({words})' if words else ''}"
    return f"{how} after {num_batches} {'batch' if num_batches == 1 else 'batches'}"


def _tell_all() -> None:
    if getattr(sys, "last_value", None) is None:
        in_flight.finish()
    for reference, departure, counts in _watched:
        if (engine := reference()) is not None:
            tell(engine._context.roles.agreement, engine.micro_steps, is_exit=True)
        else:
            departure.leave_without_engine(_words(counts.micro_steps))
