"""Hugging Face's ways to make a model, inside `zero.Init`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import shardwell
from shardwell.sharding import released
from tests.support.models import whole_parameters, zero
from tests.support.ranks import Ranks

hf = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 67, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def config(tied: bool) -> Any:
    return hf.LlamaConfig(**SMALL, tie_word_embeddings=tied)


def save(folder: str, tied: bool) -> dict[str, Tensor]:
    torch.manual_seed(5)
    model = hf.LlamaForCausalLM(config(tied))
    model.save_pretrained(folder)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def loaded(folder: str, settings: dict[str, Any], how: dict[str, Any]) -> dict[str, Any]:
    with shardwell.zero.Init(config=settings):
        model = hf.AutoModelForCausalLM.from_pretrained(folder, **how)
    kept = all(released.is_owned(parameter) for parameter in model.parameters())
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    born = whole_parameters(model)
    engine = shardwell.initialize(model=model, config=settings).engine
    tokens = torch.arange(1, 17).view(2, 8)
    with torch.no_grad():
        loss = float(engine(input_ids=tokens, labels=tokens).loss)
    return {"kept": kept, "tied": tied, "born": {n: p.float() for n, p in born.items()}, "loss": loss}


@pytest.mark.parametrize(
    ("tied", "extra", "how"),
    [
        (False, {}, {}),
        (True, {}, {"low_cpu_mem_usage": True}),
        (False, {"bf16": {"enabled": True}}, {"dtype": torch.bfloat16}),
        (False, {"bf16": {"enabled": True}}, {}),
    ],
    ids=["plain", "tied", "in bf16", "rounded"],
)
def test_from_pretrained_loads_what_was_saved(
    ranks: Ranks, tmp_path: Any, tied: bool, extra: dict[str, Any], how: dict[str, Any]
) -> None:
    expected = save(str(tmp_path), tied)
    plain = hf.LlamaForCausalLM.from_pretrained(str(tmp_path))
    if extra:
        plain.to(torch.bfloat16)
    tokens = torch.arange(1, 17).view(2, 8)
    loss = float(plain(input_ids=tokens, labels=tokens).loss.detach())
    for answer in ranks.run(2, loaded, str(tmp_path), zero(3, **extra), how):
        assert answer["kept"]
        assert answer["tied"] == tied
        for name, values in expected.items():
            there = torch.as_tensor(answer["born"][name])
            assert torch.equal(there, values.bfloat16().float() if extra else values), name
        assert abs(answer["loss"] - loss) < (0.05 if extra else 1e-5)


def from_config(tied: bool) -> tuple[bool, dict[str, Tensor]]:
    with shardwell.zero.Init(config=zero(3)):
        torch.manual_seed(5)
        model = hf.AutoModelForCausalLM.from_config(config(tied))
    return all(released.is_owned(parameter) for parameter in model.parameters()), whole_parameters(model)


@pytest.mark.parametrize("tied", [False, True])
def test_from_config_gives_the_weights_of_the_seed(ranks: Ranks, tied: bool) -> None:
    torch.manual_seed(5)
    expected = dict(hf.AutoModelForCausalLM.from_config(config(tied)).named_parameters())
    for kept, found in ranks.run(2, from_config, tied):
        assert kept
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            assert torch.equal(torch.as_tensor(found[name]), values.detach()), name
