"""Checkpoints in a folder whose files, manifest or `latest` are not as they were written."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwell.checkpoint import Folder, Manifest
from shardwell.errors import CheckpointError
from tests.support.checkpoint_folders import FILES, fill, load, save

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


def test_a_tag_may_be_a_link_to_other_storage(saved: Folder, tmp_path: Path) -> None:
    (saved.root / "a").rename(tmp_path / "outside")
    (saved.root / "a").symlink_to(tmp_path / "outside")
    assert saved.latest() == "a"
    assert saved.tags() == ["a"]
    assert load(saved) == 1
    save(saved, "b", 2)
    save(saved, "c", 3)
    assert saved.prune(1) == ["b", "a"]
    (saved.root / "a").symlink_to(tmp_path / "outside")
    save(saved, "a", 4)
    assert load(saved, "a") == 4
    assert sorted(os.listdir(tmp_path / "outside")) == [
        "manifest.json",
        *FILES,
    ]  # links are removed, not what they mean


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
def test_a_latest_that_names_no_checkpoint_is_an_error_with_the_newest_that_is_whole(
    folder: Folder, content: str
) -> None:
    save(folder, "b", 1)
    save(folder, "a", 2)
    save(folder, "torn", 3)
    (folder.root / "torn" / FILES[0]).unlink()
    (folder.root / "latest").write_text(content)
    with pytest.raises(CheckpointError, match=r"latest: names .* complete checkpoint here is 'a': pass tag='a'"):
        folder.latest()


@pytest.mark.parametrize("kind", ["directory", "link", "pipe", "binary"])
def test_a_latest_that_cannot_be_read_is_an_error(saved: Folder, tmp_path: Path, kind: str) -> None:
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
    with pytest.raises(CheckpointError, match=r"latest: .* complete checkpoint here is 'a'"):
        saved.latest()


def test_without_a_latest_the_newest_is_meant(folder: Folder) -> None:
    save(folder, "b", 1)
    save(folder, "a", 2)
    (folder.root / "latest").unlink()  # as after a crash between the first commit and its `latest`
    with pytest.warns(UserWarning, match="newest checkpoint, 'a'"):
        assert folder.latest() == "a"


@pytest.mark.parametrize("torn", ["manifest", "all", "dangling"])
def test_a_latest_whose_checkpoint_cannot_be_used_is_not_none_yet(saved: Folder, tmp_path: Path, torn: str) -> None:
    if torn == "manifest":
        (saved.root / "a" / "manifest.json").unlink()
    else:
        (saved.root / "a").rename(tmp_path / "outside")
    if torn == "dangling":
        (saved.root / "a").symlink_to(tmp_path / "not mounted")
    with pytest.raises(CheckpointError, match=r"names 'a', which .* No checkpoint here is complete"):
        saved.latest()


def test_a_torn_checkpoint_without_latest_is_not_none_yet(saved: Folder) -> None:
    (saved.root / "latest").unlink()
    (saved.root / "a").rename(saved.root / "x")
    (saved.root / "x" / FILES[0]).rename(saved.root / "x" / "rank-00000.safetensors")
    (saved.root / "x" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="x: a checkpoint without its manifest, and there is no other"):
        saved.latest()


@pytest.mark.parametrize("what", ["logs", "leftover"])
def test_a_folder_in_which_nothing_was_committed_is_none_yet(folder: Folder, what: str) -> None:
    folder.root.mkdir()
    (folder.root / "logs").mkdir()
    (folder.root / "logs" / "events").write_text("mine")
    if what == "leftover":
        fill(folder.begin("a"), 1)
    assert folder.latest() is None


@pytest.mark.parametrize("damage", [damage_missing, damage_short])
def test_an_opened_checkpoint_that_is_not_whole_names_the_newest_that_is(
    folder: Folder, damage: Callable[[Path], None]
) -> None:
    for number in range(3):
        save(folder, f"step-{number}", number)
    damage(folder.root / "step-2" / FILES[0])
    (folder.root / "step-1" / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"step-2.* complete checkpoint here is 'step-0': pass tag='step-0'"):
        folder.open()


def test_a_latest_edited_by_hand_may_have_spaces(folder: Folder) -> None:
    save(folder, "a", 1)
    save(folder, "b", 2)
    (folder.root / "latest").write_text("  a \n\n")
    assert folder.latest() == "a"
