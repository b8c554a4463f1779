"""What moves the bytes of a collective: the protocol of transports, the handle that they return, and gloo on CPU.

A transport only moves bytes. `Collectives` announces and counts a collective before it calls one. `GlooTransport` sends
and receives directly between slices of flat buffers, with waits that can be abandoned.

Gloo's own all-gather and reduce-scatter take 5 to 9 times the CPU time (its reduce-scatter is a clone and an
all-reduce).

Gloo forgets a message in flight when its link breaks: a thread that waits for it waits until the group's timeout, half
an hour by default, and nothing wakes it. So a helper thread waits, and the caller checks periodically whether a peer
has failed. If one has, the caller raises, and the helper thread is left behind. The same happens if a signal raises an
exception, but then works in flight get some time to complete first: if they do, nothing is lost, and a caller that
catches the exception can go on.

Gloo's worker threads let go of a tensor a little later than its collective is done. The thread that lets go last frees
the tensor's Python object, for which it needs Python's lock. If Python is ending at that moment, the process is aborted
("terminate called without an active exception"). So gloo is lent an alias of a tensor that it sums, which is kept here
until gloo has let go of it, and the end of the process waits for that. Parameters are not lent: an alias would look
like a view of the user's.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardwell.memory import Event, StateKind, TemporaryBuffers
from shardwell.parallel.links import Links
from shardwell.parallel.mesh import RankGroup
from shardwell.parallel.signal_errors import is_from_signal
from shardwell.parallel.simulated_moves import begin_simulated_move
from shardwell.parallel.waits import Needs, Wait

STAGING = "(staging)"  # the unit under which staging buffers of collectives are counted
_LOOK_EVERY = 0.5  # seconds
_GRACE = 5.0  # seconds for works in flight when a signal comes
_NUM_TAGS = 1 << 30
_MOMENT = 0.1  # seconds for worker threads whose collectives are done
_LONGEST = 2.0  # seconds that the end of a process waits for collectives that were never waited for

_lent: list[tuple[Tensor, int]] = []  # the aliases, and how many owners each has once gloo has let go of it
_num_owners: Callable[[Tensor], int] = Tensor._use_count  # type: ignore[attr-defined]
_idle: list[_WaitThread] = []


class Work:
    """A collective in flight. `wait` may be called any number of times; the first call finishes the work.

    To finish is to call the callbacks once, in order.
    """

    def __init__(self, *callbacks: Callable[[], object]) -> None:
        self._callbacks = list(callbacks)

    @property
    def is_done(self) -> bool:
        """Return whether `wait` has been called, or nothing was in flight."""
        return not self._callbacks

    def wait(self) -> None:
        """Wait for the collective, in the way that its backend needs: on the host or on the current stream."""
        callbacks, self._callbacks = self._callbacks, []  # if one of them raises, the others are never called
        while callbacks:
            callbacks.pop(0)()  # what a callback holds is freed before the next one is called

    def start_next_hop(self) -> bool:
        """Wait for the first hop and start the second; return false if there is no second hop that has not started."""
        return False

    def then(self, more: Callable[[], object]) -> Work:
        """Let `wait` also call `more`, after everything else; return this work."""
        self._callbacks.append(more)
        return self

    def enqueue(self, start: Callable[[], Event]) -> Work:
        """Enqueue on the device what follows this collective there; `wait` waits for its event, too."""
        return self.then(start().wait)

    def then_start(self, start: Callable[[], Work]) -> Work:
        """Return a work of two hops: this collective is the first, and `start` starts the second."""
        return _TwoHops(self, start)


class Works(list[Any]):
    """The works of torch.distributed that make one collective, and how far its announcement was, with its token."""

    announced: tuple[float, str] | None = None


class _TwoHops(Work):
    """A collective of two hops, the second of which the host starts when the first is over."""

    def __init__(self, first: Work, start: Callable[[], Work]) -> None:
        super().__init__()
        self._first = first
        self._start: Callable[[], Work] | None = start  # None once the second hop is started

    @property
    def is_done(self) -> bool:
        return self._start is None and super().is_done

    def wait(self) -> None:
        self.start_next_hop()
        super().wait()

    def start_next_hop(self) -> bool:
        if self._start is None:
            return False
        start, self._start = self._start, None
        callbacks, self._callbacks = self._callbacks, []  # if a hop raises, they are never called
        self._first.wait()
        self._callbacks = [start().wait, *callbacks]
        return True


class ObservedWork(Work):
    """A collective in flight of which somebody is told when its wait begins and ends."""

    def __init__(self, work: Work, waits: Callable[[], object], ended: Callable[[], object]) -> None:
        super().__init__()
        self._work, self._waits = work, waits
        self._ended: Callable[[], object] | None = ended

    @property
    def is_done(self) -> bool:
        return self._work.is_done

    def wait(self) -> None:
        ended, self._ended = self._ended, None
        if ended is not None:
            self._waits()
        self._work.wait()
        if ended is not None:
            ended()

    def start_next_hop(self) -> bool:
        return self._work.start_next_hop()

    def then(self, more: Callable[[], object]) -> Work:
        self._work.then(more)
        return self


@dataclass(frozen=True)
class Reduction:
    """One of several reduce-scatters that start together, see `Transport.reduce_scatter`."""

    flat: Tensor
    into: Tensor
    scale: float
    accumulate: bool


def in_turn(works: Sequence[Work]) -> Work:
    """Return a work of several that are in flight at the same time."""
    return Work(*[work.wait for work in works])


class Transport(Protocol):
    """A way to move the bytes of all-gathers and reduce-scatters."""

    def all_gather(self, flat: Tensor) -> Work:
        """Start the all-gather of `flat` in place; this rank's own shard is in it already."""

    def reduce_scatter(self, flat: Tensor, into: Tensor, scale: float, accumulate: bool) -> Work:
        """Start `into` = (or +=) `scale` x the sum over ranks of this rank's shard of `flat`, which becomes invalid."""

    def all_gathers(self, flats: Sequence[Tensor]) -> Work:
        """Start all-gathers of several tensors as one collective."""

    def reduce_scatters(self, parts: Sequence[Reduction]) -> Work:
        """Start several reduce-scatters as one collective."""


