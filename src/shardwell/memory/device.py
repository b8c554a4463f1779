"""The device seam: the only module that knows cpu, cuda and meta apart.

A `Stream` is an order of work beside the main one (a CUDA stream; on cpu and meta the main order itself, where the
process group's own threads are the overlap). An `Event` is a point on a stream that another stream can wait for.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwell.memory.statistics import Tier
from shardwell.offload.cores import update_cores

_KEEP_BYTES = 1 << 30
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's mallopt keys
_SMALL_PIECE = 1 << 16  # bytes: a shard is at least as large, or does not matter
_MOST_BY_ITSELF = 1 << 25  # to which glibc raises its own limit as large pieces are freed, if nobody sets it
_MADV_POPULATE_WRITE = 23  # Linux's, since 5.14
_PAGE, _WORTH_IT = 4096, 1 << 21

_keeps_pages = False  # malloc was asked to


class Waitable(Protocol):
    """Something that the host can wait for."""

    @property
    def is_done(self) -> bool: ...

    def synchronize(self) -> None: ...


@dataclass(frozen=True)
class AllOf:
    """Passed when all of some others have."""

    of: Sequence[Waitable]

    @property
    def is_done(self) -> bool:
        return all(one.is_done for one in self.of)

    def synchronize(self) -> None:
        for one in self.of:
            one.synchronize()


@dataclass(frozen=True)
class Event:
    """A point on a lane. Waiting orders the current lane behind it; the host goes on."""

    event: torch.cuda.Event | None = None

    def wait(self) -> None:
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)

    @property
    def is_done(self) -> bool:
        return self.event is None or self.event.query()

    def synchronize(self) -> None:
        """Block the host until the mark has passed."""
        if self.event is not None:
            self.event.synchronize()


@dataclass(frozen=True)
class Stream:
    """An order of work of its own."""

    stream: torch.cuda.Stream | None = None

    @contextlib.contextmanager
    def after_current(self) -> Iterator[None]:
        """Put work on this lane, behind what the caller's lane has been given so far."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield

    @contextlib.contextmanager
    def after(self, mark: Event) -> Iterator[None]:
        """Put work on this lane, behind a mark on another one. Any thread may do so."""
        if self.stream is None:
            yield
            return
        with torch.cuda.stream(self.stream):
            mark.wait()
            yield

    def record(self) -> Event:
        if self.stream is None:
            return Event()
        event = torch.cuda.Event()
        event.record(self.stream)
        return Event(event)


