"""Asynchronous reads and writes of files, many at a time: the queues of the compiled library through ctypes.

The structures mirror native/io.h. `kernels/io_reference.py` implements the same in Python. The module works on file
descriptors and addresses, not on tensors.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from shardwell import kernels
from shardwell.kernels.library import NAME, UnusableLibraryError, find

IO_VERSION = 3
SECTOR = 4096  # addresses, offsets and sizes of reads and writes are multiples of it
ENDED_EARLY = -1  # an error besides errno: fewer bytes were moved than requested
THREADS, IO_URING = 0, 1  # engines of the library

_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


@dataclass(frozen=True)
class IoQueueShape:
    """The number and size of the blocks in flight."""

    block: int  # bytes of one read or write
    lanes: int  # independent queues: one for each disk
    depth: int  # blocks in flight, for each ring of each lane
    parallelism: int  # rings of each lane; with threads, there are depth * parallelism
    single_submit: bool = False
    overlap_events: bool = True


class IoPart(NamedTuple):
    """Bytes that are contiguous in a file and in memory.

    Address and offset are multiples of SECTOR. The size need not be: then the file is read or written up to the next
    multiple of SECTOR, and the memory is not.
    """

    offset: int
    address: int
    size: int
    file: int  # a descriptor
    lane: int


class IoOutcome(NamedTuple):
    """The progress of a request, and the first of its errors."""

    is_done: bool
    completed: int  # blocks of any request that the queue has ended so far: while it grows, the queue makes progress
    error: int = 0  # errno or ENDED_EARLY
    part: int = 0  # the part that failed
    offset: int = 0  # where in its file it failed
    seconds: float = 0.0  # from submission to the end


class IoRequest(Protocol):
    """A submitted request. Its memory must stay allocated until it is done."""

    def wait(self, milliseconds: int) -> IoOutcome:
        """Return when the request is done, or after that time."""
        ...


class IoQueue(Protocol):
    """Takes requests, which end in any order.

    Reads begin in order, urgent ones first. Writes begin in order too, and alternate with reads.
    """

    def submit(self, is_write: bool, parts: Sequence[IoPart], *, urgent: bool = False) -> IoRequest: ...

    def close(self) -> None:
        """Wait for all requests, and close."""
        ...


class _Shape(ctypes.Structure):
    _fields_: ClassVar = [
        ("block", _SIZE),
        ("engine", _INT),
        ("lanes", _INT),
        ("depth", _INT),
        ("parallelism", _INT),
        ("single_submit", _INT),
        ("overlap_events", _INT),
    ]


class _Part(ctypes.Structure):
    _fields_: ClassVar = [("offset", _SIZE), ("address", _POINTER), ("size", _SIZE), ("file", _INT), ("lane", _INT)]


class _Outcome(ctypes.Structure):
    _fields_: ClassVar = [
        ("offset", _SIZE),
        ("completed", _SIZE),
        ("error", _INT),
        ("part", _INT),
        ("seconds", ctypes.c_double),
    ]


class IoLibrary:
    """The queues of the compiled library."""

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        if os.environ.get("SHARDWELL_NATIVE") == "0":
            raise UnusableLibraryError("SHARDWELL_NATIVE=0")
        try:
            self._library = ctypes.CDLL(os.fspath(path or find(kernels.__path__)))
            version = self._library.shardwell_io_version()
        except (OSError, AttributeError) as error:
            raise UnusableLibraryError(f"{NAME} cannot be used ({error}): install shardwell again") from None
        if version != IO_VERSION:
            raise UnusableLibraryError(f"{NAME} has queues {version}, expected {IO_VERSION}: install shardwell again")
        self._declare()

    def _declare(self) -> None:
        library = self._library
        library.shardwell_io_open.argtypes, library.shardwell_io_open.restype = [_POINTER, _POINTER], _POINTER
        library.shardwell_io_submit.argtypes = [_POINTER, _INT, _INT, _POINTER, _INT]
        library.shardwell_io_submit.restype = _POINTER
        library.shardwell_io_wait.argtypes = [_POINTER, _SIZE, _POINTER]
        for function in (library.shardwell_io_forget, library.shardwell_io_close):
            function.argtypes, function.restype = [_POINTER], None

    def uring_error(self) -> int:
        """Return 0 if this process may use io_uring, else errno."""
        return int(self._library.shardwell_io_uring())

    def open(self, engine: int, shape: IoQueueShape) -> LibraryQueue:
        """Open a queue; raise OSError if the system refuses."""
        call = _Shape(engine=engine, **vars(shape))
        error = _INT()
        address = self._library.shardwell_io_open(ctypes.byref(call), ctypes.byref(error))
        if address is None:
            raise OSError(error.value, os.strerror(error.value))
        return LibraryQueue(self._library, address)


class LibraryQueue:
    """A queue of the library."""

    def __init__(self, library: ctypes.CDLL, address: int) -> None:
        self._library = library
        self._address: int | None = address

    def submit(self, is_write: bool, parts: Sequence[IoPart], *, urgent: bool = False) -> LibraryRequest:
        call = (_Part * len(parts))(*(_Part(*part) for part in parts))
        address = self._library.shardwell_io_submit(self._address, is_write, urgent, call, len(parts))
        if address is None:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return LibraryRequest(self._library, address)

    def close(self) -> None:
        if self._address is not None:
            self._library.shardwell_io_close(self._address)
            self._address = None


class LibraryRequest:
    """A request of the library."""

    def __init__(self, library: ctypes.CDLL, address: int) -> None:
        self._library, self._address, self._process = library, address, os.getpid()

    def wait(self, milliseconds: int) -> IoOutcome:
        found = _Outcome()
        is_done = self._library.shardwell_io_wait(self._address, milliseconds, ctypes.byref(found))
        return IoOutcome(bool(is_done), found.completed, found.error, found.part, found.offset, found.seconds)

    def __del__(self) -> None:
        if self._process == os.getpid():  # in a fork, no thread would release the locks that threads had held
            self._library.shardwell_io_forget(self._address)
