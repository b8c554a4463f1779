"""With ZeRO++ on, no bit of training depends on where states rest, what is recomputed, or a checkpoint in between."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwell
from shardwell.memory import Tier
from tests.support.internals import groups_of
from tests.support.models import Gpt, batches, share, whole_parameters, zero
from tests.support.offload_cases import AIO, quickly
from tests.support.ranks import Ranks
from tests.support.zeropp import ALL

STEPS = 4
CLIPPED = {"gradient_clipping": 0.3, "gradient_accumulation_steps": 2}
HALVES = {"bf16": {"enabled": True}}


def built(model: nn.Module, block: dict[str, Any], others: dict[str, Any]) -> Any:
    """An engine on two nodes of two ranks, with all of ZeRO++."""
    os.environ.update(LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(dist.get_rank() % 2))
    zero_block = {**ALL, "stage3_param_persistence_threshold": 0, **block}
    config = zero(3, train_micro_batch_size_per_gpu=1, zero_optimization=zero_block, **others)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return shardwell.initialize(model=model, optimizer=optimizer, config=config).engine


def train(engine: Any, numbers: range) -> list[float]:
    losses, micros = [], engine.config.gradient_accumulation_steps or 1
    for number in numbers:
        batch = batches(number + 1, 24)[number]
        for micro in range(micros):
            loss = engine(share(batch, dist.get_rank(), dist.get_world_size(), micro, micros))
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
    return losses


def resting(parameters: str, optimizer: str, path: str) -> dict[str, Any]:
    """The part of a configuration that says where states rest."""
    named = {"nvme_path": path, "pin_memory": False}
    found = {"offload_param": {"device": parameters, "max_in_cpu": 0, **named}} if parameters else {}
    return found | ({"offload_optimizer": {"device": optimizer, **named}} if optimizer else {})


def story(block: dict[str, Any], others: dict[str, Any], lora: bool = False, **model: Any) -> dict[str, Any]:
    quickly()
    torch.manual_seed(0)
    gpt = Gpt(blocks=2, **model)
    if lora:  # as far as the engine can see: most weights are frozen
        for block_of in gpt.blocks:
            for name, parameter in block_of.named_parameters():
                parameter.requires_grad_("down" in name)
    engine = built(gpt, block, others)
    losses = train(engine, range(STEPS))
    rows = [group.spec for group in groups_of(engine)]
    return {
        "losses": losses,
        "whole": whole_parameters(gpt),
        "parameters": {row.parameters.tier for row in rows},
        "optimizer": {row.optimizer.tier for row in rows},
    }


def check_same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    for here, there in zip(one, other, strict=True):
        assert here["losses"] == there["losses"]
        for name, value in here["whole"].items():
            assert np.array_equal(value, there["whole"][name]), name


TIERS = {"": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.DISK}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("others", "highest", "places"),
    [
        ({**HALVES, **CLIPPED}, "", [("", "cpu"), ("nvme", "nvme")]),
        (CLIPPED, "cpu", [("cpu", "nvme"), ("nvme", "nvme")]),
    ],
    ids=["bf16", "fp32"],
)
def test_where_states_rest(
    ranks: Ranks, tmp_path: Path, others: dict[str, Any], highest: str, places: list[tuple[str, str]]
) -> None:
    """In fp32 steps on the host are other bits than steps on the device, codes or not."""
    above = ranks.run(4, story, resting("", highest, str(tmp_path)), others)
    for parameters, optimizer in places:
        block = resting(parameters, optimizer, str(tmp_path))
        below = ranks.run(4, story, block, {**others, "aio": AIO})
        check_same(above, below)
        assert below[0]["optimizer"] == {TIERS[optimizer]}
        assert below[0]["parameters"] == {TIERS[parameters]}


@pytest.fixture(scope="module")
def in_halves(ranks: Ranks) -> list[dict[str, Any]]:
    return ranks.run(4, story, {}, HALVES)


@pytest.mark.parametrize("recompute", ["reentrant", "non-reentrant"])
def test_what_is_recomputed(ranks: Ranks, in_halves: list[dict[str, Any]], recompute: str) -> None:
    check_same(in_halves, ranks.run(4, story, {}, HALVES, recompute=recompute))


@pytest.mark.slow
def test_frozen_weights_below(ranks: Ranks, tmp_path: Path) -> None:
    above = ranks.run(4, story, {}, HALVES, lora=True)
    check_same(above, ranks.run(4, story, resting("nvme", "cpu", str(tmp_path)), {**HALVES, "aio": AIO}, lora=True))


def interrupted(path: str) -> dict[str, Any]:
    """The same steps with a checkpoint between them, that another engine goes on from."""
    torch.manual_seed(0)
    before = built(Gpt(blocks=2), {}, HALVES)
    losses = train(before, range(STEPS // 2))
    before.save_checkpoint(path)
    torch.manual_seed(1)
    model = Gpt(blocks=2)
    after = built(model, {}, HALVES)
    after.load_checkpoint(path)
    return {"losses": losses + train(after, range(STEPS // 2, STEPS)), "whole": whole_parameters(model)}


def test_a_checkpoint_in_between(ranks: Ranks, in_halves: list[dict[str, Any]], tmp_path: Path) -> None:
    check_same(in_halves, ranks.run(4, interrupted, str(tmp_path)))
