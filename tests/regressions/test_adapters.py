"""Pain: frozen weights, adapters and activation checkpointing together: no gradient arrives, or backward fails."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from shardwell.utils import safe_get_full_grad
from tests.support import zoo
from tests.support.ranks import Ranks

peft = pytest.importorskip("peft")

HOW = {0: ["non-reentrant"], 1: ["reentrant"], 2: ["non-reentrant"], 3: ["non-reentrant", "reentrant"]}  # by stage


def adapted() -> nn.Module:
    """A tiny llama with adapters whose both halves are not zero."""
    torch.manual_seed(3)
    with zoo.default_dtype(torch.float64):
        options = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "up_proj"]}
        return zoo.disturb(peft.get_peft_model(zoo.build("llama"), peft.LoraConfig(**options)).train())


@cache
def plain() -> zoo.Run:
    return zoo.train_plainly(adapted(), "llama")


def train(stage: int, how: str) -> dict[str, Any]:
    model = zoo.recompute(adapted(), how)
    engine = zoo.make_engine(model, stage)
    batch = zoo.share(zoo.batches("llama", 1)[0], engine.global_rank, engine.world_size)
    engine.backward(engine(**batch).loss)
    gradients = {
        name: float(safe_get_full_grad(parameter).norm())
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    engine.zero_grad()
    return {"gradients": gradients, "run": zoo.train(engine, "llama")}


def train_both_ways(stage: int) -> list[dict[str, Any]]:
    return [train(stage, how) for how in HOW[stage]]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_adapters_train_under_activation_checkpointing(ranks: Ranks, stage: int) -> None:
    """The recomputed blocks see frozen or empty weights; here gradients arrive and frozen weights keep every bit."""
    answers = ranks.run(2, train_both_ways, stage)
    before = dict(adapted().named_parameters())
    for index, how in enumerate(HOW[stage]):
        for answer in answers:
            gradients = answer[index]["gradients"]
            assert gradients.keys() == {name for name, p in before.items() if p.requires_grad}
            assert all(norm > 0 for norm in gradients.values()), how
            for name, values in answer[index]["run"][2].items():
                same = bool((torch.as_tensor(values) == before[name]).all())
                assert same != before[name].requires_grad, f"{how}: {name}"
        zoo.check([answer[index]["run"] for answer in answers], plain(), what=how)
