"""Saving: every rank writes its parts to a file of its own, rank 0 commits when all have.

Ranks that write in the background must not meet in collectives, which belong to the training loop. They tell each
other through the store, and leave their parts of the manifest beside their files.

    main thread     | copy to the host | step | step | step | ...
    background                         | write, fsync | say "done" | wait for the verdict |
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
from shardwell.checkpoint.rank_contents import RankContents
from shardwell.errors import CheckpointError
from shardwell.memory import Device, MemoryStats, StateKind, Tier

_OK, _VERDICT = "ok", "verdict"
PATIENCE, LITTLE_PATIENCE = 600.0, 5.0  # seconds without a sign of life from ranks that write; if one has failed
_PAUSE = 0.02  # between two looks at the store, of the time waited so far
_SHORTEST, _LONGEST = 1e-3, 0.05  # seconds of such a pause
_LINGER, _LITTLE_LINGER = 5.0, 2.0  # seconds that rank 0 waits for the others to hear its verdict; that it failed
_ROUND, _GRACE = 2.0, 8.0  # seconds between two looks for ranks that are gone; that what they left may take to end well


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
    """Writes the checkpoints of one engine on this rank. At most one is on its way."""

    def __init__(self, rank: int, num_ranks: int, store: Any, device: Device, account: MemoryStats) -> None:
        self._rank, self._num_ranks = rank, num_ranks
        self._store = store if store is not None else HashStore()
        self._snapshot = Snapshot(device, account)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_given_up = threading.Event()  # by who waits in the training loop
        self._number = 0
        self._beaten = 0.0

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
        """Write and commit; returns when the checkpoint is there for all ranks, or raises on all of them."""

        def data(name: str) -> Tensor:
            self._beat(job)
            return contents.parts[name].read().cpu()

        self._write(job, contents, values, data)

    def write_later(self, job: SaveJob, contents: RankContents, values: Mapping[str, Any]) -> None:
        """Copy what is to be saved, and write it while training goes on. Whatever fails, all ranks hear of it later."""
        read: Callable[[str], Tensor] | None = None
        problem: Exception | None = None
        try:
            read = self._snapshot.take(contents)
        except Exception as error:  # no memory, say
            problem = error

        def data(name: str) -> Tensor:
            self._beat(job)
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
            warnings.warn(f"{job.tag}: written before training goes on, not beside it: {error}", stacklevel=2)
            work()
        else:
            self._thread = thread

    def wait(self, find_gone: Callable[[], Exception | None]) -> Exception | None:
        """Until nothing is on its way; raises what went wrong with it.

        `find_gone` is asked now and then: it returns an error if a rank is gone. Then what is on its way may still end
        well, if that rank had done its part; if it does not, it is given up, and the error is returned.
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
        """Raise what went wrong in the background."""
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise CheckpointError(f"a checkpoint was not saved in the background: {error}") from error

    # ------------------------------------------------------------------------------------------------- the work

    def _write(
        self, job: SaveJob, contents: RankContents, values: Mapping[str, Any], data: Callable[[str], Tensor]
    ) -> None:
        problem = ""
        try:
            self._write_part(job, contents, values, data)
        except Exception as error:
            problem = f"rank {self._rank}: {error}"
        except BaseException:  # somebody wants to end this
            self._discard(job)
            raise
        finally:
            contents.close()
        self._forget(job)
        self._store.set(self._key(job, self._rank), problem or _OK)
        verdict = self._commit(job) if self._rank == 0 else self._hear(job)
        if verdict != _OK:
            raise CheckpointError(verdict)

    def _write_part(
        self, job: SaveJob, contents: RankContents, values: Mapping[str, Any], data: Callable[[str], Tensor]
    ) -> None:
        file = f"rank-{self._rank:05d}.safetensors"
        entries = [part.entry for part in contents.parts.values() if part.numel]
        files = {file: stream(job.temporary / file, entries, data)} if entries else {}
        tensors = {name: part.record(file) for name, part in contents.parts.items()}
        manifest = Manifest(tensors, files, {**values, **contents.scalars})
        self._part_of(job, self._rank).write_text(manifest.to_json(part=True), encoding="ascii")

    def _commit(self, job: SaveJob) -> str:
        """Rank 0: when all have written, make it a checkpoint. Returns what all ranks shall hear."""
        verdict = _OK
        try:
            problems = [words for rank in range(self._num_ranks) if (words := self._wait_for(job, rank)) != _OK]
            if problems:
                raise CheckpointError("; ".join(problems))
            manifests = []
            for rank in range(self._num_ranks):
                path = self._part_of(job, rank)
                manifests.append(Manifest.from_json(path.read_text(encoding="ascii"), str(path), part=True))
                path.unlink()
            manifest = Manifest.merge(manifests, str(job.temporary))
            job.folder.commit(job.temporary, job.tag, manifest, is_latest=job.is_latest)
            if job.keep_last is not None:
                self._prune(job, job.keep_last)
        except Exception as error:
            verdict = str(error) or type(error).__name__
            self._discard(job)
        self._store.set(self._key(job, _VERDICT), verdict)
        self._let_others_hear(job, _LINGER if verdict == _OK else _LITTLE_LINGER)
        return verdict

    @staticmethod
    def _prune(job: SaveJob, keep_last: int) -> None:
        try:
            job.folder.prune(keep_last)
        except CheckpointError as error:  # of no harm to what was committed
            warnings.warn(f"an old checkpoint is left: {error}", stacklevel=2)

    def _discard(self, job: SaveJob) -> None:
        if self._rank:
            return
        with contextlib.suppress(CheckpointError):  # what went wrong first is what counts
            job.folder.discard(job.temporary)

    def _part_of(self, job: SaveJob, rank: int) -> Path:
        return job.temporary / f".part-{rank:05d}.json"

    # ------------------------------------------------------------------------------------------------ the store

    @staticmethod
    def _key(job: SaveJob, what: int | str) -> str:
        return f"save/{job.number}/{what}"

    def _forget(self, job: SaveJob) -> None:
        """Of the save before, which all ranks have left behind, nothing stays in the store."""
        mine = [f"{self._rank}", f"{self._rank}/beat", f"{self._rank}/heard"]
        for what in [*mine, *([_VERDICT] if self._rank == 0 else [])]:
            with contextlib.suppress(RuntimeError):  # a kind of store that cannot forget
                self._store.delete_key(f"save/{job.number - 1}/{what}")

    def _beat(self, job: SaveJob) -> None:
        """A sign of life, at most once a second."""
        now = time.monotonic()
        if now - self._beaten > 1.0:
            self._beaten = now
            self._store.set(self._key(job, f"{self._rank}/beat"), str(now))

    def _wait_for(self, job: SaveJob, who: int | str) -> str:
        """What a rank has to say, or rank 0's verdict."""
        key = self._key(job, who)
        beats = [self._key(job, f"{rank}/beat") for rank in range(self._num_ranks)]
        begin = last = asked = now = time.monotonic()
        seen, patience = "", PATIENCE
        while not self._store.check([key]):
            time.sleep(min(max(_PAUSE * (now - begin), _SHORTEST), _LONGEST))
            now = time.monotonic()
            if self._is_given_up.is_set():
                raise CheckpointError(f"{job.tag}: given up, because a rank is gone")
            if now - last > patience:
                whom = "rank 0" if who == _VERDICT else f"rank {who}"
                raise CheckpointError(f"{job.tag}: no word from {whom} for {patience:g} s while it was saving")
            if now - asked > 1.0:
                patience = job.look()
                asked, signs = now, self._signs(beats)
                if signs != seen:
                    last, seen = now, signs
        return str(self._store.get(key).decode())

    def _signs(self, beats: list[str]) -> str:
        return " ".join(self._store.get(beat).decode() for beat in beats if self._store.check([beat]))

    def _hear(self, job: SaveJob) -> str:
        try:
            verdict = self._wait_for(job, _VERDICT)
            self._store.set(self._key(job, f"{self._rank}/heard"), "")
            return verdict
        except DistError as error:  # rank 0 may have ended after its commit, and the store with it
            if job.folder.is_committed(job.tag):
                return _OK
            return f"{job.tag}: rank 0 is gone: {error}"

    def _let_others_hear(self, job: SaveJob, seconds: float) -> None:
        """Wait until all ranks know how the save went: the store may end with this process."""
        heard = [self._key(job, f"{rank}/heard") for rank in range(1, self._num_ranks)]
        deadline = time.monotonic() + seconds
        while heard and not self._store.check(heard) and time.monotonic() < deadline:
            time.sleep(_SHORTEST)


class Snapshot:
    """A copy in host memory of what is to be saved; its memory is kept for the next one."""

    def __init__(self, device: Device, account: MemoryStats) -> None:
        self._device, self._account = device, account
        self._memory: Tensor | None = None

    def take(self, contents: RankContents) -> Callable[[str], Tensor]:
        """Copy all parts. On a GPU the host goes on at once, and whoever reads the copy waits for it."""
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
