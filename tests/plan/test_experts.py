"""Plans of models with experts: their sizes are those of Transformers, their bytes follow the formulas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwell.errors import ConfigError
from shardwell.memory import Tier
from shardwell.plan import PlanReport, SimulatedMachine, SimulatedRanks, estimate
from shardwell.plan.decoder import Decoder, DecoderSizes
from shardwell.plan.devices import gpu, speeds_of
from shardwell.plan.models import PRESETS, decoder, sizes_of

SMALL = DecoderSizes(16, 64, 4, 96, mlp=128, kv_heads=2, gated=True, experts=8, experts_of_token=2)
COMMON = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
FILES: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 80, "intermediate_size": 200},
    "qwen3_moe": {"moe_intermediate_size": 48, "head_dim": 32, "intermediate_size": 200},
    "qwen3": {"intermediate_size": 96, "head_dim": 32},
}


def planned(ranks: int, experts: int, *, per_node: int = 8, **more: Any) -> PlanReport:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "shardwell": {"expert_parallel_size": experts},
        **more,
    }
    machine = SimulatedMachine(ranks=SimulatedRanks(0, ranks, per_node), speeds=speeds_of(gpu("h100-80gb")))
    return estimate(decoder("small", SMALL, 1, 64, recomputes=False), config, machine)


def written(folder: Path, kind: str, **changes: Any) -> Path:
    path = folder / "config.json"
    more = {"num_experts": 4, "num_experts_per_tok": 2} if "qwen" in kind and "moe" in kind else {}
    found = {"model_type": kind, "vocab_size": 99, "tie_word_embeddings": False, **COMMON, **FILES[kind], **more}
    path.write_text(json.dumps({key: value for key, value in {**found, **changes}.items() if value is not None}))
    return path


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        *((kind, {}) for kind in FILES),
        ("qwen3_moe", {"num_experts": None, "num_local_experts": 4}),  # as Transformers 5 writes it
        ("mixtral", {"num_experts": 4, "num_local_experts": None}),
    ],
)
def test_a_decoder_has_the_parameters_of_the_model_that_it_stands_for(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    path = written(tmp_path, kind, **changes)
    with torch.device("meta"):
        real = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(path))
        mine = Decoder(sizes_of(str(path))[1])
    assert sum(one.numel() for one in mine.parameters()) == sum(one.numel() for one in real.parameters())


def test_presets_have_the_published_sizes() -> None:
    # billions of all parameters, and of those that a token meets, as the models' cards have them
    for name, (total, active) in {
        "mixtral-8x7b": (46.7, 12.9),
        "mixtral-8x22b": (140.6, 39.1),
        "qwen3-30b-a3b": (30.5, 3.3),
        "qwen3-235b-a22b": (235, 22),
    }.items():
        with torch.device("meta"):
            size = sum(one.numel() for one in Decoder(PRESETS[name]).parameters())
        assert size / 1e9 == pytest.approx(total, rel=0.005)
        experts, met = PRESETS[name].expert_numels
        assert (size - experts + met) / 1e9 == pytest.approx(active, rel=0.02)


@pytest.mark.slow
def test_ranks_that_share_experts_hold_the_same_states_and_gather_fewer_bytes() -> None:
    whole, shared = planned(32, 1), planned(32, 8)
    assert shared.at_rest(Tier.DEVICE) == pytest.approx(whole.at_rest(Tier.DEVICE), rel=0.02)
    tokens, element = 64, 2
    rows = tokens * SMALL.experts_of_token * 7 // 8  # to other ranks of the node
    moved = 4 * SMALL.layers * rows * SMALL.hidden * element
    assert shared.costs.traffic["expert inside"] == moved
    assert "expert between" not in shared.costs.traffic
    experts = 3 * SMALL.hidden * SMALL.mlp * SMALL.experts * SMALL.layers
    before, after = (_gathered(one) for one in (whole, shared))
    assert before - after == pytest.approx(2 * element * experts * (31 / 32 - 3 / 32), rel=0.01)
    assert "every expert of a layer gets as many tokens as any other" in shared.assumptions
    assert "every expert of a layer gets as many tokens as any other" in whole.assumptions


def _gathered(report: PlanReport) -> int:
    return sum(size for key, size in report.costs.traffic.items() if key.startswith("gather"))


@pytest.mark.slow
def test_the_flops_are_those_of_the_experts_that_tokens_go_to() -> None:
    with torch.device("meta"):
        size = sum(one.numel() for one in Decoder(SMALL).parameters()) - SMALL.expert_numels[0] + SMALL.expert_numels[1]
    met = size - SMALL.vocabulary * SMALL.hidden  # an embedding is no matrix product
    for experts in (1, 8):
        report = planned(32, experts)
        assert report.time is not None
        assert report.time.model_flops == pytest.approx(6 * met * 64, rel=0.1)  # and attention
        assert report.active_share * report.costs.num_parameters == pytest.approx(size, rel=1e-6)


@pytest.mark.slow
def test_ranks_that_share_sequences_count_each_token_once() -> None:
    alone, shared = (planned(8, 1, sequence_parallel_size=size).time for size in (1, 2))
    assert alone is not None
    assert shared is not None
    # a decoder gets its rank's part: 64 tokens, of sequences of 128
    assert (alone.tokens, shared.tokens) == (8 * 64, 4 * 128)


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        ("mixtral", {"num_experts_per_tok": 9}, "a token cannot go to 9 of 4 experts"),
        ("mixtral", {"num_experts_per_tok": None}, "has no num_experts_per_tok"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "blocks of one kind"),
        ("qwen3_moe", {"num_local_experts": 8}, "num_local_experts 8 and num_experts 4, which are two names"),
        ("qwen3_moe", {"moe_intermediate_size": None}, "has no moe_intermediate_size"),
        ("qwen2_moe", {"model_type": "deepseek_v3"}, "a model of experts of which model_type is 'deepseek_v3'"),
    ],
)
def test_a_wrong_mixture_is_one_sentence(kind: str, changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        sizes_of(str(written(tmp_path, kind, **changes)))


def test_ranks_that_cannot_share_the_experts_are_one_sentence() -> None:
    with pytest.raises(ConfigError, match="16 ranks cannot share the 8 experts"):
        planned(32, 16)
