"""Streams, events and memory of the device, with the differences between cpu, cuda and meta.

A `Stream` is a CUDA stream; on cpu and meta it stands for the program order itself, where the process group's own
threads provide the overlap. An `Event` is a point on a stream that another stream can wait for.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwell.memory.statistics import Tier

_KEEP_BYTES = 1 << 30
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's mallopt keys
_SMALL_PIECE = 1 << 16  # bytes: smaller shards do not matter
_MOST_BY_ITSELF = 1 << 25  # to which glibc raises its own threshold as large blocks are freed, if it is not set
_MADV_POPULATE_WRITE = 23  # of Linux, since 5.14
_PAGE, _WORTH_IT = 4096, 1 << 21

_keeps_pages = False  # malloc was told to keep freed pages


class Waitable(Protocol):
    """A point of work that the host can wait for."""

    @property
    def is_done(self) -> bool: ...

    def synchronize(self) -> None: ...


@dataclass(frozen=True)
class AllOf:
    """A waitable that is done when all of several others are."""

    of: Sequence[Waitable]

    @property
    def is_done(self) -> bool:
        return all(one.is_done for one in self.of)

    def synchronize(self) -> None:
        for one in self.of:
            one.synchronize()


@dataclass(frozen=True)
class Event:
    """A point on a stream. `wait` orders the current stream behind it; the host goes on."""

    event: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Order the current stream behind this event, without blocking the host."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)

    @property
    def is_done(self) -> bool:
        """Return whether the event has passed."""
        return self.event is None or self.event.query()

    def synchronize(self) -> None:
        """Block the host until the event has passed."""
        if self.event is not None:
            self.event.synchronize()


@dataclass(frozen=True)
class Moment:
    """A time: on CUDA that at which a stream gets to a point of its work, elsewhere that of the host's clock."""

    seconds: float  # of the host's clock, when the point was enqueued
    event: torch.cuda.Event | None = None

    def since(self, earlier: Moment) -> float:
        """Return the seconds since an earlier moment of the same device. On CUDA this waits for both."""
        if self.event is None or earlier.event is None:
            return self.seconds - earlier.seconds
        self.event.synchronize()
        earlier.event.synchronize()
        return float(earlier.event.elapsed_time(self.event)) / 1e3


@dataclass(frozen=True)
class Stream:
    """An order of work beside the current stream."""

    stream: torch.cuda.Stream | None = None

    def after_current(self) -> AbstractContextManager[None]:
        """Return a context that enqueues work on this stream, behind what the caller's stream has been given so far."""
        return _NO_STREAM if self.stream is None else _enqueue_after_current(self.stream)

    def after(self, mark: Event) -> AbstractContextManager[None]:
        """Return a context, for any thread, that enqueues work on this stream, behind an event on another one."""
        return _NO_STREAM if self.stream is None else _enqueue_after(self.stream, mark)

    def record(self) -> Event:
        """Return an event behind the work that this stream has been given so far."""
        if self.stream is None:
            return _NO_EVENT
        event = torch.cuda.Event()
        event.record(self.stream)
        return Event(event)


_NO_STREAM: AbstractContextManager[None] = contextlib.nullcontext()  # where the program order is the stream
_NO_EVENT = Event()


@contextlib.contextmanager
def _enqueue_after_current(stream: torch.cuda.Stream) -> Iterator[None]:
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield


@contextlib.contextmanager
def _enqueue_after(stream: torch.cuda.Stream, mark: Event) -> Iterator[None]:
    with torch.cuda.stream(stream):
        mark.wait()
        yield


class Stopwatch:
    """Measures how long the device works on what is enqueued inside, over several uses; on the cpu, the host's time."""

    def __init__(self, *, on_cuda: bool) -> None:
        self._on_cuda = on_cuda
        self.reset()

    def reset(self) -> None:
        """Begin a new measurement."""
        self._seconds, self._spans = 0.0, list[tuple[torch.cuda.Event, torch.cuda.Event]]()

    def __enter__(self) -> None:
        if self._on_cuda:
            self._begin = torch.cuda.Event(enable_timing=True)
            self._begin.record()
        else:
            self._since = time.perf_counter()

    def __exit__(self, *_error: object) -> None:
        if self._on_cuda:
            end = torch.cuda.Event(enable_timing=True)
            end.record()
            self._spans.append((self._begin, end))
        else:
            self._seconds += time.perf_counter() - self._since

    def seconds(self) -> float:
        """Return the sum of the times; on a GPU this waits for the last one."""
        if self._spans:
            self._spans[-1][1].synchronize()
            self._seconds += sum(begin.elapsed_time(end) for begin, end in self._spans) / 1e3
            self._spans.clear()
        return self._seconds


