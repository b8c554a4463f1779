"""Saving: every rank writes its slices to its own file, and rank 0 commits when all ranks have written.

Ranks that write in the background must not use collectives, which belong to the training loop. They communicate through
the store, and write their parts of the manifest beside their files.

    main thread     | copy to the host | step | step | step | ...
    background                         | write, fsync | say "done" | wait for the result  |
    rank 0's                           | write, fsync | wait for all | commit | say so    |
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DistError, HashStore  # type: ignore[attr-defined]

from shardwell.checkpoint.files import stream
from shardwell.checkpoint.folder import Folder
from shardwell.checkpoint.manifest import Manifest
from shardwell.checkpoint.many_files import each
from shardwell.checkpoint.merging import Merger
from shardwell.checkpoint.rank_contents import RankContents
from shardwell.errors import CheckpointError
from shardwell.long_work import LongWork
from shardwell.memory import Device, MemoryStats, StateKind, Tier
from shardwell.memory.statistics import human
from shardwell.parallel.rank_store import ALL, Pause, arrive, between, forget_arrival, has_all

_OK, _RESULT, _WRITTEN, _HEARD, _PROBLEM, _ANY, _BEAT = "ok", "result", "written", "heard", "problem", "any", "beat"
SILENCE_LIMIT = 600.0  # seconds without a sign of life from ranks that write
LIMIT_AFTER_FAILURE = 6.0  # the same, if one has failed
_LINGER, _LITTLE_LINGER = 5.0, 2.0  # seconds that rank 0 waits for the others to read the result; an error
_ROUND, _GRACE = 1.0, 3.0  # seconds between two checks for ranks that exited; for their save to succeed after that


@dataclass(frozen=True)
class SaveJob:
    """One checkpoint to be written."""

    folder: Folder
    tag: str
    temporary: Path
    number: int  # of the save, the same on all ranks
    is_latest: bool
    keep_last: int | None
    look: Callable[[], float]  # called now and then while others are waited for: how long to bear their silence


class Saver:
    """Writes the checkpoints of one engine on this rank, one at a time."""

    def __init__(self, rank: int, num_ranks: int, store: Any, device: Device, account: MemoryStats) -> None:
        self._rank, self._num_ranks = rank, num_ranks
        self._store = store if store is not None else HashStore()
        self._snapshot = Snapshot(device, account)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_given_up = threading.Event()  # set by the training loop
        self._number = 0
        self._last_heartbeat = 0.0

    def next_job(
        self,
        folder: Folder,
        tag: str,
        temporary: Path,
        *,
        is_latest: bool,
        keep_last: int | None,
        look: Callable[[], float],
    ) -> SaveJob:
        self._number += 1
        return SaveJob(folder, tag, temporary, self._number, is_latest, keep_last, look)

    def write_now(self, job: SaveJob, contents: RankContents, values: Mapping[str, Any]) -> None:
        """Write and commit a checkpoint; return when all ranks can see it, or raise on all of them."""

        total = sum(part.num_bytes for part in contents.parts.values())
        saving = LongWork(f"saving {job.tag}", total, speaks=self._rank == 0, shown=human)

        def data(name: str) -> Tensor:
            self._send_heartbeat(job)
            value = contents.parts[name].read().cpu()
            saving.add(contents.parts[name].num_bytes)
            return value

        self._write(job, contents, values, data)

    def write_later(self, job: SaveJob, contents: RankContents, values: Mapping[str, Any]) -> None:
        """Copy the values to save, and write them while training continues. All ranks raise errors later."""
        read: Callable[[str], Tensor] | None = None
        problem: Exception | None = None
        try:
            read = self._snapshot.take(contents)
        except Exception as error:  # no memory, say
            problem = error

        def data(name: str) -> Tensor:
            self._send_heartbeat(job)
            if read is None:
                raise CheckpointError(f"there is no copy to be written: {problem}") from problem
            return read(name)

        def work() -> None:
            try:
                self._write(job, contents, values, data)
            except BaseException as error:
                self._error = error

        thread = threading.Thread(target=work, name=f"saving {job.tag}")
        try:
            thread.start()
        except RuntimeError as error:  # the system has none left
            warnings.warn(f"{job.tag}: written synchronously instead of in the background: {error}", stacklevel=2)
            work()
        else:
            self._thread = thread

    def wait(self, find_gone: Callable[[], Exception | None]) -> Exception | None:
        """Wait until no save is in flight; raise its error.

        `find_gone` is called now and then, and returns an error if a rank has exited. Then the save in flight may still
        succeed, if that rank had written its part; otherwise it is abandoned, and the error is returned.
        """
        thread = self._thread
        while thread is not None and thread.is_alive():
            thread.join(_ROUND)
            gone = find_gone() if thread.is_alive() else None
            if gone is not None:
                thread.join(_GRACE)
                if thread.is_alive():
                    self._is_given_up.set()
                    return gone
        self.check()
        return None

    def check(self) -> None:
        """Raise the error of a save in the background."""
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise CheckpointError(f"a checkpoint was not saved in the background: {error}") from error

    # ------------------------------------------------------------------------------------------------- the work

    def _write(
        self, job: SaveJob, contents: RankContents, values: Mapping[str, Any], data: Callable[[str], Tensor]
    ) -> None:
        problem, own = "", None
        try:
            own = self._write_part(job, contents, values, data)
        except Exception as error:
            problem = f"rank {self._rank}: {error}"
        except BaseException:  # the process is being ended
            self._discard(job)
            raise
        finally:
            contents.close()
        self._clear_previous(job)
        self.report(job, problem)
        result = self._commit(job, own) if self._rank == 0 else self.wait_for_result(job)
        if result != _OK:
            raise CheckpointError(result)

    def _write_part(
        self, job: SaveJob, contents: RankContents, values: Mapping[str, Any], data: Callable[[str], Tensor]
    ) -> Manifest:
        """Write this rank's file, and its part of the manifest unless this is rank 0, which merges the parts."""
        file = f"rank-{self._rank:05d}.safetensors"
        entries = [part.entry for part in contents.parts.values() if part.numel]
        files = {file: stream(job.temporary / file, entries, data)} if entries else {}
        tensors = contents.records(file)
        manifest = Manifest(tensors, files, {**values, **contents.scalars})
        manifest.check(part=True)
        if self._rank:
            self._part_of(job, self._rank).write_text(manifest.text(), encoding="ascii")
        return manifest

    def _commit(self, job: SaveJob, own: Manifest | None) -> str:
        """Commit the checkpoint on rank 0 when all ranks have written. Return the message for all ranks."""
        result = _OK
        try:
            self._wait_for(job, f"{_WRITTEN}/{ALL}")
            if problems := self._problems(job):
                raise CheckpointError("; ".join(problems))
            merger = Merger(str(job.temporary))
            if own is not None:
                merger.add(own)
            paths = [self._part_of(job, rank) for rank in range(1, self._num_ranks)]
            for path, text in zip(paths, each(_take, paths), strict=True):
                merger.add_text(text, str(path))
            manifest = merger.finish()
            job.folder.commit(job.temporary, job.tag, manifest, is_latest=job.is_latest)
            if job.keep_last is not None:
                self._prune(job, job.keep_last)
        except Exception as error:
            result = str(error) or type(error).__name__
            self._discard(job)
        self.publish(job, result)
        return result

    @staticmethod
    def _prune(job: SaveJob, keep_last: int) -> None:
        try:
            job.folder.prune(keep_last)
        except CheckpointError as error:  # the commit is valid without it
            warnings.warn(f"an old checkpoint was not removed: {error}", stacklevel=2)

    def _discard(self, job: SaveJob) -> None:
        if self._rank:
            return
        with contextlib.suppress(CheckpointError):  # the first error counts
            job.folder.discard(job.temporary)

    def _problems(self, job: SaveJob) -> list[str]:
        """Return the errors of the ranks that have one."""
        if not self._store.check([self._key(job, f"{_PROBLEM}/{_ANY}")]):
            return []
        keys = [self._key(job, f"{_PROBLEM}/{rank}") for rank in range(self._num_ranks)]
        return [self._store.get(key).decode() for key in keys if self._store.check([key])]

    def _part_of(self, job: SaveJob, rank: int) -> Path:
        return job.temporary / f".part-{rank:05d}.json"

    # ------------------------------------------------------------------------------------------------ the store

    @staticmethod
    def _key(job: SaveJob, what: int | str) -> str:
        return f"save/{job.number}/{what}"

    def _clear_previous(self, job: SaveJob) -> None:
        """Remove the keys of the previous save from the store; all ranks have finished it."""
        last, rank, size = f"save/{job.number - 1}", self._rank, self._num_ranks
        keys = [f"{rank}", f"{_PROBLEM}/{rank}", *([_RESULT, _BEAT, f"{_PROBLEM}/{_ANY}"] if rank == 0 else [])]
        with contextlib.suppress(RuntimeError):  # a kind of store that cannot forget
            for key in keys:
                self._store.delete_key(f"{last}/{key}")
            forget_arrival(self._store, f"{last}/{_WRITTEN}", rank, size)
            if rank:
                forget_arrival(self._store, f"{last}/{_HEARD}", rank - 1, size - 1)

    def _send_heartbeat(self, job: SaveJob) -> None:
        """Write a sign of life to the store, at most once a second. All ranks write to one key."""
        now = time.monotonic()
        if now - self._last_heartbeat > between(1.0, self._num_ranks):
            self._last_heartbeat = now
            self._store.set(self._key(job, _BEAT), f"{self._rank} {now}")

    def _wait_for(self, job: SaveJob, what: str) -> None:
        """Wait until all ranks have written, or for the result of rank 0."""
        pause = Pause(self._num_ranks)
        last = asked = time.monotonic()
        seen, limit = "", SILENCE_LIMIT
        while not self._store.check([self._key(job, what)]):
            pause()
            now = time.monotonic()
            if self._is_given_up.is_set():
                raise CheckpointError(f"{job.tag}: abandoned, because a rank has exited")
            if now - last > limit:
                whom = "rank 0" if what == _RESULT else f"rank {self._first_missing(job)}"
                raise CheckpointError(f"{job.tag}: no word from {whom} for {limit:g} s while it was saving")
            if now - asked > between(1.0, self._num_ranks):
                limit = job.look()
                asked, found = now, self._last_beat(job)
                if found != seen:
                    last, seen = now, found

    def _first_missing(self, job: SaveJob) -> int:
        """Return the first rank that has not written."""
        missing = (rank for rank in range(self._num_ranks) if not self._store.check([self._key(job, rank)]))
        return next(missing, 0)

    def _last_beat(self, job: SaveJob) -> str:
        key = self._key(job, _BEAT)
        return str(self._store.get(key).decode()) if self._store.check([key]) else ""

    def report(self, job: SaveJob, problem: str) -> None:
        """Tell rank 0 that this rank has written its part, or why it has not."""
        if problem:
            self._store.set(self._key(job, f"{_PROBLEM}/{self._rank}"), problem)
            self._store.set(self._key(job, f"{_PROBLEM}/{_ANY}"), "")
        self._store.set(self._key(job, self._rank), "")
        arrive(self._store, self._key(job, _WRITTEN), self._rank, self._num_ranks)

    def publish(self, job: SaveJob, result: str) -> None:
        """Tell all ranks how the save went, and wait a little until they know: the store may end with this process."""
        self._store.set(self._key(job, _RESULT), result)
        self._wait_for_readers(job, _LINGER if result == _OK else _LITTLE_LINGER)

    def wait_for_result(self, job: SaveJob) -> str:
        """Wait until rank 0 has committed the save, and return how it went."""
        try:
            self._wait_for(job, _RESULT)
            result = str(self._store.get(self._key(job, _RESULT)).decode())
            arrive(self._store, self._key(job, _HEARD), self._rank - 1, self._num_ranks - 1)
            return result
        except DistError as error:  # rank 0 may have ended after its commit, and the store with it
            if job.folder.is_committed(job.tag):
                return _OK
            return f"{job.tag}: rank 0 has exited: {error}"

    def _wait_for_readers(self, job: SaveJob, seconds: float) -> None:
        """Wait until all ranks know how the save went."""
        if self._num_ranks > 1:
            deadline, pause = time.monotonic() + seconds, Pause(self._num_ranks)
            while not has_all(self._store, self._key(job, _HEARD)) and time.monotonic() < deadline:
                pause()


