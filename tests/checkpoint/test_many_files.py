"""The same work on very many files is done several at a time, in order as far as anybody can see."""

from __future__ import annotations

import threading

import pytest

from shardwell.checkpoint.many_files import FEW, THREADS, WAVE, each
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
