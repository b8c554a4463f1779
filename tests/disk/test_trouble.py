"""Full disks, lost drives, damaged files: an error that names the path, and never a hang."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import subprocess
import sys
import time
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwell.errors import ShardwellError
from shardwell.kernels.io import SECTOR
from shardwell.memory import Device, Event, MemoryStats
from shardwell.offload import disk, disk_file
from shardwell.offload.disk import DiskTier, aligned
from shardwell.offload.disk_file import file_system, free_bytes
from shardwell.offload.param_swap import ReadBuffers, SwappedShard
from shardwell.offload.staging import AlignedAllocator
from shardwell.offload.swapped_tensors import SwappedTensors
from tests.support.command import environment
from tests.support.disk_engines import BLOCK, EACH, Stuck, noise, replace_file, settings
from tests.support.internals import files_of
from tests.support.patience import HANG, soon

TINY = 1 << 20


@contextlib.contextmanager
def mounted(path: Path, options: str) -> Iterator[Path]:
    """A small file system in memory; the test is skipped where that is not allowed."""
    path.mkdir()
    call = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", os.fspath(path)]
    try:
        done = subprocess.run(call, env=environment(), capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip(f"no file system can be mounted: {done.stderr.strip()}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is in memory
            yield path
    finally:
        gc.collect()
        subprocess.run(["umount", os.fspath(path)], check=True)


def test_more_than_the_disk_has_is_refused_at_once(tmp_path: Path) -> None:
    with DiskTier([tmp_path], settings()) as tier:
        tier.allocate(SECTOR)
        size = 2 * (free_bytes(tmp_path) or 0)
        with pytest.raises(ShardwellError, match=r"reserving .*iB failed \(No space left on device\); .*iB are free"):
            tier.allocate(size)
        assert tier.num_bytes == os.fstat(files_of(tier)[0].descriptor).st_size == SECTOR


def test_a_disk_that_fills_up_is_an_error_that_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_file, "free_bytes", lambda path: None)  # others write too: what was free may be gone
    with mounted(tmp_path / "tiny", f"size={TINY}") as path, DiskTier([tmp_path, path], settings()) as tier:
        kept = [tier.allocate(TINY // 2) for _ in range(3)]
        with pytest.raises(ShardwellError, match=r"tiny: reserving .* failed .No space .*add a path on another drive"):
            tier.allocate(TINY)
        assert tier.num_bytes == 3 * TINY // 2
        tier.free(kept.pop())
        memory, found = noise(TINY // 2), aligned(TINY // 2)
        tier.write(kept[0], 0, memory).wait()
        tier.read(kept[0], 0, found).wait()
        assert torch.equal(found, memory)


def test_a_failed_reservation_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.posix_fallocate

    def half(descriptor: int, offset: int, size: int) -> None:
        real(descriptor, offset, size // 2)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with DiskTier([tmp_path], settings()) as tier:
        monkeypatch.setattr(os, "posix_fallocate", half)
        with pytest.raises(ShardwellError, match="quota exceeded"):
            tier.allocate(10 * SECTOR)
        assert os.fstat(files_of(tier)[0].descriptor).st_size == 0


def test_without_reservations_space_is_taken_when_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "")

    monkeypatch.setattr(os, "posix_fallocate", unknown)
    with DiskTier([tmp_path], settings()) as tier:
        extent, memory, found = tier.allocate(BLOCK), noise(BLOCK), aligned(BLOCK)
        tier.write(extent, 0, memory).wait()
        tier.read(extent, 0, found).wait()
        assert torch.equal(found, memory)


LIMITED = """
import resource, sys
from shardwell.offload.disk import AioSettings, DiskTier
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
tier = DiskTier([sys.argv[1]], AioSettings(engine="python"))
try:
    tier.allocate(1 << 21)
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.slow
def test_a_limit_on_files_is_named(tmp_path: Path) -> None:
    call = [sys.executable, "-c", LIMITED, os.fspath(tmp_path)]
    found = subprocess.run(call, capture_output=True, text=True, timeout=HANG).stdout
    assert found.startswith(f"ShardwellError {tmp_path}: reserving 2.0 MiB failed (File too large)")
    assert "ulimit -f" in found


