"""Models of Transformers are cut by their own plans, and train as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwell
from tests.support.models import zero
from tests.support.ranks import Ranks
from tests.support.training import distance

transformers = pytest.importorskip("transformers")

COMMON = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {},
    "Mistral": {},
    "Gemma2": {},
    "Phi3": {},
    "Olmo2": {},
    "Granite": {},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
}

STEPS = 2
NORMS_IN_FP32 = ("Gemma2",)  # whatever the dtype of the model


def built(kind: str) -> nn.Module:
    config = getattr(transformers, f"{kind}Config")(**{**COMMON, **MODELS[kind]})
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForCausalLM")(config).double()


def rows(step: int) -> Tensor:
    return torch.randint(1, 50, (4, 8), generator=torch.Generator().manual_seed(step))


def plainly(kind: str) -> dict[str, Tensor]:
    model = built(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(input_ids=rows(step), labels=rows(step)).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


def cut(kinds: list[str], stage: int, tensor: dict[str, Any]) -> dict[str, Any]:
    """Train each model on two data and two tensor ranks; the words of what fails stand for it."""
    found: dict[str, Any] = {}
    for kind in kinds:
        model = built(kind)
        config = zero(stage, gradient_clipping=0.5, tensor_parallel={"autotp_size": 2, **tensor})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        engine = shardwell.initialize(model=model, optimizer=optimizer, config=config).engine
        for step in range(STEPS):
            mine = rows(step).chunk(engine.data_size)[engine.data_rank]
            engine.backward(engine(input_ids=mine, labels=mine).loss)
            engine.step()
        found[kind] = engine.state_dict()
        engine.destroy(whole=False)
        dist.barrier()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "sequence"), [(3, False), (1, True)])
def test_plans_of_models_follow_one_process(ranks: Ranks, stage: int, sequence: bool) -> None:
    kinds = list(MODELS) if not sequence else ["Llama", "Qwen3", "Olmo2"]  # norms of heads, and of all heads together
    found = ranks.run(4, cut, kinds, stage, {"sequence_parallel": sequence})[-1]
    for kind in kinds:
        difference, name = distance(found[kind], plainly(kind))
        assert difference < (1e-5 if kind in NORMS_IN_FP32 else 1e-10), f"{kind}: {name} differs by {difference}"
