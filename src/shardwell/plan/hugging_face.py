"""Configurations of Hugging Face as sizes of a decoder: what a `config.json` says, and what its class has by default.

A field whose default in its class is a number of one model (32 layers, 8 heads of keys) is asked for: a plan of another
model than the one that was meant would not be noticed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardwell.config.source import read
from shardwell.errors import ConfigError
from shardwell.plan.decoder import DecoderSizes

_NAMES = {  # of the fields of configurations: those that the architectures have for one size
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head"),
    "vocabulary": ("vocab_size",),
}
_POSITIONS = ("max_position_embeddings", "n_positions")
_MLP = ("intermediate_size", "n_inner", "ffn_dim")
_KV_HEADS = ("num_key_value_heads",)
_GATED = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "olmo2", "granite", "smollm3")
_PLAIN = ("gpt2", "gpt_neox", "opt", "bloom")
_MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_GEMMAS = ("gemma", "gemma2", "gemma3_text")
_TIED = ("gpt2", "opt", "bloom", *_GEMMAS, "smollm3")  # unless the configuration says otherwise
_FOUR_TIMES = ("gpt2", "bloom")  # the MLP's inner size over the hidden one, where it is not said
_AS_HEADS = ("llama", "phi3", "olmo2", "granite", *_PLAIN)  # heads of keys and values, where they are not said
_HEAD_DIMS = {**dict.fromkeys(_GEMMAS, 256), "qwen3": 128}  # where it is not said, and not the hidden size over heads
_FLAGS = (
    *("tie_word_embeddings", "attention_bias", "mlp_bias", "qkv_bias", "enable_bias", "do_layer_norm_before"),
    *("layer_norm_elementwise_affine", "_remove_final_layer_norm", "add_cross_attention", "use_sliding_window"),
)
_READ_BY = {  # fields that only some classes read: the others have the same number of parameters with them
    "attention_bias": ("llama", "qwen3", "qwen3_moe", "olmo2", "granite", "smollm3", "gpt_neox", *_GEMMAS),
    "mlp_bias": ("llama", "granite", "smollm3"),
    "qkv_bias": ("qwen2_moe",),
    "head_dim": (*_GATED, *_MIXTURES),
    "num_key_value_heads": (*_GATED, *_MIXTURES),
    "intermediate_size": (*_GATED, *_MIXTURES, "gpt_neox"),
    "n_inner": ("gpt2",),
    "ffn_dim": ("opt",),
    "n_embed": ("bloom",),
    "use_sliding_window": ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe"),
}
_LAST_WORDS = ("ForCausalLM", "LMHeadModel")  # of classes whose output layer has the size of the vocabulary
_SHARED_MLP = "shared_expert_intermediate_size"


def sizes_of_file(path: Path) -> tuple[DecoderSizes, tuple[str, ...]]:
    """Return the sizes of a configuration, and what a plan of them assumes."""
    found = dict(read(path)[2])
    kind = str(found.get("model_type"))
    known = (*_MIXTURES, *(() if any(found.get(name) for name in _EXPERTS) else (*_GATED, *_PLAIN)))
    if kind not in known:
        raise ConfigError(_unknown(path, found, known))
    _check_flags(found, path)
    found = {name: value for name, value in found.items() if kind in _READ_BY.get(name, (kind,))}
    if found.get("n_embed") is not None:  # an older name, which comes first
        found["hidden_size"] = found["n_embed"]
    mlp = tuple(name for name in _MLP if kind in _READ_BY[name])
    sizes = {size: _number(found, path, names, needed=True) for size, names in _NAMES.items()}
    sizes["mlp"] = 0 if kind in _MIXTURES else _number(found, path, mlp, needed=kind not in _FOUR_TIMES)
    is_said = kind in _AS_HEADS or any(name in found for name in _KV_HEADS)  # null: as many as heads
    sizes["kv_heads"] = _number(found, path, _KV_HEADS, needed=not is_said)
    sizes["head_dim"] = _number(found, path, ("head_dim",), needed=False) or _HEAD_DIMS.get(kind, 0)
    sizes |= _mixture(found, path) if kind in _MIXTURES else {}
    _check_form(found, path)
    _number(found, path, ("sliding_window",), needed=False)
    has_bias, is_gated = bool(found.get("attention_bias")), kind in (*_GATED, *_MIXTURES)
    return DecoderSizes(
        **sizes,
        positions=_positions(found, path),
        gated=is_gated,
        tied=bool(found.get("tie_word_embeddings", kind in _TIED)),
        qkv_bias=bool(found.get("qkv_bias", kind in ("qwen2", "qwen2_moe")) or (is_gated and has_bias)),
        out_bias=is_gated and has_bias,
        mlp_bias=is_gated and bool(found.get("mlp_bias")),
        head_norm=kind in ("qwen3", "qwen3_moe", "gemma3_text"),
        width_norm=kind == "olmo2",
        embed_norm=kind == "bloom",
        norms={"gemma2": "around", "gemma3_text": "around", "olmo2": "after"}.get(kind, "before"),
    ), tuple(_assumed(found))


def _unknown(path: Path, found: dict[str, Any], known: tuple[str, ...]) -> str:
    kind, inner = found.get("model_type"), found.get("text_config")
    what = "a model of experts of which " if len(known) == len(_MIXTURES) else ""
    way = "Plan another one with MODULE:FUNCTION."
    if isinstance(inner, dict) and inner.get("model_type") in known:
        way = f"Its text_config alone, written to a file, is a {inner['model_type']}; all of it needs MODULE:FUNCTION."
    return f"{path}: {what}model_type is {kind!r}, and plans know {', '.join(known)}. {way}"


def _positions(found: dict[str, Any], path: Path) -> int:
    """Return the rows of learned position embeddings; 0 if positions are no parameters."""
    if found["model_type"] not in ("gpt2", "opt"):
        return 0
    rows = _number(found, path, _POSITIONS, needed=True)
    return rows + 2 if found["model_type"] == "opt" else rows


def _check_flags(found: dict[str, Any], path: Path) -> None:
    """Refuse flags of other types: the text "false" would be true."""
    for name in (one for one in _FLAGS if not isinstance(found.get(one), bool | None)):
        raise ConfigError(f"{path}: {name} is {found[name]!r}, expected true or false")


def _check_form(found: dict[str, Any], path: Path) -> None:
    """Refuse variants of a class that have other parameters than its usual form."""
    width, hidden = found.get("word_embed_proj_dim"), found.get("hidden_size")
    strange = {
        "word_embed_proj_dim": width not in (None, hidden),
        "do_layer_norm_before": found.get("do_layer_norm_before") is False,
        "enable_bias": found.get("enable_bias") is False,
        "layer_norm_elementwise_affine": found.get("layer_norm_elementwise_affine") is False,
        "_remove_final_layer_norm": bool(found.get("_remove_final_layer_norm")),
        "attention_bias": found["model_type"] == "gpt_neox" and found.get("attention_bias") is False,
        "add_cross_attention": bool(found.get("add_cross_attention")),
    }
    for name in (name for name, is_on in strange.items() if is_on):
        raise ConfigError(
            f"{path}: {name} is {found[name]!r}, and plans know the usual form of {found['model_type']} only. Plan it "
            "with MODULE:FUNCTION."
        )


def _assumed(found: dict[str, Any]) -> list[str]:
    """Return what a configuration says that a plan does not count."""
    words, window = [], found.get("sliding_window")
    uses_window = found.get("use_sliding_window", not str(found["model_type"]).startswith("qwen"))
    classes = found.get("architectures")
    if isinstance(classes, list) and classes and not any(str(one).endswith(_LAST_WORDS) for one in classes):
        words.append(f"it predicts tokens, with an output layer for the vocabulary, though its class is {classes[0]}")
    if isinstance(window, int) and uses_window:
        words.append(f"attention looks at all tokens before one, and not at {window:,} of them (sliding_window)")
    if found.get("attn_logit_softcapping"):
        words.append("attn_logit_softcapping takes no memory, as in kernels that know it")
    if found.get("quantization_config"):
        words.append("weights are trained in the precision of the configuration: quantization_config is not counted")
    return words


def _mixture(found: dict[str, Any], path: Path) -> dict[str, int]:
    """Return the sizes of experts; all blocks must have them, since a plan has blocks of one kind."""
    if found.get("mlp_only_layers") or found.get("decoder_sparse_step", 1) != 1:
        raise ConfigError(
            f"{path}: mlp_only_layers or decoder_sparse_step let some blocks have no experts, and a plan has blocks of "
            "one kind. Plan it with MODULE:FUNCTION."
        )
    is_mixtral = found["model_type"] == "mixtral"
    shared = 0 if found["model_type"] != "qwen2_moe" else _number(found, path, (_SHARED_MLP,), needed=True)
    return {
        "mlp": _number(found, path, ("intermediate_size" if is_mixtral else "moe_intermediate_size",), needed=True),
        "experts": _num_experts(found, path),
        "experts_of_token": _number(found, path, ("num_experts_per_tok",), needed=True),
        "shared_mlp": shared,
    }


def _num_experts(found: dict[str, Any], path: Path) -> int:
    """Return the experts of a block: Mixtral and Qwen3-MoE have two names for them."""
    names = ("num_experts",) if found["model_type"] == "qwen2_moe" else ("num_local_experts", "num_experts")
    said = [(name, found[name]) for name in names if found.get(name) is not None]
    if any(number != said[0][1] for _, number in said):
        words = " and ".join(f"{name} {number}" for name, number in said)
        raise ConfigError(f"{path}: has {words}, which are two names for the experts of a block: remove one")
    return _number(found, path, names, needed=True)


def _number(found: dict[str, Any], path: Path, names: tuple[str, ...], *, needed: bool) -> int:
    for name in names:
        value = found.get(name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{path}: {name} is {value!r}, expected a whole number of 1 or more")
            if value > (most := _most(name)):
                raise ConfigError(f"{path}: {name} is {value:,}, expected at most {most:,}")
            return value
    if needed:
        raise ConfigError(f"{path}: has no {' or '.join(names)}")
    return 0


def _most(name: str) -> int:
    """Return the largest number that a plan takes, with which the elements of a tensor still have 64 bits."""
    if name in _NAMES["layers"] or name in _EXPERTS:
        return 1 << 14
    return 1 << (31 if name in (*_NAMES["vocabulary"], *_POSITIONS, "sliding_window") else 22)
