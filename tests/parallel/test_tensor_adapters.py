"""Adapters of cut layers that would not fit, and experts that would count several times, are refused in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardwell
from shardwell.errors import ShardwellError
from tests.support.expert_models import Router
from tests.support.models import zero
from tests.support.ranks import Ranks
from tests.support.sequence_models import pretrained

peft = pytest.importorskip("peft")


def adapted(kind: str) -> nn.Module:
    """Return a model with adapters that are no plain LoRA."""
    model: Any = pretrained("Llama")
    layers = {"target_modules": ["q_proj", "down_proj"]}
    if kind == "AdaLoRA":
        found = peft.get_peft_model(model, peft.AdaLoraConfig(total_step=10, **layers))
    elif kind == "DoRA":
        found = peft.get_peft_model(model, peft.LoraConfig(use_dora=True, **layers))
    else:
        found = peft.get_peft_model(model, peft.LoHaConfig(**layers))
    return found


def words_of(kind: str) -> str:
    plan: Any = "auto"
    if kind == "experts":
        plan, model = {"blocks.*.experts": "moe_tp_experts"}, Router()
    else:
        model = adapted(kind)
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    config = zero(1, tensor_parallel={"autotp_size": 2, "plan": plan})
    try:
        shardwell.initialize(model=model, optimizer=optimizer, config=config)
    except ShardwellError as error:
        return str(error)
    return "nothing was refused"


REFUSALS = {
    "AdaLoRA": "has adapters of another kind than plain LoRA (lora_E)",
    "DoRA": "lora_magnitude_vector), which are of the whole layer",
    "LoHa": "has adapters of another kind than plain LoRA (hada_w1_a, hada_w1_b",
    "experts": "the outputs of 'blocks.0.experts', a PackedExperts, would be summed",
}


def test_what_does_not_fit_cut_layers_is_one_sentence(ranks: Ranks) -> None:
    for kind, words in REFUSALS.items():
        for found in ranks.run(2, words_of, kind):
            assert words in found
