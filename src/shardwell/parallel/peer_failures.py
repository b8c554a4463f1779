"""What ranks tell each other when one of them fails or ends: messages in the store, and links that are cut.

A rank that raises leaves its reason in the store and cuts its links, which wakes the peers that wait for it. A rank
that ends leaves a message with the number of tokens it announced, for ranks that go on and then miss it.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from shardwell.errors import DivergenceError, PeerError, ShardwellError
from shardwell.parallel.heartbeat import Heartbeats
from shardwell.parallel.rank_store import Pause, RankStore

_NOTICED = 2.0  # seconds in which the end of a process shows, once its connections are closed
_FAILURE = "failure"
_END, _ANY = "end", "any"
_AFTER = "after"  # under it ranks are counted that have ended an engine that has failed
_WHY_NOT = f"{_AFTER}/why not"  # the first reason why they cannot go on
FINISHED = "finished"  # how a rank ended that had no more to do
_UNEVEN = (
    "Give all ranks the same number of batches (drop_last of a DataLoader, or a DistributedSampler), or run the loop "
    "inside `with engine.join():`, where ranks may have different numbers of them."
)
_NO_RETURN = (
    "All ranks stop where one fails, because the others wait for what it would bring: an error that is caught does not "
    "bring this engine back. Start again from the last checkpoint, and leave out what may fail (a bad batch, say) "
    "before the forward."
)


class Departure:
    """The news that the other ranks must get when this rank's process ends, also if its engine is gone by then.

    It holds nothing of the engine but a count, so that it may be kept until the process ends.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._store: Any = None
        self._num_announced: Callable[[], int] = lambda: 0
        self._exit = ("", 0)  # where the script left this rank inside of the engine, and the tokens announced by then
        self.is_over = False  # this rank takes part in no more collectives, and has said so

    def use_store(self, store: Any, num_announced: Callable[[], int]) -> None:
        """Leave the message in this store, with the number of tokens that this rank has announced by then."""
        self._store, self._num_announced = store, num_announced

    def note_exit(self, words: str) -> None:
        """Remember that the script leaves inside of the engine: `words` are the reason, if it takes part in no more."""
        self._exit = words, self._num_announced()

    def leave(self, words: str) -> None:
        """Leave a message that this rank takes part in nothing more, and how it ended."""
        inside, num_then = self._exit
        words = inside if inside and num_then == self._num_announced() else words
        self._store.set(f"{_END}/{self._rank}", f"{self._num_announced()} {words}")
        self._store.set(f"{_END}/{_ANY}", "")  # only now other ranks look for it

    def leave_without_engine(self, words: str) -> None:
        """Leave the message if nothing was said and no rank has failed; for a process whose engine is gone."""
        if self._store is not None and not self.is_over:
            self.is_over = True
            with contextlib.suppress(Exception):  # the store may have ended with the process that holds it
                if not self._store.check([_FAILURE]):
                    self.leave(words)