_pinned: dict[int, weakref.finalize[..., Any]] = {}  # by address: unpins the memory, at the latest when it is freed


def _unregister(runtime: Any, address: int) -> None:
    _pinned.pop(address, None)
    runtime.cudaHostUnregister(address)


class Device:
    """A torch device, its streams, and all that differs between kinds of device."""

    torch_device: torch.device
    is_cuda: bool
    is_meta: bool  # tensors have shapes but no values: nothing can be read back
    all_gather_stream: Stream
    prefetch_stream: Stream  # copies shards to the device ahead of their all-gathers
    reduce_stream: Stream
    copy_stream: Stream  # copies to the host and back
    upload_stream: Stream  # copies updated parameters to the device

    def __init__(self, device: torch.device | str, *, keep_pages: bool = True) -> None:
        where = torch.device(device)
        is_bare_cuda = where.type == "cuda" and str(where) == "cuda"
        self.torch_device = torch.device("cuda", torch.cuda.current_device()) if is_bare_cuda else where
        self.is_cuda, self.is_meta = where.type == "cuda", where.type == "meta"
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
    def has_device_memory(self) -> bool:
        """Return whether the device has memory of its own, to which data on the host has to be copied."""
        return self.is_cuda

    def empty(self, numel: int, dtype: torch.dtype, tier: Tier = Tier.DEVICE, *, pinned: bool = True) -> Tensor:
        """Return an uninitialised 1-D tensor on a tier.

        Host memory next to a GPU is pinned, unless only the host uses it.
        """
        if tier is Tier.DEVICE or self.is_meta:
            return torch.empty(numel, dtype=dtype, device=self.torch_device)
        if self.is_cuda and not pinned:
            # All threads touch the pages here: a first copy would fault them in one by one.
            return torch.empty(numel, dtype=dtype, device="cpu").zero_()
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=self.is_cuda and pinned)

    def pinned(self, num_bytes: int) -> Tensor:
        """Return pinned host memory of exactly `num_bytes` (torch would round the size up)."""
        return self.pin(torch.empty(num_bytes, dtype=torch.uint8, device="cpu"))

    def pin(self, memory: Tensor) -> Tensor:
        """Pin this memory, until it is freed, so that the device can copy to and from it asynchronously; return it."""
        num_bytes = memory.numel() * memory.element_size()
        if self.is_cuda and num_bytes:
            runtime: Any = torch.cuda.cudart()
            torch.cuda.check_error(int(runtime.cudaHostRegister(memory.data_ptr(), num_bytes, 0)))
            _pinned[memory.data_ptr()] = weakref.finalize(
                memory.untyped_storage(), _unregister, runtime, memory.data_ptr()
            )
        return memory

    def unpin(self, memory: Tensor) -> None:
        """Unpin memory that `pin` has pinned, before its bytes are freed under a storage that stays."""
        if memory.numel() and (unregister := _pinned.get(memory.data_ptr())) is not None:
            unregister()

    def scalar(self, value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a 0-D tensor on the device."""
        return torch.full((), value, dtype=dtype, device=self.torch_device)

    def read_async(self, value: Tensor) -> AsyncScalar:
        """Start copying a small tensor to the host without waiting for it."""
        if self.is_cuda:
            copy = torch.empty_like(value, device="cpu", pin_memory=True)
            copy.copy_(value, non_blocking=True)
            return AsyncScalar(copy, self.now())
        return AsyncScalar(value, _NO_EVENT)

    def now(self) -> Event:
        """Return an event behind the work that the current stream has been given so far."""
        if not self.is_cuda:
            return Event()
        event = torch.cuda.Event()
        event.record()
        return Event(event)

    def moment(self, stream: Stream | None = None) -> Moment:
        """Return the time at which a stream, by default the current one, will have done the work that it has so far."""
        if not self.is_cuda:
            return Moment(time.perf_counter())
        event = torch.cuda.Event(enable_timing=True)
        event.record() if stream is None or stream.stream is None else event.record(stream.stream)
        return Moment(time.perf_counter(), event)

    @property
    def name(self) -> str:
        """The name of the hardware, such as NVIDIA H200; of other devices than CUDA their type."""
        return torch.cuda.get_device_name(self.torch_device) if self.is_cuda else self.torch_device.type

    def peak_bytes(self) -> int:
        """Return the most bytes that tensors have had on the device at a time; 0 where torch does not count them."""
        return torch.cuda.max_memory_allocated(self.torch_device) if self.is_cuda else 0

    def copy_to_host(self, source: Tensor) -> tuple[Tensor, Event]:
        """Start copying a 1-D tensor to the host; the source must not be freed or changed before the event."""
        copy = self.empty(source.numel(), source.dtype, Tier.HOST)
        with self.copy_stream.after_current():
            copy.copy_(source, non_blocking=True)
        return copy, self.copy_stream.record()

    def copy_from_host(self, source: Tensor) -> tuple[Tensor, Event]:
        """Start copying a 1-D tensor to the device; the copy may be read after the event, and freed at any time.

        Its memory belongs to the copy stream. The next copy that reuses it is on that stream too, ordered behind the
        work that the current stream has been given by then.
        """
        with self.copy_stream.after_current():
            copy = self.empty(source.numel(), source.dtype)
            copy.copy_(source, non_blocking=True)
        return copy, self.copy_stream.record()

    def free_bytes(self) -> float:
        """Return the device bytes that this process may have but never reserved so far; 0 where this is unknown."""
        if not self.is_cuda:
            return 0.0
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        mine = min(self.capacity_bytes(), free + torch.cuda.memory_reserved(self.torch_device))
        return max(0.0, mine - torch.cuda.max_memory_reserved(self.torch_device))

    def capacity_bytes(self) -> float:
        """Return the device bytes that this process may have; 0 where this is unknown."""
        if not self.is_cuda:
            return 0.0
        total = torch.cuda.get_device_properties(self.torch_device).total_memory
        return total * torch.cuda.get_per_process_memory_fraction(self.torch_device)

    def available_bytes(self) -> float:
        """Return the device bytes that this process may have beyond those in use now; 0 where this is unknown."""
        if not self.is_cuda:
            return 0.0
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        num_ranks = -(-int(os.environ.get("LOCAL_WORLD_SIZE", "1")) // torch.cuda.device_count())  # that share the GPU
        mine = min(self.capacity_bytes(), free / num_ranks + torch.cuda.memory_reserved(self.torch_device))
        return max(0.0, mine - torch.cuda.memory_allocated(self.torch_device))

    def local_gpu_buses(self) -> tuple[int, list[str]] | None:
        """Return this rank's index on its machine and the PCI addresses of all GPUs there; None where there is none."""
        if not self.is_cuda:
            return None
        num_ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        rank = int(os.environ.get("LOCAL_RANK", "0")) % num_ranks
        return rank, [_bus_of(other % torch.cuda.device_count()) for other in range(num_ranks)]

    def random_state(self) -> Tensor | None:
        """Return the state of the device's random generator; None if it has none of its own."""
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
    """A small tensor in flight to the host."""

    value: Tensor
    event: Event

    def get(self) -> Tensor:
        """Wait for the copy and return the value on the host."""
        if self.event.event is not None:
            self.event.synchronize()
        return self.value


def _bus_of(index: int) -> str:
    """Return the PCI address of a GPU; an empty string where torch does not tell."""
    properties: Any = torch.cuda.get_device_properties(index)
    if not hasattr(properties, "pci_bus_id"):
        return ""
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def default_device() -> torch.device:
    """Return the device of this process: SHARDWELL_DEVICE if set, its own GPU if there is one, else the CPU."""
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
    """Make malloc keep freed pages instead of returning them to the kernel immediately.

    Stage 3 frees and allocates every unit's buffer twice a step; with glibc's defaults each allocation faults its pages
    in again, which costs five times the copy that fills them. `Device.trim` returns the pages on demand.
    """
    global _keeps_pages
    if (libc := _glibc()) is not None:
        _keeps_pages = True
        libc.mallopt(_M_MMAP_THRESHOLD, _KEEP_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES)


@contextlib.contextmanager
def returning_freed_pages(where: torch.device) -> Iterator[None]:
    """Make malloc return large blocks to the kernel as soon as they are freed inside, and all free ones at the end.

    Blocks that are freed between others that stay allocated would otherwise remain with the process.
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
    """Let the kernel populate all pages of new host memory in one call, which is cheaper than one fault per page.

    This is a hint: where the kernel does not support it, nothing happens.
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


def generator_of(device: torch.device) -> torch.Generator | None:
    """Return the generator of a device's random numbers; None if it has none, as the meta device."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator if device.type == "cpu" else None
