"""The steps of a script that `shardwell run --profile DIR` records: a few, after the first ones have warmed up."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from shardwell.monitor.recording import TimedTrace

FIRST, NUM_STEPS = 3, 2  # steps before the recording, and recorded steps


class ProfiledSteps:
    """Begins and ends a recording as an engine's forwards begin, and writes the timeline of this rank."""

    def __init__(self, engine: Any, record: Callable[[Any], AbstractContextManager[TimedTrace]], folder: str) -> None:
        self._record, self._folder, self._rank = record, folder, engine.global_rank
        self._open: contextlib.ExitStack | None = None
        self._trace: TimedTrace | None = None
        self._hook = engine.register_forward_pre_hook(self._forward_begins)
        self._ending = weakref.finalize(engine, self._end, at_exit=True)

    def _forward_begins(self, engine: Any, _args: Any) -> None:
        if self._open is None and engine.global_steps >= FIRST:
            self._open = contextlib.ExitStack()
            self._trace = self._open.enter_context(self._record(engine))
        elif self._open is not None and engine.global_steps >= FIRST + NUM_STEPS:
            self._ending.detach()
            self._end()

    def _end(self, *, at_exit: bool = False) -> None:
        self._hook.remove()
        if self._open is None or self._trace is None:
            if self._rank == 0:
                warnings.warn(
                    f"--profile: the script ended before step {FIRST + 1}, so that nothing was recorded", stacklevel=2
                )
            return
        self._open.close()
        assert self._trace.timeline is not None
        files = self._trace.timeline.save(self._folder, f"rank{self._rank}")
        if self._rank == 0:
            print(f"{self._trace.timeline}\nwritten: {', '.join(map(str, files))}", flush=True)