class DirectTransport(Transport, Protocol):
    """A transport between all ranks of one process group, which also serves the other collectives."""

    sends_shards: bool  # `scatter` sends each rank its shard; if not, it sends everything to all ranks

    def all_to_all(self, sent: Tensor, received: Tensor) -> Work:
        """Start to send the r-th of equal parts of `sent` to rank r, and to receive the r-th of `received` from it."""

    def all_reduce(self, part: Tensor, into: Tensor, scale: float, accumulate: bool) -> Work:
        """Start `into` = (or +=) `scale` x the sum over ranks of `part`, which becomes invalid.

        All ranks get the same bits.
        """

    def exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        """Send outgoing[r] to rank r and receive incoming[r] from it; this rank's own parts are equal already."""

    def scatter(self, flat: Tensor, into: Tensor, source: int, shard_indices: Sequence[int]) -> None:
        """Copy this rank's shard of `source`'s `flat` to `into`; shard_indices[r] is the index of rank r's shard."""

    def wait(self, works: list[Any], needs: Needs = ()) -> None:
        """Wait for works of torch.distributed; raise the cause if one of them fails.

        `needs` are of the collective that was announced last, if nothing else is said.
        """


class GlooTransport:
    """Point-to-point transfers between the ranks of one process group."""

    sends_shards = True

    def __init__(self, mesh: RankGroup, links: Links, temporary: TemporaryBuffers) -> None:
        self._rank, self._size, self._group = mesh.rank, mesh.size, mesh.group
        self._links, self._temporary = links, temporary
        self._global_ranks = [mesh.global_rank(rank) for rank in range(mesh.size)]
        self._peers = [rank for rank in self._global_ranks if rank != self._global_ranks[mesh.rank]]
        self._tag = 0  # of the last collective, the same on all ranks
        self._is_simulated, self._mesh = mesh.is_simulated, mesh

    def all_gather(self, flat: Tensor) -> Work:
        """Start the all-gather of `flat` in place; this rank's own shard is in it already."""
        shards = flat.chunk(self._size)
        works = self._start_exchange([shards[self._rank]] * self._size, shards)
        return Work(partial(self.wait, works))

    def reduce_scatter(self, flat: Tensor, into: Tensor, scale: float, accumulate: bool) -> Work:
        """Start `into` = (or +=) `scale` x the sum over ranks of this rank's shard of `flat`, which becomes invalid."""
        shards, shard_numel = flat.chunk(self._size), flat.numel() // self._size
        # What the peers send; torch cannot split it into empty parts.
        received = self._temporary.allocate((self._size - 1) * shard_numel, flat.dtype, StateKind.STAGING, STAGING)
        parts = list(received.split(shard_numel)) if shard_numel else [received] * (self._size - 1)
        mine = shards[self._rank]
        works = self._start_exchange(shards, [*parts[: self._rank], mine, *parts[self._rank :]])
        return Work(
            partial(self.wait, works),
            partial(sum_in_rank_order, [mine, *parts], into, scale, accumulate),
            partial(self._temporary.free, received),
        )

    def all_gathers(self, flats: Sequence[Tensor]) -> Work:
        """Start all-gathers of several tensors: messages go out between slices, back to back, without a copy."""
        return in_turn([self.all_gather(flat) for flat in flats])

    def reduce_scatters(self, parts: Sequence[Reduction]) -> Work:
        """Start several reduce-scatters, whose messages go out back to back."""
        return in_turn([self.reduce_scatter(one.flat, one.into, one.scale, one.accumulate) for one in parts])

    def all_to_all(self, sent: Tensor, received: Tensor) -> Work:
        """Start to send the r-th of equal parts of `sent` to rank r, and to receive the r-th of `received` from it."""
        outgoing, incoming = sent.chunk(self._size), received.chunk(self._size)
        incoming[self._rank].copy_(outgoing[self._rank])
        return Work(partial(self.wait, self._start_exchange(outgoing, incoming)))

    def all_reduce(self, part: Tensor, into: Tensor, scale: float, accumulate: bool) -> Work:
        """Start `into` = (or +=) `scale` x the sum over ranks of `part`, which becomes invalid: gloo's ring sums it.

        Each piece of it is summed by one rank, so that all ranks get the same bits.
        """
        works = Works()
        self._note_announcement(works)
        try:
            if self._is_simulated:
                works += begin_simulated_move("all_reduce", 2 * part.nbytes, self._mesh)
            else:
                works.append(dist.all_reduce(lend(part), group=self._group, async_op=True))
        except RuntimeError as error:
            self._links.raise_cause(error)
        wait = partial(self.wait, works)
        return Work(wait, partial(sum_in_rank_order, [part], into, scale, accumulate))

    def exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        """Send outgoing[r] to rank r and receive incoming[r] from it; this rank's own parts are equal already."""
        self.wait(self._start_exchange(outgoing, incoming))

    def scatter(self, flat: Tensor, into: Tensor, source: int, shard_indices: Sequence[int]) -> None:
        """Copy this rank's shard of `source`'s `flat` to `into`; shard_indices[r] is the index of rank r's shard."""
        self._tag = (self._tag + 1) % _NUM_TAGS
        shards = flat.split(into.numel())
        works = Works()
        self._note_announcement(works)
        try:
            if self._is_simulated:
                pass
            elif self._rank != source:
                works.append(dist.irecv(into, self._global_ranks[source], group=self._group, tag=self._tag))
            else:
                for peer in (rank for rank in range(self._size) if rank != source):
                    shard = shards[shard_indices[peer]]
                    works.append(dist.isend(shard, self._global_ranks[peer], group=self._group, tag=self._tag))
        except RuntimeError as error:
            self._links.raise_cause(error)
        self.wait(works)
        if self._rank == source:
            into.copy_(shards[shard_indices[source]])

    def _start_exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> list[Any]:
        """Start to send outgoing[r] to every other rank r, and to receive incoming[r] from it."""
        if self._is_simulated:
            return begin_simulated_move("exchange", sum(part.nbytes for part in incoming), self._mesh)
        self._tag = (self._tag + 1) % _NUM_TAGS
        works, agreement = Works(), self._links.agreement
        if agreement is not None:  # as `_note_announcement` does, for each collective of a step
            tokens = agreement.tokens
            works.announced = tokens.num_announced + 0.5 * tokens.is_comparing, tokens.last
        try:
            for step in range(1, self._size):
                to, source = (self._rank + step) % self._size, (self._rank - step) % self._size
                if incoming[source].numel():
                    peer = self._global_ranks[source]
                    works.append(dist.irecv(incoming[source], peer, group=self._group, tag=self._tag))
                if outgoing[to].numel():
                    peer = self._global_ranks[to]
                    works.append(dist.isend(outgoing[to], peer, group=self._group, tag=self._tag))
        except RuntimeError as error:
            self._links.raise_cause(error)
        return works

    def _note_announcement(self, works: Works) -> None:
        """Note that works are of the collective that was announced last."""
        agreement = self._links.agreement
        if agreement is not None:
            works.announced = agreement.tokens.progress, agreement.tokens.last

    def wait(self, works: list[Any], needs: Needs = ()) -> None:
        """Wait for works of torch.distributed; raise the cause if one of them fails, or if a rank has failed."""
        agreement = self._links.agreement
        if agreement is None or not works or self._is_simulated:
            for work in works:
                work.wait()
            return
        agreement.is_waiting = True
        long: list[Wait] = []
        try:
            wait_all(works, partial(self._begin_long_wait, works, needs, long), self._links.abandon)
        except BaseException as error:
            keep_group(self._group)
            if isinstance(error, RuntimeError):
                self._links.raise_cause(error)
            raise
        finally:
            agreement.is_waiting = False
            if long:
                agreement.waits.end(long.pop())

    def _begin_long_wait(self, works: list[Any], needs: Needs, long: list[Wait]) -> Callable[[], None]:
        """Say what this rank waits for, and return the check for failures."""
        agreement = self._links.agreement
        assert agreement is not None
        announced = works.announced if isinstance(works, Works) else None
        long.append(agreement.waits.begin(needs or [agreement.need(self._peers, announced)]))
        return self._links.poll_failures()