class PeerFailures:
    """The failures and ends of the ranks of one engine. With one rank, or simulated ranks, there is nothing to tell."""

    def __init__(self, rank: int, ranks: Sequence[int], cut_links: Callable[[], None]) -> None:
        """Begin without a store. `cut_links` breaks this rank's links, so that peers which wait for it wake up."""
        self._rank, self._ranks = rank, ranks
        self.cut_links = cut_links
        self.runs_ahead = False  # the host only enqueues collectives, and the device waits for other ranks (NCCL)
        self._store: Any = None
        self._board: RankStore | None = None
        self._pulse: Heartbeats | None = None
        self.departure = Departure(rank)
        self.out_of_memory = ""  # what to do if a device has no memory left
        self.forget()

    def advise_on_memory(self, error: Exception) -> None:
        """Add what to do to an error for want of memory, once: it may pass here again on its way."""
        if self.out_of_memory and self.out_of_memory not in getattr(error, "__notes__", ()):
            error.add_note(self.out_of_memory)

    def forget(self) -> None:
        """Forget what has failed: the engine begins again."""
        self.error: tuple[type[ShardwellError], str] | None = None  # the error itself would keep its frames alive
        self._where = ""  # what this rank itself failed in
        self.is_over = False

    @property
    def is_over(self) -> bool:
        """Return whether this rank takes part in no more collectives."""
        return self.departure.is_over

    @is_over.setter
    def is_over(self, value: bool) -> None:
        self.departure.is_over = value

    def use_store(self, store: Any, board: RankStore, pulse: Heartbeats, num_announced: Callable[[], int]) -> None:
        """Leave messages in this store, and ask these heartbeats which processes have ended.

        `num_announced` returns how many tokens this rank has announced. It must not hold the engine.
        """
        self._store, self._board, self._pulse = store, board, pulse
        self.departure.use_store(store, num_announced)

    # ---------------------------------------------------------------------------------------------------- telling

    def fail(self, error: ShardwellError, where: str = "") -> ShardwellError:
        """Tell the peers why this rank stops, wake peers that wait for it, and refuse further tokens here.

        `where` is what this rank failed in, for `meet_again`.
        """
        if self._board is not None and self.error is None:
            self._where = where
            self.error = type(error), f"{error} (on this rank, {self._rank}). {_NO_RETURN}"
            self._tell("divergence" if isinstance(error, DivergenceError) else "peer", str(error))
        return error

    def post_message(self, words: str) -> None:
        """Tell peers that will wait for this rank why it does not come. The links stay open for their other users."""
        if self._board is not None:
            with contextlib.suppress(Exception):  # the store may have ended with the process that holds it
                self._board.first(_FAILURE, f"peer {self._rank} {words}")

    def _tell(self, kind: str, words: str) -> None:
        if self._board is not None:
            with contextlib.suppress(Exception):  # the store may have ended with the process that holds it
                self._board.first(_FAILURE, f"{kind} {self._rank} {words}")
        self.is_over = True
        self.cut_links()

    def report_lost(self, store: Any, rank: int) -> None:
        """Leave a failure message for a rank whose process has ended without one. Any thread may call this."""
        if not store.check([f"{_END}/{rank}"]):
            store.compare_set(_FAILURE, "", f"lost {rank} {_gone(rank)}")

    def end(self, words: str, *, is_exit: bool = False) -> None:
        """Leave a message that this rank takes part in nothing more, if it has not failed.

        The message says how the rank ended, and after how many tokens. `is_exit`: its process ends, too.
        """
        if self._board is not None:
            with contextlib.suppress(Exception):  # the store may have ended with the process that holds it
                if self.error is None:
                    self.departure.leave(words)
                elif is_exit and not self._board.has(f"{_AFTER}/{self._rank}"):
                    reason = self._first_words(self._board)
                    words = f"the process of rank {self._rank} ended after the failure ({reason})"
                    self._board.first(_WHY_NOT, words)
                    self._arrive_after(self._board)
            self.is_over = True

    # ---------------------------------------------------------------------------------------------------- finding

    def raise_again(self) -> NoReturn:
        """Raise the failure that this rank knows of."""
        assert self.error is not None
        kind, words = self.error
        raise kind(words)

    @property
    def has_failed(self) -> bool:
        """Return whether a rank is known to have failed. Any thread may ask; no rank is told and no links are cut."""
        if self._board is None:
            return False
        try:
            return self.error is not None or bool(self._store.check([_FAILURE]))
        except RuntimeError:  # the store ended with the process that holds it
            return True

    def check(self, board: RankStore | None = None) -> None:
        """Raise the error of the first rank that failed, if one has. Other threads have a `board` of their own."""
        board = board or self._board
        if board is None or not board.has(_FAILURE):
            return
        kind, rank, words = board.get(_FAILURE).split(" ", 2)
        known = {"divergence": DivergenceError(words), "lost": PeerError(words)}
        found = known.get(kind) or PeerError(f"rank {rank} failed first: {words}. {_NO_RETURN}")
        self.error = type(found), str(found)
        self.cut_links()
        raise found

    def check_exits(self, needed: int, board: RankStore | None = None) -> None:
        """Raise if a rank has ended before `needed` tokens and will never take part in this rank's collective."""
        if (words := self._ended_ranks(needed, board or self._board)) is not None:
            raise self._missing(words)

    def _missing(self, words: str) -> PeerError:
        self._tell("lost", words)
        self.error = PeerError, words
        return PeerError(words)

    def _ended_ranks(self, needed: int, board: RankStore | None) -> str | None:
        """Return the messages of ranks that ended before `needed` tokens, with advice; None if no rank has."""
        if board is None or not board.has(f"{_END}/{_ANY}"):
            return None
        others = (rank for rank in self._ranks if rank != self._rank)
        ended = [rank for rank in others if board.has(f"{_END}/{rank}")]
        words = [(rank, *board.get(f"{_END}/{rank}").partition(" ")[::2]) for rank in ended]
        if not (said := "; ".join(f"rank {rank} {how}" for rank, moves, how in words if int(moves) < needed)):
            return None
        said = f"{said}; rank {self._rank} goes on and waits for what it would bring."
        return f"{said} {_UNEVEN}" if any(how.startswith(FINISHED) for _, _, how in words) else said

    def _lost(self) -> list[int]:
        """Return the ranks whose processes are known to have ended."""
        return [] if self._pulse is None else self._pulse.lost()

    def diagnose(self, error: Exception, num_announced: int) -> ShardwellError:
        """Return the cause of a broken collective: the message of the first rank that failed, if it left one.

        If it left none, other ranks may have no link to the failed rank and wait for this one: they are told.
        """
        deadline, words = time.monotonic() + _NOTICED, f"rank {self._rank}: a peer stopped answering: {error}"
        while time.monotonic() < deadline:
            try:
                self.check()
                self.check_exits(num_announced)
                if lost := self._lost():
                    return self._missing(self._last_words(lost))
            except ShardwellError as known:
                return known
            time.sleep(0.05)
        return self._missing(words)

    def _last_words(self, lost: Sequence[int]) -> str:
        """Return how the first of these ranks ended, by its own words if none of them ended without any.

        What a rank left then counts whatever it had announced: messages between pipeline stages are not announced.
        """
        board = self._board
        silent = [rank for rank in lost if board is None or not board.has(f"{_END}/{rank}")]
        words = None if silent else self._ended_ranks(sys.maxsize, board)
        return words or _gone((silent or lost)[0])

    def without_store(self, error: Exception) -> ShardwellError:
        """Return the error for a store that has ended with the process that holds it."""
        deadline = time.monotonic() + _NOTICED
        while 0 not in (lost := self._lost()) and time.monotonic() < deadline:
            time.sleep(0.05)  # its connections close before its process is gone
        if lost:  # of several, rank 0 is the first cause: it holds the store, unless a launcher does
            words = f"{_gone(min(lost))}, and the store that ranks leave words in has gone, too"
        else:
            words = (
                f"rank {self._rank}: a peer stopped answering. The store that ranks leave words in is gone: the "
                f"process that holds it (rank 0's, or the launcher's) has ended ({error})"
            )
        self.error = PeerError, words
        self.is_over = True
        self.cut_links()
        return PeerError(words)

    # ------------------------------------------------------------------------------------------- after a failure

    def meet_again(self, state: str, *, is_updating: bool, time_limit: float) -> str | None:
        """Meet the other ranks, each of which must have raised the error; return None, or why they cannot go on.

        `state` is what the ranks must have alike. A rank that raised nothing is elsewhere, and one that failed in a
        step, or `is_updating`, may have updated a part of its parameters.
        """
        if self._board is None:
            return None
        where = "step" if is_updating else self._where
        reason = self._first_words(self._board)
        try:
            if why_not := self._unlike_first(self._board, where, state, reason):
                self._board.first(_WHY_NOT, why_not)
            self._arrive_after(self._board)
            self._await_others(self._board, time_limit)
            return self._board.get(_WHY_NOT) if self._board.has(_WHY_NOT) else None
        except ShardwellError as error:
            return str(error)

    def _unlike_first(self, board: RankStore, where: str, state: str, reason: str) -> str:
        """Return why this rank cannot go on with the rank that came first; an empty string if it can."""
        if self.error is None:
            return f"rank {self._rank} did not have the failure of the others ({reason}): it is at another place"
        if where == "step":
            return f"rank {self._rank} failed in a step: its parameters may be updated in part ({reason})"
        rank, theirs = json.loads(board.first(f"{_AFTER}/state", json.dumps([self._rank, state])))
        if theirs != state:
            return f"rank {self._rank} is at {state} and rank {rank} at {theirs} after the failure ({reason})"
        return ""

    def _arrive_after(self, board: RankStore) -> None:
        """Count this rank among those that have ended an engine that has failed, once."""
        if board.first(f"{_AFTER}/{self._rank}", mine := str(time.monotonic_ns())) == mine:
            board.arrive(_AFTER, self._ranks.index(self._rank), len(self._ranks))

    def _first_words(self, board: RankStore) -> str:
        """Return the first sentence of the first rank that failed, which is not to be taken for that error again."""
        with contextlib.suppress(ShardwellError):
            if board.has(_FAILURE):
                _, rank, words = board.get(_FAILURE).split(" ", 2)
                return f"rank {rank}: {words.split('. ')[0].rstrip('.')}"
        return "its words are gone"

    def _await_others(self, board: RankStore, time_limit: float) -> None:
        """Wait until all ranks have ended the engine that has failed; raise an error if one of them will not."""
        begin, pause = time.monotonic(), Pause(len(self._ranks))
        while not board.has_all(_AFTER):
            pause()
            lost = [rank for rank in self._lost() if not board.has(f"{_AFTER}/{rank}")]
            if lost:
                raise PeerError(_gone(lost[0]))
            if time.monotonic() - begin > time_limit:
                missing = next((rank for rank in self._ranks if not board.has(f"{_AFTER}/{rank}")), self._rank)
                raise PeerError(f"rank {missing} did not come within {time_limit:g} s after the failure")


def _gone(rank: int) -> str:
    return f"rank {rank} is gone: its process has ended without a word, as one that was killed does"
