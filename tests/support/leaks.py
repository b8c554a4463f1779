"""What is begun must be ended: work that nobody waited for and memory that was not given back are errors in tests.

`watch` makes `Work` say where it was made when it dies without having been waited for, and has every step look at
what `TemporaryBuffers` has handed out. An engine that dies or fails takes with it what was on its way; that is no loss.
"""

from __future__ import annotations

import contextlib
import sys
import time
import types
import weakref
from collections.abc import Iterator
from typing import Any

from shardwell import virtual_time
from shardwell.engine.engine import Engine
from shardwell.memory import TemporaryBuffers
from shardwell.parallel import Agreement
from shardwell.parallel.transport import Work
from shardwell.sharding.context import EngineContext
from tests.support.internals import (
    groups_of,
    handed_out,
    is_of_simulation,
    memory_going_down,
    memory_kept_by,
    temporary_buffers_of,
    updates_if_any,
)
from tests.support.patience import soon

_DEPTH = 12  # callers that a place names

found: list[str] = []  # what was dropped, and where it was made
_Callers = list[tuple[types.CodeType, int]]  # with the instructions that they are at
_places: weakref.WeakKeyDictionary[TemporaryBuffers, dict[int, _Callers]] = weakref.WeakKeyDictionary()
_failed: weakref.WeakSet[TemporaryBuffers] = weakref.WeakSet()  # of engines that went through an error
_agreements: weakref.WeakKeyDictionary[TemporaryBuffers, weakref.ref[Agreement]] = weakref.WeakKeyDictionary()


def watch() -> None:
    """From now on, in this process."""
    if hasattr(Work, "__del__"):
        return
    make, adopt, allocate = Work.__init__, TemporaryBuffers.adopt, TemporaryBuffers.allocate
    step, forget, together, share = Engine.step, Engine.zero_grad, Agreement.failing_together, EngineContext.__init__

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.made_at, self.owner = _callers(sys._getframe(1)), _owner(sys._getframe(1))

    def dropped(self: Any) -> None:
        if hasattr(self, "owner") and not self.is_done and _counts(self.owner):
            found.append(f"nobody waited for what was begun here:\n{_words(self.made_at)}")

    def adopted(self: TemporaryBuffers, tensor: Any, *args: Any) -> Any:
        _places.setdefault(self, {})[id(tensor)] = _callers(sys._getframe(1))
        return adopt(self, tensor, *args)

    def allocated(self: TemporaryBuffers, *args: Any) -> Any:
        tensor = allocate(self, *args)
        _places.setdefault(self, {})[id(tensor)] = _callers(sys._getframe(1))
        return tensor

    def stepped(self: Engine, *args: Any, **kwargs: Any) -> Any:
        at_boundary = self.is_gradient_accumulation_boundary()
        answer = step(self, *args, **kwargs)
        if at_boundary:
            look(self)
        return answer

    def forgotten(self: Engine, *args: Any, **kwargs: Any) -> None:
        forget(self, *args, **kwargs)
        look(self)

    @contextlib.contextmanager
    def failing(self: Agreement, *args: Any, **kwargs: Any) -> Iterator[None]:
        try:
            with together(self, *args, **kwargs):
                yield
        except Exception:
            _failed.update(memory for memory, agreement in _agreements.items() if agreement() is self)
            raise

    def shared(self: EngineContext, *args: Any, **kwargs: Any) -> None:
        share(self, *args, **kwargs)
        _agreements[self.temporary] = weakref.ref(self.roles.agreement)

    for owner, name, function in (
        (Work, "__init__", made), (Work, "__del__", dropped), (TemporaryBuffers, "adopt", adopted),
        (TemporaryBuffers, "allocate", allocated),
        (Engine, "step", stepped), (Engine, "zero_grad", forgotten), (Agreement, "failing_together", failing),
        (EngineContext, "__init__", shared),
    ):  # fmt: skip
        setattr(owner, name, function)


def look(engine: Engine) -> None:
    """After a step, and after gradients were given up: what is out is gradients that are kept, and copies."""
    temporary = temporary_buffers_of(engine)
    if temporary in _failed or virtual_time.clock is not None:  # there workers go on as its clock does, not meanwhile
        return
    groups = groups_of(engine)
    kept = {id(tensor) for group in groups for tensor in memory_kept_by(group)}
    kept |= {id(memory) for memory in memory_going_down(engine)}
    for key, (_, state, unit) in list(handed_out(temporary).items()):
        if key not in kept and not _comes_back(temporary, key, engine):
            place = _words(_places.get(temporary, {}).get(key, []))
            found.append(f"{state.value} of '{unit}' were not given back; they were taken here:\n{place}")
    _places[temporary] = {
        key: place for key, place in _places.get(temporary, {}).items() if key in handed_out(temporary)
    }


def _comes_back(temporary: TemporaryBuffers, key: int, engine: Engine) -> bool:
    """Whether memory is still given back by threads that bring gradients down to the host."""
    deadline = time.monotonic() + (soon(5.0) if updates_if_any(engine) is not None else 0.0)
    while key in handed_out(temporary) and time.monotonic() < deadline:
        time.sleep(0.005)
    return key not in handed_out(temporary)


def said() -> list[str]:
    """What was found since the last time."""
    words, found[:] = list(dict.fromkeys(found)), []
    return words


def _counts(owner: weakref.ref[TemporaryBuffers] | None) -> bool:
    temporary = owner() if owner is not None else None
    return temporary is not None and temporary not in _failed and not is_of_simulation(temporary)


def _callers(frame: types.FrameType | None) -> _Callers:
    """The callers of a frame. They are asked for each collective, and told of hardly any."""
    callers: _Callers = []
    while frame is not None and len(callers) < _DEPTH:
        callers.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return callers


def _owner(frame: types.FrameType | None) -> weakref.ref[TemporaryBuffers] | None:
    """Whose memory the work of the nearest caller that has any is about."""
    for _ in range(_DEPTH):
        if frame is None:
            return None
        variables = frame.f_code.co_varnames
        if "self" in variables or "temporary" in variables:  # a frame's variables as a dictionary take long to make
            names = frame.f_locals
            this = names.get("self")
            temporary = names.get("temporary") or getattr(this, "_temporary", None)
            temporary = temporary or getattr(getattr(this, "_context", None), "temporary", None)
            if isinstance(temporary, TemporaryBuffers):
                return weakref.ref(temporary)
        frame = frame.f_back
    return None


def _words(callers: _Callers) -> str:
    return "\n".join(f"  {code.co_filename}:{_line(code, at)} {code.co_name}" for code, at in callers) or "?"


def _line(code: types.CodeType, at: int) -> int | None:
    return next((line for start, end, line in code.co_lines() if start <= at < end), None)
