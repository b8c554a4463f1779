"""Checkpoints in a folder: from when on they are there, how they may be named, and what is tidied away."""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from shardwell.checkpoint import Folder
from shardwell.checkpoint.directory import LOCK
from shardwell.errors import CheckpointError
from tests.support.checkpoint_folders import FILES, abandon, fill, hidden, lay_aside, load, save

# --- the life of a checkpoint -----------------------------------------------------------------------------------


def test_a_checkpoint_is_there_once_it_is_committed_and_not_before(folder: Folder) -> None:
    path = folder.begin("step-1")
    assert path.parent == folder.root
    assert path.name.startswith(".step-1.")
    manifest = fill(path, 1)
    assert folder.tags() == []
    assert folder.latest() is None
    assert not folder.is_committed("step-1")
    with pytest.raises(CheckpointError, match="no such checkpoint; those here are: none"):
        folder.open("step-1")
    with pytest.raises(CheckpointError, match="no checkpoint to open"):
        folder.open()
    assert folder.commit(path, "step-1", manifest) == folder.root / "step-1"
    assert folder.tags() == ["step-1"]
    assert folder.latest() == "step-1"
    assert (folder.root / "latest").read_text() == "step-1"  # as DeepSpeed writes it: programs read the tag as it is
    assert folder.open() == folder.open("step-1") == manifest
    assert load(folder) == 1
    assert hidden(folder.root) == []


def test_a_root_that_does_not_exist_is_empty(folder: Folder) -> None:
    assert folder.tags() == []
    assert folder.latest() is None
    assert folder.clean() == []
    assert folder.prune(1) == []
    assert not folder.root.exists()


def test_a_checkpoint_of_the_same_tag_is_replaced(folder: Folder) -> None:
    save(folder, "best", 1)
    save(folder, "other", 2)
    save(folder, "best", 3)
    assert load(folder, "best") == 3
    assert folder.tags() == ["best", "other"]
    assert hidden(folder.root) == []


