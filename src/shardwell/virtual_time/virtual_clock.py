"""The clock of a simulation.

A *track* is an order of work: a stream of the device, the training loop's thread, a worker's thread, one transfer. It
has a time at which all that it was given is done. Work on a track takes time of a *resource*: the device's cores, a
link, a bus, the host's cores, the drives. A resource does one work at a time; a track that comes later may use a gap
before work of another track.

Each track also knows what every moment of it went by for. A track that waits for another takes over the other's reasons
for that time. So what the training loop's stream did not compute in is blamed on what was really waited for, through
any number of events, threads and queues.
"""

from __future__ import annotations

import contextlib
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwell.errors import ShardwellError
from shardwell.virtual_time.speeds import Speeds

if TYPE_CHECKING:
    from torch import Tensor

COMPUTE, INSIDE, BETWEEN, UP, DOWN, UPDATE, DISK, HOST = RESOURCES = (
    *("compute", "link inside", "link between", "copy up", "copy down", "host update", "disk", "host"),
)
IDLE = "idle"


@dataclass(frozen=True)
class Task:
    """One work of a simulated step; times are seconds of the clock."""

    name: str
    resource: str  # one of RESOURCES
    begin: float
    end: float
    num_bytes: int = 0


class Track:
    """An order of work, and the reason for each of its moments."""

    def __init__(self, name: str, begun_by: Track | None = None) -> None:
        """Give a track that another one has begun the reasons of that one until then."""
        self.name = name
        self.at: float = 0.0 if begun_by is None else begun_by.at
        self._begun_by, self._begin = begun_by, self.at
        self._begins: list[float] = []
        self._pieces: list[tuple[float, float, str]] = []  # begin, end, reason: without gaps, in order

    def fill(self, upto: float, reason: str) -> None:
        """Let time pass for a reason."""
        if upto <= self.at:
            return
        if self._pieces and self._pieces[-1][2] == reason and self._pieces[-1][1] == self.at:
            self._pieces[-1] = (self._pieces[-1][0], upto, reason)
        else:
            self._begins.append(self.at)
            self._pieces.append((self.at, upto, reason))
        self.at = upto

    def take_over(self, other: Track, upto: float) -> None:
        """Wait until a time of another track, for the reasons of that track."""
        if upto <= self.at:
            return
        for begin, end, reason in other.reasons(self.at, upto):
            self.fill(begin, IDLE)
            self.fill(end, reason)
        self.fill(upto, IDLE)

    def reasons(self, begin: float, end: float) -> list[tuple[float, float, str]]:
        """Return what happened in an interval."""
        if self._begun_by is not None and begin < self._begin:
            before = self._begun_by.reasons(begin, min(end, self._begin))
            return before + (self.reasons(self._begin, end) if end > self._begin else [])
        first = max(0, bisect_right(self._begins, begin) - 1)
        found = []
        for place in range(first, len(self._pieces)):
            one, other, reason = self._pieces[place]
            if one >= end:
                break
            if other > begin:
                found.append((max(one, begin), min(other, end), reason))
        return found


class _Resource:
    """A resource that does one work at a time."""

    def __init__(self) -> None:
        self._begins: list[float] = []
        self._ends: list[float] = []

    def place(self, ready: float, seconds: float) -> float:
        """Return when work that is ready at a time begins: in the first gap that is long enough."""
        place = max(0, bisect_right(self._ends, ready))
        begin = ready
        while place < len(self._begins) and self._begins[place] < begin + seconds:
            begin = max(begin, self._ends[place])
            place += 1
        self._enter(place, begin, begin + seconds)
        return begin

    def is_busy(self, at: float) -> bool:
        """Return whether work has been placed at a time."""
        place = bisect_right(self._ends, at)
        return place < len(self._begins) and self._begins[place] <= at

    def _enter(self, place: int, begin: float, end: float) -> None:
        joins_last = place > 0 and self._ends[place - 1] == begin
        joins_next = place < len(self._begins) and self._begins[place] == end
        if joins_last and joins_next:
            self._ends[place - 1] = self._ends.pop(place)
            del self._begins[place]
        elif joins_last:
            self._ends[place - 1] = end
        elif joins_next:
            self._begins[place] = begin
        elif end > begin:
            self._begins.insert(place, begin)
            self._ends.insert(place, end)


