"""Inside `GatheredParameters`: looking leaves masters alone, and a copy is an ordinary model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

import shardwell
from shardwell.utils import safe_get_full_fp32_param
from shardwell.zero import GatheredParameters
from tests.support.changing_models import OPTIONS, STAGES, Block, at_all_stages, build, fresh, tokens, train
from tests.support.models import whole_parameters, zero
from tests.support.ranks import Ranks


def masters_through_contexts(stage: int, how: str, precision: str) -> float:
    """How far masters are from themselves after nothing was changed."""
    block = {"bf16": {"enabled": precision == "bf16"}, "fp16": {"enabled": precision == "fp16", "loss_scale": 8.0}}
    model = build().float()
    engine, *_ = shardwell.initialize(
        model=model, optimizer=AdamW(model.parameters(), **OPTIONS), config=zero(stage, **block)
    )
    train(engine, range(2))
    before = {name: safe_get_full_fp32_param(p) for name, p in model.named_parameters()}
    rounded = {name: value.detach().float() for name, value in whole_parameters(model).items()}
    assert any((before[name] != rounded[name]).any() for name in before)
    if how == "refit":
        model.blocks.insert(0, fresh(Block).float())
        engine.refit()
        del model.blocks[0]
        engine.refit()
    with GatheredParameters(model.parameters(), modifier_rank=0):
        if how == "nested":
            with GatheredParameters(model.blocks[1].parameters()):
                pass
        elif how == "state dict":
            engine.state_dict()
    after = {name: safe_get_full_fp32_param(model.get_parameter(name)) for name in before}
    return max(float((before[name] - after[name].float()).abs().max()) for name in before)


def all_masters(how: str) -> dict[tuple[int, str], float]:
    return {(stage, precision): masters_through_contexts(stage, how, precision) for stage, precision in LOOKS[how]}


LOOKS = {
    "once": [(0, "bf16"), (3, "fp16")],
    "nested": [(1, "fp16"), (3, "bf16")],
    "state dict": [(2, "bf16"), (3, "fp16")],
    "refit": [(0, "bf16"), (1, "fp16"), (3, "bf16")],
}


@pytest.mark.slow
@pytest.mark.parametrize("how", LOOKS)
def test_looking_at_parameters_leaves_their_masters_alone(ranks: Ranks, how: str) -> None:
    for case, distance in ranks.run(2, all_masters, how)[0].items():
        assert distance == 0.0, case


def copied(stage: int) -> dict[str, Any]:
    model = build(tied=True)
    engine, *_ = shardwell.initialize(model=model, optimizer=AdamW(model.parameters(), **OPTIONS), config=zero(stage))
    train(engine, range(2))
    with GatheredParameters(model.parameters()):
        twin = copy.deepcopy(model)
    whole = whole_parameters(model)
    same = all(torch.equal(whole[name], parameter) for name, parameter in twin.named_parameters())
    if dist.get_rank() == 0:  # it is this rank's own: no other one has to take part
        twin(tokens(0, 1)[0]).backward()
    train(engine, range(2, 3))
    return {
        "ordinary": all(type(p) is nn.Parameter and not hasattr(p, "_shardwell_owner") for p in twin.parameters()),
        "same": same,
        "tied": twin.head.weight is twin.embed.weight,
        "trained": dist.get_rank() != 0 or all(p.grad is not None for p in twin.parameters()),
        "engine": engine.global_steps == 3,
    }


def test_a_copy_made_inside_a_context_is_an_ordinary_model(ranks: Ranks) -> None:
    for by_stage in ranks.run(2, at_all_stages, copied):
        for stage, answer in zip(STAGES, by_stage, strict=True):
            assert all(answer.values()), f"stage {stage}: {answer}"
