"""The links of one process group: what a broken one means, how it is found, and how links are broken on purpose."""

from __future__ import annotations

import contextlib
from collections import deque
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from shardwell.errors import ShardwellError
from shardwell.memory import Event
from shardwell.parallel.agreement import Agreement
from shardwell.parallel.mesh import RankGroup
from shardwell.parallel.signal_errors import is_from_signal
from shardwell.parallel.stragglers import FailurePoll

_MOST_IN_FLIGHT = 24  # collectives: enough for the device to have work while the host is busy elsewhere
_CUT, _PROBE = (1 << 30) + 1, (1 << 30) + 2  # tags that no send uses


class InFlight:
    """The last collectives of a rank that the host has enqueued, on all communicators of an engine.

    The host is kept from running further ahead of the device than this many: long queues on two communicators were
    seen to hang.
    """

    def __init__(self, most: int = _MOST_IN_FLIGHT) -> None:
        self._events: deque[Event] = deque()
        self._most = most

    def add(self, event: Event) -> Event:
        """Add the event behind a collective; wait for the oldest collective if there are too many."""
        self._events.append(event)
        if len(self._events) > self._most:
            self._events.popleft().synchronize()
        return event


class Links:
    """The links between the ranks of one process group, and the agreement that knows why a rank failed."""

    def __init__(self, mesh: RankGroup, in_flight: InFlight | None = None) -> None:
        """`in_flight` has the collectives of the engine's other groups."""
        self._mesh = mesh
        self.in_flight = InFlight() if in_flight is None else in_flight
        self.agreement: Agreement | None = None
        self.channels: list[Any] = []  # process groups for messages, of pairs or through the host

    def raise_cause(self, error: RuntimeError) -> NoReturn:
        """Raise the reason why a collective failed: that of the first rank that failed, if this is known."""
        if self.agreement is None or isinstance(error, ShardwellError) or is_from_signal(error):
            raise error
        raise self.agreement.diagnose(error) from error

    def poll_failures(self) -> FailurePoll:
        """Return a function to call repeatedly while waiting for peers; it raises when waiting has become useless."""
        return FailurePoll(self.agreement, self.probe)

    def probe(self) -> None:
        """Raise the diagnosed error if a link to another rank is broken."""
        try:
            self._try()
        except RuntimeError as error:
            self.raise_cause(error)

    def find_gone(self) -> Exception | None:
        """Return the error of a broken link, or None. It is for callers that wait for something else than a collective.

        Other ranks are not told and no links are cut, because a peer may have ended without an error. A caller that has
        waited long enough calls `lost` with the error.
        """
        try:
            self._try()
        except RuntimeError as error:
            if is_from_signal(error):
                raise
            return error
        return None

    def lost(self, error: Exception) -> Exception:
        """Tell the other ranks of an error that `find_gone` returned, and return the first cause."""
        return error if self.agreement is None else self.agreement.diagnose(error)

    def abandon(self, signal: BaseException) -> None:
        """Tell the peers and cut the links: peers would still write to memory that the caller is about to free."""
        assert self.agreement is not None
        words = f": {signal}" if str(signal) else ""
        where = f"while rank {self._mesh.rank} waited for others"
        self.agreement.fail(ShardwellError(f"{type(signal).__name__} {where}{words}"))

    def abort(self) -> None:
        """Break this rank's links so that peers waiting for it wake up with an error.

        Gloo closes all connections of a group when a receive times out, so a receive that no send matches is posted.
        This needs a peer whose link is intact: over a broken link the receive fails immediately and closes none. NCCL's
        communicators are aborted together, see `nccl_groups`.
        """
        if self._mesh.backend != "gloo" or self._mesh.is_simulated:
            return
        for peer in range(self._mesh.size):
            if peer != self._mesh.rank:
                with contextlib.suppress(RuntimeError):
                    work = dist.irecv(_nothing(), self._mesh.global_rank(peer), group=self._mesh.group, tag=_CUT)
                    if work is not None:
                        work.wait(timedelta(milliseconds=1))

    @property
    def nccl_groups(self) -> list[Any]:
        """Return the process groups with NCCL communicators that a failure aborts."""
        mesh = self._mesh
        return [mesh.reduce_group, mesh.group, *self.channels] if mesh.backend == "nccl" else []

    def _try(self) -> None:
        """Raise if a peer is gone and has left no message: a receive over a broken link fails immediately."""
        if self._mesh.backend == "gloo" and not self._mesh.is_simulated:
            for peer in (peer for peer in range(self._mesh.size) if peer != self._mesh.rank):
                number = self._mesh.global_rank(peer)
                try:
                    dist.irecv(_nothing(), number, group=self._mesh.group, tag=_PROBE)
                except RuntimeError as error:
                    if is_from_signal(error):
                        raise
                    raise RuntimeError(f"the link to rank {number} is broken: {error}") from error


def _nothing() -> Tensor:
    """Return a tensor for a receive that never completes. It is on the cpu, whatever the user's default device is."""
    return torch.empty(1, device="cpu")
