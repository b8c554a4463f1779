"""Sequence and expert axes with fp16, and with states on the host and on NVMe: the numbers of one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import expert_models, sequence_models
from tests.support.expert_models import ExpertCase
from tests.support.ranks import Ranks
from tests.support.sequence_models import SequenceCase
from tests.support.training import distance

SEQUENCE = SequenceCase(model={"kv_heads": 2}, data="packed", steps=3, accumulation=2)
PACKED, LISTED = ExpertCase(steps=3, accumulation=2), ExpertCase(model={"listed": True}, steps=3)
EXPERTS = {"host": PACKED, "host optimizer": LISTED, "nvme": PACKED, "fp16": LISTED}
HOST = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
HALF = {"fp16": {"enabled": True, "initial_scale_power": 8}}


def with_states(case: Any, states: dict[str, Any], **more: Any) -> Any:
    return replace(case, config={"zero_optimization": states, **more.pop("config", {})}, **more)


def on_tiers(folder: str) -> list[list[dict[str, Tensor]]]:
    """Train in fp64 with states on the host; in fp32, which kernels for disks need, on NVMe; and in fp16."""
    disk: dict[str, dict[str, Any]] = {
        "offload_optimizer": {"device": "nvme", "nvme_path": folder},
        "offload_param": {"device": "nvme", "nvme_path": folder, "max_in_cpu": 0},
    }
    single, found = {"dtype": torch.float32}, []
    for kind, states, more in (
        ("host", HOST, {}),
        ("host optimizer", {"offload_optimizer": {"device": "cpu"}}, {}),
        ("nvme", disk, single),
        ("fp16", {}, {**single, "config": HALF}),
    ):
        stage = 2 if kind == "host optimizer" else 3
        found.append(sequence_models.on_axis([with_states(SEQUENCE, states, **more)], stage))
        found[-1] += expert_models.on_axis([with_states(EXPERTS[kind], states, **more)], stage)
    return found


@pytest.mark.slow
def test_states_on_other_tiers_and_fp16_follow_one_process(ranks: Ranks, tmp_path: Path) -> None:
    answers = dict(zip(EXPERTS, ranks.run(4, on_tiers, str(tmp_path))[2], strict=True))
    for tier, limit, dtype in (
        ("host", 1e-10, torch.float64),
        ("host optimizer", 1e-10, torch.float64),
        ("nvme", 1e-5, torch.float32),  # the kernels of the host round otherwise
        ("fp16", 2e-2, torch.float32),  # Adam steps by 1e-2 where rounding decides on a sign
    ):
        expected = [sequence_models.plainly(replace(SEQUENCE, dtype=dtype))]
        expected += [expert_models.plainly(replace(EXPERTS[tier], dtype=dtype))]
        for found, plain in zip(answers[tier], expected, strict=True):
            noise = {name for name in plain if name.endswith("k.bias")}  # their gradient is rounding noise
            difference, name = distance(found, plain, noise)
            assert difference < limit, f"{name} differs by {difference}"
            apart = [
                (torch.as_tensor(found[name]) - plain[name]).abs().flatten() for name in plain if name not in noise
            ]
            assert torch.cat(apart).mean() < min(limit, 1e-3)
