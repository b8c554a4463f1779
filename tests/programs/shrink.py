"""A failing program made small: instructions are left out, and the setting is simplified, while the failure stays."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.programs.instructions import Backward, Forward
from tests.programs.program import Program
from tests.programs.trial import Outcome

MOST_TRIALS, MOST_SECONDS = 120, 40.0  # a trial that crashes takes seconds
SIMPLER = {
    "engines": 1, "groups": 1, "accumulation": 1, "clip": 0.0, "dtype": "float64", "optimizer": "SGD",
    "offload": "none", "loop": "engine",
}  # fmt: skip


def shrunk(program: Program, outcome: Outcome, attempt: Callable[[Program], Outcome]) -> tuple[Program, Outcome]:
    """The smallest that was found with a failure of the same kind."""
    num_trials, end = 0, time.monotonic() + MOST_SECONDS
    kind = _kind(outcome)
    changed = True
    while changed:
        changed = False
        for candidate in _candidates(program):
            num_trials += 1
            if num_trials > MOST_TRIALS or time.monotonic() > end:
                return program, outcome
            found = attempt(candidate)
            if _kind(found) == kind:
                program, outcome, changed = candidate, found, True
                break
    return program, outcome


def _kind(outcome: Outcome) -> tuple[str, str]:
    return outcome.verdict, outcome.signature


def _candidates(program: Program) -> Iterator[Program]:
    """Large cuts first."""
    instructions = program.instructions
    size = len(instructions) // 2
    while size:
        for start in range(len(instructions) - size, -1, -size):
            yield replace(program, instructions=instructions[:start] + instructions[start + size :])
        size //= 2
    for key, value in SIMPLER.items():
        if getattr(program.setting, key) != value:
            setting = replace(program.setting, **{key: value})
            left = instructions
            if key == "engines":
                left = tuple(one for one in instructions if "d" not in getattr(one, "who", "g"))
            yield Program(setting, left)
    for number, one in enumerate(instructions):
        simple = one
        if isinstance(one, Forward) and one.way != "tensor":
            simple = replace(one, way="tensor")
        elif isinstance(one, Backward) and (one.retain or one.loss != "first"):
            simple = replace(one, retain=False, loss="first")
        if simple != one:
            yield replace(program, instructions=(*instructions[:number], simple, *instructions[number + 1 :]))
