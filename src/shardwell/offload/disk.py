"""The disk tier: bytes that are stored on one or several NVMe disks, with asynchronous reads and writes.

An extent is a contiguous range of the tier, striped over the paths. Reads and writes go directly between the disks and
host memory, bypass the page cache, and have many blocks in flight. Two transfers of the same bytes are not ordered: a
reader of bytes that are still being written must wait for the write first.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from shardwell import spans
from shardwell.errors import ShardwellError
from shardwell.kernels.io import SECTOR, IoOutcome, IoPart, IoQueue, IoRequest
from shardwell.memory.machine import current_machine
from shardwell.memory.statistics import human
from shardwell.offload.disk_file import DiskFile, rounded
from shardwell.offload.disk_queue import (
    AioSettings,
    IoEngineChoice,
    SimulatedQueue,
    aligned,
    check,
    choose,
    open_queue,
    settle,
)
from shardwell.spans import waiting
from shardwell.virtual_time.virtual_clock import TrackPoint

__all__ = ["AioSettings", "DiskExtent", "DiskTier", "DiskTransfer", "aligned"]

Tell = Callable[[ShardwellError], object]


@dataclass(frozen=True)
class FileRegion:
    """The part of an extent that is in one file."""

    lane: int  # the index of the file
    offset: int
    size: int


@dataclass(frozen=True, eq=False)
class DiskExtent:
    """A range of the tier. Stripe i is in region i % len(regions), after the earlier stripes of that region."""

    num_bytes: int
    stripe: int
    regions: tuple[FileRegion, ...]

    def places(self, start: int, size: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (file index, offset in the file, offset in memory, size) of the pieces of a range, in order."""
        end = start + size
        while start < end:
            stripe, inside = divmod(start, self.stripe)
            row, column = divmod(stripe, len(self.regions))
            region = self.regions[column]
            length = min(end - start, self.stripe - inside if len(self.regions) > 1 else end - start)
            yield region.lane, region.offset + row * self.stripe + inside, size - (end - start), length
            start += length


class DiskTransfer:
    """A read or write in flight. The memory must not be touched until it is done."""

    def __init__(
        self,
        request: IoRequest,
        extent: DiskExtent,
        memory: Tensor,
        about: tuple[bool, list[IoPart], tuple[Path, ...], float],
        tell: Tell | None,
    ) -> None:
        self.extent = extent
        self._tell = tell
        self._about = about  # the arguments of `check`, for the error message
        self._memory: Tensor | None = memory  # stays alive as long as the disks access it
        self._request: IoRequest | None = request
        self.point: TrackPoint | None = getattr(
            request, "point", None
        )  # in a simulation with virtual time: when it ends
        self._outcome: IoOutcome | None = None
        self._is_stuck = False

    @property
    def is_done(self) -> bool:
        """Whether it has ended, successfully or not."""
        request = self._request
        if request is not None:
            self._note(request.wait(0))
        return self._outcome is not None

    @property
    def has_passed(self) -> bool:
        """The same as `is_done`, as a task handle has it."""
        return self.is_done

    @property
    def has_succeeded(self) -> bool:
        """Whether it has ended without an error."""
        return self.is_done and self._outcome is not None and not self._outcome.error

    @property
    def seconds(self) -> float:
        """The seconds from the request to its end; 0 if it has not ended."""
        return self._outcome.seconds if self.is_done and self._outcome is not None else 0.0

    def synchronize(self) -> None:
        """Block until it is done, successfully or not."""
        self.end()

    def wait(self) -> None:
        """Block until it is done. Raise a ShardwellError if it failed, or if the disks have stopped answering."""
        with waiting("disk"):
            self.end()
        with _told(self._tell):
            check(self._outcome or IoOutcome(False, 0), *self._about)

    def end(self) -> bool:
        """Block until it is done, successfully or not. Return False if the disks have stopped answering."""
        request = self._request
        if request is not None and not self._is_stuck:
            outcome = settle(request, self._about[3])
            self._is_stuck = not outcome.is_done
            self._note(outcome)
        return self.is_done

    def _note(self, outcome: IoOutcome) -> None:
        if outcome.is_done:
            self._outcome = outcome  # first: another thread may read it
            if self.point is None:
                self._request = self._memory = None
        elif self.point is not None:
            self._outcome = None  # a simulated thread may be at an earlier time than the one that asked before


