"""Heartbeats: a thread writes to the store what its rank is doing, for the other ranks.

So a rank that waits for another can tell whether that rank is slow, which is no error, went on to something else, or is
gone. One thread serves all engines of a process. Once a second it writes a line for each engine, and checks whether the
processes of a few other ranks of its machine still run: a process that was killed leaves no message, so its neighbours
leave one for it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwell.parallel.device_watch import DeviceWatch
from shardwell.parallel.thread_location import main_thread_state, thread_location
from shardwell.parallel.waits import Wait

if TYPE_CHECKING:
    from shardwell.parallel.agreement import Agreement

INTERVAL = 1.0  # seconds between two heartbeats
_SILENT = 10.0  # seconds without a heartbeat that are told of
_LONGEST_END = 20.0  # seconds: on a busy machine the thread may get no time for a while
_RANKS_PER_INTERVAL = 256  # with more ranks, heartbeats are less frequent: one process holds the store


@dataclass(frozen=True)
class Heartbeat:
    """The last state that a rank wrote about itself."""

    moves: int  # collectives that it has announced
    doing: str
    seconds: float  # for which it has been doing that
    elsewhere: tuple[int, int] | None = None  # another engine in which it waits for others, and its moves there
    silence: float = 0.0  # seconds for which this has been its last heartbeat
    is_stopped: bool = False  # its process is stopped: by a signal, or in a debugger
    beat: int = 0  # the number of this heartbeat
    wait: Wait | None = None  # in any engine of its process
    positions: Mapping[str, float] = field(default_factory=dict)  # how far it has come in what others may wait for

    @property
    def is_stalled(self) -> bool:
        """Return whether the rank's process does not run, so that what it has announced may not come."""
        return self.is_stopped or self.silence >= _SILENT

    def __str__(self) -> str:
        if self.is_stopped:
            return f"stopped, by SIGSTOP or a debugger (it was {self.doing}); `kill -CONT` lets its process go on"
        words = f"{self.doing} for {self.seconds + self.silence:.0f} s"
        return words if self.silence < _SILENT else f"{words}, and sent no heartbeat for {self.silence:.0f} s"


