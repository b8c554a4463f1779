"""A crash at any moment leaves the old or the new checkpoint, whole; half of one is never opened."""

from __future__ import annotations

import errno
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwell.checkpoint import Folder, Manifest, Piece, TensorRecord, write
from shardwell.errors import CheckpointError

FILES = ("r0.safetensors", "r1.safetensors")


def fill(path: Path, number: int) -> Manifest:
    """Two files that hold halves of a tensor whose elements are all `number`."""
    files = {name: write(path / name, {"w": torch.full((3,), float(number))}) for name in FILES}
    pieces = tuple(Piece(name, "w", 3 * index, 3) for index, name in enumerate(FILES))
    return Manifest({"w": TensorRecord(torch.float32, (6,), (1,), "parameter", pieces)}, files, {"number": number})


def save(folder: Folder, tag: str, number: int) -> None:
    path = folder.begin(tag)
    folder.commit(path, tag, fill(path, number))


def load(folder: Folder, tag: str | None = None) -> int:
    """The number that was saved, once every file says the same."""
    tag = tag or folder.latest()
    assert tag is not None
    manifest = folder.open(tag)
    number: int = manifest.values["number"]
    for piece in manifest.tensors["w"].pieces:
        with folder.reader(tag, piece.file, manifest) as reader:
            assert torch.equal(reader.read(piece.key), torch.full((3,), float(number)))
    return number


def lay_aside(folder: Folder, tag: str, numbers: list[int]) -> list[str]:
    """Checkpoints of one tag, the oldest first, as crashes between the renames of commits leave them."""
    names = [f".{tag}.{'f0'[index % 2]}{index:015x}.aside" for index in range(len(numbers))]
    for number, name in zip(numbers, names, strict=True):
        save(folder, tag, number)
        (folder.root / tag).rename(folder.root / name[1:])
    for name in names:
        (folder.root / name[1:]).rename(folder.root / name)
    return names


def hidden(root: Path) -> list[str]:
    return [name for name in os.listdir(root) if name.startswith(".")]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "root")


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
    assert (folder.root / "latest").read_text() == "step-1\n"
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
        with pytest.raises(CheckpointError, match="not what begin returned"):
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
        with pytest.raises(CheckpointError, match="not what begin"):
            folder.commit(wrong, tag, manifest)
    folder.discard(path)
    with pytest.raises(CheckpointError, match="no longer there"):
        folder.commit(path, "a", manifest)


# --- files that are not as the manifest says --------------------------------------------------------------------


@pytest.fixture
def saved(folder: Folder) -> Folder:
    save(folder, "a", 1)
    return folder


def damage_missing(path: Path) -> None:
    path.unlink()


def damage_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def damage_link(path: Path) -> None:
    path.rename(path.parents[2] / "outside")
    path.symlink_to(path.parents[2] / "outside")


def damage_link_inside(path: Path) -> None:
    path.rename(path.with_name("inside"))
    path.symlink_to("inside")


def damage_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (damage_missing, "missing; the manifest names it"),
        (damage_short, "it was cut or changed"),
        (damage_link, "found a link"),
        (damage_link_inside, "found a link"),
        (damage_directory, "expected a file"),
    ],
)
def test_a_file_that_is_not_as_recorded_is_an_error(
    saved: Folder, damage: Callable[[Path], None], sentence: str
) -> None:
    manifest, path = saved.open("a"), saved.root / "a" / FILES[1]
    damage(path)
    with pytest.raises(CheckpointError, match=sentence) as caught:
        saved.open("a")
    assert str(path) in str(caught.value)
    with pytest.raises(CheckpointError, match=FILES[1]):
        saved.reader("a", FILES[1], manifest)
    temporary = saved.begin("b")
    other = fill(temporary, 2)
    damage(temporary / FILES[1]) if damage is not damage_link else (temporary / FILES[1]).unlink()
    with pytest.raises(CheckpointError, match=FILES[1]):
        saved.commit(temporary, "b", other)
    assert saved.tags() == ["a"]


def test_a_flipped_byte_is_found_when_it_is_read(saved: Folder) -> None:
    path = saved.root / "a" / FILES[0]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    manifest = saved.open("a")
    with saved.reader("a", FILES[0], manifest) as reader, pytest.raises(CheckpointError, match="damaged"):
        reader.read("w")


