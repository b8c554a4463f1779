"""What goes with several axes: late weight gradients, states on the host and on NVMe, bf16."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwell
from shardwell.sharding.tensor_part import part_of
from shardwell.utils import safe_get_full_fp32_param
from tests.support.packed_models import Leg, alone, trained
from tests.support.pipelines import Decoder, next_token_loss, pipeline_config, stream
from tests.support.ranks import Ranks

STEPS = 2
HOST = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
PIPE, TENSOR, BOTH = Leg(stages=2), Leg(tensor=2), Leg(stages=2, tensor=2)


EXACT = [
    replace(BOTH, schedule="zb-h1"),
    replace(BOTH, schedule="zb-h1", zero=3),
    replace(PIPE, zero=3, states=HOST),
    replace(TENSOR, zero=3, states=HOST),
    replace(BOTH, zero=2, states={"offload_optimizer": {"device": "cpu"}}),
]


def all_trained(folder: str) -> tuple[list[dict[str, Any]], list[tuple[dict[str, Any], dict[str, Any]]]]:
    """Train in fp64; then in fp32, which kernels for states on disk need, with states on the device and on disk."""
    disk: dict[str, dict[str, Any]] = {
        "offload_optimizer": {"device": "nvme", "nvme_path": folder},
        "offload_param": {"device": "nvme", "nvme_path": folder, "max_in_cpu": 0},
    }
    single = [replace(axes, zero=3, dtype=torch.float32) for axes in (PIPE, TENSOR)]
    pairs = [(trained(leg, STEPS), trained(replace(leg, states=disk), STEPS)) for leg in single]
    return [trained(leg, STEPS) for leg in EXACT], pairs


@pytest.mark.slow
def test_late_weight_gradients_and_offloaded_states_on_several_axes(ranks: Ranks, tmp_path: Path) -> None:
    expected = alone([Leg()], STEPS)
    answers = ranks.run(4, all_trained, str(tmp_path))
    for number, leg in enumerate(EXACT):
        held = {name: torch.as_tensor(value) for exact, _ in answers for name, value in exact[number].items()}
        for name, value in expected.items():
            assert (held[name] - value).abs().max() < 1e-10, f"{leg}: {name}"
    for _, pairs in answers:
        for device, disk in pairs:
            for name, value in device.items():
                if (
                    "qkv.bias" not in name
                ):  # that of the keys has a gradient of rounding noise, of which Adam makes steps
                    assert abs(disk[name] - value).max() < 1e-5, name  # the kernels of the host round otherwise


HALF = {"bf16": {"enabled": True}}


def halves(steps: int) -> list[dict[str, Any]]:
    """Train in bf16 at stages 1 to 3 in each layout."""
    layouts = [replace(one, more=HALF, dtype=torch.float32) for one in (PIPE, TENSOR, BOTH)]
    return [trained(replace(one, zero=stage), steps) for one in layouts for stage in (1, 2, 3)]


@pytest.mark.slow
def test_bf16_gives_the_same_bits_at_stages_1_to_3_in_every_layout(ranks: Ranks) -> None:
    answers = ranks.run(4, halves, 2)
    for one in answers:
        for number in range(0, 9, 3):
            first = one[number]
            for other in one[number + 1 : number + 3]:
                assert all((other[name] == value).all() for name, value in first.items())


def held_after(steps: int) -> list[dict[str, Any]]:
    """Train tied and replicated parameters in bf16; return the values and masters that this rank holds whole."""
    found = []
    for stage in (1, 3):
        torch.manual_seed(0)
        model = shardwell.pipeline.split(Decoder(2, tied=True), loss_fn=next_token_loss)
        tensor = {"autotp_size": 2, "plan": {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}}
        engine: Any = shardwell.initialize(
            model=model,
            config={**pipeline_config(stage, "1f1b", tensor_parallel=tensor, **HALF), "gradient_accumulation_steps": 2},
        ).engine
        batches = stream(steps, engine.data_rank, 2)
        for _ in range(steps):
            engine.train_batch(batches)
        values: dict[str, Any] = {}
        for name, parameter in engine.module.named_parameters():
            if part_of(parameter) is None:
                with shardwell.zero.GatheredParameters([parameter]):
                    values[name] = parameter.detach().float().clone()
                values[f"master of {name}"] = safe_get_full_fp32_param(parameter)
        found.append(values)
        engine.destroy(whole=False)
    return found


@pytest.mark.slow
def test_replicated_and_tied_parameters_are_bit_equal_after_50_steps(ranks: Ranks) -> None:
    answers = ranks.run(4, held_after, 50)
    for at in range(2):
        first, *_, last = (one[at] for one in answers)
        assert "tokens.weight" in first
        assert "tokens.weight" in last  # the copy of the last stage
        for one in answers:
            for other in answers:
                for name, value in one[at].items():
                    assert name not in other[at] or (other[at][name] == value).all(), name
