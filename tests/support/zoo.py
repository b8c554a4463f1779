"""Tiny models of many architectures with random weights, batches for them, and the same training plain and sharded.

Each model computes its own loss as a mean over predicted tokens, and every row predicts equally many. So the mean of
the ranks' losses is the loss of the whole batch. Routers have no auxiliary loss: that is no mean over rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwell
from tests.support.models import whole_parameters, zero
from tests.support.training import distance

hf = pytest.importorskip("transformers")

VOCAB = 67  # odd, so that shards cut through rows
TEXT = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ROWS, LENGTH = 4, 9  # 8 predicted tokens a row: their number is a power of two on a rank and on the whole batch
STEPS = 3
ADAMW = {"lr": 1e-3, "weight_decay": 0.1}
CLIP = 1.0
Batch = dict[str, Tensor]
Run = tuple[list[float], list[float], dict[str, Any]]  # losses, gradient norms, final parameters


@dataclass(frozen=True)
class Architecture:
    """How to make a model and its batches."""

    model: Callable[..., nn.Module]
    config: Callable[..., Any]
    options: dict[str, Any]
    batch: Callable[[torch.Generator], Batch]
    sums_rows_in_fp32: bool = False  # somewhere inside, whatever the dtype of the model


def build(name: str, dtype: torch.dtype = torch.float64, seed: int = 0, **options: Any) -> nn.Module:
    """A model in training mode. The same seed gives the same weights."""
    one = ZOO[name]
    torch.manual_seed(seed)
    with default_dtype(dtype):
        return one.model(one.config(**{**one.options, **options})).train()


def disturb(model: nn.Module, seed: int = 7) -> nn.Module:
    """Move all weights a little, as some training would: no bias is zero then, and no scale is one.

    A key bias has a gradient of rounding noise alone. In fp64 what AdamW makes of that, 1e-13, is far below its value.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


def recompute(model: nn.Module, how: str) -> nn.Module:
    """Switch on the model's own gradient checkpointing: "reentrant", "non-reentrant", or "" for none."""
    if how:
        reentrant = how == "reentrant"
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
    return model


def batches(name: str, num_steps: int, seed: int = 1) -> list[Batch]:
    """`num_steps` batches of the whole world; pictures and sound are fp64."""
    generator = torch.Generator().manual_seed(seed)
    return [ZOO[name].batch(generator) for _ in range(num_steps)]


def share(batch: Batch, rank: int, num_ranks: int) -> Batch:
    """The rows of one rank."""
    return {key: tensor.chunk(num_ranks)[rank] for key, tensor in batch.items()}


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def train_plainly(model: nn.Module, name: str, parts: int = 1) -> Run:
    """One process on the whole batch; in several parts, their gradients are averaged."""
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    losses, norms = [], []
    for batch in batches(name, STEPS):
        optimizer.zero_grad()
        parted = [model(**share(batch, part, parts)).loss / parts for part in range(parts)]
        for loss in parted:
            loss.backward()
        losses.append(sum(loss.item() for loss in parted))
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
    return losses, norms, {key: parameter.detach() for key, parameter in model.named_parameters()}


def train_sharded(model: nn.Module, name: str, stage: int, **config: Any) -> Run:
    """Each rank on its rows. The optimizer is an object at stage 2 and named in the configuration elsewhere."""
    return train(make_engine(model, stage, **config), name)


def make_engine(model: nn.Module, stage: int, **config: Any) -> shardwell.Engine:
    settings = zero(stage, gradient_clipping=CLIP, **config)
    if stage == 2:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **ADAMW)
        return shardwell.initialize(model=model, optimizer=optimizer, config=settings).engine
    settings["optimizer"] = {"type": "AdamW", "params": ADAMW}
    return shardwell.initialize(model=model, config=settings).engine


def train(engine: shardwell.Engine, name: str) -> Run:
    losses, norms = [], []
    for batch in batches(name, STEPS):
        loss = engine(**share(batch, dist.get_rank(), dist.get_world_size())).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(engine.get_global_grad_norm())
    return losses, norms, whole_parameters(engine.module)


def check(answers: list[Run], expected: Run, tolerance: float = 1e-10, what: str = "") -> None:
    """The ranks' mean losses, gradient norms and parameters are those of a plain run.

    Losses and norms are looser: most models compute their loss in fp32, whatever their dtype.
    """
    losses = [sum(of_ranks) / len(answers) for of_ranks in zip(*(losses for losses, _, _ in answers), strict=True)]
    assert losses == pytest.approx(expected[0], rel=1e-6), what
    for _, norms, parameters in answers:
        assert norms == pytest.approx(expected[1], rel=1e-6), what
        assert parameters.keys() == expected[2].keys(), what
        difference, where = distance(parameters, expected[2])
        assert difference < tolerance, f"{what}: {where} differs by {difference}"


def _words(generator: torch.Generator, length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCAB, (ROWS, length), generator=generator)


def _next_word(generator: torch.Generator) -> Batch:
    words = _words(generator)
    return {"input_ids": words, "labels": words.clone()}


def _hidden_words(generator: torch.Generator) -> Batch:
    words = _words(generator)
    hidden = torch.arange(LENGTH) % 2 == 1
    return {
        "input_ids": torch.where(hidden, 3, words),
        "attention_mask": torch.ones_like(words),
        "labels": torch.where(hidden, words, -100),
    }


def _answer(generator: torch.Generator) -> Batch:
    return {"input_ids": _words(generator), "labels": _words(generator, 8)}


def _picture(generator: torch.Generator) -> Batch:
    return {
        "pixel_values": torch.randn(ROWS, 3, 8, 8, generator=generator, dtype=torch.float64),
        "labels": torch.randint(5, (ROWS,), generator=generator),
    }


