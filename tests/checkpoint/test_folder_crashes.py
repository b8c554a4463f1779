"""A crash or an error at any moment leaves the old or the new checkpoint, whole; half of one is never opened."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from shardwell.checkpoint import Folder
from shardwell.errors import CheckpointError
from tests.support.checkpoint_folders import FILES, abandon, fill, hidden, lay_aside, load, save

CALLS = ("mkdir", "open", "write", "fsync", "rename", "replace", "utime", "unlink", "rmdir", "close")


class Crash(BaseException):
    """The process is gone."""


@contextmanager
def failing_from(call: int, error: Callable[[], BaseException], *, forever: bool) -> Iterator[list[str]]:
    """The `call`-th system call fails; with `forever`, so does each after it, as nothing runs after a crash."""
    made: list[str] = []

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            made.append(name)
            failing = len(made) > call if forever else len(made) == call + 1
            if failing and name == "close":
                real(*arguments)  # a process that is gone has no open files
            if failing:
                raise error()
            return real(*arguments, **options)

        return wrapped

    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, wrap(name, getattr(os, name)))
        yield made


def disk_error() -> OSError:
    return OSError(errno.EIO, os.strerror(errno.EIO))


def run_with_failures(
    root: Path, prepare: Callable[[Folder], None], act: Callable[[Folder], None], error: Any, *, forever: bool
) -> Iterator[Folder]:
    """`act` failing at its first system call, at its second, and so on until it gets through."""
    for call in range(1000):
        folder = Folder(root / str(call))
        prepare(folder)
        with warnings.catch_warnings(), failing_from(call, error, forever=forever) as made:
            warnings.simplefilter("ignore")
            with suppress(Crash, CheckpointError):
                act(folder)
        abandon(folder)
        yield Folder(folder.root)
        if len(made) <= call:
            assert call > 10
            return
    raise AssertionError("never got through")


def clean_up(folder: Folder) -> None:
    """Now, and an hour later. What stays so long is small."""
    folder.clean()
    for path in [folder.root / name for name in hidden(folder.root)]:
        assert path.is_file() or os.listdir(path) in ([], [".lock"])
        for old in (*(path.iterdir() if path.is_dir() else ()), path):
            os.utime(old, (0, 0))
    folder.clean()


FAILURES = pytest.mark.parametrize(("error", "forever"), [(Crash, True), (disk_error, False)], ids=["crash", "error"])


@pytest.mark.slow
@FAILURES
def test_a_failure_while_a_checkpoint_is_replaced_leaves_the_old_or_the_new(
    tmp_path: Path, error: Any, forever: bool
) -> None:
    found = set()
    for folder in run_with_failures(
        tmp_path, lambda folder: save(folder, "a", 1), lambda folder: save(folder, "a", 2), error, forever=forever
    ):
        assert folder.tags() == ["a"]
        number = load(folder)
        found.add(number)
        clean_up(folder)
        assert load(folder) == load(folder, "a") == number
        assert sorted(os.listdir(folder.root)) == ["a", "latest"]
        save(folder, "a", 3)
        assert load(folder) == 3
    assert found == {1, 2}


@FAILURES
def test_a_failure_while_a_checkpoint_is_added_leaves_the_one_before(tmp_path: Path, error: Any, forever: bool) -> None:
    found = set()
    for folder in run_with_failures(
        tmp_path, lambda folder: save(folder, "a", 1), lambda folder: save(folder, "b", 2), error, forever=forever
    ):
        assert load(folder, "a") == 1
        found.add((tuple(folder.tags()), folder.latest()))
        if folder.is_committed("b"):
            assert load(folder, "b") == 2
        clean_up(folder)
        assert hidden(folder.root) == []
    assert found == {(("a",), "a"), (("b", "a"), "a"), (("b", "a"), "b")}


@FAILURES
def test_a_failure_of_the_first_checkpoint_leaves_it_or_nothing(tmp_path: Path, error: Any, forever: bool) -> None:
    for folder in run_with_failures(
        tmp_path, lambda folder: None, lambda folder: save(folder, "a", 1), error, forever=forever
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # latest may be missing
            assert folder.latest() is None or load(folder) == 1
        folder.clean()
        save(folder, "a", 2)
        assert load(folder) == 2


@pytest.mark.slow
@FAILURES
def test_a_failure_while_pruning_leaves_no_half_checkpoint(tmp_path: Path, error: Any, forever: bool) -> None:
    def prepare(folder: Folder) -> None:
        for number in range(4):
            save(folder, f"step-{number}", number)

    for folder in run_with_failures(tmp_path, prepare, lambda folder: folder.prune(2) and None, error, forever=forever):
        tags = folder.tags()
        assert tags[:2] == ["step-3", "step-2"]
        assert all(load(folder, tag) == int(tag[-1]) for tag in tags)
        folder.clean()
        assert folder.tags() == tags
        assert hidden(folder.root) == []
        folder.prune(2)
        assert folder.tags() == ["step-3", "step-2"]


@pytest.mark.slow
@FAILURES
def test_a_failure_while_cleaning_loses_nothing(tmp_path: Path, error: Any, forever: bool) -> None:
    def prepare(folder: Folder) -> None:
        lay_aside(folder, "a", [0, 1, 2])
        save(folder, "b", 7)
        fill(folder.begin("c"), 8)
        abandon(folder)
        (folder.root / f".d.{'0' * 16}.deleted").mkdir()

    for folder in run_with_failures(tmp_path, prepare, lambda folder: folder.clean() and None, error, forever=forever):
        assert (load(folder, "a"), load(folder, "b")) == (2, 7)
        folder.clean()
        assert (load(folder, "a"), load(folder, "b")) == (2, 7)
        assert sorted(os.listdir(folder.root)) == ["a", "b", "latest"]


def test_everything_is_on_the_disk_before_it_gets_its_name(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    save(folder, "a", 1)
    done: list[tuple[str, str]] = []

    def name_of(path: Any) -> str:
        name = Path(os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else path).name
        parts = name.split(".")
        return name if not name.startswith(".") else f"{'.'.join(parts[1:-2])}:{parts[-1]}"

    fsync, rename, replace = os.fsync, os.rename, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (done.append(("sync", name_of(file))), fsync(file)))
    for verb, real in (("rename", rename), ("replace", replace)):

        def move(old: Any, new: Any, real: Callable[..., None] = real) -> None:
            done.append((name_of(old), name_of(new)))
            real(old, new)

        monkeypatch.setattr(os, verb, move)
    save(folder, "a", 2)
    assert done == [
        ("sync", FILES[0]),
        ("sync", FILES[1]),
        ("sync", "manifest.json:partial"),
        ("manifest.json:partial", "manifest.json"),
        ("sync", "a:partial"),
        ("a", "a:aside"),
        ("a:partial", "a"),
        ("sync", "root"),
        ("sync", "latest:partial"),
        ("latest:partial", "latest"),
        ("sync", "root"),
        ("a:aside", "a:deleted"),
        ("sync", "root"),
    ]


def test_a_full_disk_while_the_manifest_is_written_leaves_the_old_one(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(folder, "a", 1)
    path = folder.begin("a")
    manifest = fill(path, 2)

    def full(descriptor: int, view: memoryview) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(CheckpointError, match=r"manifest\.json: cannot be written .No space left on device"):
            folder.commit(path, "a", manifest)
    assert load(folder) == 1
    assert sorted(os.listdir(path)) == [".lock", *FILES]
    folder.commit(path, "a", manifest)  # once there is room again
    assert load(folder) == 2


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_cannot_sync_directories_is_used_without(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    fsync = os.fsync

    def refuse(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(code, os.strerror(code))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    save(folder, "a", 1)
    assert load(folder) == 1


@pytest.mark.parametrize("stage", ["begin", "discard"])
def test_what_could_not_be_removed_after_an_error_goes_with_the_next_save(tmp_path: Path, stage: str) -> None:
    folder = Folder(tmp_path)
    begun = folder.begin("a") if stage == "discard" else None
    with failing_from(0 if begun is not None else 1, disk_error, forever=True), pytest.raises(CheckpointError):
        folder.begin("a") if begun is None else folder.discard(begun)
    assert len(hidden(tmp_path)) == 1
    Folder(tmp_path).clean()
    assert hidden(tmp_path) == []
