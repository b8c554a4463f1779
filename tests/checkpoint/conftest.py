from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwell.checkpoint import Folder
from tests.support.deepspeed_checkpoints import FOLDER, TAG


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "root")


@pytest.fixture
def no_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here DeepSpeed cannot be imported, even where it is installed."""
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ImportError):
        importlib.import_module("deepspeed")


@pytest.fixture
def copy(tmp_path: Path) -> Callable[[str], Path]:
    """Copies a checkpoint of DeepSpeed to where it can be damaged, and gives the directory of its tag."""

    def made(case: str) -> Path:
        shutil.copytree(FOLDER / case, tmp_path / case)
        return tmp_path / case / TAG

    return made
