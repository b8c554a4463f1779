"""One program in both worlds, and what came of it."""

from __future__ import annotations

import json
import logging
import re
import traceback
import warnings
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import shardwell
from shardwell.errors import DivergenceError, NonFiniteError, PeerError, ShardwellError
from tests.programs.program import Program
from tests.programs.worlds import Plain, Sharded, World

ROUGH = 1e-3  # a tolerance from which on an element's error is one of all elements that it was made of
PATIENCE = 90.0  # seconds that a rank waits for the others to end a program
WORST_FIRST = ["failed", "warned", "refused", "agreed"]
# Errors of shardwell that are no refusal: nothing in a program is not finite, and ranks do the same thing.
NO_ANSWER = (DivergenceError, NonFiniteError)
ECHO = re.compile(r"(?:^|failed first: )(\w+) in \w+: ")  # an error, told again at the next use


@dataclass(frozen=True)
class Outcome:
    """`agreed`; `refused`: an error of shardwell's; `warned`: other numbers, and it said so; or `failed`."""

    verdict: str
    what: str = ""  # refused: the sentence; failed: silent, crash, raw error
    at: str = ""  # the instruction
    detail: str = ""

    @property
    def signature(self) -> str:
        """Equal for outcomes of one cause, as far as one can tell."""
        words = re.sub(r"0x[0-9a-f]+|\d+(\.\d+)?(e-?\d+)?", "#", self.what)
        return f"{self.verdict}: {words}"


@dataclass(frozen=True)
class End:
    """How a program ended in one world."""

    world: World
    number: int  # of instructions that were done
    error: Exception | None


def perform(world: World, program: Program) -> End:
    for number, instruction in enumerate(program.instructions):
        try:
            instruction.perform(world)
        except Exception as error:
            return End(world, number, error)
    return End(world, len(program.instructions), None)


class Lines(logging.Handler):
    """What is said through the log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def attempt(program: Program, folder: Path) -> Outcome:
    """On this rank."""
    own = dist.get_rank()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = perform(Plain(program.setting, own), program)
    lines = Lines()
    logging.getLogger("shardwell").addHandler(lines)
    world: Sharded | None = None
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            world = Sharded(program.setting, folder)
            found = perform(world, program)
    except Exception as error:
        return _of_error(error, "initialize")
    finally:
        logging.getLogger("shardwell").removeHandler(lines)
        if world is not None:
            world.close()
    said = [str(one.message) for one in caught if _is_ours(one)] + lines.said
    return _judge(program, expected, found, said)


def _is_ours(warning: warnings.WarningMessage) -> bool:
    """A sentence of shardwell's about the program, not about the machine."""
    text = str(warning.message)
    by = f"{warning.filename} {warning.category.__module__}"
    return "shardwell" in text or ("shardwell" in by and "files here are kept in memory" not in text)


def _judge(program: Program, expected: End, found: End, said: list[str]) -> Outcome:
    difference = _difference(expected.world, found.world)
    if difference is None and found.error is not None:
        at = str(program.instructions[found.number])
        if expected.error is not None and expected.number == found.number:
            return Outcome("agreed", f"both raise {type(expected.error).__name__}")
        return _of_error(found.error, at)
    if difference is None and expected.error is not None and len(found.world.seen) > len(expected.world.seen):
        return Outcome("agreed", f"only plain PyTorch raises {type(expected.error).__name__}")
    if difference is None:
        return Outcome("agreed")
    if not {"grad", "safe_grad"} & {one.word for one in program.instructions}:  # that sentence is about nothing else
        said = [sentence for sentence in said if "got no gradient in a backward" not in sentence]
    if said:
        return Outcome("warned", said[0], detail=difference)
    if isinstance(found.error, ShardwellError):
        difference += f"; later {type(found.error).__name__}: {found.error}"
    return Outcome("failed", "silent", detail=difference)


def is_refusal(error: Exception) -> bool:
    """Whether shardwell says in words of its own that it does not do this. A user's own error may be repeated."""
    if not isinstance(error, ShardwellError) or isinstance(error, NO_ANSWER):
        return "shardwell.zero.GatheredParameters" in str(error)  # torch may put it into an error of its own
    return is_echo_of_refusal(str(error))


def is_echo_of_refusal(sentence: str) -> bool:
    """Whether what is told of an earlier error is not of a raw one; LookupErrors are raised by programs."""
    echo = ECHO.search(sentence)
    return echo is None or echo[1] == LookupError.__name__ or hasattr(shardwell.errors, echo[1])


def _of_error(error: Exception, at: str) -> Outcome:
    text = f"{type(error).__name__}: {error}"
    if is_refusal(error):
        return Outcome("refused", text, at)
    where = "".join(traceback.format_exception(error)[-4:])
    return Outcome("failed", f"error {text.splitlines()[0][:160]}", at, where)


def _difference(expected: World, found: World) -> str | None:
    for (what, value), (_, other) in zip(expected.seen, found.seen, strict=False):
        tolerance = expected.setting.tolerance
        if what == "evaluation" and tolerance > ROUGH:
            tolerance *= 2  # a loss is a square of outputs, of which each is off by that much
        if not _close(value, other, tolerance):
            return f"{what}: expected {_short(value)}, found {_short(other)}"
    return None


def _close(value: Any, other: Any, tolerance: float) -> bool:
    if value is None or other is None:
        return value is other
    value, other = torch.as_tensor(value, dtype=torch.float64), torch.as_tensor(other, dtype=torch.float64)
    if value.shape != other.shape:
        return False
    size = value.abs() if tolerance < ROUGH or not value.numel() else value.abs().max()
    return bool(((value - other).abs() <= tolerance * (1 + size)).all())


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return str([round(number, 6) for number in value.flatten().tolist()[:6]])
    return str(value)


# ------------------------------------------------------------------------------------------- many, on several ranks


def merged(outcomes: list[Outcome]) -> Outcome:
    """Of all ranks: the worst. A rank that heard of a peer's error has none of its own."""
    heard = [one for one in outcomes if one.what.startswith(PeerError.__name__)]
    own = [one for one in outcomes if one not in heard]
    if not own:
        is_answer = is_echo_of_refusal(heard[0].what)
        return replace(heard[0], verdict="refused" if is_answer else "failed", detail=heard[0].what)
    worst = min(own, key=lambda one: WORST_FIRST.index(one.verdict))
    if worst.what == "silent":  # unless another rank, which holds what was changed, has said so
        return next((one for one in own if one.verdict == "warned"), worst)
    return worst


def attempt_all(texts: list[str], folder: str, progress: str) -> list[dict[str, str]]:
    """The job of a rank: programs in turn, until one fails; the next job starts clean.

    What came of each is written down at once: nobody can be asked after a crash.
    """
    store = dist.distributed_c10d._get_default_store()
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    done: list[dict[str, str]] = []
    for number, text in enumerate(texts):
        program = Program.read(text)
        outcome = attempt(program, Path(folder) / str(number))
        store.set(f"program/{number}/{rank}", json.dumps(vars(outcome)))
        keys = [f"program/{number}/{other}" for other in range(num_ranks)]
        store.wait(keys, timedelta(seconds=PATIENCE))
        outcome = merged([Outcome(**json.loads(store.get(key))) for key in keys])
        done.append(vars(outcome))
        with Path(f"{progress}.{rank}").open("a") as file:
            file.write(json.dumps(vars(outcome)) + "\n")
        if outcome.verdict == "failed":
            break
    return done
