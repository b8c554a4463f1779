"""Values that the engine's dtype cannot hold: they are refused, and never wrapped, cut or made infinite in silence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import shardwell
from shardwell.checkpoint.narrowing import first_lost
from shardwell.errors import CheckpointError

CONFIG = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}
LIMIT = torch.finfo(torch.float32).min


def engine_of(buffer: Tensor, weight: float = 0.5, dtype: torch.dtype = torch.float32) -> shardwell.Engine:
    model = nn.Linear(3, 2, bias=False, dtype=dtype)
    nn.init.constant_(model.weight, weight)
    model.register_buffer("kept", buffer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return shardwell.initialize(model=model, optimizer=optimizer, config=CONFIG, device="cpu").engine


@pytest.mark.parametrize(
    ("saved", "dtype", "lost"),
    [
        (torch.tensor([1, 2**40 + 3]), torch.int32, 2**40 + 3),
        (torch.tensor([5, -1]), torch.uint8, -1),
        (torch.tensor([0.5, 2.0]), torch.int64, 0.5),
        (torch.tensor([1.0, 2.0]), torch.bool, 2.0),
        (torch.tensor([1e30]), torch.float16, 1e30),
        (torch.tensor([1e300], dtype=torch.float64), torch.float32, 1e300),
        (torch.tensor([2**20]), torch.float16, 2**20),
        (torch.tensor([1.0, float("nan")]), torch.int64, float("nan")),
        (torch.tensor([1000.0]), torch.float8_e4m3fn, 1000.0),
        (torch.tensor([1e-9, -float("inf"), float("nan"), LIMIT, 6e4]), torch.float16, None),
        (torch.tensor([1.001, 3e38]), torch.bfloat16, None),
        (torch.tensor([0, 1, 7]), torch.int32, None),
        (torch.tensor([2**24 + 1]), torch.float32, None),
        (torch.tensor([0.0, -0.0, 1.0]), torch.bool, None),
        (torch.tensor([True, False]), torch.uint8, None),
        (torch.empty(0), torch.int8, None),
    ],
)
def test_only_what_is_more_than_rounding_is_lost(saved: Tensor, dtype: torch.dtype, lost: object) -> None:
    found = first_lost(saved, dtype)
    assert found == (None if lost is None else pytest.approx(lost, nan_ok=True))


@pytest.mark.parametrize(
    ("saved", "mine"),
    [
        (torch.tensor([2**40 + 3]), torch.tensor([7], dtype=torch.int32)),
        (torch.tensor([2.5]), torch.tensor([7])),
        (torch.tensor([1e30]), torch.tensor([7.0], dtype=torch.float16)),
    ],
)
def test_a_buffer_that_cannot_hold_what_was_saved_refuses_the_checkpoint(
    tmp_path: Path, saved: Tensor, mine: Tensor
) -> None:
    engine_of(saved).save_checkpoint(tmp_path)
    engine = engine_of(mine, weight=0.25)
    with pytest.raises(CheckpointError, match=r"'model/kept': holds .*, which torch\..*, the dtype that it has"):
        engine.load_checkpoint(tmp_path)
    assert engine.module.kept.item() == 7
    assert engine.module.weight[0, 0].item() == 0.25


def load_own(engine: shardwell.Engine, folder: Path) -> None:
    engine_of(torch.zeros(1), weight=1e6).save_checkpoint(folder)
    engine.load_checkpoint(folder)


def load_a_model(engine: shardwell.Engine, folder: Path) -> None:
    save_file({"weight": torch.full((2, 3), 1e6), "kept": torch.zeros(1)}, folder / "model.safetensors")
    engine.load_model(folder)


@pytest.mark.parametrize("load", [load_own, load_a_model])
def test_weights_that_would_be_infinite_are_refused(
    tmp_path: Path, load: Callable[[shardwell.Engine, Path], None]
) -> None:
    engine = engine_of(torch.zeros(1), dtype=torch.float16)
    with pytest.raises(CheckpointError, match=r"'model/weight': holds 1000000\.0, which torch\.float16"):
        load(engine, tmp_path)
    assert engine.module.weight[0, 0].item() == 0.5


def test_what_only_rounds_is_loaded(tmp_path: Path) -> None:
    engine_of(torch.tensor([LIMIT, 3.0]), weight=0.3).save_checkpoint(tmp_path)
    engine = engine_of(torch.zeros(2, dtype=torch.float16), dtype=torch.bfloat16)
    engine.load_checkpoint(tmp_path)
    assert engine.module.weight[0, 0] == torch.tensor(0.3).bfloat16()
    assert engine.module.kept.tolist() == [-float("inf"), 3.0]