def test_tags_are_in_the_order_of_their_commits_whatever_the_clock_says(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time_ns()
    for tag, shift in (("z", 0), ("a", 0), ("k", -(10**15)), ("b", 10**15), ("c", 0)):
        monkeypatch.setattr(time, "time_ns", lambda shift=shift: now + shift)
        save(folder, tag, 1)
    assert folder.tags() == ["c", "b", "k", "a", "z"]


def test_tags_of_the_same_time_are_in_the_order_of_their_numbers(folder: Folder) -> None:
    for tag in ("step-9", "step-10", "step-100", "last"):
        save(folder, tag, 1)
        os.utime(folder.root / tag / "manifest.json", ns=(0, 0))
    assert folder.tags() == ["step-100", "step-10", "step-9", "last"]


def test_an_uncommitted_checkpoint_can_be_discarded(folder: Folder) -> None:
    path = folder.begin("a")
    fill(path, 1)
    folder.discard(path)
    folder.discard(path)  # twice is once
    assert hidden(folder.root) == []
    save(folder, "a", 1)
    for wrong in (folder.root / "a", folder.root, Path("/"), path.parent.parent / path.name):
        with pytest.raises(CheckpointError, match="not a directory that begin returned"):
            folder.discard(wrong)


# --- names and places -------------------------------------------------------------------------------------------

BAD_TAGS: list[Any] = [
    "",
    ".",
    "..",
    ".a",
    "a/b",
    "/a",
    "../a",
    "a\\b",
    "a\0",
    "a\n",
    " a",
    "latest",
    "x" * 201,
    7,
    None,
]


@pytest.mark.parametrize("tag", BAD_TAGS)
def test_a_tag_that_is_not_a_plain_name_is_refused(folder: Folder, tag: Any) -> None:
    with pytest.raises(CheckpointError, match="expected a plain name"):
        folder.begin(tag)
    path = folder.begin("a")
    with pytest.raises(CheckpointError, match="expected a plain name"):
        folder.commit(path, tag, fill(path, 1))
    assert not folder.is_committed(tag)
    if tag is not None:
        with pytest.raises(CheckpointError, match="expected a plain name"):
            folder.open(tag)


@pytest.mark.parametrize("tag", ["x" * 200, "ü", "a.0123456789abcdef.partial", "with space", "a.deleted"])
def test_odd_but_plain_tags_work(folder: Folder, tag: str) -> None:
    save(folder, tag, 1)
    save(folder, tag, 2)
    assert load(Folder(folder.root)) == 2
    assert folder.clean() == []


def test_a_root_that_is_a_file_or_below_one_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="file: not a directory"):
        Folder(tmp_path / "file").begin("a")
    with pytest.raises(CheckpointError, match="dangling: not a directory"):
        Folder(tmp_path / "dangling").begin("a")
    with pytest.raises(CheckpointError, match="cannot be made"):
        Folder(tmp_path / "file" / "root").begin("a")
    with pytest.raises(CheckpointError, match="cannot be read"):
        Folder(tmp_path / "file").tags()


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_root_that_cannot_be_written_to_is_an_error(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    folder.root.mkdir()

    def refuse(path: Any, *arguments: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(CheckpointError, match=f"no checkpoint can be written here .{os.strerror(code)}"):
        folder.begin("a")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_root_can_be_read(folder: Folder) -> None:
    save(folder, "a", 1)
    folder.root.chmod(0o555)
    try:
        assert load(folder) == 1
        with pytest.raises(CheckpointError, match="no checkpoint can be written here"):
            folder.begin("b")
    finally:
        folder.root.chmod(0o755)


def test_what_is_in_the_way_is_not_touched(folder: Folder) -> None:
    folder.root.mkdir()
    (folder.root / "logs").mkdir()
    (folder.root / "logs" / "mine").write_text("mine")
    (folder.root / "notes").write_text("mine")
    for tag in ("logs", "notes"):
        with pytest.raises(CheckpointError, match="in the way, and not a checkpoint"):
            folder.begin(tag)
    path = folder.begin("late")
    manifest = fill(path, 1)
    (folder.root / "late").write_text("mine")
    with pytest.raises(CheckpointError, match="in the way"):
        folder.commit(path, "late", manifest)
    folder.discard(path)
    for number in range(3):
        save(folder, f"step-{number}", number)
    assert folder.tags() == ["step-2", "step-1", "step-0"]
    folder.prune(1)
    folder.clean()
    assert (folder.root / "logs" / "mine").read_text() == "mine"
    assert sorted(os.listdir(folder.root)) == ["late", "latest", "logs", "notes", "step-2"]
    with pytest.raises(CheckpointError, match="not a committed checkpoint"):
        folder.open("logs")


def test_only_what_begin_returned_is_committed(folder: Folder, tmp_path: Path) -> None:
    path = folder.begin("a")
    manifest = fill(path, 1)
    elsewhere = Folder(tmp_path / "other").begin("a")
    for wrong, tag in ((path, "b"), (folder.root, "a"), (elsewhere, "a"), (folder.root / f"{path.name}x", "a")):
        with pytest.raises(CheckpointError, match=r"not (a|the) directory that begin"):
            folder.commit(wrong, tag, manifest)
    folder.discard(path)
    with pytest.raises(CheckpointError, match="does not exist any more"):
        folder.commit(path, "a", manifest)


# --- tidying ----------------------------------------------------------------------------------------------------


def test_prune_keeps_the_newest_and_the_latest(folder: Folder) -> None:
    for number in range(6):
        save(folder, f"step-{number}", number)
    (folder.root / "latest").write_text("step-1")
    assert folder.prune(2) == ["step-3", "step-2", "step-0"]
    assert folder.tags() == ["step-5", "step-4", "step-1"]
    assert folder.prune(2) == []
    assert folder.latest() == "step-1"
    assert hidden(folder.root) == []
    (folder.root / "latest").write_text("../nonsense")
    assert folder.prune(1) == ["step-4", "step-1"]
    with pytest.raises(CheckpointError, match="keep_last: expected at least 1, found 0"):
        folder.prune(0)


def test_prune_goes_by_the_step_in_the_manifest_and_not_by_the_time_of_files(folder: Folder) -> None:
    for number, tag in enumerate(["e", "d", "c", "b", "a"]):
        save(folder, tag, number, step=10 * number)
        copied = 10**18 - number * 10**12  # a plain copy, the newest first
        os.utime(folder.root / tag / "manifest.json", ns=(copied, copied))
    (folder.root / "latest").unlink()
    assert folder.tags() == ["a", "b", "c", "d", "e"]
    assert folder.prune(2) == ["c", "d", "e"]
    assert folder.tags() == ["a", "b"]


def test_prune_neither_counts_nor_removes_what_is_not_whole(folder: Folder) -> None:
    for number in range(4):
        save(folder, f"step-{number}", number, step=number)
    (folder.root / "step-3" / FILES[0]).unlink()
    (folder.root / "step-1" / "manifest.json").write_text("{")
    assert folder.prune(1) == ["step-0"]
    assert sorted(folder.tags()) == ["step-1", "step-2", "step-3"]


def test_a_leftover_of_who_cannot_be_asked_stays_for_an_hour(folder: Folder) -> None:
    save(folder, "a", 1)
    elsewhere, unmarked, here = (folder.begin(name) for name in ("elsewhere", "unmarked", "here"))
    abandon(folder)
    (elsewhere / ".lock").write_text("shardwell another-boot")
    (unmarked / ".lock").unlink()  # killed before it was there, or about to be committed
    assert folder.clean() == [here.name]
    for path in (elsewhere / ".lock", elsewhere, unmarked):
        os.utime(path, (0, 0))
    assert folder.clean() == [elsewhere.name, unmarked.name]


def test_a_leftover_is_as_old_as_the_file_system_says(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks of machines and of file servers may be hours apart; what another machine saves is not old then."""
    save(folder, "a", 1)
    elsewhere, dead = folder.begin("elsewhere"), folder.begin("dead")
    abandon(folder)
    for path in (elsewhere, dead):
        (path / ".lock").write_text("shardwell another-boot")
    now = time.time()
    for path in (dead / ".lock", dead):
        os.utime(path, (now - 4000, now - 4000))
    for skew in (9000, -9000):
        monkeypatch.setattr(time, "time", lambda skew=skew: now + skew)
        assert folder.clean() == ([dead.name] if skew > 0 else [])
    assert elsewhere.is_dir()


def test_a_name_that_a_crash_kept_from_its_place_is_gone_after_seconds(folder: Folder) -> None:
    save(folder, "a", 1)
    left = folder.root / f".latest.{'0' * 16}.partial"
    left.write_text("a\n")
    assert folder.clean() == []  # somebody may be writing it
    os.utime(left, (time.time() - 10, time.time() - 10))
    assert folder.clean() == [left.name]
    assert load(folder) == 1


def test_the_next_commit_removes_a_name_that_a_crash_kept_from_its_place(folder: Folder) -> None:
    save(folder, "a", 1)
    left = folder.root / f".latest.{'0' * 16}.partial"
    left.write_text("a")
    save(folder, "b", 2)
    assert not left.exists()
    assert load(folder) == 2


def test_a_name_that_was_taken_for_a_leftover_on_a_slow_drive_is_written_again(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(folder, "a", 1)
    replace, lost = os.replace, []

    def tidied_before(old: Path, new: Path) -> None:
        if not lost:
            lost.append(old)
            os.unlink(old)
        replace(old, new)

    monkeypatch.setattr(os, "replace", tidied_before)
    save(folder, "b", 2)
    assert lost
    assert load(folder) == 2
    assert not list(folder.root.rglob("*.partial"))


def test_a_tag_that_looks_deleted_loses_its_name_before_it_is_removed(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(folder, "a.deleted", 1)
    save(folder, "b", 2)
    rename, renamed = os.rename, []
    monkeypatch.setattr(os, "rename", lambda old, new: (renamed.append(Path(old).name), rename(old, new)))
    assert folder.prune(1) == ["a.deleted"]
    assert renamed == ["a.deleted"]


def test_clean_removes_leftovers_that_are_old_enough(folder: Folder) -> None:
    save(folder, "a", 1)
    old, young = folder.begin("old"), folder.begin("young")
    fill(old, 2)
    fill(young, 3)
    for path in (old, *old.iterdir(), young):
        os.utime(path, (0, 0))  # the files of young are still being written
    (folder.root / ".mine").mkdir()
    assert Folder(folder.root).clean() == []  # both are being written
    abandon(folder)
    assert folder.clean(older_than=60) == [old.name]
    assert folder.clean() == [young.name]
    assert sorted(os.listdir(folder.root)) == [".mine", "a", "latest"]
    assert load(folder) == 1


def test_cleaning_a_link_does_not_follow_it(folder: Folder, tmp_path: Path) -> None:
    save(folder, "a", 1)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "mine").write_text("mine")
    partial = folder.begin("b")
    abandon(folder)
    (partial / "link").symlink_to(tmp_path / "outside")
    for state in ("partial", "aside", "deleted"):
        (folder.root / f".a.{'0' * 16}.{state}").symlink_to(tmp_path / "outside")
    folder.clean()
    assert hidden(folder.root) == []
    assert (tmp_path / "outside" / "mine").read_text() == "mine"


def test_a_checkpoint_that_lies_aside_is_read_and_gets_its_name_back(folder: Folder) -> None:
    lay_aside(folder, "a", [1])
    assert folder.is_committed("a")
    assert folder.tags() == ["a"]
    assert load(folder) == 1
    assert folder.clean() == []
    assert sorted(os.listdir(folder.root)) == ["a", "latest"]
    assert load(folder) == 1


def test_of_several_that_lie_aside_the_newest_is_the_checkpoint(folder: Folder) -> None:
    names = lay_aside(folder, "a", [1, 2])
    assert load(folder) == 2
    assert folder.clean() == names[:1]
    assert load(folder) == 2
    assert folder.tags() == ["a"]


@pytest.mark.parametrize("end", ["prune", "replace"])
def test_what_lies_aside_does_not_come_back(folder: Folder, end: str) -> None:
    lay_aside(folder, "a", [1, 2])
    if end == "replace":
        save(folder, "a", 3)
        assert load(folder) == 3
    else:
        save(folder, "b", 3)
        assert folder.prune(1) == ["a"]
        assert folder.tags() == ["b"]
    assert hidden(folder.root) == []


@pytest.mark.parametrize("locked", [False, True], ids=["before its lock", "while it was locked"])
def test_a_directory_whose_writer_was_killed_as_it_began_goes_with_the_next_save(folder: Folder, locked: bool) -> None:
    leftover = folder.begin("a").with_name(".b.0123456789abcdef.partial")
    leftover.mkdir()
    if locked:
        (leftover / LOCK).touch()
    assert folder.clean() == []  # its writer may be about to lock it
    for path in (leftover, *leftover.iterdir()):
        os.utime(path, (time.time() - 2.0,) * 2)
    assert folder.clean() == [leftover.name]


def test_a_writer_that_slept_before_its_lock_begins_anew(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    write, removed = os.write, []

    def after_removal(descriptor: int, data: bytes) -> int:
        if not removed:
            removed.append(next(folder.root.glob(".a.*.partial")))
            shutil.rmtree(removed[0])
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", after_removal)
    assert folder.begin("a").is_dir()
    assert removed