def test_a_checkpoint_without_a_regular_manifest_is_not_opened(saved: Folder) -> None:
    manifest = saved.root / "a" / "manifest.json"
    text = manifest.read_bytes()
    manifest.write_bytes(text[: len(text) // 2])
    with pytest.raises(CheckpointError, match=f"{manifest}: not valid JSON"):
        saved.open("a")
    manifest.rename(saved.root.parent / "outside")
    manifest.symlink_to(saved.root.parent / "outside")
    assert not saved.is_committed("a")
    manifest.unlink()
    assert not saved.is_committed("a")
    assert saved.tags() == []


def test_a_tag_that_is_a_link_is_no_checkpoint(saved: Folder, tmp_path: Path) -> None:
    (saved.root / "a").rename(tmp_path / "outside")
    (saved.root / "a").symlink_to(tmp_path / "outside")
    assert not saved.is_committed("a")
    assert saved.tags() == []
    with pytest.raises(CheckpointError, match="not a committed checkpoint"):
        saved.open("a")
    with pytest.raises(CheckpointError, match="in the way"):
        saved.begin("a")
    assert sorted(os.listdir(tmp_path / "outside")) == ["manifest.json", *FILES]


def test_a_root_that_is_a_link_works(saved: Folder, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(saved.root)
    other = Folder(tmp_path / "link")
    save(other, "b", 2)
    assert load(saved, "b") == 2


def test_files_that_the_manifest_does_not_name_cannot_be_read(saved: Folder) -> None:
    manifest = saved.open("a")
    for name in ("manifest.json", "../latest", "/etc/passwd"):
        with pytest.raises(CheckpointError, match="not among the files"):
            saved.reader("a", name, manifest)
    forged = Manifest(files={"../latest": manifest.files[FILES[0]]})
    with pytest.raises(CheckpointError, match="not a plain name"):
        saved.reader("a", "../latest", forged)
    path = saved.begin("b")
    with pytest.raises(CheckpointError, match="not a plain name"):
        saved.commit(path, "b", forged)


# --- latest -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["gone\n", "../a\n", "", ".hidden", "\0", "latest", "x" * 10_000, "a/b", "a\nb"])
def test_a_latest_that_names_no_checkpoint_falls_back_to_the_newest(folder: Folder, content: str) -> None:
    save(folder, "b", 1)
    save(folder, "a", 2)
    (folder.root / "latest").write_text(content)
    with pytest.warns(UserWarning, match="newest checkpoint, 'a'"):
        assert folder.latest() == "a"


@pytest.mark.parametrize("kind", ["missing", "directory", "link", "pipe", "binary"])
def test_a_latest_that_cannot_be_read_falls_back_to_the_newest(saved: Folder, tmp_path: Path, kind: str) -> None:
    path = saved.root / "latest"
    path.unlink()
    if kind == "directory":
        path.mkdir()
    elif kind == "link":
        (tmp_path / "outside").write_text("a")
        path.symlink_to(tmp_path / "outside")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "binary":
        path.write_bytes(b"\xff\xfe")
    with pytest.warns(UserWarning, match="newest checkpoint, 'a'"):
        assert saved.latest() == "a"


def test_a_latest_without_any_checkpoint_is_none(folder: Folder) -> None:
    folder.root.mkdir()
    (folder.root / "latest").write_text("a")
    with pytest.warns(UserWarning, match="nor is any other"):
        assert folder.latest() is None


def test_a_latest_edited_by_hand_may_have_spaces(folder: Folder) -> None:
    save(folder, "a", 1)
    save(folder, "b", 2)
    (folder.root / "latest").write_text("  a \n\n")
    assert folder.latest() == "a"


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


def test_a_tag_that_looks_deleted_loses_its_name_before_it_is_removed(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(folder, "a.deleted", 1)
    save(folder, "b", 2)
    rename, renamed = os.rename, []
    monkeypatch.setattr(os, "rename", lambda old, new: (renamed.append(Path(old).name), rename(old, new)))
    assert folder.prune(1) == ["a.deleted"]
    assert renamed == ["a.deleted"]


def abandon(folder: Folder) -> None:
    """What the end of a process does to its locks."""
    for descriptor in folder._locks.values():
        os.close(descriptor)
    folder._locks.clear()


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


# --- crashes ----------------------------------------------------------------------------------------------------

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


FAILURES = pytest.mark.parametrize(("error", "forever"), [(Crash, True), (disk_error, False)], ids=["crash", "error"])


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
        folder.clean()
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
        folder.clean()
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


# --- at the same time -------------------------------------------------------------------------------------------


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