def _speech(generator: torch.Generator) -> Batch:
    sound = torch.randn(ROWS, 8, 16, generator=generator, dtype=torch.float64)
    return {"input_features": sound, "labels": _words(generator, 8)}


def _switch(config: Any) -> nn.Module:
    """Routers in the dtype of the model: otherwise they convert their weights in their first forward."""
    model = hf.SwitchTransformersForConditionalGeneration(config)
    for module in model.modules():
        if hasattr(module, "expert_capacity"):
            module.dtype = torch.get_default_dtype()
    return model


DECODER = {
    **TEXT,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}
ENCODER = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
PICTURE = {"image_size": 8, "patch_size": 4, "num_labels": 5}
EXPERTS = {
    "num_experts_per_tok": 2,
    "output_router_logits": False,
    "experts_implementation": "eager",  # the default has no fp64 kernel
}

ZOO = {
    "llama": Architecture(hf.LlamaForCausalLM, hf.LlamaConfig, {**DECODER, "num_hidden_layers": 3}, _next_word),
    "llama-tied": Architecture(
        hf.LlamaForCausalLM, hf.LlamaConfig, {**DECODER, "tie_word_embeddings": True}, _next_word
    ),
    "qwen3": Architecture(hf.Qwen3ForCausalLM, hf.Qwen3Config, {**DECODER, "tie_word_embeddings": True}, _next_word),
    "mistral": Architecture(hf.MistralForCausalLM, hf.MistralConfig, {**DECODER, "sliding_window": 4}, _next_word),
    "gemma2": Architecture(
        hf.Gemma2ForCausalLM,
        hf.Gemma2Config,
        {**DECODER, "tie_word_embeddings": True, "query_pre_attn_scalar": 8, "sliding_window": 4},
        _next_word,
        sums_rows_in_fp32=True,
    ),
    "phi": Architecture(hf.PhiForCausalLM, hf.PhiConfig, DECODER, _next_word),
    "phi3": Architecture(hf.Phi3ForCausalLM, hf.Phi3Config, DECODER, _next_word),
    "gpt2": Architecture(
        hf.GPT2LMHeadModel,
        hf.GPT2Config,
        {
            **TEXT,
            "n_positions": 32,
            "n_embd": 24,
            "n_layer": 2,
            "n_head": 4,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
        _next_word,
    ),
    "gpt-neox": Architecture(hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig, DECODER, _next_word),
    "falcon": Architecture(
        hf.FalconForCausalLM,
        hf.FalconConfig,
        {**TEXT, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": False},
        _next_word,
    ),
    "bert": Architecture(hf.BertForMaskedLM, hf.BertConfig, {**TEXT, **ENCODER}, _hidden_words),
    "deberta-v2": Architecture(
        hf.DebertaV2ForMaskedLM,
        hf.DebertaV2Config,
        {**TEXT, **ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_position_embeddings": 32},
        _hidden_words,
    ),
    "t5": Architecture(
        hf.T5ForConditionalGeneration,
        hf.T5Config,
        {
            **TEXT,
            "d_model": 24,
            "d_kv": 6,
            "d_ff": 40,
            "num_layers": 2,
            "num_heads": 4,
            "dropout_rate": 0.0,
            "feed_forward_proj": "gated-gelu",
            "decoder_start_token_id": 0,
        },
        _answer,
    ),
    "switch": Architecture(  # experts are modules: some get no token on one rank, some on none
        _switch,
        hf.SwitchTransformersConfig,
        {
            **TEXT,
            "d_model": 24,
            "d_kv": 6,
            "d_ff": 16,
            "num_layers": 2,
            "num_decoder_layers": 2,
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
            "num_heads": 4,
            "num_experts": 12,
            "router_jitter_noise": 0.0,
            "dropout_rate": 0.0,
            "output_router_logits": False,
            "decoder_start_token_id": 0,
        },
        _answer,
    ),
    "vit": Architecture(hf.ViTForImageClassification, hf.ViTConfig, {**ENCODER, **PICTURE}, _picture),
    "clip": Architecture(
        hf.CLIPForImageClassification,
        lambda **options: hf.CLIPConfig(
            vision_config={
                "hidden_size": 24,
                "intermediate_size": 40,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "image_size": 8,
                "patch_size": 4,
            },
            text_config={
                **TEXT,
                "hidden_size": 24,
                "intermediate_size": 40,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
            },
            **options,
        ),
        {"num_labels": 5},
        _picture,
    ),
    "whisper": Architecture(
        hf.WhisperForConditionalGeneration,
        hf.WhisperConfig,
        {
            **TEXT,
            "num_mel_bins": 8,
            "d_model": 24,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 40,
            "decoder_ffn_dim": 40,
            "max_source_positions": 8,
            "max_target_positions": 16,
            "dropout": 0.0,
            "decoder_start_token_id": 1,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
        _speech,
    ),
    "mixtral": Architecture(
        hf.MixtralForCausalLM, hf.MixtralConfig, {**DECODER, **EXPERTS, "num_local_experts": 4}, _next_word
    ),
    "qwen3-moe": Architecture(
        hf.Qwen3MoeForCausalLM,
        hf.Qwen3MoeConfig,
        {**DECODER, **EXPERTS, "num_experts": 4, "moe_intermediate_size": 20},
        _next_word,
    ),
    "mamba": Architecture(
        hf.MambaForCausalLM,
        hf.MambaConfig,
        {**TEXT, "hidden_size": 24, "state_size": 4, "num_hidden_layers": 2, "time_step_rank": 3},
        _next_word,
        sums_rows_in_fp32=True,
    ),
}
