"""The same work on very many files is done several at a time, in order as far as anybody can see."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from shardwell.checkpoint import Entry, FilePiece, Folder, TensorRecord
from shardwell.checkpoint.manifest_index import index_of, manifest_of
from shardwell.checkpoint.many_files import FEW, THREADS, WAVE, each
from shardwell.checkpoint.save import Saver
from shardwell.checkpoint.sources import ShardwellSource
from shardwell.errors import CheckpointError
from tests.support.patience import HANG


@pytest.mark.parametrize("number", [0, 1, FEW, FEW + 1, 2 * WAVE + 1])
def test_what_is_found_comes_in_order(number: int) -> None:
    assert list(each(lambda item: -item, range(number))) == [-item for item in range(number)]


def test_several_files_are_waited_for_at_a_time() -> None:
    met = threading.Barrier(THREADS)

    def wait(item: int) -> int:
        met.wait(HANG)
        return item

    assert len(list(each(wait, range(16 * THREADS)))) == 16 * THREADS


@pytest.mark.parametrize("number", [FEW, FEW + 1])
def test_the_first_file_that_fails_is_named(number: int) -> None:
    def fail(item: int) -> None:
        if item in (20, 21, 60):
            raise OSError(f"file {item}")

    with pytest.raises(OSError, match="file 20"):
        list(each(fail, range(number)))


def test_a_system_without_free_threads_does_it_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert list(each(str, range(FEW + 1))) == [str(item) for item in range(FEW + 1)]


def test_a_checkpoint_of_many_ranks_is_read_and_checked_whole(tmp_path: Path) -> None:
    ranks, values = FEW + 2, torch.arange(7 * (FEW + 2))
    store, folder = HashStore(), Folder(tmp_path)
    temporary = folder.begin("all")

    def save(rank: int) -> None:
        def records(file: str) -> dict[str, TensorRecord]:
            return {
                "w": TensorRecord(values.dtype, (7 * ranks,), (1,), "parameter", (FilePiece(file, "w", 7 * rank, 7),))
            }

        entry, mine = Entry("w", values.dtype, (7,)), values[7 * rank :][:7].clone()
        parts = {"w": SimpleNamespace(entry=entry, numel=7, num_bytes=mine.nbytes, read=lambda: mine)}
        contents: Any = SimpleNamespace(parts=parts, scalars={}, records=records, close=lambda: None)
        device: Any = None
        saver = Saver(rank, ranks, store, device, device)
        job = saver.next_job(folder, "all", temporary, is_latest=True, keep_last=None, look=lambda: HANG)
        saver.write_now(job, contents, {"step": 3})

    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(save, range(ranks)))
    manifest = folder.open("all")
    assert len(list((tmp_path / "all").iterdir())) == ranks + 1
    for known in (manifest, manifest_of(index_of(manifest))):
        source = ShardwellSource(tmp_path / "all", known)
        assert torch.equal(source.read("w", 0, values.numel()), values)
        assert torch.equal(source.read("w", 5, 100), values[5:100])
        source.close()
    (tmp_path / "all" / f"rank-{ranks - 2:05d}.safetensors").write_bytes(b"cut")
    with pytest.raises(CheckpointError, match=rf"rank-{ranks - 2:05d}.safetensors: 3 bytes"):
        folder.open("all")
