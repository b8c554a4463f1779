"""Checkpoints in a folder whose files, manifest or `latest` are not as they were written."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwell.checkpoint import Folder, Manifest
from shardwell.errors import CheckpointError
from tests.checkpoint.folders import FILES, fill, load, save

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