class DiskTier:
    """Private files of this process, one on each path. They are removed when the process ends, however it ends."""

    def __init__(self, paths: Sequence[str | os.PathLike[str]], settings: AioSettings | None = None) -> None:
        self.settings = settings or AioSettings()
        self.is_simulated = current_machine().ranks is not None
        self.num_read = self.num_written = 0  # bytes since the tier was opened
        self.tell: Tell | None = None  # is called with an error before it is raised, on any thread
        self.paths = tuple(Path(path) for path in paths)
        if not self.paths:
            raise ShardwellError("the disk tier has no path; name a directory on a local drive")
        self._files: list[DiskFile] = []
        try:
            for path in self.paths:
                self._files.append(DiskFile(path, is_simulated=self.is_simulated))
            if self.is_simulated:
                self.choice = IoEngineChoice("none", "the drives are simulated")
                self._queue: IoQueue = SimulatedQueue()
            else:
                self.choice = choose(self.paths, self.settings)
                self._queue = open_queue(self.choice.engine, len(self.paths), self.settings)
        except BaseException:
            for file in self._files:
                file.close()
            raise
        self._lock = threading.RLock()
        self._extents: set[DiskExtent] = set()
        self._pending: deque[DiskTransfer] = deque()
        self._finalizer = weakref.finalize(self, _shut, os.getpid(), self._queue, self._files, self._pending)

    @property
    def num_bytes(self) -> int:
        """The bytes that are reserved on the disks."""
        return sum(file.size for file in self._files)

    @property
    def is_direct(self) -> bool:
        """Whether all paths bypass the page cache."""
        return all(file.is_direct for file in self._files)

    def memory(self, num_bytes: int) -> Tensor:
        """Return uninitialised bytes of host memory that the disks can copy to and from."""
        return torch.empty(num_bytes, dtype=torch.uint8, device="meta") if self.is_simulated else aligned(num_bytes)

    def allocate(self, num_bytes: int) -> DiskExtent:
        """Reserve space for that many bytes, without filling it. A full disk raises an error and changes nothing."""
        if num_bytes < 0:
            raise ShardwellError(f"an extent of {num_bytes} bytes; expected 0 or more")
        with self._lock:
            self._check_open()
            stripe = self.settings.block_size
            order = sorted(range(len(self._files)), key=lambda lane: self._files[lane].size)
            regions: list[FileRegion] = []
            try:
                with _told(self.tell):
                    for place, lane in enumerate(order):
                        size = _share(num_bytes, stripe, place, len(order))
                        regions.append(FileRegion(lane, self._files[lane].take(size) if size else 0, size))
            except ShardwellError:
                self._give(regions)
                raise
            extent = DiskExtent(num_bytes, stripe, tuple(regions))
            self._extents.add(extent)
            return extent

    def read(self, extent: DiskExtent, start: int, memory: Tensor, *, urgent: bool = False) -> DiskTransfer:
        """Start to read the extent from byte `start` on into `memory`. Urgent reads have precedence."""
        return self._begin(False, extent, start, memory, urgent)

    def write(self, extent: DiskExtent, start: int, memory: Tensor) -> DiskTransfer:
        """Start to write `memory` to the extent, from byte `start` on.

        The size must be a multiple of SECTOR unless it ends where the extent does, because disks write full sectors.
        """
        return self._begin(True, extent, start, memory)

    def free(self, extent: DiskExtent) -> None:
        """Free an extent, once its transfers have ended."""
        with self._lock:
            self._check_extent(extent)
            if not all(transfer.end() for transfer in self._pending if transfer.extent is extent):
                raise ShardwellError(f"an extent of {human(extent.num_bytes)} cannot be freed: its transfers hang")
            self._extents.remove(extent)
            self._give(extent.regions)

    def close(self) -> None:
        """Wait for transfers in flight, and free all space."""
        with self._lock:
            self._extents.clear()
            self._finalizer()

    def __enter__(self) -> DiskTier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(
        self, is_write: bool, extent: DiskExtent, start: int, memory: Tensor, urgent: bool = False
    ) -> DiskTransfer:
        with self._lock:
            self._check_extent(extent)
            size = _check(is_write, extent, start, memory, "meta" if self.is_simulated else "cpu")
            address = memory.data_ptr()
            if is_write:
                self.num_written += size
            else:
                self.num_read += size
            parts = [
                IoPart(offset, address + at, length, self._files[lane].descriptor, lane)
                for lane, offset, at, length in extent.places(start, size)
            ]
            about = is_write, parts, self.paths, self.settings.stall_timeout
            transfer = DiskTransfer(
                self._queue.submit(is_write, parts, urgent=urgent), extent, memory, about, self.tell
            )
            while self._pending and self._pending[0].is_done:
                self._pending.popleft()
            self._pending.append(transfer)
            if spans.listener is not None:
                spans.listener.transfer(is_write, size, transfer)
            return transfer

    def _give(self, regions: Sequence[FileRegion]) -> None:
        for region in regions:
            self._files[region.lane].give(region.offset, region.size)

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise ShardwellError("the disk tier is closed")

    def _check_extent(self, extent: DiskExtent) -> None:
        self._check_open()
        if extent not in self._extents:
            raise ShardwellError(f"an extent of {human(extent.num_bytes)} is not one of this tier's, or was freed")


