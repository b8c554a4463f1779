"""Files that become shorter while they are read are an error, and no end of the process by SIGBUS."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest
import torch

from shardwell.checkpoint.sources import mapped, torch_files
from shardwell.checkpoint.sources.flat_parts import FlatParts
from shardwell.errors import CheckpointError


def _parts(path: Path) -> FlatParts:
    torch.save({"a": torch.arange(1 << 16, dtype=torch.float32), "step": torch.tensor(3.0)}, path)
    parts = FlatParts()
    parts.add_full("a", torch_files.load(path)["a"], path)
    return parts


def test_a_tensor_of_a_file_that_was_cut_off_since_it_was_opened_is_an_error(tmp_path: Path) -> None:
    parts = _parts(tmp_path / "x.pt")
    number = torch_files.load(tmp_path / "x.pt")["step"]
    os.truncate(tmp_path / "x.pt", 100)
    with pytest.raises(CheckpointError, match="a file became shorter"):
        parts.read("a", 40000, 40100)
    with pytest.raises(CheckpointError, match="a file became shorter"):
        torch_files.number(number)


@pytest.mark.parametrize("is_there", [True, False])
def test_mapped_tensors_are_copied_in_pieces_also_without_the_call(tmp_path: Path, is_there: bool) -> None:
    parts = _parts(tmp_path / "x.pt")
    found = mapped._copy_call() if is_there else None
    with mock.patch.object(mapped, "_PIECE", 1000), mock.patch.object(mapped, "_copy_call", return_value=found):
        assert torch.equal(parts.read("a", 7, 40007), torch.arange(7, 40007, dtype=torch.float32))
