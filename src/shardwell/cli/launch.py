"""Starting ranks through torch's elastic launcher, and telling which of them failed first.

Knows processes and their ends; nothing of engines, and prints nothing while ranks run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.text import Text

from shardwell.errors import ShardwellError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
    from torch.distributed.launcher.api import LaunchConfig

_RANK = Path(__file__).with_name("rank.py")
_GRACE = 5  # seconds that ranks get to end after Ctrl-C, before they are killed
_HEAD_START = 2.0  # seconds; torch notes ends in whole seconds, and a silent death shows as errors in its peers
_MOST_LINES = 20  # of a rank's stderr in an error


@dataclass(frozen=True)
class Place:
    """How many ranks run here, and how they meet ranks on other nodes."""

    ranks_here: int
    num_nodes: int = 1
    node_rank: int = 0
    master_addr: str = ""
    master_port: int = 29500


@dataclass(frozen=True)
class End:
    """How one rank failed."""

    rank: int
    exit_code: int  # negative: the signal that ended it
    message: str  # the exception; empty if the rank left none
    details: str  # its traceback, or the end of its stderr
    when: float

    @property
    def was_ended(self) -> bool:
        """By the launcher, after another rank failed."""
        return self.exit_code == -signal.SIGTERM and not self.message

    @property
    def cause(self) -> str:
        if self.message:
            return self.message
        if self.exit_code == -signal.SIGILL:
            return "ended by SIGILL: torch used an instruction that this CPU lacks; shardwell doctor may know which"
        if self.exit_code < 0:
            return f"ended by {_signal_name(-self.exit_code)}"
        return f"ended with exit code {self.exit_code}"


class RanksFailedError(ShardwellError):
    """One or more ranks failed; `ends` has the first of them first."""

    def __init__(self, ends: Sequence[End]) -> None:
        super().__init__(f"rank {ends[0].rank} failed first: {ends[0].cause}")
        self.ends = tuple(ends)

    @property
    def exit_code(self) -> int:
        """Of the first failing rank, as a shell would say it."""
        code = self.ends[0].exit_code
        return code if code > 0 else 128 - code

    def show(self) -> None:
        """Print the first failing rank's error on top, then what else went wrong, to stderr."""
        console = Console(stderr=True)
        console.print(Text.assemble(("error: ", "bold red"), (str(self), "red")), soft_wrap=True)
        if self.ends[0].details:
            console.print(Text(self.ends[0].details.rstrip(), "dim"), soft_wrap=True)
        for end in self.ends[1:]:
            if not end.was_ended:
                line = f"then rank {end.rank}: {end.cause.splitlines()[0]}"
                console.print(Text(line, "dim"), soft_wrap=True)


class RunInterruptedError(ShardwellError):
    """Ctrl-C, or another signal, ended the run; no rank is left."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {_signal_name(number)}; all ranks have ended")
        self.exit_code = 128 + number


def launch(command: Sequence[str], place: Place, *, quiet_ranks: bool = False) -> None:
    """Run `command` (`script args...` or `-m module args...`) on every rank; returns when all have succeeded.

    When a rank fails the others are ended and `RanksFailedError` is raised; on a signal, `RunInterruptedError`.
    `quiet_ranks` keeps what ranks print off the terminal.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _num_cores() // place.ranks_here)))
    with tempfile.TemporaryDirectory(prefix="shardwell-") as logs, _no_leftovers(), _quiet_agent():
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import elastic_launch

        config = _launch_config(place, logs, quiet_ranks)
        try:
            elastic_launch(config, sys.executable)(str(_RANK), *command)
        except ChildFailedError as error:
            raise RanksFailedError(in_order([_end(r, f, logs) for r, f in error.failures.items()])) from None
        except SignalException as error:
            raise RunInterruptedError(error.sigval) from None
        except KeyboardInterrupt:
            raise RunInterruptedError(signal.SIGINT) from None


def in_order(ends: Sequence[End]) -> list[End]:
    """The rank to blame first: what the launcher ended, and errors that only tell of another rank, come last."""

    def blame(end: End) -> tuple[bool, bool, float]:
        reports_a_peer = end.message.startswith("PeerError")
        return end.was_ended, reports_a_peer, end.when - (0.0 if end.message else _HEAD_START)

    return sorted(ends, key=blame)


def _launch_config(place: Place, logs: str, quiet_ranks: bool) -> LaunchConfig:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig

    alone = place.num_nodes == 1
    return LaunchConfig(
        min_nodes=place.num_nodes,
        max_nodes=place.num_nodes,
        nproc_per_node=place.ranks_here,
        run_id=uuid.uuid4().hex if alone else "shardwell",
        rdzv_backend="c10d" if alone else "static",
        rdzv_endpoint="localhost:0" if alone else f"{place.master_addr}:{place.master_port}",
        rdzv_configs={} if alone else {"rank": place.node_rank},
        local_addr="127.0.0.1" if alone else None,
        max_restarts=0,
        shutdown_timeout=_GRACE,
        logs_specs=DefaultLogsSpecs(log_dir=logs, redirects=Std.ALL if quiet_ranks else Std.NONE),
    )


def _end(rank: int, failure: ProcessFailure, logs: str) -> End:
    message: Any = failure.error_file_data.get("message") if Path(failure.error_file).is_file() else None
    if isinstance(message, dict):
        extra = message["extraInfo"]
        when = float(extra.get("seconds", failure.timestamp))
        return End(rank, failure.exitcode, message["message"], extra["py_callstack"], when)
    words = _last_words(logs, failure.local_rank)
    return End(rank, failure.exitcode, "", words, float(failure.timestamp))


def _last_words(logs: str, local_rank: int) -> str:
    """The end of what a rank wrote to stderr, where that was kept."""
    for path in Path(logs).glob(f"*/attempt_0/{local_rank}/stderr.log"):
        return "\n".join(path.read_text(errors="replace").splitlines()[-_MOST_LINES:])
    return ""


@contextlib.contextmanager
def _no_leftovers() -> Iterator[None]:
    """Whatever happens, also a second Ctrl-C while ranks are being ended: no rank outlives its launcher."""
    try:
        yield
    finally:
        import psutil  # type: ignore[import-untyped, unused-ignore]

        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()


@contextlib.contextmanager
def _quiet_agent() -> Iterator[None]:
    """torch's agent logs every end of a rank; here the first failing rank's error says it once."""
    if os.environ.get("SHARDWELL_DEBUG") == "1":
        yield
        return
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@contextlib.contextmanager
def ending_as_the_ranks_do() -> Iterator[None]:
    """Around a launch: show why the ranks ended, and end the command with their exit code."""
    try:
        yield
    except RanksFailedError as failure:
        failure.show()
        raise typer.Exit(failure.exit_code) from None
    except RunInterruptedError as interrupted:
        Console(stderr=True).print(f"[yellow]{interrupted}[/yellow]")
        raise typer.Exit(interrupted.exit_code) from None
