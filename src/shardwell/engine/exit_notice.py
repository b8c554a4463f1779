"""A notice that a rank posts when it exits: other ranks would wait for it without knowing why."""

from __future__ import annotations

import atexit
import sys
import weakref
from typing import TYPE_CHECKING

from shardwell.parallel import Agreement

if TYPE_CHECKING:
    from shardwell.engine.engine import Engine

_living: weakref.WeakSet[Engine] = weakref.WeakSet()


def watch(engine: Engine) -> None:
    """Post a notice to the other ranks of an engine when this process ends."""
    if not _living:
        atexit.unregister(_tell_all)
        atexit.register(_tell_all)
    _living.add(engine)


def tell(agreement: Agreement, num_batches: int, *, is_exit: bool = False) -> None:
    """Post that this rank ends, normally or by an uncaught error; with `is_exit`, its process ends, too."""
    error = getattr(sys, "last_value", None)  # set by Python before it exits
    how = "finished" if error is None else f"ended with {type(error).__name__} ({error})"
    agreement.end(f"{how} after {num_batches} {'batch' if num_batches == 1 else 'batches'}", is_exit=is_exit)


def _tell_all() -> None:
    for engine in list(_living):
        tell(engine._context.roles.agreement, engine.micro_steps, is_exit=True)