class Heartbeats:
    """The heartbeats of one engine: those that this rank writes, and those of the other ranks."""

    def __init__(self, agreement: Agreement, number: int, rank: int, size: int, store: Any, home: Any) -> None:
        """Start the heartbeats of an engine.

        `home` is the store of the process group in which `number` identifies the engine; another process group counts
        anew.
        """
        self.number, self._rank, self._size, self.home = number, rank, size, home
        self._agreement = weakref.ref(agreement)
        self._thread_state = main_thread_state()
        self._store = self._shared = store
        with contextlib.suppress(AttributeError, RuntimeError):  # not every store can be cloned
            self._store = store.clone()  # with a connection of its own: other threads may block while they hold theirs
        self._watch = DeviceWatch(self._store) if agreement.failures.runs_ahead else None
        self._seen = (-1, False, time.monotonic())  # tokens, whether it waited, and since when
        self._processes: dict[int, RankProcess] = {}  # of other ranks on this machine
        self._asked: set[int] = {(rank + 1) % size, (rank - 1) % size, 0} - {rank}  # their processes are not known yet
        self._next = 0.0
        self._num_beats = 0
        self._seen_of: dict[int, tuple[bytes, float]] = {}  # the last heartbeat of each rank, and when it was new
        _heart.take(self)

    # --------------------------------------------------------------------------------------------- of this rank

    def beat(self) -> bool:
        """Write what this rank does, if it is time; return false if the engine or the store has ended."""
        agreement = self._agreement()
        if agreement is None or agreement.failures.is_over or agreement.store is not self._shared:
            return False  # the engine has ended, or begun again after a failure
        now = time.monotonic()
        if now < self._next:
            return self._learn_early()
        self._next = now + INTERVAL * max(1.0, self._size / _RANKS_PER_INTERVAL)
        seen = agreement.tokens.num_announced, agreement.is_waiting
        if seen != self._seen[:2]:
            self._seen = (*seen, now)
        seconds = now - self._seen[2]
        words = {"moves": agreement.tokens.num_announced, "doing": self._doing(agreement, seconds), "seconds": seconds}
        other = _heart.waits_elsewhere(self)
        words["elsewhere"] = None if other is None else [other.number, other.num_moves]
        self._num_beats += 1
        words |= {"beat": self._num_beats, **_heart.waits_of(self)}
        try:
            self._store.set(f"pulse/{self._rank}", json.dumps({**words, "process": RankProcess.own().words}))
            self._learn_processes()
            for rank in self.lost():
                agreement.failures.report_lost(self._store, rank)
            if self._watch is not None:
                self._watch.look(agreement)
        except RuntimeError:  # the store has ended, which the code that needs it reports; or a rank has failed
            return False
        return True

    @property
    def num_moves(self) -> int:
        """Return the number of tokens that the engine has announced."""
        agreement = self._agreement()
        return 0 if agreement is None else agreement.tokens.num_announced

    @property
    def is_waiting(self) -> bool:
        """Return whether the engine waits for other ranks."""
        agreement = self._agreement()
        return agreement is not None and agreement.is_waiting

    def wait(self, now: float) -> list[Any] | None:
        """Return what the engine waits for as JSON values, if it has waited for as long as a heartbeat takes."""
        agreement = self._agreement()
        wait = None if agreement is None else agreement.waits.current
        return None if wait is None or now - wait.begin < INTERVAL else wait.written(self.number)

    def positions(self) -> dict[str, float]:
        """Return how far the engine has come in what others may wait for."""
        agreement = self._agreement()
        return {} if agreement is None else {f"{self.number} {key}": at for key, at in agreement.positions().items()}

    def _doing(self, agreement: Agreement, seconds: float) -> str:
        if agreement.is_waiting:
            return f"waiting in '{agreement.tokens.last}'"
        return thread_location(self._thread_state) if seconds >= INTERVAL else "busy"

    def _learn_early(self) -> bool:
        """Look for processes that are not known yet, between heartbeats; return false if the store has ended."""
        try:
            self._learn_processes()
        except RuntimeError:
            return False
        return True

    @property
    def is_new(self) -> bool:
        """Return whether processes of other ranks are still looked for: a rank may end within its first second."""
        return bool(self._asked) and self._size <= _RANKS_PER_INTERVAL

    def _learn_processes(self) -> None:
        for rank in list(self._asked):
            if self._store.check([key := f"pulse/{rank}"]):
                process = RankProcess(*json.loads(self._store.get(key))["process"])
                if process.is_near:
                    self._processes[rank] = process
                self._asked.discard(rank)

    # -------------------------------------------------------------------------------------------- of other ranks

    def lost(self) -> list[int]:
        """Return the ranks of this machine whose processes are known to have ended. It needs no store."""
        return [rank for rank, process in list(self._processes.items()) if process.has_ended]

    def of(self, rank: int) -> Heartbeat | None:
        """Return the last heartbeat of another rank; None if it never wrote one."""
        if not self._store.check([f"pulse/{rank}"]):
            return None
        text, now = self._store.get(f"pulse/{rank}"), time.monotonic()
        if self._seen_of.get(rank, (b"", 0.0))[0] != text:
            self._seen_of[rank] = text, now
        said = json.loads(text)
        elsewhere = tuple(said["elsewhere"]) if said["elsewhere"] else None
        silence, process = now - self._seen_of[rank][1], RankProcess(*said["process"])
        is_stopped = process.is_near and process.is_stopped
        wait = Wait.read(said["wait"]) if said.get("wait") else None
        words = said["moves"], said["doing"], said["seconds"], elsewhere, silence, is_stopped
        return Heartbeat(*words, said.get("beat", 0), wait, said.get("positions", {}))

    def crosses(self, sign: Heartbeat) -> bool:
        """Return whether a rank waits in another engine for what this rank, which waits here, has not begun there."""
        if sign.elsewhere is None:
            return False
        number, moves = sign.elsewhere
        return (own := _heart.moves_of(number, self.home)) is not None and own < moves


