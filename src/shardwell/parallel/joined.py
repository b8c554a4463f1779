"""One collective for several tensors: the groups of a unit are all-gathered, or reduce-scattered, together.

The groups prepare their parts one after the other, as each would alone, through a `JoinedRoute` in place of their
`Collectives`: it collects the parts. `start` then announces and starts one collective for all of them. A part whose
codec needs several hops of its own (qgZ) is not collected: its collective starts immediately.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from shardwell.errors import ShardwellError
from shardwell.kernels.quantize import Codec
from shardwell.memory import Event
from shardwell.parallel import quantized
from shardwell.parallel.mesh import RankGroup
from shardwell.parallel.traffic import TrafficKind
from shardwell.parallel.transport import DirectTransport, Reduction, Work

if TYPE_CHECKING:
    from shardwell.memory import Device
    from shardwell.parallel.collectives import Collectives


class JoinedWork(Work):
    """The part of one group in a collective of several. Whoever waits for one part first waits for all."""

    def __init__(self) -> None:
        super().__init__()
        self.whole: Work | None = None  # None before the start
        self._enqueues: list[Callable[[], object]] = []  # called behind the start

    @property
    def is_done(self) -> bool:
        return (self.whole is None or self.whole.is_done) and super().is_done

    def wait(self) -> None:
        if self.whole is None:  # what follows must not take what never came for data
            self._callbacks = []
            raise ShardwellError("this part of a collective was never started: another part of it failed")
        self.whole.wait()
        super().wait()

    def begin(self, whole: Work) -> None:
        """Note that the collective has started, and enqueue what follows this part on the device."""
        enqueues, self._enqueues, self.whole = self._enqueues, [], whole  # what a callback holds is freed with it
        for enqueue in enqueues:
            enqueue()

    def enqueue(self, start: Callable[[], Event]) -> Work:
        events: list[Event] = []
        self._enqueues.append(lambda: events.append(start()))

        return self.then(lambda: events[0].wait())

    def start_next_hop(self) -> bool:
        return self.whole is not None and self.whole.start_next_hop()


class Joined:
    """The collectives of one unit in one direction, which start as one."""

    def __init__(self, token: str, kind: TrafficKind) -> None:
        self.token, self.kind = token, kind
        self._routes: dict[Collectives, JoinedRoute] = {}

    def over(self, comm: Collectives) -> JoinedRoute:
        """Return what collects parts over the ranks of `comm`; parts over other ranks are another collective."""
        route = self._routes.get(comm)
        if route is None:
            route = self._routes[comm] = JoinedRoute(comm)
        return route

    @property
    def is_empty(self) -> bool:
        """Return whether no part was collected."""
        return not any(route.transport.works for route in self._routes.values())

    def start(self) -> None:
        """Start one collective for all parts that were collected."""
        for route in self._routes.values():
            if route.transport.works:
                route.start(self.token, self.kind)


class JoinedRoute:
    """`Collectives` over some ranks, as groups see them whose collectives are collected."""

    def __init__(self, comm: Collectives) -> None:
        self._comm, self.transport = comm, _Collecting()

    @property
    def rank_group(self) -> RankGroup:
        """Return the ranks."""
        return self._comm.rank_group

    @property
    def device(self) -> Device:
        """Return the device."""
        return self._comm.device

    @property
    def shard_index(self) -> int:
        """Return the index of the shard that this rank owns."""
        return self._comm.shard_index

    @property
    def host_drives_progress(self) -> bool:
        """Return whether the host has to start what follows a hop."""
        return self._comm.host_drives_progress

    @property
    def direct(self) -> DirectTransport:
        """Return the transport of collectives that are not collected."""
        return self._comm.direct

    def all_gather(
        self, flat: Tensor, token: str | None, kind: TrafficKind = TrafficKind.ALL_GATHER, codec: Codec | None = None
    ) -> Work:
        """Collect the all-gather of `flat`, see `Collectives.all_gather`. Token and kind are those of the whole."""
        if codec is not None and self.rank_group.size > 1 and flat.numel():
            return quantized.all_gather(self, flat, codec, self._comm.temporary)
        return self.transport.all_gather(flat)

    def all_gather_codes(
        self,
        rest: Tensor,
        flat: Tensor,
        codec: Codec,
        token: str,
        copied: Callable[[], object],
        keep: quantized.Keep | None = None,
    ) -> Work:
        """Collect an all-gather of quantised shards, see `Collectives.all_gather_codes`."""
        return quantized.all_gather(self, flat, codec, self._comm.temporary, rest, copied, keep)

    def reduce_scatter(
        self,
        flat: Tensor,
        into: Tensor,
        scale: float,
        accumulate: bool,
        token: str | None,
        codecs: tuple[Codec, Codec] | None = None,
        kind: TrafficKind = TrafficKind.REDUCE_SCATTER,
        residual: Tensor | None = None,
    ) -> Work:
        """Collect a reduce-scatter, see `Collectives.reduce_scatter`; one that is quantised starts immediately."""
        if codecs is not None and flat.numel() and self.rank_group.size > 1:
            return self._comm.reduce_scatter(flat, into, scale, accumulate, token, codecs, kind, residual)
        return self.transport.reduce_scatter(flat, into, scale, accumulate)

    def start(self, token: str, kind: TrafficKind) -> None:
        """Start what was collected, as one collective, and what follows it on the device."""
        collected = self.transport
        if collected.reductions:
            whole = self._comm.reduce_scatters(collected.reductions, token, kind)
        else:
            whole = self._comm.all_gathers(collected.flats, token, kind)
        for work in collected.works:
            work.begin(whole)


class _Collecting:
    """A transport that collects moves instead of starting them. It knows no route: a cycle would keep memory."""

    def __init__(self) -> None:
        self.works: list[JoinedWork] = []
        self.flats: list[Tensor] = []  # to be all-gathered
        self.reductions: list[Reduction] = []

    def _add(self) -> JoinedWork:
        work = JoinedWork()
        self.works.append(work)
        return work

    def all_gather(self, flat: Tensor) -> Work:
        """Collect an all-gather."""
        self.flats.append(flat)
        return self._add()

    def reduce_scatter(self, flat: Tensor, into: Tensor, scale: float, accumulate: bool) -> Work:
        """Collect a reduce-scatter."""
        self.reductions.append(Reduction(flat, into, scale, accumulate))
        return self._add()