def sum_in_rank_order(parts: list[Tensor], into: Tensor, scale: float, accumulate: bool) -> None:
    """Compute `into` = (or +=) `scale` x the sum of `parts`, which become invalid.

    16-bit parts are summed in fp32 and rounded once. Others are summed first, and then added: a library that reduces
    gives the same bits.
    """
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    if accumulate:
        if parts[0].dtype == wide:
            for part in parts[1:]:
                parts[0].add_(part)
            parts = parts[:1]
        for part in parts:
            into.add_(part, alpha=scale)
        return
    if len(parts) == 1 and parts[0].dtype == into.dtype and scale == 1.0:
        into.copy_(parts[0])
        return
    total = into if into.dtype == wide else torch.empty_like(into, dtype=wide)
    if len(parts) == 1 or parts[0].dtype != wide:
        total.copy_(parts[0])
        rest = parts[1:]
    else:
        torch.add(parts[0], parts[1], out=total)
        rest = parts[2:]
    for part in rest:
        total.add_(part)
    if scale != 1.0:
        total.mul_(scale)
    if total is not into:
        into.copy_(total)


def wait_all(
    works: list[Any], poll_failures: Callable[[], Callable[[], None]], abandon: Callable[[BaseException], None]
) -> None:
    """Return when all works are done; raise what one of them raises, or what a check for failures raises.

    If the wait turns out to be long, `poll_failures` is called for a check, which is made periodically from then on.
    `abandon` is called with what a signal has raised, if works are left behind that still use their memory.
    """
    try:
        waiter = _idle.pop()
    except IndexError:
        waiter = _WaitThread()
    check: Callable[[], None] | None = None
    error: Exception | None = None
    is_over = False
    waiter.tasks.put(works)
    try:
        while not (is_over := waiter.done.acquire(timeout=_LOOK_EVERY)):
            check = check or poll_failures()
            check()
    except BaseException as signal:
        if isinstance(signal, RuntimeError) and not is_from_signal(signal):
            raise  # from the check, which knows that waiting is useless
        try:
            is_over = is_over or waiter.done.acquire(timeout=_GRACE)
        finally:
            if not is_over:
                abandon(signal)
        raise
    finally:
        if is_over:  # the thread is available to other callers, but not before its error was read
            error, waiter.error = waiter.error, None
            _idle.append(waiter)
    if error is not None:
        raise error


