"""The folder that a user names: only one that is known to be absent has no checkpoint yet, all else is an error."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import NoReturn

import pytest

from shardwell.checkpoint.user_folder import folder_named
from shardwell.errors import CheckpointError


def test_an_absent_folder_may_be_named(tmp_path: Path) -> None:
    assert folder_named(tmp_path / "a" / "b", "load_dir") == str(tmp_path / "a" / "b")


@pytest.mark.parametrize("below", ["", "run", "run/one"])
def test_a_link_to_storage_that_is_not_mounted_is_no_absent_folder(tmp_path: Path, below: str) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "storage")
    with pytest.raises(CheckpointError, match=r"link is a link to .*storage, which is not there"):
        folder_named(tmp_path / "link" / below, "load_dir")
    (tmp_path / "storage").mkdir()
    folder_named(tmp_path / "link" / below, "load_dir")


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EACCES, errno.EIO, errno.ENOTCONN])
def test_storage_that_does_not_answer_is_no_absent_folder(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def stat(path: str, **_: object) -> NoReturn:
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr(os, "stat", stat)
    with pytest.raises(CheckpointError, match=r"load_dir='run': cannot be looked at \(.*\)"):
        folder_named("run", "load_dir")


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 300])
def test_a_name_that_no_folder_can_have_is_refused_in_words(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="cannot be looked at"):
        folder_named(str(tmp_path / name), "save_dir")