class Device:
    """A torch device and what differs between kinds of device."""

    torch_device: torch.device
    all_gather_stream: Stream
    prefetch_stream: Stream  # of shards, ahead of their gathers
    reduce_stream: Stream
    copy_stream: Stream  # to the host and back
    upload_stream: Stream  # of updated parameters

    def __init__(self, device: torch.device | str, *, keep_pages: bool = True) -> None:
        where = torch.device(device)
        is_bare_cuda = where.type == "cuda" and str(where) == "cuda"
        self.torch_device = torch.device("cuda", torch.cuda.current_device()) if is_bare_cuda else where
        if self.is_cuda:
            self.all_gather_stream = Stream(torch.cuda.Stream(self.torch_device))
            self.prefetch_stream = Stream(torch.cuda.Stream(self.torch_device))
            self.reduce_stream = Stream(torch.cuda.Stream(self.torch_device))
            self.copy_stream = Stream(torch.cuda.Stream(self.torch_device))
            self.upload_stream = Stream(torch.cuda.Stream(self.torch_device))
        else:
            self.all_gather_stream = self.prefetch_stream = self.reduce_stream = self.copy_stream = (
                self.upload_stream
            ) = Stream()
            if keep_pages and self.torch_device.type == "cpu":
                keep_freed_pages()

    @property
    def is_cuda(self) -> bool:
        return self.torch_device.type == "cuda"

    @property
    def has_device_memory(self) -> bool:
        """What rests on the host has a way to go."""
        return self.is_cuda

    @property
    def is_meta(self) -> bool:
        """Tensors have shapes but no values: nothing can be read back."""
        return self.torch_device.type == "meta"

    def empty(self, numel: int, dtype: torch.dtype, tier: Tier = Tier.DEVICE, *, pinned: bool = True) -> Tensor:
        """An unfilled 1-D tensor on a tier; host memory next to a GPU is pinned unless only the host uses it."""
        if tier is Tier.DEVICE or self.is_meta:
            return torch.empty(numel, dtype=dtype, device=self.torch_device)
        if self.is_cuda and not pinned:
            return torch.empty(
                numel, dtype=dtype, device="cpu"
            ).zero_()  # touched by all threads: a copy would fault page by page
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=self.is_cuda and pinned)

    def pinned(self, num_bytes: int) -> Tensor:
        """Host memory that the device can copy to and from, of exactly that size (torch would round it up)."""
        return self.pin(torch.empty(num_bytes, dtype=torch.uint8, device="cpu"))

    def pin(self, memory: Tensor) -> Tensor:
        """The same memory, which the device can copy to and from until it is freed."""
        num_bytes = memory.numel() * memory.element_size()
        if self.is_cuda and num_bytes:
            runtime: Any = torch.cuda.cudart()
            torch.cuda.check_error(int(runtime.cudaHostRegister(memory.data_ptr(), num_bytes, 0)))
            weakref.finalize(memory.untyped_storage(), runtime.cudaHostUnregister, memory.data_ptr())
        return memory

    def scalar(self, value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((), value, dtype=dtype, device=self.torch_device)

    def read_async(self, value: Tensor) -> AsyncScalar:
        """Start copying a small tensor to the host without waiting for it."""
        if self.is_cuda:
            copy = torch.empty_like(value, device="cpu", pin_memory=True)
            copy.copy_(value, non_blocking=True)
            return AsyncScalar(copy, self.now())
        return AsyncScalar(value, Event())

    def now(self) -> Event:
        """The point that the current lane has been given work up to."""
        if not self.is_cuda:
            return Event()
        event = torch.cuda.Event()
        event.record()
        return Event(event)

    def copy_to_host(self, source: Tensor) -> tuple[Tensor, Event]:
        """Start copying a 1-D tensor; the source must not be freed or changed before the mark has passed."""
        copy = self.empty(source.numel(), source.dtype, Tier.HOST)
        with self.copy_stream.after_current():
            copy.copy_(source, non_blocking=True)
        return copy, self.copy_stream.record()

    def copy_from_host(self, source: Tensor) -> tuple[Tensor, Event]:
        """Start copying a 1-D tensor back; the copy may be read after the mark, and be freed at any time.

        Its memory is the lane's own. Whoever takes it next is on the lane too, behind the current lane's work so far.
        """
        with self.copy_stream.after_current():
            copy = self.empty(source.numel(), source.dtype)
            copy.copy_(source, non_blocking=True)
        return copy, self.copy_stream.record()

    def free_bytes(self) -> float:
        """What this process never needed so far of what it may have; 0 where that cannot be told."""
        if not self.is_cuda:
            return 0.0
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        mine = min(self.capacity_bytes(), free + torch.cuda.memory_reserved(self.torch_device))
        return max(0.0, mine - torch.cuda.max_memory_reserved(self.torch_device))

    def capacity_bytes(self) -> float:
        """What this process may have of the device; 0 where that cannot be told."""
        if not self.is_cuda:
            return 0.0
        total = torch.cuda.get_device_properties(self.torch_device).total_memory
        return total * torch.cuda.get_per_process_memory_fraction(self.torch_device)

    def available_bytes(self) -> float:
        """What this process may have of the device beside what it has in use now; 0 where that cannot be told."""
        if not self.is_cuda:
            return 0.0
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        num_ranks = -(-int(os.environ.get("LOCAL_WORLD_SIZE", "1")) // torch.cuda.device_count())  # that share it
        mine = min(self.capacity_bytes(), free / num_ranks + torch.cuda.memory_reserved(self.torch_device))
        return max(0.0, mine - torch.cuda.memory_allocated(self.torch_device))

    def update_cores(self) -> list[int] | None:
        """Which cores update what rests on the host; None: as many threads as torch has, wherever they run."""
        if not self.is_cuda:
            return None
        num_ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        rank = int(os.environ.get("LOCAL_RANK", "0")) % num_ranks
        return update_cores(rank, [_bus_of(other % torch.cuda.device_count()) for other in range(num_ranks)])

    def random_state(self) -> Tensor | None:
        """Of the generator on the device; None if it has none of its own."""
        return torch.cuda.get_rng_state(self.torch_device) if self.is_cuda else None

    def set_random_state(self, state: Tensor) -> None:
        if self.is_cuda:
            torch.cuda.set_rng_state(state, self.torch_device)

    def trim(self) -> None:
        """Return freed memory to the system."""
        if self.is_cuda:
            torch.cuda.empty_cache()
        elif self.torch_device.type == "cpu" and (libc := _glibc()) is not None:
            libc.malloc_trim(0)


@dataclass(frozen=True)
class AsyncScalar:
    """A value on its way to the host."""

    value: Tensor
    event: Event

    def get(self) -> Tensor:
        self.event.synchronize()
        return self.value


def _bus_of(index: int) -> str:
    """The PCI address of a GPU; empty where torch does not tell."""
    properties: Any = torch.cuda.get_device_properties(index)
    if not hasattr(properties, "pci_bus_id"):
        return ""
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def default_device() -> torch.device:
    """The device of this process: what SHARDWELL_DEVICE says, its own GPU if there is one, else the CPU."""
    if named := os.environ.get("SHARDWELL_DEVICE"):
        return torch.device(named)
    if torch.cuda.is_available():
        index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    return torch.device("cpu")


def num_gpus() -> int:
    return torch.cuda.device_count()


def keep_freed_pages() -> None:
    """Ask malloc to keep freed pages instead of returning them to the kernel at once.

    Stage 3 frees and regrows every unit's buffer twice a step; with glibc's defaults each regrowth faults its pages
    in again, which costs five times the copy that fills them. `Device.trim` gives the pages back on demand.
    """
    global _keeps_pages
    if (libc := _glibc()) is not None:
        _keeps_pages = True
        libc.mallopt(_M_MMAP_THRESHOLD, _KEEP_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES)


@contextlib.contextmanager
def returning_freed_pages(where: torch.device) -> Iterator[None]:
    """Meanwhile malloc returns large pieces to the kernel as soon as they are freed, and what is left at the end.

    Pieces that are freed between others that stay would otherwise be the process's for good.
    """
    libc = _glibc() if where.type == "cpu" else None
    if libc is None:
        yield
        return
    libc.mallopt(_M_MMAP_THRESHOLD, _SMALL_PIECE)
    libc.mallopt(_M_TRIM_THRESHOLD, _SMALL_PIECE)
    try:
        yield
    finally:
        for key, by_itself in ((_M_MMAP_THRESHOLD, _MOST_BY_ITSELF), (_M_TRIM_THRESHOLD, 2 * _MOST_BY_ITSELF)):
            libc.mallopt(key, _KEEP_BYTES if _keeps_pages else by_itself)
        libc.malloc_trim(0)


def prefault(memory: Tensor) -> Tensor:
    """Have the kernel give new host memory its pages at once, which is cheaper than one at a time.

    A hint: where it is not understood, nothing happens.
    """
    begin = -(-memory.data_ptr() // _PAGE) * _PAGE
    size = (memory.data_ptr() + memory.numel() * memory.element_size() - begin) // _PAGE * _PAGE
    if size >= _WORTH_IT and (libc := _glibc()) is not None:
        libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), _MADV_POPULATE_WRITE)
    return memory


def _glibc() -> ctypes.CDLL | None:
    try:
        libc = ctypes.CDLL("libc.so.6")
        return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None
    except OSError:
        return None
