"""Agreement of the ranks on the order of collectives, so that a divergence is an error with names and not a hang.

Each collective has a token, which is announced before the collective is issued. All ranks keep the same table: *after
these last tokens comes that token*. While the announced token is the one in the table, the collective is issued
unchecked, at the cost of a dictionary look-up.

- A position that is not in the table yet is decided through the store by the first rank to arrive: a rank that arrives
  with another token raises before it issues anything.
- A rank about to deviate from the table waits until every rank has deviated in the same way. Ranks that follow the
  table will never deviate: the waiting rank raises once it sees that they went on. Ranks that have not arrived yet may
  be slow, which is no error: the waiting rank logs which ranks it waits for and what they do (`heartbeat.py`), and
  goes on waiting.

A rank that raises leaves its reason in the store and cuts its links, which wakes the peers that wait for it. A rank
that ends leaves a message with the number of tokens it announced, for ranks that go on and then miss it.
"""

from __future__ import annotations

import contextlib
import json
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.utils.checkpoint import _StopRecomputationError

from shardwell.errors import DivergenceError, NonFiniteError, PeerError, ShardwellError
from shardwell.parallel.heartbeat import Heartbeat, Heartbeats
from shardwell.parallel.mesh import RankGroup, timeout
from shardwell.parallel.rank_store import RankStore
from shardwell.parallel.signed_store import signed_where_secret
from shardwell.parallel.stragglers import PeerWait

_WINDOW = 4096  # tokens that define a position: longer than any step, so that no position in a step is ambiguous
_MOST_POSITIONS = 1 << 16
_PRIME = (1 << 61) - 1
_BASE = 1_000_003
_OLDEST = pow(_BASE, _WINDOW, _PRIME)
_FAILURE = "failure"
_ADVICE = (
    "Make all ranks run the same modules in the same order, or name the module that chooses between paths as one unit "
    "(zero_optimization.leaf_module)."
)
_NO_RETURN = (
    "All ranks stop where one fails, because the others wait for what it would bring: an error that is caught does not "
    "bring this engine back. Start again from the last checkpoint, and leave out what may fail (a bad batch, say) "
    "before the forward."
)
_END = "end"
_AFTER, _LEFT = "after", "left"  # what a rank leaves when it ends an engine that has failed
_TIME_LIMIT = 60.0  # seconds, until the configuration is read