@dataclass(frozen=True)
class RankProcess:
    """A process, identified so that a later process with the same pid is not taken for it."""

    space: str  # the boot of the machine, and the pid namespace
    pid: int
    started: int  # in clock ticks of that machine

    @staticmethod
    def own() -> RankProcess:
        """Return the identity of this process."""
        global _own
        if _own is None or _own.pid != os.getpid():
            _own = RankProcess(_space(), os.getpid(), _state_of(os.getpid())[1])
        return _own

    @property
    def words(self) -> list[Any]:
        """Return the fields as JSON values."""
        return [self.space, self.pid, self.started]

    @property
    def is_near(self) -> bool:
        """Return whether this process can look the other one up: same boot, same pid namespace."""
        return bool(self.space) and self.space == RankProcess.own().space

    @property
    def has_ended(self) -> bool:
        """Return whether the process has ended."""
        letter, started = _state_of(self.pid)
        return letter in ("", "Z", "X") or started != self.started

    @property
    def is_stopped(self) -> bool:
        """Return whether the process exists and does not run until it gets a signal."""
        letter, started = _state_of(self.pid)
        return letter in ("T", "t") and started == self.started


_own: RankProcess | None = None


def _space() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""  # not Linux: other processes cannot be looked up


def _state_of(pid: int) -> tuple[str, int]:
    """Return the state letter of a process and its start time; an empty letter if there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], int(fields[19])
    except (OSError, IndexError, ValueError):
        return "", 0


class _HeartbeatThread:
    """The thread that writes the heartbeats of all engines of this process."""

    def __init__(self) -> None:
        self._pulses: list[Heartbeats] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._pid = 0

    def take(self, pulse: Heartbeats) -> None:
        """Write the heartbeats of one more engine, and start the thread if it does not run in this process."""
        with self._lock:
            self._pulses = [other for other in self._pulses if self._pid == os.getpid()] + [pulse]
            if self._thread is None or self._pid != os.getpid() or not self._thread.is_alive():
                self._pid = os.getpid()
                self._stop.clear()
                self._thread = threading.Thread(target=self._run, name="shardwell's pulse", daemon=True)
                self._thread.start()
                atexit.register(self._end)  # a thread inside torch when Python ends would end the process by a signal

    def waits_elsewhere(self, here: Heartbeats) -> Heartbeats | None:
        """Return another engine in which this process waits for other ranks; None if there is none."""
        others = (pulse for pulse in self._pulses if pulse is not here and pulse.home is here.home)
        return next((pulse for pulse in others if pulse.is_waiting), None)

    def waits_of(self, here: Heartbeats) -> dict[str, Any]:
        """Return what this process waits for, in whichever engine, and how far it has come in all of them."""
        now, pulses = time.monotonic(), [pulse for pulse in self._pulses if pulse.home is here.home]
        wait = next((found for pulse in pulses if (found := pulse.wait(now)) is not None), None)
        return {"wait": wait, "positions": {key: at for pulse in pulses for key, at in pulse.positions().items()}}

    def moves_of(self, number: int, home: Any) -> int | None:
        """Return the number of tokens that an engine of this process has announced; None if there is no such engine."""
        found = (pulse for pulse in self._pulses if pulse.number == number and pulse.home is home)
        return next((pulse.num_moves for pulse in found), None)

    def _run(self) -> None:
        pause = 0.0
        while not self._stop.wait(pause):
            pause = INTERVAL / 20 if any(pulse.is_new for pulse in self._pulses) else INTERVAL / 2
            for pulse in list(self._pulses):
                if not pulse.beat():
                    with self._lock:
                        self._pulses = [other for other in self._pulses if other is not pulse]

    def _end(self) -> None:
        self._stop.set()
        if self._thread is not None and self._pid == os.getpid():
            self._thread.join(_LONGEST_END)


_heart = _HeartbeatThread()
