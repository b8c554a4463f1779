"""Several that write, read and tidy one folder at the same time."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardwell.checkpoint import Folder
from shardwell.errors import CheckpointError
from tests.support.checkpoint_folders import fill, hidden, load, save
from tests.support.ranks import Ranks


def at_once(*acts: Callable[[], None]) -> None:
    """Runs all of them in threads and raises what the first to fail raised."""
    failures: list[BaseException] = []
    start = threading.Barrier(len(acts))

    def run(act: Callable[[], None]) -> None:
        start.wait()
        try:
            act()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def test_several_may_commit_the_same_tag_while_others_read_it(folder: Folder) -> None:
    save(folder, "a", 0)
    read: list[int] = []

    def writer(first: int) -> None:
        for number in range(first, first + 15):
            save(folder, "a", number)

    def reader() -> None:
        for _ in range(60):
            assert folder.is_committed("a")
            assert folder.latest() == "a"
            read.append(folder.open("a").values["number"])

    at_once(lambda: writer(100), lambda: writer(200), reader)
    assert load(folder) in {114, 214}
    assert set(read) <= {0, *range(100, 115), *range(200, 215)}
    assert hidden(folder.root) == []


def test_several_may_commit_clean_and_prune_at_once(folder: Folder) -> None:
    save(folder, "start", 0)

    def writer(name: str) -> None:
        for number in range(10):
            save(folder, f"{name}-{number}", number)

    def tidy() -> None:
        for _ in range(30):
            folder.clean(older_than=60)
            folder.prune(3)

    at_once(lambda: writer("a"), lambda: writer("b"), tidy, tidy)
    folder.prune(3)
    tags = folder.tags()
    assert 3 <= len(tags) <= 4
    assert folder.latest() in {"a-9", "b-9"}
    assert all(load(folder, tag) == int(tag[-1]) for tag in tags)
    assert hidden(folder.root) == []


def test_cleaning_between_the_renames_of_a_commit_does_no_harm(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    save(folder, "a", 1)
    rename, busy = os.rename, [False]

    def cleaning(old: Any, new: Any) -> None:
        rename(old, new)
        if not busy[0] and str(new).endswith(".aside"):
            busy[0] = True
            assert load(folder) == 1
            Folder(folder.root).clean(older_than=60)

    monkeypatch.setattr(os, "rename", cleaning)
    save(folder, "a", 2)
    assert busy[0]
    assert load(folder) == 2
    assert hidden(folder.root) == []


def test_a_tag_that_others_never_stop_writing_is_given_up(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    save(folder, "a", 1)
    rename = os.rename

    def crowded(old: Any, new: Any) -> None:
        if Path(new).name == "a":
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
        rename(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", crowded)
        with pytest.raises(CheckpointError, match="others keep writing the same tag"):
            save(folder, "a", 2)
    assert load(folder) == 1


# --- several processes ------------------------------------------------------------------------------------------

SAVES = 15


def save_or_poll(root: str, others: int) -> tuple[int, list[str]]:
    """The last rank polls as a reader does, the others are jobs that save as engines do: how often, and what failed."""
    rank, failures, count = dist.get_rank(), [], 0
    end = Path(root, "end")
    while count < SAVES if rank < others else len(list(Path(root).glob("end*"))) < others:
        count += 1
        try:
            if rank < others:
                folder = Folder(root)
                tag = f"step-{count}" if count % 2 else f"job-{rank}-{count}"  # its own, and one that all use
                path = folder.begin(tag)
                folder.clean()
                folder.commit(path, tag, fill(path, count, step=count))
                folder.prune(3)
            elif Folder(root).has_any():
                load(Folder(root))
        except (CheckpointError, OSError, AssertionError) as error:
            if rank < others:  # a reader may find that what it reads was replaced, and hears so
                failures.append(f"{type(error).__name__}: {error}")
            elif not isinstance(error, CheckpointError):
                failures.append(repr(error))
    if rank < others:
        end.with_name(f"end{rank}").write_text("")
    return count, failures


def test_several_jobs_save_into_one_folder_while_a_reader_polls(ranks: Ranks, tmp_path: Path) -> None:
    answers = ranks.run(4, save_or_poll, str(tmp_path), 3)
    assert [failures for _, failures in answers] == [[], [], [], []]
    assert [count for count, _ in answers[:3]] == [SAVES] * 3
    folder = Folder(tmp_path)
    assert folder.newest_complete() == folder.tags()[0]
    assert load(folder) in {SAVES, SAVES - 1, SAVES - 2}
    assert hidden(tmp_path) == []
