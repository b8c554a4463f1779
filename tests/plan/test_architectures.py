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

KINDS = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3", "olmo2", "granite", "smollm3")
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
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
}


def written(kind: str, path: Path) -> str:
    """Write a configuration as it is published: without what its class has by default."""
    (path / "config.json").write_text(json.dumps({"model_type": kind, **SIZES}))
    return str(path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_decoder_has_the_parameters_of_the_model(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    _, sizes = sizes_of(written(kind, tmp_path))
    with torch.device("meta"):
        real = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
        made = Decoder(sizes)
    assert sum(one.numel() for one in made.parameters()) == sum(one.numel() for one in real.parameters())
    norms = [Counter(one.numel() for one in model.parameters() if one.dim() == 1) for model in (made, real)]
    assert norms[0] == norms[1]


def test_models_that_normalise_after_attention_are_planned_and_what_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    model = model_named(written("olmo2", tmp_path))
    machine = SimulatedMachine(80e9, ranks=SimulatedRanks(0, 4, 4))
    assert model.report(CONFIG, machine, 64, False).fits
    with pytest.raises(ConfigError, match="normalises all queries of a token together"):
        model.report(with_axes(CONFIG, tensor=2), machine, 64, False)
