"""Lightning's converter opens DeepSpeed's files itself: it reads shardwell's checkpoints, and DeepSpeed's layout."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from types import ModuleType

import pytest
import torch

from shardwell.checkpoint.export import to_deepspeed
from shardwell.checkpoint.sources import open_source
from shardwell.compat.deepspeed_api import loss_scaler, zero_to_fp32
from tests.support.odd_model import Odd, save

converter = pytest.importorskip("lightning.pytorch.utilities.deepspeed")


@pytest.fixture
def deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the modules of DeepSpeed's that the converter and its files name be shardwell's, as the compat layer does."""
    for name in ("deepspeed", "deepspeed.utils", "deepspeed.runtime", "deepspeed.runtime.fp16"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "deepspeed.utils.zero_to_fp32", zero_to_fp32)
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.fp16.loss_scaler", loss_scaler)
    monkeypatch.setattr(converter, "_DEEPSPEED_AVAILABLE", True)


@pytest.mark.usefixtures("deepspeed")
@pytest.mark.parametrize("stage", [2, 3])
def test_the_converter_keeps_weights_and_client_state(stage: int, tmp_path: Path) -> None:
    save(tmp_path / "own", stage, bf16={"enabled": True})
    with closing(open_source(tmp_path / "own")) as source:
        to_deepspeed(source, tmp_path / "layout", 2)
    results = []
    for folder in ("own", "layout"):
        file = tmp_path / f"{folder}.pt"
        told = converter.convert_zero_checkpoint_to_fp32_state_dict(tmp_path / folder, file)
        loaded = torch.load(file, weights_only=True)
        assert loaded.keys() == told.keys()
        assert (loaded["epoch"], loaded["note"], loaded["pair"]) == (2, "mine", (1, 2))
        assert not {"module", "optimizer", "global_steps"} & loaded.keys()
        model = Odd()
        model.load_state_dict(loaded["state_dict"])
        results.append(loaded["state_dict"])
    for name, tensor in results[0].items():
        assert torch.equal(results[1][name], tensor), name
        assert tensor.dtype is torch.float32 or name in ("calls", "shift")
