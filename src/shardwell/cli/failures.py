"""Failures of ranks: which rank failed first and why, whether a restart may help, and the report."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.text import Text

from shardwell.errors import ShardwellError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_HEAD_START = 2.0  # seconds; torch records ends in full seconds, and a killed rank causes errors in its peers
_MOST_LINES = 20  # of a rank's stderr in an error
_NOT_RETRYABLE = {"ConfigError", "SyntaxError", "ImportError"}  # by a restart: the same script would raise them again


@dataclass(frozen=True)
class RankFailure:
    """The failure of one rank."""

    rank: int
    exit_code: int  # negative: the signal that ended it
    message: str  # of the exception; empty if the rank wrote none
    details: str  # its traceback, or the end of its stderr
    when: float
    kinds: tuple[str, ...] = ()  # the names of the exception's classes
    local_rank: int = 0

    @property
    def was_ended(self) -> bool:
        """Whether the launcher ended the rank, after another rank failed."""
        return self.exit_code == -signal.SIGTERM and not self.message

    @property
    def reports_a_peer(self) -> bool:
        return self.message.startswith("PeerError")

    @property
    def cause(self) -> str:
        if self.message:
            return self.message
        if self.exit_code == -signal.SIGILL:
            return "ended by SIGILL: torch used an instruction that this CPU lacks; shardwell doctor may know which"
        if self.exit_code < 0:
            return f"ended by {_signal_name(-self.exit_code)}"
        return f"ended with exit code {self.exit_code}"

    @property
    def first_line(self) -> str:
        return next(iter(self.cause.splitlines()), "")


@dataclass(frozen=True)
class Restarts:
    """The number of restarts that are allowed, and the smallest number of ranks."""

    limit: int = 0
    min_ranks: int | None = None  # None: as many as before
    min_uptime: float = 0.0  # seconds; an end before that is an early failure


NEVER = Restarts()


class RanksFailedError(ShardwellError):
    """Raised if ranks failed; `ends` lists the failures, the first one first."""

    def __init__(self, ends: Sequence[RankFailure]) -> None:
        super().__init__(f"rank {ends[0].rank} failed first: {ends[0].cause}")
        self.ends = tuple(ends)

    @property
    def exit_code(self) -> int:
        """The exit code of the first failing rank, as a shell reports it.

        The launcher may end a rank that has written its error down and not ended yet, because another one failed in
        the same moment; that rank would have ended with code 1.
        """
        first = self.ends[0]
        if first.message and first.exit_code == -signal.SIGTERM:
            return 1
        return first.exit_code if first.exit_code > 0 else 128 - first.exit_code

    def show(self, *, runs_own_code: bool = False) -> None:
        """Print the first failing rank's error to stderr, then the other failures.

        Where ranks run shardwell's own code, an error of shardwell's needs no traceback: its message says what to do.
        """
        console = Console(stderr=True)
        console.print(Text.assemble(("error: ", "bold red"), (str(self), "red")), soft_wrap=True)
        is_clear = runs_own_code and "ShardwellError" in self.ends[0].kinds and os.environ.get("SHARDWELL_DEBUG") != "1"
        if self.ends[0].details and not is_clear:
            console.print(Text(self.ends[0].details.rstrip(), "dim"), soft_wrap=True)
        for end in self.ends[1:]:
            if not end.was_ended:
                console.print(Text(f"then rank {end.rank}: {end.first_line}", "dim"), soft_wrap=True)


class RunInterruptedError(ShardwellError):
    """Raised if Ctrl-C, or another signal, ended the run; no rank runs any more."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {_signal_name(number)}; all ranks have ended")
        self.exit_code = 128 + number


def in_order(ends: Sequence[RankFailure]) -> list[RankFailure]:
    """Return failures, causes first: ranks that the launcher ended, and errors about peers, come last."""

    def blame(end: RankFailure) -> tuple[bool, bool, float]:
        return end.was_ended, end.reports_a_peer, end.when - (0.0 if end.message else _HEAD_START)

    return sorted(ends, key=blame)


def is_retryable(ends: Sequence[RankFailure]) -> bool:
    """Tell whether a restart may help: not if every rank that failed by itself raised an error that will recur."""
    own = [end for end in ends if not end.was_ended and not end.reports_a_peer]
    return not own or any(_NOT_RETRYABLE.isdisjoint(end.kinds) for end in own)


def failures_of(failures: Mapping[int, ProcessFailure], logs: str) -> list[RankFailure]:
    """Return the failures that torch's agent knows, the cause first."""
    return in_order([_end(rank, failure, logs) for rank, failure in failures.items()])


def _end(rank: int, failure: ProcessFailure, logs: str) -> RankFailure:
    message: Any = failure.error_file_data.get("message") if Path(failure.error_file).is_file() else None
    code, local_rank = failure.exitcode, failure.local_rank
    if isinstance(message, dict):
        extra = message["extraInfo"]
        when, kinds = float(extra.get("seconds", failure.timestamp)), tuple(extra.get("kinds", ()))
        return RankFailure(rank, code, message["message"], extra["py_callstack"], when, kinds, local_rank)
    words = _stderr_tail(logs, local_rank)
    return RankFailure(rank, code, "", words, float(failure.timestamp), local_rank=local_rank)


def _stderr_tail(logs: str, local_rank: int) -> str:
    """Return the end of a rank's stderr since its last start, if it was recorded."""
    found = sorted(Path(logs).glob(f"*/attempt_*/{local_rank}/stderr.log"), key=lambda path: path.stat().st_mtime_ns)
    return "\n".join(found[-1].read_text(errors="replace").splitlines()[-_MOST_LINES:]) if found else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@contextlib.contextmanager
def exit_like_ranks(*, runs_own_code: bool = False, then: Callable[[], str] = str) -> Iterator[None]:
    """Run a launch in the block; if ranks fail, print why, and end the command with their exit code.

    What `then` returns is said after a run that was interrupted.
    """
    try:
        yield
    except RanksFailedError as failure:
        failure.show(runs_own_code=runs_own_code)
        raise typer.Exit(failure.exit_code) from None
    except RunInterruptedError as interrupted:
        Console(stderr=True).print(Text(f"{interrupted}{then()}", "yellow"), soft_wrap=True)
        raise typer.Exit(interrupted.exit_code) from None