class _WaitThread:
    """A thread that waits on behalf of one caller at a time."""

    def __init__(self) -> None:
        self.tasks: SimpleQueue[list[Any]] = SimpleQueue()  # the works to wait for
        self.done = threading.Lock()  # held until the works are done
        self.done.acquire()
        self.error: Exception | None = None
        threading.Thread(target=self._serve, name="shardwell waits", daemon=True).start()

    def _serve(self) -> None:
        while True:
            self._wait(self.tasks.get())  # keeps no reference to the works, and so no memory, once they are done
            self.done.release()

    def _wait(self, works: list[Any]) -> None:
        try:
            for work in works:
                work.wait()
        except Exception as error:
            self.error = error


def lend(tensor: Tensor) -> Tensor:
    """Return an alias of a tensor for a collective of gloo."""
    end_loans()
    alias = tensor.detach()
    _lent.append((alias, _num_owners(alias)))
    return alias


def keep_group(group: Any) -> None:
    """Let a process group of gloo live until the process ends: works of it may be left behind.

    Its destructor waits for its threads, and these wait for messages that may never come, until the group's timeout:
    whoever freed a failed engine, the garbage collector for one, would wait as long.
    """
    if group is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def end_loans() -> None:
    """Forget the aliases that gloo has let go of."""
    for index in range(len(_lent) - 1, -1, -1):
        if _num_owners(_lent[index][0]) <= _lent[index][1]:
            del _lent[index]


def await_loans(seconds: float) -> None:
    """Wait, so long at most, until gloo has let go of all aliases."""
    deadline = time.monotonic() + seconds
    end_loans()
    while _lent and time.monotonic() < deadline:
        time.sleep(1e-3)
        end_loans()


def _await_workers() -> None:
    """Wait until gloo has let go of all aliases; those that it still holds then are never freed.

    Collectives that other code has started hold tensors, too, of which nothing is known here: gloo gets a moment.
    """
    await_loans(_LONGEST)
    if dist.is_initialized() and "gloo" in dist.get_backend():
        time.sleep(_MOMENT)
    for alias, _ in _lent:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(alias))


atexit.register(_await_workers)
