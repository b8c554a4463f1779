"""Asynchronous reads and writes of files: the queues of native/io.cpp as Python threads, where it was not built.

The GIL is not held while a block is moved.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardwell.kernels.io import ENDED_EARLY, SECTOR, IoOutcome, IoPart, IoQueueShape

_LEAST = 512  # the smallest sector size of any disk


class ThreadRequest:
    """The number of blocks that are not moved yet, and the first error among them."""

    def __init__(self, owner: ThreadQueue, num_blocks: int) -> None:
        self._owner = owner
        self._changed = threading.Condition()
        self._left = num_blocks
        self._error = (0, 0, 0)
        self._begun, self._seconds = time.monotonic(), 0.0

    def wait(self, milliseconds: int) -> IoOutcome:
        with self._changed:
            is_done = self._changed.wait_for(lambda: self._left == 0, milliseconds / 1000)
            return IoOutcome(is_done, self._owner.completed, *self._error, self._seconds)

    def end(self, error: int, part: int, offset: int) -> None:
        """Note the end of a block, and its error."""
        self._owner.completed += 1
        with self._changed:
            if error and not self._error[0]:
                self._error = error, part, offset
            self._left -= 1
            self._seconds = time.monotonic() - self._begun
            self._changed.notify_all()


class ThreadQueue:
    """A queue in which each thread of a lane has one block in flight."""

    def __init__(self, shape: IoQueueShape) -> None:
        self.completed = 0
        self._shape = shape
        self._lanes = [_BlockQueue() for _ in range(shape.lanes)]
        self._threads: list[threading.Thread] = []
        for lane in self._lanes:
            for _ in range(shape.depth * shape.parallelism):
                self._threads.append(threading.Thread(target=_serve, args=(lane,), name="disk", daemon=True))
                self._threads[-1].start()

    def submit(self, is_write: bool, parts: Sequence[IoPart], *, urgent: bool = False) -> ThreadRequest:
        blocks = [(index, block) for index, part in enumerate(parts) for block in _blocks(part, self._shape.block)]
        request = ThreadRequest(self, len(blocks))
        for index, block in blocks:
            self._lanes[block.lane].put(_Block(request, index, is_write, block), urgent)
        return request

    def close(self) -> None:
        for lane in self._lanes:
            lane.stop()
        for thread in self._threads:
            thread.join()
        self._threads = []


@dataclass(frozen=True)
class _Block:
    request: ThreadRequest
    index: int  # of its part
    is_write: bool
    part: IoPart  # exactly one block

    def run(self) -> None:
        try:
            error, offset = _move(self.part, self.is_write)
        except OSError as problem:
            error, offset = problem.errno or ENDED_EARLY, self.part.offset
        self.request.end(error, self.index, offset)


class _BlockQueue:
    """Blocks that wait. Reads and writes alternate if both wait."""

    def __init__(self) -> None:
        self._urgent, self._reads, self._writes = deque[_Block](), deque[_Block](), deque[_Block]()
        self._wrote_last = self._is_stopped = False
        self._changed = threading.Condition()

    def put(self, block: _Block, urgent: bool) -> None:
        with self._changed:
            (self._writes if block.is_write else self._urgent if urgent else self._reads).append(block)
            self._changed.notify()

    def stop(self) -> None:
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def get(self) -> _Block | None:
        """Return the next block; None after `stop`."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or self._urgent or self._reads or self._writes)
            reads = self._urgent or self._reads
            if not reads and not self._writes:
                return None
            self._wrote_last = not reads or (bool(self._writes) and not self._wrote_last)
            return (self._writes if self._wrote_last else reads).popleft()


def _serve(lane: _BlockQueue) -> None:
    while (block := lane.get()) is not None:
        block.run()


def _blocks(part: IoPart, block: int) -> Iterator[IoPart]:
    """Split a part into blocks of full sectors, and the remainder at the end."""
    whole = part.size // SECTOR * SECTOR
    for at in range(0, whole, block):
        yield part._replace(offset=part.offset + at, address=part.address + at, size=min(block, whole - at))
    if whole < part.size:
        yield part._replace(offset=part.offset + whole, address=part.address + whole, size=part.size - whole)


def _move(part: IoPart, is_write: bool) -> tuple[int, int]:
    """Move a block; return the error and its offset in the file."""
    with contextlib.ExitStack() as stack:
        memory = memoryview((ctypes.c_char * part.size).from_address(part.address)).cast("B")
        target = memory
        if part.size % SECTOR:
            page = stack.enter_context(mmap.mmap(-1, SECTOR))
            memory = stack.enter_context(memoryview(page))
            if is_write:
                memory[: part.size] = target
        done = 0
        while done < len(memory):
            with memory[done:] as rest:
                call = os.pwritev if is_write else os.preadv
                moved = call(part.file, [rest], part.offset + done)
            if moved < len(memory) - done:
                moved = moved // _LEAST * _LEAST
            if moved == 0:
                return ENDED_EARLY, part.offset + done
            done += moved
        if part.size % SECTOR and not is_write:
            target[:] = memory[: part.size]
    return 0, 0