class Agreement:
    """The table of expected tokens of one engine. With one rank, or simulated ranks, it does nothing."""

    def __init__(
        self, mesh: RankGroup, time_limit: float = _TIME_LIMIT, cut_links: Callable[[], None] = lambda: None
    ) -> None:
        """Open the table. `cut_links` breaks this rank's links, so that peers which wait for it wake up."""
        self._mesh = mesh
        self.rank = mesh.global_rank(mesh.rank)
        self.ranks = mesh.ranks or tuple(range(mesh.size))  # in the default process group
        self._active = mesh.size > 1 and mesh.backend != "fake"
        self.time_limit = time_limit
        self.cut_links = cut_links
        self.advice = _ADVICE  # what the user can do about a divergence
        self.probe: Callable[[], None] = lambda: None  # raises if a link to another rank is broken
        self.advise: Callable[[str, str], str] | None = None  # returns the advice for the tokens of two ranks
        self._store: Any = None
        self.open()

    def open(self) -> None:
        """Open an empty table; after a failure that all ranks had, a second one. All ranks must call it."""
        self._table: dict[int, str] = {}
        self._revisions: dict[int, int] = {}
        self._recent: deque[int] = deque()
        self._generation = 0  # of the table: incremented when a full table is cleared
        self._position = 0  # the position: a rolling hash over the last tokens
        self._num_meetings = 0
        self.num_moves = 0  # tokens so far, the same on all ranks at the same position
        self.last_token = ""
        self.is_waiting = False  # for other ranks
        self.is_over = False  # this rank takes part in no more collectives
        self._failure: tuple[type[ShardwellError], str] | None = None  # the error itself would keep its frames alive
        self._own_failure = ""  # where this rank itself failed
        if self._active:
            self._open_store()

    def _open_store(self) -> None:
        store = dist.distributed_c10d._get_default_store()
        # Tables are opened in the same order on all ranks: the store itself counts them for each rank.
        number = store.add(f"shardwell/books/{self.rank}", 1)
        prefix = f"shardwell/{number}"
        self._store = signed_where_secret(dist.distributed_c10d.PrefixStore(prefix, store), prefix, self.rank)
        self._board = RankStore(self._store, self._without_store)
        self._pulse = Heartbeats(self, number, self.rank, self.size, self._store, store)

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.ranks)

    @property
    def store(self) -> Any:
        """Return the store in which the ranks of this engine leave messages for each other; None with one rank."""
        return self._store

    def announce(self, token: str) -> None:
        """Announce the next token; raise before a mismatched collective.

        It returns if all ranks have announced the same token, or will.
        """
        if not self._active:
            return
        if self._failure is not None:
            kind, words = self._failure
            raise kind(words)
        expected = self._table.get(self._position)
        if expected is None:
            self._settle(token)
        elif expected != token:
            self._deviate(token, expected)
        self.num_moves += 1
        self.last_token = token
        code = zlib.crc32(token.encode()) + 1
        self._recent.append(code)
        position = (self._position * _BASE + code) % _PRIME
        if len(self._recent) > _WINDOW:
            position = (position - self._recent.popleft() * _OLDEST) % _PRIME
        self._position = position

    def _settle(self, token: str) -> None:
        """Decide a new position: the first rank that reaches it writes its token down, and others compare theirs."""
        self._check(self._board.first(f"new/{self._generation}/{self._position}", self._signed(token)), token)
        self._write(token)

    def _deviate(self, token: str, expected: str) -> None:
        """Wait until all ranks deviate from the expected token in the same way, and enter the new token."""
        revision = self._revisions.get(self._position, 0)
        key = f"turn/{self._generation}/{self._position}/{revision}"
        self._check(self._board.first(key, self._signed(token)), token)
        self._wait_for_all(key, token, expected)
        self._revisions[self._position] = revision + 1
        self._write(token)

    def meet(self, token: str, *, limited: bool = True) -> None:
        """Announce a token, and wait until all ranks have announced it: some ranks may never come.

        Without `limited` it waits until they do, or until one of them fails.
        """
        self.announce(token)
        if self._active:
            self._num_meetings += 1
            self._wait_for_all(f"meeting/{self._num_meetings}", token, limited=limited)

    def _wait_for_all(self, key: str, token: str, expected: str = "", *, limited: bool = True) -> None:
        """Return when all ranks have arrived; raise an error that names a rank if that rank will not arrive.

        `expected` is the token in the table, if that is another one.
        """
        self._board.set(f"{key}/{self.rank}", "")
        arrived = self._board.add(f"{key}/count", 1)
        wait = PeerWait(self, key, token, expected, timeout() if limited else float("inf"))
        pause = 1e-4
        before, self.is_waiting = self.is_waiting, True
        try:
            while arrived < self.size:
                self.check_failures()
                self.check_exits(self.num_moves + bool(expected))  # a deviation is not counted yet
                wait.look()
                time.sleep(pause)
                pause = min(pause * 2, 0.05)
                arrived = self._board.add(f"{key}/count", 0)
        finally:
            self.is_waiting = before

    def missing(self, key: str) -> list[int]:
        """Return the ranks that have not arrived where this rank waits."""
        return [rank for rank in self.ranks if not self._board.has(f"{key}/{rank}")]

    def sign_of(self, rank: int) -> Heartbeat | None:
        """Return the last heartbeat of another rank; None if it sent none."""
        return self._pulse.of(rank)

    def is_left_by(self, sign: Heartbeat) -> bool:
        """Return whether a rank has announced more than this rank, so that it will not come here."""
        return sign.moves > self.num_moves

    def is_crossed_by(self, sign: Heartbeat) -> bool:
        """Return whether a rank waits in another engine for a collective that this rank has not begun there."""
        return self._pulse.crosses(sign)

    def behind(self) -> dict[int, Heartbeat]:
        """Return the ranks that have not announced what this rank waits for, with their heartbeats.

        The result is empty if a lower rank has announced it, because then that rank reports.
        """
        if not self._active:
            return {}
        signs = {rank: self.sign_of(rank) for rank in self.ranks if rank != self.rank}
        known = {rank: sign for rank, sign in signs.items() if sign is not None}
        if any(rank < self.rank and sign.moves >= self.num_moves for rank, sign in known.items()):
            return {}
        return {rank: sign for rank, sign in known.items() if sign.moves < self.num_moves}

    def _check(self, written: str, token: str) -> None:
        rank, _, theirs = written.partition(" ")
        if theirs != token:
            raise self.fail(
                DivergenceError(
                    f"ranks diverge: rank {self.rank} is about to run '{token}' where rank {rank} runs "
                    f"'{theirs}'. {self.way_out(token, theirs)}"
                )
            )

    def way_out(self, ours: str, theirs: str) -> str:
        """Return the advice for a divergence between two tokens."""
        return self.advice if self.advise is None else self.advise(ours, theirs)

    def _signed(self, token: str) -> str:
        return f"{self.rank} {token}"

    def _write(self, token: str) -> None:
        if len(self._table) >= _MOST_POSITIONS:  # all ranks get here together, because their tables are equal
            self._table.clear()
            self._revisions.clear()
            self._generation += 1
        self._table[self._position] = token

    def begin_step(self) -> None:
        """Start a new step: earlier tokens are no longer part of the position."""
        self._recent.clear()
        self._position = 0

    # ------------------------------------------------------------------------------------------------ failures

    def fail(self, error: ShardwellError, where: str = "") -> ShardwellError:
        """Tell the peers why this rank stops, wake peers that wait for it, and refuse further tokens here.

        `where` is what this rank failed in, for `meet_after_failure`.
        """
        if self._active and self._failure is None:
            self._own_failure = where
            self._failure = type(error), f"{error} (on this rank, {self.rank}). {_NO_RETURN}"
            self._tell("divergence" if isinstance(error, DivergenceError) else "peer", str(error))
        return error

    @contextlib.contextmanager
    def failing_together(self, where: str, *, common: tuple[type[ShardwellError], ...] = ()) -> Iterator[None]:
        """Report an error raised inside to the other ranks before it propagates, so that they do not wait.

        All ranks raise the `common` errors themselves. The signal by which torch ends a recomputation is no error.
        """
        try:
            yield
        except _StopRecomputationError:
            raise
        except Exception as error:
            if not isinstance(error, (PeerError, NonFiniteError, *common)):
                self.fail(ShardwellError(f"{type(error).__name__} in {where}: {error}"), where)
            raise

    def post_message(self, words: str) -> None:
        """Tell peers that will wait for this rank why it does not come. The links stay open for their other users."""
        if self._active:
            with contextlib.suppress(Exception):  # the store may have ended with the process that holds it
                self._board.first(_FAILURE, f"peer {self.rank} {words}")

    def _tell(self, kind: str, words: str) -> None:
        with contextlib.suppress(Exception):  # the store may have ended with the process that holds it
            self._board.first(_FAILURE, f"{kind} {self.rank} {words}")
        self.is_over = True
        self.cut_links()

    def report_lost(self, store: Any, rank: int) -> None:
        """Leave a failure message for a rank whose process has ended without one. Any thread may call this."""
        if not store.check([f"{_END}/{rank}"]):
            store.compare_set(_FAILURE, "", f"lost {rank} {_gone(rank)}")

    def _without_store(self, error: Exception) -> ShardwellError:
        """Return the error for a store that has ended with the process that holds it."""
        if lost := self._pulse.lost():
            words = f"{_gone(lost[0])}, and the store that ranks leave words in has gone, too"
        else:
            words = (
                f"rank {self.rank}: a peer stopped answering. The store that ranks leave words in is gone: the "
                f"process that holds it (rank 0's, or the launcher's) has ended ({error})"
            )
        self._failure = PeerError, words
        self.is_over = True
        self.cut_links()
        return PeerError(words)

    def diagnose(self, error: Exception) -> ShardwellError:
        """Return the cause of a broken collective: the message of the first rank that failed, if it left one.

        If it left none, other ranks may have no link to the failed rank and wait for this one: they are told.
        """
        deadline, words = time.monotonic() + 2.0, f"rank {self.rank}: a peer stopped answering: {error}"
        while time.monotonic() < deadline:
            try:
                self.check_failures()
                if (ended := self._ended_ranks(self.num_moves)) is not None:
                    return self._missing(ended)
                if lost := self._pulse.lost():
                    return self._missing(_gone(lost[0]))
            except ShardwellError as known:
                return known
            time.sleep(0.05)
        self._tell("lost", words)
        self._failure = PeerError, words
        return PeerError(words)

    def end(self, words: str, *, is_exit: bool = False) -> None:
        """Leave a message that this rank takes part in nothing more, if it has not failed.

        The message says how the rank ended, and after how many tokens. `is_exit`: its process ends, too.
        """
        if self._active:
            with contextlib.suppress(Exception):  # the store may have ended with the process that holds it
                if self._failure is None:
                    self._board.set(f"{_END}/{self.rank}", f"{self.num_moves} {words}")
                elif is_exit:
                    self._board.first(f"{_AFTER}/{self.rank}", _LEFT)
            self.is_over = True

    def meet_after_failure(self, state: str, *, is_updating: bool) -> str | None:
        """Meet the other ranks, each of which must have raised the error, and open a new table; or say why not.

        `state` is what the ranks must have alike. A rank that raised nothing is elsewhere, and one that failed in a
        step, or `is_updating`, may have updated a part of its parameters: the result says so, and nothing is opened.
        """
        if not self._active:
            return None
        where = "step" if is_updating else self._own_failure
        mine = json.dumps([self._failure is not None, where, state])
        reason = self._first_words()
        try:
            self._board.first(f"{_AFTER}/{self.rank}", mine)
            others = self._await_states()
        except ShardwellError as error:
            return str(error)
        if (left := [rank for rank, words in others.items() if words == _LEFT]) != []:
            return f"the process of rank {left[0]} ended after the failure ({reason})"
        states = {rank: json.loads(words) for rank, words in others.items()}
        for rank, (raised, where, theirs) in states.items():
            if not raised:
                return f"rank {rank} did not have the failure of the others ({reason}): it is at another place"
            if where == "step":
                return f"rank {rank} failed in a step: its parameters may be updated in part ({reason})"
            if theirs != state:
                return f"rank {rank} is at {theirs} and rank {self.rank} at {state} after the failure ({reason})"
        self.open()
        return None

    def _first_words(self) -> str:
        """Return the first sentence of the first rank that failed, which is not to be taken for that error again."""
        with contextlib.suppress(ShardwellError):
            if self._board.has(_FAILURE):
                _, rank, words = self._board.get(_FAILURE).split(" ", 2)
                return f"rank {rank}: {words.split('. ')[0].rstrip('.')}"
        return "its words are gone"

    def _await_states(self) -> dict[int, str]:
        """Return what each rank has left after a failure; raise an error if one of them will leave nothing."""
        begin, pause = time.monotonic(), 1e-3
        while missing := [rank for rank in self.ranks if not self._board.has(f"{_AFTER}/{rank}")]:
            if lost := set(self._pulse.lost()) & set(missing):
                raise PeerError(_gone(min(lost)))
            if time.monotonic() - begin > self.time_limit:
                raise PeerError(f"rank {missing[0]} did not come within {self.time_limit:g} s after the failure")
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return {rank: self._board.get(f"{_AFTER}/{rank}") for rank in self.ranks}

    def check_exits(self, needed: int | None = None) -> None:
        """Raise if a rank has ended and will never take part in this rank's collective, which needs all ranks."""
        if self._active and (words := self._ended_ranks(needed or self.num_moves)) is not None:
            raise self._missing(words)

    def _missing(self, words: str) -> PeerError:
        self._tell("lost", words)
        self._failure = PeerError, words
        return PeerError(words)

    def _ended_ranks(self, needed: int) -> str | None:
        """Return the messages of ranks that ended before `needed` tokens, with advice; None if no rank has."""
        others = (rank for rank in self.ranks if rank != self.rank)
        ended = [rank for rank in others if self._board.has(f"{_END}/{rank}")]
        words = [(rank, *self._board.get(f"{_END}/{rank}").partition(" ")[::2]) for rank in ended]
        if not (said := "; ".join(f"rank {rank} {how}" for rank, moves, how in words if int(moves) < needed)):
            return None
        return (
            f"{said}; rank {self.rank} goes on and waits for what it would bring. Give all ranks the same number "
            "of batches (drop_last of a DataLoader, or a DistributedSampler), or run the loop inside `with "
            "engine.join():`, where ranks may have different numbers of them."
        )

    @property
    def has_failed(self) -> bool:
        """Return whether a rank is known to have failed. Any thread may ask; no rank is told and no links are cut."""
        if not self._active:
            return False
        try:
            return self._failure is not None or bool(self._store.check([_FAILURE]))
        except RuntimeError:  # the store ended with the process that holds it
            return True

    def check_failures(self) -> None:
        """Raise the error of the first rank that failed, if one has."""
        if not self._active or not self._board.has(_FAILURE):
            return
        kind, rank, words = self._board.get(_FAILURE).split(" ", 2)
        known = {"divergence": DivergenceError(words), "lost": PeerError(words)}
        found = known.get(kind) or PeerError(f"rank {rank} failed first: {words}. {_NO_RETURN}")
        self._failure = type(found), str(found)
        self.cut_links()
        raise found


def _gone(rank: int) -> str:
    return f"rank {rank} is gone: its process has ended without a word, as one that was killed does"
