"""Which engine runs, how that is told, and what the settings may be."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from shardwell.errors import ShardwellError
from shardwell.kernels import io
from shardwell.offload import disk_queue
from shardwell.offload.disk import AioSettings, DiskTier
from shardwell.offload.disk_queue import ENGINES, choose, fastest, measure, unusable
from tests.support.disk_engines import BLOCK, EACH, settings

BUILT = pytest.mark.skipif("threads" in unusable(), reason="the native library was not built")


@EACH
def test_every_engine_can_be_forced(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose([tmp_path], settings(engine)).engine == engine
    monkeypatch.setenv("SHARDWELL_IO", engine)
    assert choose([tmp_path], AioSettings()) == disk_queue.IoEngineChoice(engine, "SHARDWELL_IO says so")


def test_an_unknown_engine_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWELL_IO", "aio")
    with pytest.raises(ShardwellError, match="SHARDWELL_IO: found 'aio', expected one of io_uring, threads, python"):
        choose([tmp_path], AioSettings())


@pytest.mark.slow
@pytest.mark.skipif(bool(unusable()), reason="io_uring cannot be used here")
def test_the_faster_engine_is_chosen_and_the_figures_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_queue, "_choices", {})
    monkeypatch.delenv("SHARDWELL_IO", raising=False)
    chosen, calls = AioSettings(block_size=BLOCK), []
    real = disk_queue._time
    slow = {"io_uring": 50.0, "threads": 1.0}

    def timed(engine: str, *others: Any) -> float:
        calls.append(engine)
        return real(engine, *others) * slow[engine]

    monkeypatch.setattr(disk_queue, "_time", timed)
    with DiskTier([tmp_path], chosen) as tier:
        assert tier.choice.engine == "threads"
        assert tier.choice.why.count("GB/s") == 2
        assert tier.choice.why.count("mixed") == 2
    once = len(calls)
    DiskTier([tmp_path], chosen).close()
    assert len(calls) == once  # a choice is made once
    slow.update(io_uring=1.0, threads=50.0)
    assert choose([tmp_path], AioSettings(block_size=2 * BLOCK)).engine == "io_uring"


def test_io_uring_wins_unless_threads_are_clearly_faster() -> None:
    """In what training asks of a drive: reads and writes at once."""
    assert fastest({"io_uring": {"mixed": 100}, "threads": {"mixed": 104}}) == "io_uring"
    assert fastest({"io_uring": {"mixed": 100}, "threads": {"mixed": 106}}) == "threads"


@BUILT
def test_a_system_that_forbids_io_uring_gets_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHARDWELL_IO", raising=False)
    monkeypatch.setattr(io.IoLibrary, "uring_error", lambda self: errno.EPERM)
    with DiskTier([tmp_path]) as tier:
        assert tier.choice.engine == "threads"
        assert tier.choice.why == "io_uring: the system refuses: Operation not permitted"
    with pytest.raises(ShardwellError, match=r"'io_uring' cannot be used here \(the system refuses: Operation not"):
        DiskTier([tmp_path], settings("io_uring"))


def test_without_the_library_python_does_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHARDWELL_IO", raising=False)
    monkeypatch.setenv("SHARDWELL_NATIVE", "0")
    with DiskTier([tmp_path]) as tier:
        assert (tier.choice.engine, tier.choice.why) == ("python", "SHARDWELL_NATIVE=0")
    with pytest.raises(ShardwellError, match="'threads' cannot be used here"):
        DiskTier([tmp_path], settings("threads"))


def test_a_library_that_does_not_fit_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io.kernels, "__path__", [os.fspath(tmp_path)])
    assert "was not built" in unusable()["threads"]
    (tmp_path / io.NAME).write_bytes(b"no library")
    assert "cannot be used" in unusable()["io_uring"]


@BUILT
def test_a_library_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    built = io.IO_VERSION
    monkeypatch.setattr(io, "IO_VERSION", 99)
    assert f"has queues {built}, expected 99" in unusable()["threads"]


@EACH
def test_speeds_are_measured_on_all_paths_at_once(engine: str, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    found = measure([tmp_path, tmp_path / "other"], settings(engine), 50 * BLOCK, [engine])
    assert list(found) == [engine]
    assert min(found[engine].values()) > 0
    assert os.listdir(tmp_path) == ["other"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 1000}, "block_size: found 1000, expected a multiple of 4096"),
        ({"block_size": 0}, "block_size: found 0"),
        ({"queue_depth": 0}, "queue_depth: found 0, expected 1 to 4096"),
        ({"intra_op_parallelism": 65}, "intra_op_parallelism: found 65, expected 1 to 64"),
        ({"engine": "aio"}, f"engine: found 'aio', expected auto, {', '.join(ENGINES)}"),
        ({"stall_timeout": 0}, "stall_timeout: found 0"),
    ],
)
def test_settings_out_of_range_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ShardwellError, match=message):
        AioSettings(**change)


def test_the_defaults_are_those_of_the_aio_block() -> None:
    found = AioSettings()
    assert (found.block_size, found.queue_depth, found.intra_op_parallelism) == (1048576, 8, 1)
    assert (found.single_submit, found.overlap_events) == (False, True)
