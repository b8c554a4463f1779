"""Checkpoints that DeepSpeed wrote (`deepspeed/make.py`), what is true of them, and ways to change them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwell.checkpoint.reader import Reader
from shardwell.checkpoint.sources.base import Source
from shardwell.checkpoint.sources.deepspeed import STUBS
from shardwell.checkpoint.sources.torch_files import load

FOLDER = Path(__file__).parents[1] / "checkpoint" / "deepspeed"
CASES = sorted(path.parent.name for path in FOLDER.glob("*/latest"))
TAG = "global_step3"
MAIN = "mp_rank_00_model_states.pt"
SECOND = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


def truth(case: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    with Reader(FOLDER / case / "truth.safetensors") as reader:
        return {name: reader.read(name) for name in reader.entries}, json.loads(reader.metadata["facts"])


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes what a file holds. Of DeepSpeed's own objects only the stage is kept, as a number."""
    content = load(path, STUBS)
    optimizer = content.get("optimizer_state_dict", {})
    for key in ("loss_scaler", "param_slice_mappings"):
        optimizer.pop(key, None)
    if "zero_stage" in optimizer:
        optimizer["zero_stage"] = optimizer["zero_stage"].arguments[0]
    change(content)
    torch.save(content, path.with_suffix(".new"))
    path.with_suffix(".new").rename(path)


def whole(source: Source, name: str) -> Tensor:
    return source.read(name, 0, source.tensors[name].numel).view(source.tensors[name].shape)
