"""Agreement of the ranks on the order of collectives, so that a divergence is an error with names and not a hang.

Each collective has a token, which is announced before the collective is issued. All ranks keep the same table: *after
these last tokens comes that token*. While the announced token is the one in the table, the collective is issued
unchecked, at the cost of a dictionary look-up.

- A position that is not in the table yet is decided through the store by the first rank to arrive: a rank that arrives
  with another token raises before it issues anything. More than a few dozen ranks compare by an all-reduce.
- A rank about to deviate from the table waits until every rank has deviated in the same way. Ranks that follow the
  table will never deviate: the waiting rank raises once it sees that they went on. Ranks that have not arrived yet may
  be slow, which is no error: the waiting rank logs which ranks it waits for and what they do (`heartbeat.py`), and
  goes on waiting.

What ranks tell each other when one of them fails or ends is in `peer_failures.py`.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.utils.checkpoint import _StopRecomputationError

from shardwell.errors import DivergenceError, NonFiniteError, PeerError, ShardwellError
from shardwell.parallel.heartbeat import Heartbeat, Heartbeats
from shardwell.parallel.mesh import RankGroup, timeout
from shardwell.parallel.peer_failures import PeerFailures
from shardwell.parallel.rank_store import Pause, RankStore
from shardwell.parallel.signed_store import signed_where_secret
from shardwell.parallel.stragglers import PeerWait
from shardwell.parallel.waits import Need, Waits

_WINDOW = 4096  # tokens that define a position: longer than any step, so that no position in a step is ambiguous
_MOST_POSITIONS = 1 << 16
_PRIME = (1 << 61) - 1
_BASE = 1_000_003
_OLDEST = pow(_BASE, _WINDOW, _PRIME)
_ADVICE = (
    "Make all ranks run the same modules in the same order, or name the module that chooses between paths as one unit "
    "(zero_optimization.leaf_module)."
)
_TIME_LIMIT = 60.0  # seconds, until the configuration is read
_MOST_TOKENS = 1 << 14  # with sizes, that are cached


@lru_cache(_MOST_TOKENS)
def with_size(token: str, numel: int, dtype: torch.dtype) -> str:
    """Return a token with the size and dtype of its tensor."""
    return f"{token} ({numel:,} x {str(dtype).removeprefix('torch.')})"


@lru_cache(_MOST_TOKENS)
def with_each_size(token: str, sizes: tuple[tuple[int, torch.dtype], ...]) -> str:
    """Return a token with the sizes and dtypes of several tensors."""
    each = [f"{numel:,} x {str(dtype).removeprefix('torch.')}" for numel, dtype in sizes]
    return f"{token} ({' + '.join(each)})"


class TokenTable:
    """The tokens that are expected, by what was announced before: *after these last tokens comes that token*."""

    def __init__(self) -> None:
        self.expected: str | None = None  # the token at this position, if one was announced here before
        self.generation = 0  # incremented when a full table is cleared
        self.position = 0  # a rolling hash over the last tokens
        self.num_announced = 0  # the same on all ranks at the same position
        self.last = ""
        self.is_comparing = False  # the next token, by an all-reduce
        self.num_meetings = 0  # of all ranks, in the store
        self.met: deque[str] = deque(maxlen=2)  # the last keys at which all ranks wait for all
        self._tokens: dict[int, str] = {}
        self._revisions: dict[int, int] = {}
        self._recent: deque[int] = deque()

    def follow(self, token: str, *, is_settled: bool = False) -> bool:
        """Go on to the position after a token; return false if it is not the expected one, unless it `is_settled`."""
        if token != self.expected and not is_settled:
            return False
        self.num_announced += 1
        self.last = token
        code = zlib.crc32(token.encode()) + 1
        self._recent.append(code)
        position = (self.position * _BASE + code) % _PRIME
        if len(self._recent) > _WINDOW:
            position = (position - self._recent.popleft() * _OLDEST) % _PRIME
        self.position = position
        self.expected = self._tokens.get(position)
        return True

    def write(self, token: str) -> None:
        """Expect a token at this position from now on."""
        if len(self._tokens) >= _MOST_POSITIONS:  # all ranks get here together, because their tables are equal
            self._tokens.clear()
            self._revisions.clear()
            self.generation += 1
        self._tokens[self.position] = token

    @property
    def progress(self) -> float:
        """Return how many tokens were announced, and a half if the next one is compared."""
        return self.num_announced + 0.5 * self.is_comparing

    @property
    def revision(self) -> int:
        """Return how often the token at this position was replaced."""
        return self._revisions.get(self.position, 0)

    def replace(self, token: str) -> None:
        """Expect another token at this position from now on."""
        self._revisions[self.position] = self.revision + 1
        self.write(token)

    def begin_step(self) -> None:
        """Start a new step: earlier tokens are no longer part of the position."""
        self._recent.clear()
        self.position = 0
        self.expected = self._tokens.get(0)


class Agreement:
    """The agreement of the ranks of one engine. With one rank, or simulated ranks, it does nothing."""

    tokens: TokenTable

    def __init__(
        self, mesh: RankGroup, time_limit: float = _TIME_LIMIT, cut_links: Callable[[], None] = lambda: None
    ) -> None:
        """Open the table. `cut_links` breaks this rank's links, so that peers which wait for it wake up."""
        self.rank = mesh.global_rank(mesh.rank)
        self.ranks = mesh.ranks or tuple(range(mesh.size))  # in the default process group
        self.size = len(self.ranks)
        self._active = mesh.size > 1 and mesh.backend != "fake" and not mesh.is_simulated
        self.time_limit = time_limit
        self.failures = PeerFailures(self.rank, self.ranks, cut_links)
        self.failures.runs_ahead = mesh.backend == "nccl" and not mesh.is_simulated
        self.compare: Callable[[str], bool] | None = None  # returns whether all ranks have this token; set if many
        self.probe: Callable[[], None] = lambda: None  # raises if a link to another rank is broken
        self.advise: Callable[[str, str], str] = lambda ours, theirs: _ADVICE  # for the tokens of two ranks
        self.waits = Waits()
        self.store: Any = None  # in which the ranks of this engine leave messages for each other; None with one rank
        self.open()

    @property
    def name(self) -> str:
        """Return the name of a group, which is the same on all its ranks; that of all ranks is empty."""
        return ""

    @property
    def whole(self) -> Agreement:
        """Return the agreement of all ranks of the job."""
        return self

    def open(self) -> None:
        """Open an empty table; after a failure that all ranks had, a second one. All ranks must call it."""
        self.tokens = TokenTable()
        self.failures.forget()
        self.is_waiting = False  # for other ranks
        if self._active:
            self._open_store()

    def _open_store(self) -> None:
        store = dist.distributed_c10d._get_default_store()
        # Tables are opened in the same order on all ranks: the store itself counts them for each rank.
        number = store.add(f"shardwell/books/{self.rank}", 1)
        prefix = f"shardwell/{number}"
        self.store = signed_where_secret(dist.distributed_c10d.PrefixStore(prefix, store), prefix, self.rank)
        self._board = RankStore(self.store, self.failures.without_store)
        self._pulse = Heartbeats(self, number, self.rank, self.size, self.store, store)
        tokens = self.tokens
        self.failures.use_store(self.store, self._board, self._pulse, lambda: tokens.num_announced)

    def announce(self, token: str) -> None:
        """Announce the next token; raise before a mismatched collective.

        It returns if all ranks have announced the same token, or will. `Collectives` calls it for tokens that are not
        the expected ones.
        """
        if not self._active:
            return
        if self.failures.error is not None:
            self.failures.raise_again()
        expected = self.tokens.expected
        if expected is None:
            self._settle(token)
        elif expected != token:
            self._deviate(token, expected)
        self.tokens.follow(token, is_settled=True)

    def _settle(self, token: str) -> None:
        """Decide a new position: the first rank that reaches it writes its token down, and others compare theirs.

        Many ranks compare by an all-reduce instead, and ask the store only if they differ. They all come here, because
        their tables were equal so far.
        """
        tokens = self.tokens
        if not self._are_alike(token):
            self._check(self._board.first(f"new/{tokens.generation}/{tokens.position}", self._signed(token)), token)
            if self.compare is not None:
                self._await_divergence(token)
        tokens.write(token)

    def _are_alike(self, token: str) -> bool:
        """Return whether all ranks are known to have this token; without a comparison they are not."""
        if self.compare is None:
            return False
        self.tokens.is_comparing = True
        try:
            return self.compare(token)
        finally:
            self.tokens.is_comparing = False

    def _await_divergence(self, token: str) -> NoReturn:
        """Raise the error of another rank, which differs from this one and from the first rank."""
        begin, pause = time.monotonic(), Pause(self.size)
        while time.monotonic() - begin < self.time_limit:
            self.failures.check()
            pause()
        raise self.fail(
            DivergenceError(f"ranks diverge: not all ranks run '{token}', as rank {self.rank} does. {_ADVICE}")
        )

    def _deviate(self, token: str, expected: str) -> None:
        """Wait until all ranks deviate from the expected token in the same way, and enter the new token."""
        tokens = self.tokens
        key = f"turn/{tokens.generation}/{tokens.position}/{tokens.revision}"
        self._check(self._board.first(key, self._signed(token)), token)
        self._wait_for_all(key, token, expected)
        tokens.replace(token)

    def meet(self, token: str, *, limited: bool = True) -> None:
        """Announce a token, and wait until all ranks have announced it: some ranks may never come.

        Without `limited` it waits until they do, or until one of them fails.
        """
        self.announce(token)
        if self._active:
            self.tokens.num_meetings += 1
            self._wait_for_all(f"meeting/{self.tokens.num_meetings}", token, limited=limited)

    def _wait_for_all(self, key: str, token: str, expected: str = "", *, limited: bool = True) -> None:
        """Return when all ranks have arrived; raise an error that names a rank if that rank will not arrive.

        `expected` is the token in the table, if that is another one.
        """
        self.tokens.met.append(key)
        self._board.set(f"{key}/{self.rank}", "")
        if self._board.arrive(key, self.ranks.index(self.rank), self.size):
            return
        wait = PeerWait(self, key, token, expected, timeout() if limited else float("inf"))
        pause = Pause(self.size)
        need = Need([rank for rank in self.ranks if rank != self.rank], self._place(key), 1, f"in '{token}' for")
        before, self.is_waiting = self.is_waiting, True
        try:
            with self.waits.during([need], expected):
                while not self._board.has_all(key):
                    self.failures.check()
                    self.check_exits(self.tokens.num_announced + bool(expected))  # a deviation is not counted yet
                    wait.look()
                    pause()
        finally:
            self.is_waiting = before

    def need(self, ranks: Sequence[int], announced: tuple[float, str] | None = None) -> Need:
        """Return what a collective needs of other ranks: that they have announced it, too.

        `announced` is how far this rank had come with it, and its token; by default it was announced last.
        """
        progress, token = announced or (self.tokens.progress, self.tokens.last)
        return Need(ranks, self.name, progress, f"in '{token}' for")

    def _place(self, key: str) -> str:
        return f"{self.name} at {key}"

    def positions(self) -> dict[str, float]:
        """Return how far this rank has come in all that others may wait for. Any thread may ask.

        Nothing falls behind where it was, as long as others may wait there: they are at most one meeting behind.
        """
        groups = (reference() for reference in list(self.waits.groups))
        found = dict(self.waits.messages)
        for one in [self, *(group for group in groups if group is not None)]:
            found[one.name] = one.tokens.progress
            found.update(dict.fromkeys(map(one._place, list(one.tokens.met)), 1))
        return found

    def is_first(self, what: str) -> bool:
        """Return whether this rank is the first to ask: one rank looks at all others, and tells them what it finds."""
        return self._board.first(what, str(self.rank)) == str(self.rank)

    def missing(self, key: str) -> list[int]:
        """Return the ranks that have not arrived where this rank waits."""
        return [rank for rank in self.ranks if not self._board.has(f"{key}/{rank}")]

    def sign_of(self, rank: int) -> Heartbeat | None:
        """Return the last heartbeat of another rank; None if it sent none."""
        return self._pulse.of(rank)

    def is_left_by(self, sign: Heartbeat) -> bool:
        """Return whether a rank has announced more than this rank, so that it will not come here."""
        return sign.moves > self.tokens.num_announced

    def is_crossed_by(self, sign: Heartbeat) -> bool:
        """Return whether a rank waits in another engine for a collective that this rank has not begun there."""
        return self._pulse.crosses(sign)

    def behind(self) -> dict[int, Heartbeat]:
        """Return the ranks that have not announced what this rank waits for, with their heartbeats.

        The result is empty on all ranks that wait for it but one, which reports.
        """
        if not self._active or not self.is_first(f"behind/{self.tokens.num_announced}"):
            return {}
        return self.signs_behind()

    def signs_behind(self) -> dict[int, Heartbeat]:
        """Return the heartbeats of the ranks that have announced less than this rank, or do not run at all."""
        signs = {rank: self.sign_of(rank) for rank in self.ranks if rank != self.rank}
        known = {rank: sign for rank, sign in signs.items() if sign is not None}
        return {rank: sign for rank, sign in known.items() if sign.moves < self.tokens.num_announced or sign.is_stalled}

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
        return self.advise(ours, theirs)

    def _signed(self, token: str) -> str:
        return f"{self.rank} {token}"

    # ------------------------------------------------------------------------------------------------ failures

    def fail(self, error: ShardwellError, where: str = "") -> ShardwellError:
        """Tell the peers why this rank stops, see `PeerFailures.fail`."""
        return self.failures.fail(error, where)

    @contextlib.contextmanager
    def failing_together(self, where: str, *, common: tuple[type[ShardwellError], ...] = ()) -> Iterator[None]:
        """Report an error raised inside to the other ranks before it propagates, so that they do not wait.

        All ranks raise the `common` errors themselves. The signal by which torch ends a recomputation is no error.
        """
        try:
            yield
        except _StopRecomputationError:
            raise
        except SystemExit as leaving:
            self.failures.departure.note_exit(f"left by sys.exit({leaving.code!r}) in {where}")
            raise
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError):
                self.failures.advise_on_memory(error)
            if not isinstance(error, (PeerError, NonFiniteError, *common)):
                self.fail(ShardwellError(f"{type(error).__name__} in {where}: {error}"), where)
            raise

    def diagnose(self, error: Exception) -> ShardwellError:
        """Return the cause of a broken collective, see `PeerFailures.diagnose`.

        A rank that runs ahead may have announced the broken collective and ended before its device took part.
        """
        return self.failures.diagnose(error, self.tokens.num_announced + self.failures.runs_ahead)

    def check_peers(self) -> None:
        """Raise if a rank has failed or ended, where numbers that the device computed since then may be garbage."""
        if self._active and self.failures.runs_ahead:
            if self.failures.error is not None:
                self.failures.raise_again()
            self.failures.check()
            self.failures.check_exits(self.tokens.num_announced + 1)

    def check_exits(self, needed: int | None = None) -> None:
        """Raise if a rank has ended and will never take part in this rank's collective, which needs all ranks."""
        self.failures.check_exits(needed or self.tokens.num_announced)

    def end(self, words: str, *, is_exit: bool = False) -> None:
        """Leave a message that this rank takes part in nothing more, see `PeerFailures.end`."""
        self.failures.end(words, is_exit=is_exit)

    def meet_after_failure(self, state: str, *, is_updating: bool) -> str | None:
        """Meet the other ranks, each of which must have raised the error, and open a new table; or say why not.

        The ranks must be alike, see `PeerFailures.meet_again`.
        """
        why_not = self.failures.meet_again(state, is_updating=is_updating, time_limit=self.time_limit)
        if why_not is None and self._active:
            self.open()
        return why_not
