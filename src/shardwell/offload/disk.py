"""The disk tier: bytes that rest on one or several drives, and come and go beside the caller.

An extent is a stretch of the tier, striped over the paths. Reads and writes go straight between the drives and host
memory, around the page cache, many blocks at once. Two transfers of the same bytes are in no order: whoever reads what
is still being written waits for the ticket first.
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

from torch import Tensor

from shardwell.errors import ShardwellError
from shardwell.kernels.io import SECTOR, IoOutcome, IoPart, IoQueue, IoRequest
from shardwell.memory.statistics import human
from shardwell.offload.disk_file import DiskFile, rounded
from shardwell.offload.disk_queue import AioSettings, IoEngineChoice, aligned, check, choose, open_queue, settle

__all__ = ["AioSettings", "DiskExtent", "DiskTier", "DiskTransfer", "aligned"]

Tell = Callable[[ShardwellError], object]


@dataclass(frozen=True)
class FileRegion:
    """Where the stripes of an extent lie that are in one file."""

    lane: int  # the number of the file
    offset: int
    size: int


@dataclass(frozen=True, eq=False)
class DiskExtent:
    """A stretch of the tier. Stripe number i is in region i % len(regions), behind those before it."""

    num_bytes: int
    stripe: int
    regions: tuple[FileRegion, ...]

    def places(self, start: int, size: int) -> Iterator[tuple[int, int, int, int]]:
        """(lane, offset in its file, offset in memory, size) of the pieces of a stretch, in order."""
        end = start + size
        while start < end:
            stripe, inside = divmod(start, self.stripe)
            row, column = divmod(stripe, len(self.regions))
            region = self.regions[column]
            length = min(end - start, self.stripe - inside if len(self.regions) > 1 else end - start)
            yield region.lane, region.offset + row * self.stripe + inside, size - (end - start), length
            start += length


class DiskTransfer:
    """A read or write on its way. The memory must not be touched until it is done."""

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
        self._about = about  # what `check` needs to tell what went wrong
        self._memory: Tensor | None = memory  # stays alive as long as the drives work on it
        self._request: IoRequest | None = request
        self._outcome: IoOutcome | None = None
        self._is_stuck = False

    @property
    def is_done(self) -> bool:
        request = self._request
        if request is not None:
            self._note(request.wait(0))
        return self._outcome is not None

    @property
    def has_passed(self) -> bool:
        return self.is_done

    @property
    def has_succeeded(self) -> bool:
        return self.is_done and self._outcome is not None and not self._outcome.error

    @property
    def seconds(self) -> float:
        """From when it was asked for until it was done; 0 if it is not."""
        return self._outcome.seconds if self.is_done and self._outcome is not None else 0.0

    def synchronize(self) -> None:
        """Block until it is done, well or not."""
        self.end()

    def wait(self) -> None:
        """Block until it is done; raises a ShardwellError if it failed, or if the drives have stopped answering."""
        self.end()
        with _told(self._tell):
            check(self._outcome or IoOutcome(False, 0), *self._about)

    def end(self) -> bool:
        """Block until it is done, well or not; False if the drives have stopped answering."""
        request = self._request
        if request is not None and not self._is_stuck:
            outcome = settle(request, self._about[3])
            self._is_stuck = not outcome.is_done
            self._note(outcome)
        return self.is_done

    def _note(self, outcome: IoOutcome) -> None:
        if outcome.is_done:
            self._outcome = outcome  # first: another thread may look
            self._request = self._memory = None


class DiskTier:
    """Files of this process alone, one on each path; they are gone when it ends, however it ends."""

    def __init__(self, paths: Sequence[str | os.PathLike[str]], settings: AioSettings | None = None) -> None:
        self.settings = settings or AioSettings()
        self.tell: Tell | None = None  # whom to tell of errors before they go up, on any thread
        self.paths = tuple(Path(path) for path in paths)
        if not self.paths:
            raise ShardwellError("the disk tier has no path; name a directory on a local drive")
        self._files: list[DiskFile] = []
        try:
            for path in self.paths:
                self._files.append(DiskFile(path))
            self.choice: IoEngineChoice = choose(self.paths, self.settings)
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
        """Reserved on the disks."""
        return sum(file.size for file in self._files)

    @property
    def is_direct(self) -> bool:
        """No path goes through the page cache."""
        return all(file.is_direct for file in self._files)

    def allocate(self, num_bytes: int) -> DiskExtent:
        """Space for so many bytes, reserved, not filled. A full disk is an error that changes nothing."""
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
        """Begin to fill `memory` with what the extent holds from byte `start` on; what is urgent comes first."""
        return self._begin(False, extent, start, memory, urgent)

    def write(self, extent: DiskExtent, start: int, memory: Tensor) -> DiskTransfer:
        """Begin to keep `memory` in the extent, from byte `start` on.

        Its size must be a multiple of SECTOR unless it ends where the extent does: drives write whole sectors.
        """
        return self._begin(True, extent, start, memory)

    def free(self, extent: DiskExtent) -> None:
        """Take an extent back, once its transfers have ended."""
        with self._lock:
            self._check_extent(extent)
            if not all(transfer.end() for transfer in self._pending if transfer.extent is extent):
                raise ShardwellError(f"an extent of {human(extent.num_bytes)} cannot be freed: its transfers hang")
            self._extents.remove(extent)
            self._give(extent.regions)

    def close(self) -> None:
        """Wait for what is on its way, and give everything back to the disks."""
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
            size = _check(is_write, extent, start, memory)
            address = memory.data_ptr()
            parts = [
                IoPart(offset, address + at, length, self._files[lane].descriptor, lane)
                for lane, offset, at, length in extent.places(start, size)
            ]
            about = is_write, parts, self.paths, self.settings.patience
            transfer = DiskTransfer(
                self._queue.submit(is_write, parts, urgent=urgent), extent, memory, about, self.tell
            )
            while self._pending and self._pending[0].is_done:
                self._pending.popleft()
            self._pending.append(transfer)
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
    """The bytes of an extent, in whole sectors, that one of its regions holds."""
    num_stripes = -(-num_bytes // stripe)
    share = max(0, -((place - num_stripes) // num_places)) * stripe
    is_last = num_stripes > 0 and (num_stripes - 1) % num_places == place
    return share - (num_stripes * stripe - rounded(num_bytes) if is_last else 0)


def _check(is_write: bool, extent: DiskExtent, start: int, memory: Tensor) -> int:
    """The size of a transfer; raises if the drives cannot do it."""
    size = memory.numel() * memory.element_size()
    end = start + size
    if memory.device.type != "cpu" or not memory.is_contiguous():
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


_left: list[object] = []  # drives that wake up again may still write to the memory of transfers


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