@contextlib.contextmanager
def _told(tell: Tell | None) -> Iterator[None]:
    try:
        yield
    except ShardwellError as error:
        if tell is not None:
            tell(error)
        raise


def _share(num_bytes: int, stripe: int, place: int, num_places: int) -> int:
    """Return the bytes of an extent, in full sectors, that one of its regions holds."""
    num_stripes = -(-num_bytes // stripe)
    share = max(0, -((place - num_stripes) // num_places)) * stripe
    is_last = num_stripes > 0 and (num_stripes - 1) % num_places == place
    return share - (num_stripes * stripe - rounded(num_bytes) if is_last else 0)


def _check(is_write: bool, extent: DiskExtent, start: int, memory: Tensor, home: str) -> int:
    """Return the size of a transfer; raise if the disks cannot do it."""
    size = memory.numel() * memory.element_size()
    end = start + size
    if memory.device.type != home or not memory.is_contiguous():
        raise ShardwellError(f"memory: found a tensor on {memory.device}, expected a contiguous one in host memory")
    if size and memory.data_ptr() % SECTOR:
        raise ShardwellError(f"memory: its address is no multiple of {SECTOR}; take it from aligned()")
    if start % SECTOR or start < 0 or end > extent.num_bytes:
        raise ShardwellError(
            f"bytes {start} to {end} of an extent of {extent.num_bytes}; expected them inside it, "
            f"from a multiple of {SECTOR} on"
        )
    if is_write and size % SECTOR and end != extent.num_bytes:
        raise ShardwellError(
            f"writing bytes {start} to {end} of an extent of {extent.num_bytes} would change what follows; expected "
            f"a multiple of {SECTOR}, or the end of the extent"
        )
    return size


_left: list[object] = []  # disks that answer again may still write to the memory of transfers


def _shut(process: int, queue: IoQueue, files: list[DiskFile], pending: deque[DiskTransfer]) -> None:
    if os.getpid() == process:  # a fork has the files, but not the threads
        if not all(transfer.end() for transfer in pending):
            warnings.warn("the disk tier is left as it is: its drives have stopped answering", stacklevel=2)
            _left.append((queue, files, pending))
            return
        queue.close()
    pending.clear()
    for file in files:
        file.close()