def _take(path: Path) -> str:
    """Return the text of a rank's part of the manifest, and remove its file."""
    text = path.read_text(encoding="ascii")
    path.unlink()
    return text


class Snapshot:
    """A copy in host memory of the values to save; its memory is reused for the next one."""

    def __init__(self, device: Device, account: MemoryStats) -> None:
        self._device, self._account = device, account
        self._memory: Tensor | None = None

    def take(self, contents: RankContents) -> Callable[[str], Tensor]:
        """Copy all slices. On a GPU the host does not wait; a reader of the copy does."""
        starts, size = {}, 0
        for name, part in contents.parts.items():
            starts[name] = size
            size += -(-part.num_bytes // 64) * 64
        if self._memory is None or self._memory.numel() < size:
            self._memory = None
            self._memory = self._device.empty(size, torch.uint8, Tier.HOST)
            self._account.set(StateKind.STAGING, "(snapshot)", Tier.HOST, size)
        memory = self._memory
        copies = {}
        try:
            for name, part in contents.parts.items():
                copies[name] = memory[starts[name] : starts[name] + part.num_bytes].view(part.dtype)
                copies[name].copy_(part.read(), non_blocking=True)
        finally:
            contents.close()
        mark = self._device.now()

        def read(name: str) -> Tensor:
            mark.synchronize()
            return copies[name]

        return read
