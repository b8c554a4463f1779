"""Decoders of plans have the parameters of the models whose configurations they were made from, norms included."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwell.errors import ConfigError
from shardwell.plan import SimulatedMachine, SimulatedRanks
from shardwell.plan.axes import with_axes
from shardwell.plan.decoder import Decoder
from shardwell.plan.models import model_named, sizes_of

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 1000,
    "head_dim": 16,
    "pad_token_id": 0,
}
GEMMAS = ("gemma", "gemma2", "gemma3_text")
LLAMAS = ("llama", "mistral", "qwen2", "qwen3", *GEMMAS, "phi3", "olmo2", "granite", "smollm3")
WITHOUT: list[tuple[str, str]] = [  # fields that published files leave out, where the class has another rule
    *((kind, "head_dim") for kind in ("llama", *GEMMAS, "qwen3")),
    *((kind, "num_key_value_heads") for kind in ("llama", "phi3", "olmo2")),
]
VARIANTS: list[tuple[str, dict[str, Any]]] = [  # what a file says beside the sizes
    *((kind, {}) for kind in LLAMAS),
    *((kind, {"attention_bias": True}) for kind in ("llama", "qwen3", "gemma2", "granite")),
    ("llama", {"mlp_bias": True, "tie_word_embeddings": True}),
    ("llama", {"vocab_size": 50257, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    ("gemma2", {"tie_word_embeddings": False, "sliding_window": 16}),
    ("qwen2", {"sliding_window": 16, "use_sliding_window": True}),
    # fields that other classes read, and these do not
    ("mistral", {"attention_bias": True, "mlp_bias": True, "qkv_bias": True}),
    ("qwen2", {"attention_bias": True, "mlp_bias": True, "qkv_bias": False}),
    ("qwen3", {"mlp_bias": True, "qkv_bias": True}),
    ("gemma2", {"mlp_bias": True, "n_inner": 80}),
]
PLAIN: list[dict[str, Any]] = [  # with other names for the same sizes
    {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 1000},
    {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 99, "n_inner": 96},
    {"model_type": "bloom", "hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 1000},
    {"model_type": "bloom", "n_embed": 64, "n_layer": 2, "n_head": 4, "vocab_size": 1000},
    {key: SIZES[key] for key in SIZES if key not in ("head_dim", "num_key_value_heads")} | {"model_type": "gpt_neox"},
    {
        **{key: SIZES[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")},
        "model_type": "opt",
        "ffn_dim": 96,
        "word_embed_proj_dim": 64,
        "max_position_embeddings": 32,
    },
]
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
}


def written(kind: str, path: Path, without: str = "", **more: Any) -> str:
    """Write a configuration as it is published: without what its class has by default."""
    sizes = {key: value for key, value in SIZES.items() if key != without}
    (path / "config.json").write_text(json.dumps({"model_type": kind, **sizes, **more}))
    return str(path)


def compare(path: Path) -> None:
    """Compare the decoder of a configuration with the model that Transformers makes of it."""
    transformers = pytest.importorskip("transformers")
    _, sizes, _ = sizes_of(str(path))
    with torch.device("meta"):
        real = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(path))
        made = Decoder(sizes)
    assert sum(one.numel() for one in made.parameters()) == sum(one.numel() for one in real.parameters())
    assert sum(one.dim() > 1 for one in made.parameters()) > 0
    norms = [
        Counter(one.numel() for name, one in model.named_parameters() if one.dim() == 1 and "bias" not in name)
        for model in (made, real)
    ]
    assert norms[0] == norms[1]


@pytest.mark.parametrize(("kind", "more"), VARIANTS)
def test_a_decoder_has_the_parameters_of_the_model(kind: str, more: dict[str, Any], tmp_path: Path) -> None:
    written(kind, tmp_path, **more)
    compare(tmp_path)


@pytest.mark.parametrize(("kind", "without"), WITHOUT)
def test_what_a_file_leaves_out_is_what_its_class_has(kind: str, without: str, tmp_path: Path) -> None:
    written(kind, tmp_path, without)
    compare(tmp_path)


@pytest.mark.parametrize("fields", PLAIN, ids=lambda fields: fields["model_type"])
def test_fields_of_other_classes_change_nothing_of_gpts(fields: dict[str, Any], tmp_path: Path) -> None:
    own = {"gpt2": "n_inner", "opt": "ffn_dim", "gpt_neox": "intermediate_size"}.get(fields["model_type"])
    others = {"head_dim": 32, "num_key_value_heads": 1, "intermediate_size": 80, "n_inner": 80, "ffn_dim": 80}
    others = {name: size for name, size in others.items() if name != own}
    (tmp_path / "config.json").write_text(json.dumps({**fields, **others}))
    compare(tmp_path)


@pytest.mark.parametrize("fields", PLAIN, ids=lambda fields: fields["model_type"])
def test_a_decoder_in_gpts_form_has_the_parameters_of_the_model(fields: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    compare(tmp_path)


@pytest.mark.parametrize(
    ("kind", "fields", "says"),
    [
        ("llama", {"intermediate_size": None}, "has no intermediate_size"),
        ("opt", {"ffn_dim": 96, "max_position_embeddings": 32, "word_embed_proj_dim": 32}, "word_embed_proj_dim is 32"),
        ("opt", {"ffn_dim": 96}, "has no max_position_embeddings"),
        ("opt", {"ffn_dim": 96, "max_position_embeddings": 32, "_remove_final_layer_norm": True}, "_remove_final"),
        ("opt", {"ffn_dim": 96, "max_position_embeddings": 32, "layer_norm_elementwise_affine": False}, "_affine is"),
        ("llama", {"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false', expected true or false"),
        ("llama", {"attention_bias": 1}, "attention_bias is 1, expected true or false"),
        ("gpt_neox", {"attention_bias": False}, "attention_bias is False"),
        ("gemma3", {"text_config": {"model_type": "gemma3_text"}}, "Its text_config alone"),
    ],
)
def test_a_form_that_plans_do_not_know_is_refused(kind: str, fields: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        sizes_of(written(kind, tmp_path, **fields))


def test_heads_of_keys_are_asked_for_where_the_class_has_a_number_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no num_key_value_heads"):
        sizes_of(written("mistral", tmp_path, "num_key_value_heads"))


def test_what_a_plan_does_not_count_of_a_configuration_is_said(tmp_path: Path) -> None:
    model = model_named(written("mistral", tmp_path, sliding_window=16, quantization_config={"bits": 4}))
    report = model.report(CONFIG, SimulatedMachine(80e9, ranks=SimulatedRanks(0, 4, 4)), 64, True)
    assert any("sliding_window" in one for one in report.assumptions)
    assert any("quantization_config is not counted" in one for one in report.assumptions)


def test_a_class_that_predicts_no_tokens_is_said(tmp_path: Path) -> None:
    _, _, assumed = sizes_of(written("llama", tmp_path, architectures=["LlamaForSequenceClassification"]))
    assert any("though its class is LlamaForSequenceClassification" in one for one in assumed)
    assert sizes_of(written("llama", tmp_path, architectures=["LlamaForCausalLM"]))[2] == ()


def test_models_that_normalise_after_attention_are_planned_and_what_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    model = model_named(written("olmo2", tmp_path))
    machine = SimulatedMachine(80e9, ranks=SimulatedRanks(0, 4, 4))
    assert model.report(CONFIG, machine, 64, False).fits
    with pytest.raises(ConfigError, match="normalises all queries of a token together"):
        model.report(with_axes(CONFIG, tensor=2), machine, 64, False)
