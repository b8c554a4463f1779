"""Reads files in DeepSpeed's layout by its rules, independently of shardwell's reader and writer.

Stages 1 and 2: the parts of all ranks, one after another, are the parameters of a group, one after another. Stage 3:
of each parameter every rank has an equal part, and the parts of a rank's parameters follow each other.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class LossScaler:
    """What DeepSpeed's loss scalers become: the only objects that a file may hold besides plain values and tensors."""


_SCALERS = [(LossScaler, f"deepspeed.runtime.fp16.loss_scaler.{name}") for name in ("LossScaler", "DynamicLossScaler")]


def opened(path: Path) -> dict[str, Any]:
    """The content of a file; each tensor has a storage of its own size."""
    with torch.serialization.safe_globals(_SCALERS):  # type: ignore[arg-type]
        content: dict[str, Any] = torch.load(path, weights_only=True)
    for tensor in tensors_in(content):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, path
    return content


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


def _numbers(path: Path) -> list[int]:
    return [int(part) for part in path.name.split("_") if part.isdigit()]


class Layout:
    """A checkpoint in DeepSpeed's layout."""

    def __init__(self, root: Path) -> None:
        self.tag = (root / "latest").read_text()
        files = sorted((root / self.tag).iterdir(), key=_numbers)
        self.model = [opened(path) for path in files if path.name.endswith("_model_states.pt")]
        self.optim = [opened(path) for path in files if path.name.endswith("_optim_states.pt")]
        self.names = sorted(path.name for path in files)
        self.states = [one["optimizer_state_dict"] for one in self.optim]
        self.stage = self.states[0]["zero_stage"]
        self.main = self.model[0]

    def masters(self) -> dict[str, Tensor]:
        key = "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"
        return self._merged([one[key] for one in self.states])

    def state(self, key: str) -> dict[str, Tensor]:
        base = "optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"
        groups = [[one[base]["state"][i][key] for i in range(len(one[base]["state"]))] for one in self.states]
        return self._merged(groups)

    def groups(self) -> list[dict[str, Any]]:
        base = "optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"
        return self.states[0][base]["param_groups"]

    def frozen(self) -> dict[str, Tensor]:
        found = {}
        for name, shape in (self.main["frozen_param_shapes"] or {}).items():
            if self.stage == 3:
                whole = torch.cat([one["frozen_param_fragments"][name] for one in self.model])
                found[name] = whole[: shape.numel()].view(shape)
            else:
                found[name] = self.main["frozen_param_fragments"][name]
        return found

    def buffers(self) -> dict[str, Tensor]:
        return {name: self.main["module"][name] for name in self.main["buffer_names"]}

    def _merged(self, by_rank: list[list[Tensor]]) -> dict[str, Tensor]:
        ranks, found = len(by_rank), {}
        for index, shapes in enumerate(self.main["param_shapes"]):
            if self.stage < 3:
                joined = torch.cat([flats[index] for flats in by_rank])
                at = 0
                for name, shape in shapes.items():
                    found[name] = joined[at : at + shape.numel()].view(shape)
                    at += shape.numel()
                continue
            at = 0
            for name, shape in shapes.items():
                part = math.ceil(shape.numel() / ranks)
                joined = torch.cat([flats[index][at : at + part] for flats in by_rank])
                found[name] = joined[: shape.numel()].view(shape)
                at += part
        return found