@EACH
def test_no_space_at_a_write_reaches_the_ticket(engine: str, tmp_path: Path) -> None:
    with DiskTier([tmp_path], settings(engine)) as tier:
        extent = tier.allocate(20 * BLOCK)
        replace_file(tier, "/dev/full")
        transfer = tier.write(extent, 0, noise(20 * BLOCK))
        for _ in range(2):
            with pytest.raises(ShardwellError, match=r"writing 320.0 KiB, at byte .* \(No space left .*free space"):
                transfer.wait()


@EACH
def test_an_input_output_error_reaches_the_ticket(engine: str, tmp_path: Path) -> None:
    with DiskTier([tmp_path], settings(engine)) as tier:
        extent = tier.allocate(20 * BLOCK)
        replace_file(tier, "/proc/self/mem")  # at its beginning nothing can be read
        with pytest.raises(ShardwellError, match=r"reading 320.0 KiB, .* \(Input/output error\); .*dmesg"):
            tier.read(extent, 0, aligned(20 * BLOCK)).wait()


@EACH
def test_a_file_that_may_not_be_written_reaches_the_ticket(engine: str, tmp_path: Path) -> None:
    with DiskTier([tmp_path], settings(engine)) as tier:
        extent = tier.allocate(BLOCK)
        replace_file(tier, __file__, os.O_RDONLY)
        with pytest.raises(ShardwellError, match="Bad file descriptor"):
            tier.write(extent, 0, noise(BLOCK)).wait()


