"""Plans of Transformers with latent attention, experts and sinks train as in one process, also on split sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwell
from shardwell.errors import ShardwellError
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
    "num_key_value_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_shared_experts": 1}
ONE_GROUP = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
SHARED = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
}
MODELS: dict[str, dict[str, Any]] = {
    "DeepseekV3": {**LATENT, **ROUTED, **ONE_GROUP},  # attention that the plan leaves whole, shared and packed experts
    "DeepseekV2": {**LATENT, **ROUTED, **ONE_GROUP},  # attention that is cut (mla_kv_a_proj)
    "Qwen2Moe": SHARED,  # a shared expert that gets tokens of all rows in one dimension
    "GraniteSWA": {},  # one sink for each head
    "Qwen3Next": {  # a mixer whose cut layers all gather their outputs
        **SHARED,
        "head_dim": 4,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "layer_types": ["linear_attention", "full_attention"],
    },
}
# Routers compute in fp32 whatever the dtype of the model, and AdamW makes more of it.
CLOSE = {"DeepseekV3": 1e-6, "DeepseekV2": 1e-6, "Qwen3Next": 1e-6}


def built(kind: str, **extra: Any) -> nn.Module:
    config = getattr(transformers, f"{kind}Config")(**{**COMMON, **MODELS[kind], **extra})
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForCausalLM")(config).double()


def rows(step: int) -> Tensor:
    return torch.randint(1, 50, (2, 8), generator=torch.Generator().manual_seed(step))


def plainly(kind: str) -> dict[str, Tensor]:
    model = built(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        optimizer.zero_grad()
        model(input_ids=rows(step), labels=rows(step)).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


def started(model: nn.Module, split: bool) -> shardwell.Engine:
    config = zero(2, gradient_clipping=0.5, tensor_parallel={"autotp_size": 2, "sequence_parallel": split})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return shardwell.initialize(model=model, optimizer=optimizer, config=config).engine


def cut(kinds: list[str], split: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in kinds:
        model = built(kind)
        engine = started(model, split)
        for step in range(3):
            engine.backward(engine(input_ids=rows(step), labels=rows(step)).loss)
            engine.step()
        found[kind] = engine.state_dict()
        engine.destroy(whole=False)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("split", [False, True])
def test_plans_with_latent_attention_experts_and_sinks_follow_one_process(ranks: Ranks, split: bool) -> None:
    kinds = list(MODELS)
    found = ranks.run(2, cut, kinds, split)[-1]
    for kind in kinds:
        difference, name = distance(found[kind], plainly(kind))
        assert difference < CLOSE.get(kind, 1e-10), f"{kind}: {name} differs by {difference}"


def words_of(what: str) -> str:
    extra: dict[str, Any] = {"router": {"output_router_logits": True}, "dropout": {"attention_dropout": 0.1}}[what]
    try:
        engine = started(built("Qwen2Moe" if what == "router" else "DeepseekV3", **extra), True)
        engine(input_ids=rows(0), labels=rows(0))
    except ShardwellError as error:
        return str(error)
    return "nothing was refused"


def all_words() -> list[str]:
    return [words_of(what) for what in ("router", "dropout")]


def test_what_split_sequences_do_not_allow_is_one_sentence(ranks: Ranks) -> None:
    for router, dropout in ranks.run(2, all_words):
        assert "output_router_logits asks for the logits of routers" in router
        assert "'model.layers.0.self_attn' is not cut, runs on whole sequences therefore, and drops values" in dropout