@dataclass(frozen=True)
class TrackPoint:
    """A time of a track."""

    time: float
    track: Track


class VirtualClock:
    """The tracks and resources of one simulated rank."""

    def __init__(self, speeds: Speeds, *, has_gpus: bool = True, local_ranks: int = 1) -> None:
        """`local_ranks` share the host and the drives. Without GPUs, kernels run in the thread that calls them."""
        self.speeds, self.has_gpus = speeds, has_gpus
        self.loop = self.thread = Track("training loop")
        self.compute = self.stream = Track("compute") if has_gpus else self.loop
        self.tasks: list[Task] = []
        self.moved: Counter[str] = Counter()  # bytes by resource
        self.label = ""  # of kernels: what the engine does now
        self.collective = ""  # the name of the collective that is being started
        self.flops = 0.0  # of matrix products so far
        self.progress: Callable[[], bool] | None = None  # runs a task of a worker; false if there is none
        self.is_on_device: Callable[[Tensor], bool] = lambda _: True
        self._share = 1.0 / local_ranks
        self._resources = {name: _Resource() for name in RESOURCES}
        if not has_gpus:  # the same cores
            self._resources[UPDATE] = self._resources[COMPUTE]

    # ------------------------------------------------------------------------------------------------------- tracks

    def now(self) -> TrackPoint:
        """Return the time at which the current stream will have done what it was given so far."""
        track = self.stream
        if track.at < self.thread.at:
            track.take_over(self.thread, self.thread.at)
        return TrackPoint(track.at, track)

    def thread_now(self) -> TrackPoint:
        """Return the time of the current thread."""
        return TrackPoint(self.thread.at, self.thread)

    @contextlib.contextmanager
    def on_stream(self, track: Track) -> Iterator[None]:
        """Give the work inside to a stream."""
        before, self.stream = self.stream, track
        try:
            yield
        finally:
            self.stream = before

    @contextlib.contextmanager
    def on_thread(self, track: Track) -> Iterator[None]:
        """Run what is inside on another thread, whose current stream is the usual one."""
        before, self.thread, self.stream = (self.thread, self.stream), track, self.compute if self.has_gpus else track
        try:
            yield
        finally:
            self.thread, self.stream = before

    def progress_until(self, is_met: Callable[[], bool]) -> None:
        """Let workers run until a condition is met that the current thread waits for."""
        while not is_met():
            if self.progress is None or not self.progress():
                raise ShardwellError("a thread of the simulation waits for what no worker will do")

    # -------------------------------------------------------------------------------------------------------- work

    def kernel(
        self,
        num_bytes: int,
        flops: float = 0.0,
        dtype: str = "bf16",
        *,
        is_attention: bool = False,
        num_strided: int = 0,
    ) -> None:
        """Add a kernel to the current stream: it takes the time of its bytes or of its FLOPs, whichever is longer.

        `num_strided`: the elements that it writes where its tensors have gaps or are in different orders.
        """
        speeds, seconds = self.speeds, max(num_bytes, num_strided / self.speeds.strided_share)
        seconds /= speeds.device_memory
        if flops:
            rate = speeds.matmul_in(dtype).at(flops) * (speeds.attention_share if is_attention else 1.0)
            seconds, self.flops = max(seconds, flops / rate), self.flops + flops
        if self.has_gpus:
            self.thread.fill(self.thread.at + speeds.launch_seconds, HOST)
            self._work(self.stream, COMPUTE, max(seconds, speeds.kernel_seconds), self.label, num_bytes)
        else:
            self._work(self.thread, COMPUTE, seconds + speeds.launch_seconds, self.label, num_bytes)

    def touch(self, tensors: Sequence[Tensor], flops: float = 0.0, dtype: str = "bf16") -> None:
        """Add what reads and writes tensors, the last of which is written: a kernel, a copy, or work of the host."""
        on_device = [self.is_on_device(tensor) for tensor in tensors]
        sizes = [tensor.nbytes for tensor in tensors]
        if all(on_device):
            self.kernel(sum(sizes), flops, dtype)
        elif not any(on_device):
            self.host_work("host update", sum(sizes))
        else:
            self.copy(sum(sizes[:-1]), is_up=on_device[-1])

    def copy(self, num_bytes: int, *, is_up: bool) -> None:
        """Add a copy between host and device to the current stream."""
        resource, rate = (UP, self.speeds.copy_up) if is_up else (DOWN, self.speeds.copy_down)
        self.thread.fill(self.thread.at + self.speeds.launch_seconds, HOST)
        self._work(self.stream, resource, num_bytes / rate, resource, num_bytes)

    def host_work(self, name: str, num_bytes: int, *, out_of_place: bool = False, eight_bit: bool = False) -> None:
        """Let the current thread read and write bytes of host memory: an optimizer step, or a sum."""
        rate = self.speeds.host_update * self._share
        rate *= self.speeds.out_of_place_share if out_of_place else 1.0  # caches read what they are to overwrite
        rate *= self.speeds.eight_bit_share if eight_bit else 1.0
        self._work(self.thread, UPDATE, num_bytes / rate, name, num_bytes)

    def disk(self, num_bytes: int, *, is_write: bool, urgent: bool) -> TrackPoint:
        """Begin a transfer now; return its end. It is divided into as many parts as there are ranks in the node."""
        rate = self.speeds.disk_write if is_write else self.speeds.disk_read
        track = Track("disk", self.thread)
        self._work(track, DISK, num_bytes / (rate * self._share), "write" if is_write else "read", num_bytes)
        return TrackPoint(track.at, track)

    def move(self, name: str, inside: int, between: int, nodes: int, *, between_each: float | None = None) -> None:
        """Add a collective to the current stream, in which the rank receives bytes inside its node and between nodes.

        `between_each`: the bytes of those between nodes that pass this rank's own link, where ranks of a node share the
        way; by default all of them.
        """
        self._move(self.stream, name, inside, between, nodes, between_each)

    def begin_move(self, name: str, inside: int, between: int, nodes: int) -> TrackPoint:
        """Begin a collective that threads of the backend move; return its end."""
        track = Track("links", self.thread)
        self._move(track, name, inside, between, nodes, None)
        return TrackPoint(track.at, track)

    def _move(self, track: Track, name: str, inside: int, between: int, nodes: int, between_each: float | None) -> None:
        resource, seconds = self.link_seconds(inside, between, nodes, between_each)
        # What is ready while the link is busy runs beside that, on another communicator: together they may be faster.
        is_faster = resource is INSIDE and self.speeds.two_communicators > 1.0
        if is_faster and self._resources[INSIDE].is_busy(max(track.at, self.thread.at)):
            _, seconds = self.link_seconds(inside, between, nodes, between_each, is_beside=True)
        self._work(track, resource, seconds, self.collective or name, inside + between)

    def link_seconds(
        self, inside: int, between: int, nodes: int, between_each: float | None = None, *, is_beside: bool = False
    ) -> tuple[str, float]:
        """Return the link that bytes go over, and the seconds that they take.

        `is_beside`: links inside a node work for another communicator already.
        """
        speeds = self.speeds
        across = (between if between_each is None else between_each) / speeds.between
        within = (inside if between_each is None else inside + between) / speeds.inside
        resource = BETWEEN if nodes > 1 and (across >= within or not inside) else INSIDE
        if is_beside:
            return resource, max(across, within / speeds.two_communicators)
        latency = speeds.inside_seconds + speeds.between_seconds * math.log2(max(1, nodes))
        return resource, latency + max(across, within)

    def _work(self, track: Track, resource: str, seconds: float, name: str, num_bytes: int) -> None:
        if track.at < self.thread.at:
            track.take_over(self.thread, self.thread.at)  # a stream cannot begin before the host has said so
        begin = self._resources[resource].place(track.at, seconds)
        track.fill(begin, resource)
        track.fill(begin + seconds, resource)
        self.moved[resource] += num_bytes
        last = self.tasks[-1] if self.tasks else None
        if (
            last is not None
            and (last.name, last.resource, last.end) == (name, resource, begin)
            and resource in (COMPUTE, UPDATE)
        ):
            self.tasks[-1] = Task(name, resource, last.begin, begin + seconds, last.num_bytes + num_bytes)
        else:
            self.tasks.append(Task(name, resource, begin, begin + seconds, num_bytes))
