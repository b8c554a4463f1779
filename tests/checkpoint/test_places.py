"""Where checkpoints are looked for and written: what is not there is said, and what is no place is refused."""

from __future__ import annotations

import errno
import logging
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardwell.checkpoint import Folder
from shardwell.errors import CheckpointError, ShardwellError
from tests.support.checkpoint_engines import CASE, alone, step
from tests.support.checkpoint_legs import Leg
from tests.support.internals import locks_of
from tests.support.ranks import Ranks


@pytest.mark.parametrize("exists", [False, True], ids=["no folder", "empty folder"])
def test_a_load_without_a_checkpoint_warns_and_strict_raises(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, exists: bool
) -> None:
    engine = alone()
    where = tmp_path / "checkpoints"
    if exists:
        where.mkdir()
    with caplog.at_level(logging.WARNING, "shardwell"), pytest.warns(UserWarning, match="nothing was loaded") as caught:
        assert engine.load_checkpoint(where) == (None, None)
    assert caught[0].filename == __file__
    assert str(where) in caplog.text
    assert "training begins from scratch" in caplog.text
    with pytest.raises(CheckpointError, match="nothing was loaded, and strict=True asked for one"):
        engine.load_checkpoint(where, strict=True)
    step(engine)  # nothing is broken
    engine.save_checkpoint(where)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert engine.load_checkpoint(where, strict=True)[0] is not None


def load_from_nowhere(root: str) -> list[str]:
    engine = Leg(2, 0, 1, CASE, loads=False).engine()
    said = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.load_checkpoint(root)
    said.append(str(caught[-1].message))
    for attempt in (
        lambda: engine.load_checkpoint(root, strict=True),
        lambda: engine.save_checkpoint("" if dist.get_rank() == 1 else root),
    ):
        try:
            attempt()
            said.append("nothing")
        except CheckpointError as error:
            said.append(str(error))
    engine.save_checkpoint(root)
    return said


def test_all_ranks_hear_of_a_wrong_place(ranks: Ranks, tmp_path: Path) -> None:
    for warned, refused, saved in ranks.run(2, load_from_nowhere, str(tmp_path / "nowhere")):
        assert "nothing was loaded" in warned
        assert "strict=True" in refused
        assert "save_dir=''" in saved


@pytest.mark.parametrize("place", ["", "  ", None, 5])
def test_no_path_is_refused_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Any) -> None:
    monkeypatch.chdir(tmp_path)
    engine = alone()
    for call, argument in ((engine.save_checkpoint, "save_dir"), (engine.load_checkpoint, "load_dir")):
        with pytest.raises(CheckpointError, match=f"{argument}={place!r}: expected the path of a folder"):
            call(place)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("place", ["", None, 5])
def test_weights_from_no_path_are_refused_in_one_sentence(place: Any) -> None:
    with pytest.raises(CheckpointError, match="expected the path of a folder or file of weights"):
        alone().load_model(place)


def test_a_state_that_is_no_mapping_is_refused_in_one_sentence() -> None:
    for given in (None, 5, "weights.pt"):
        with pytest.raises(ShardwellError, match=f"got a {type(given).__name__}"):
            alone().load_state_dict(given)  # type: ignore[arg-type]


def test_a_folder_may_have_a_name_that_is_no_text(tmp_path: Path) -> None:
    engine, folder = alone(), os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")  # in Latin 1, as old disks have names
    engine.save_checkpoint(folder, "one")
    assert engine.load_checkpoint(folder)[0] is not None


def test_a_file_is_no_place_for_checkpoints(tmp_path: Path) -> None:
    engine = alone()
    (tmp_path / "file").write_text("mine")
    for call in (engine.save_checkpoint, engine.load_checkpoint):
        with pytest.raises(CheckpointError, match="is a file; expected the path of a folder"):
            call(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("harm", ["manifest", "latest", "all", "storage"])
def test_a_checkpoint_that_cannot_be_used_is_not_none_yet(tmp_path: Path, harm: str) -> None:
    engine, root = alone(), tmp_path / "root"
    step(engine)
    engine.save_checkpoint(root, "one")
    if harm != "all":
        engine.save_checkpoint(root, "two")
    newest = root / (root / "latest").read_text().strip()
    if harm == "latest":
        (root / "latest").write_text("")
    elif harm == "storage":
        newest.rename(tmp_path / "storage")
        newest.symlink_to(tmp_path / "away")
    else:
        (newest / "manifest.json").unlink()  # as after an interrupted copy
    words = (
        "No checkpoint here is complete"
        if harm == "all"
        else f"complete checkpoint here is {'two' if harm == 'latest' else 'one'!r}"
    )
    with pytest.raises(CheckpointError, match=words):
        alone().load_checkpoint(root)


def test_a_checkpoint_may_be_a_link_to_other_storage(tmp_path: Path) -> None:
    engine, root = alone(), tmp_path / "root"
    step(engine)
    engine.save_checkpoint(root)
    (root / "global_step1").rename(tmp_path / "storage")
    (root / "global_step1").symlink_to(tmp_path / "storage")
    other = alone()
    other.load_checkpoint(root)
    assert other.global_steps == 1


def test_a_folder_that_cannot_be_written_to_is_read_with_what_crashes_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = alone()
    step(engine)
    engine.save_checkpoint(tmp_path)
    crashed = Folder(tmp_path)
    left = crashed.begin("later")
    os.close(locks_of(crashed).pop(left.name))
    opened = os.open

    def read_only(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def open_to_read(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and str(path).startswith(str(tmp_path)):
            read_only()
        return opened(path, flags, *rest, **more)

    for name in ("mkdir", "rename", "replace", "unlink", "rmdir", "utime"):
        monkeypatch.setattr(os, name, read_only)
    monkeypatch.setattr(os, "open", open_to_read)
    other = alone()
    assert other.load_checkpoint(tmp_path, strict=True)[0] is not None
    assert other.global_steps == 1
    monkeypatch.undo()
    assert left.exists()


@pytest.mark.parametrize("tag", ["a/b", "..", "../up", "", "latest", "."])
def test_a_tag_stays_in_its_folder(tmp_path: Path, tag: str) -> None:
    engine = alone()
    with pytest.raises(CheckpointError, match="expected a plain name"):
        engine.save_checkpoint(tmp_path / "here", tag=tag)
    assert os.listdir(tmp_path) in ([], ["here"])
    assert not (tmp_path / "here").exists() or not os.listdir(tmp_path / "here")