@EACH
@pytest.mark.parametrize("left", [0, 5 * BLOCK, 5 * BLOCK + SECTOR, 5 * BLOCK + 700])
def test_a_file_that_was_cut_is_a_short_read(engine: str, left: int, tmp_path: Path) -> None:
    with DiskTier([tmp_path], settings(engine)) as tier:
        extent = tier.allocate(20 * BLOCK)
        tier.write(extent, 0, noise(20 * BLOCK)).wait()
        os.ftruncate(files_of(tier)[0].descriptor, left)
        with pytest.raises(ShardwellError, match=rf"^{tmp_path}: reading .*fewer bytes moved than were asked for"):
            tier.read(extent, 0, aligned(20 * BLOCK)).wait()
        tier.read(extent, 0, aligned(left // BLOCK * BLOCK)).wait()


@EACH
def test_an_error_leaves_the_tier_usable(engine: str, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with DiskTier([tmp_path, tmp_path / "other"], settings(engine)) as tier:
        extent, memory, found = tier.allocate(BLOCK), noise(BLOCK), aligned(BLOCK)
        extent_there = tier.allocate(BLOCK)
        replace_file(tier, "/dev/full")
        with pytest.raises(ShardwellError, match="No space"):
            tier.write(extent, 0, memory).wait()
        tier.write(extent_there, 0, memory).wait()
        tier.read(extent_there, 0, found).wait()
        assert torch.equal(found, memory)


def test_a_path_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ShardwellError, match=r"gone: opening a file failed \(No such file .*mount the drive, or make"):
        DiskTier([tmp_path / "gone"], settings())
    (tmp_path / "file").touch()
    with pytest.raises(ShardwellError, match=r"file: opening a file failed \(Not a directory\).*; name a directory"):
        DiskTier([tmp_path, tmp_path / "file"], settings())
    with pytest.raises(ShardwellError, match="has no path; name a directory"):
        DiskTier([], settings())


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with (
        mounted(tmp_path / "fixed", "ro") as path,
        pytest.raises(ShardwellError, match=r"fixed: opening a file failed \(Read-only .*mount it for writing"),
    ):
        DiskTier([path], settings())


def test_a_directory_that_vanishes_does_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "drive"
    path.mkdir()
    with DiskTier([path], settings()) as tier:
        path.rmdir()
        extent, memory, found = tier.allocate(BLOCK), noise(BLOCK), aligned(BLOCK)
        tier.write(extent, 0, memory).wait()
        tier.read(extent, 0, found).wait()
        assert torch.equal(found, memory)


def test_a_drive_that_stops_answering_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Stuck()
    monkeypatch.setattr(disk, "open_queue", lambda *_: queue)
    tier = DiskTier([tmp_path], settings(stall_timeout=0.1))
    extent, memory = tier.allocate(BLOCK), aligned(BLOCK)
    alive = weakref.ref(memory)
    transfer = tier.write(extent, 0, memory)
    begin = time.monotonic()
    with pytest.raises(ShardwellError, match=r"writing 16.0 KiB has not ended, and nothing else did for 0.1 s"):
        transfer.wait()
    with pytest.raises(ShardwellError, match="cannot be freed: its transfers hang"):
        tier.free(extent)
    with pytest.warns(UserWarning, match="have stopped answering"):
        tier.close()
    assert time.monotonic() - begin < soon(5)
    assert not queue.is_closed  # that would hang
    del tier, transfer, memory
    gc.collect()
    assert alive() is not None  # the drive may still write to it


@pytest.mark.parametrize("ends", ["read", "forget"])
def test_a_slot_that_a_drive_may_still_write_to_is_not_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    queue = Stuck()
    monkeypatch.setattr(disk, "open_queue", lambda *_: queue)
    with DiskTier([tmp_path], settings(stall_timeout=0.1)) as tier:
        pages = ReadBuffers(tier, AlignedAllocator(Device("cpu"), MemoryStats()), 2)
        page = SwappedShard(pages, SwappedTensors(tier, MemoryStats(), "unit"))
        queue.is_done = True
        page.swapped.register([torch.randn(100)])
        slot = pages.slots.take(SECTOR)
        pages.slots.give(slot, Event())
        queue.is_done = False
        if ends == "read":
            with pytest.raises(ShardwellError, match="has not ended"):
                page.read()
        else:
            page.expect()
            page.forget()
        assert pages.slots.take(SECTOR).data_ptr() != slot.data_ptr()
        queue.is_done = True


def test_errors_are_told_before_they_go_up(tmp_path: Path) -> None:
    with DiskTier([tmp_path], settings()) as tier:
        told: list[ShardwellError] = []
        tier.tell = told.append
        extent = tier.allocate(BLOCK)
        tier.write(extent, 0, noise(BLOCK)).wait()
        assert not told
        replace_file(tier, "/proc/self/mem")
        with pytest.raises(ShardwellError, match="Input/output error") as read:
            tier.read(extent, 0, aligned(BLOCK)).wait()
        with pytest.raises(ShardwellError, match="No space left") as allocated:
            tier.allocate(2 * (free_bytes(tmp_path) or 0))
        assert told == [read.value, allocated.value]


def test_waiting_can_be_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def alarm(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, alarm)
    monkeypatch.setattr(disk, "open_queue", lambda *_: Stuck())
    try:
        tier = DiskTier([tmp_path], settings(stall_timeout=0.5))
        transfer = tier.write(tier.allocate(BLOCK), 0, aligned(BLOCK))
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(TimeoutError):
            transfer.wait()
        with pytest.warns(UserWarning, match="have stopped answering"):
            tier.close()
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_file_system_without_direct_transfers_works_and_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_file, "_go_direct", lambda descriptor: False)
    monkeypatch.setattr(disk_file, "file_system", lambda path: "nfs")
    with pytest.warns(UserWarning, match=r"the file system \(nfs\) cannot go around the page cache") as told:
        tiers = [DiskTier([tmp_path], settings()) for _ in range(2)]
    assert len(told) == 1
    for tier in tiers:
        extent, memory, found = tier.allocate(BLOCK + 1), noise(BLOCK + 1), aligned(BLOCK + 1)
        tier.write(extent, 0, memory).wait()
        tier.read(extent, 0, found).wait()
        assert (torch.equal(found, memory), tier.is_direct) == (True, False)
        tier.close()


@EACH
def test_memory_that_plays_a_disk_works_and_is_told(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path("/dev/shm")
    if file_system(path) != "tmpfs":
        pytest.skip("/dev/shm is no tmpfs")
    monkeypatch.setattr(disk_file, "_told", set())
    with pytest.warns(UserWarning, match="/dev/shm: files here are kept in memory, not on a disk"):
        tier = DiskTier([path], settings(engine))
    with tier:
        extent, memory, found = tier.allocate(9 * BLOCK + 1), noise(9 * BLOCK + 1), aligned(9 * BLOCK + 1)
        tier.write(extent, 0, memory).wait()
        tier.read(extent, 0, found).wait()
        assert torch.equal(found, memory)
