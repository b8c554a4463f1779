"""The tier's files: nobody else can open them, and nothing is left of them."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwell.kernels.io import SECTOR
from shardwell.offload.disk import DiskTier
from shardwell.offload.disk_file import DiskFile
from tests.support.command import environment
from tests.support.disk_engines import BLOCK, noise, settings
from tests.support.internals import files_of


def without_unnamed_files(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """A file system that lacks O_TMPFILE; returns the names and flags of what is opened instead."""
    real, opened = os.open, []

    def refusing(path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        opened.append((os.path.basename(path), flags))
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refusing)
    return opened


@pytest.mark.parametrize("is_unnamed", [True, False])
def test_files_have_no_name_and_no_other_readers(
    is_unnamed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = [] if is_unnamed else without_unnamed_files(monkeypatch)
    with DiskTier([tmp_path], settings()) as tier:
        tier.write(tier.allocate(BLOCK), 0, noise(BLOCK)).wait()
        status = os.fstat(files_of(tier)[0].descriptor)
        assert (stat.S_IMODE(status.st_mode), status.st_nlink) == (0o600, 0)
        assert os.listdir(tmp_path) == []
    for _, flags in opened:
        assert flags & os.O_EXCL
        assert flags & os.O_NOFOLLOW
    assert len({name for name, _ in opened}) == len(opened) == (0 if is_unnamed else 1)


def test_names_cannot_be_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = without_unnamed_files(monkeypatch)
    for _ in range(3):
        DiskFile(tmp_path).close()
    assert len({name for name, _ in opened}) == 3
    assert all(len(name) == len(".shardwell-") + 32 for name, _ in opened)


KILLED = """
import sys, time
from shardwell.offload.disk import AioSettings, DiskTier, aligned
tier = DiskTier([sys.argv[1]], AioSettings(engine="python"))
tier.write(tier.allocate(1 << 20), 0, aligned(1 << 20)).wait()
print("ready", flush=True)
time.sleep(600)
"""


def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, os.fspath(tmp_path)]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert os.listdir(tmp_path) == []


def test_transfers_go_around_the_page_cache(tmp_path: Path) -> None:
    try:
        os.close(os.open(tmp_path / "probe", os.O_CREAT | os.O_RDWR | os.O_DIRECT, 0o600))
    except OSError:
        pytest.skip("the file system cannot go around the page cache")
    file = DiskFile(tmp_path)
    flags = fcntl.fcntl(file.descriptor, fcntl.F_GETFL)
    file.close()
    assert file.is_direct
    assert flags & os.O_DIRECT


def test_descriptors_do_not_reach_other_programs(tmp_path: Path) -> None:
    file = DiskFile(tmp_path)
    assert not os.get_inheritable(file.descriptor)
    file.close()


@given(st.lists(st.one_of(st.integers(1, 10 * SECTOR), st.just(0)), max_size=40), st.randoms(use_true_random=False))
def test_regions_never_overlap_and_all_space_comes_back(tmp_path_factory: Any, sizes: list[int], choose: Any) -> None:
    file = DiskFile(tmp_path_factory.getbasetemp())
    held: dict[int, int] = {}
    for size in sizes:
        if size:
            held[file.take(size)] = -(-size // SECTOR) * SECTOR
        elif held:
            offset = choose.choice(sorted(held))
            file.give(offset, held.pop(offset))
        ends = [0]
        for offset, length in sorted(held.items()):
            assert offset % SECTOR == 0
            assert offset >= ends[-1]
            ends.append(offset + length)
        assert file.size == ends[-1] == os.fstat(file.descriptor).st_size
    vacant = sum(size for _, size in file._vacant)
    assert vacant + sum(held.values()) == file.size
    file.close()
