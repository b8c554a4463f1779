"""Plans: how the layers of a model are cut, by patterns of their names.

A plan maps patterns to styles, under Transformers' names: `layers.*.mlp.up_proj: colwise`. In a pattern, `*` is one
part of a name. A weight that is packed of other blocks than two of one size names them: `packed_colwise:3`, or
`packed_colwise:64,32,32`. A plan comes from the model (`"auto"`), from the configuration, or from DeepSpeed's
`layer_specs`, whose patterns are regular expressions over names of parameters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from shardwell.errors import ConfigError, ShardwellError

_OLD_NAMES = {
    "colwise_rep": "colwise_gather_output",
    "rowwise_rep": "rowwise_split_input",
    "local_colwise": "colwise",
    "local_rowwise": "rowwise",
    "local_packed_rowwise": "packed_rowwise",
    "embedding": "embedding_rowwise",
    "column": "colwise",
    "row": "rowwise",
}
STYLES = (
    "colwise",
    "colwise_gather_output",
    "rowwise",
    "rowwise_split_input",
    "packed_colwise",
    "packed_rowwise",
    "embedding_rowwise",
    "embedding_colwise",
    "moe_tp_experts",
    "mla_kv_a_proj",
    "replicated_with_grad_allreduce",
    "replicate",
)
_SHAPE = re.compile(r"packed_\w+:[1-9]\d*(,[1-9]\d*)*|\w+")
_SEVERAL_RANKS = ("ep_router", "grouped_gemm", "ep_dispatch_experts", "moe_identity_expert")


def plan_of(model: nn.Module, asked: str | Mapping[str, str], specs: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the style of each module or parameter that the plan names, by full name."""
    if specs is not None:
        return _of_layer_specs(model, specs)
    patterns = _own_plan(model) if asked == "auto" else dict(asked) if not isinstance(asked, str) else {}
    if not patterns:
        raise ShardwellError(
            f"tensor_parallel.plan: {type(model).__name__} has no plan of its own (tp_plan, _tp_plan or "
            'base_model_tp_plan). Write one: "plan": {"layers.*.up": "colwise", "layers.*.down": "rowwise"}'
        )
    return _matched(model, patterns)


def kind_of(style: str) -> str:
    """Return a style without the blocks that it names."""
    return style.partition(":")[0]


def blocks_of(style: str, size: int) -> tuple[int, ...]:
    """Return the sizes of the blocks that a style cuts, along a dimension of this size; none if it is one block."""
    kind, _, words = style.partition(":")
    if not kind.startswith("packed"):
        return ()
    numbers = [int(word) for word in (words or "2").split(",")]
    if len(numbers) == 1:
        return (size // numbers[0],) * numbers[0] if size % numbers[0] == 0 else (size, -1)
    return tuple(numbers)


def names_with_style(model: nn.Module, style: str) -> list[str]:
    """Return the full names that a model's own plan gives a style."""
    patterns = {pattern: one for pattern, one in _own_plan(model).items() if one == style}
    return list(_matched(model, patterns, is_own=True)) if patterns else []


def _own_plan(model: nn.Module) -> dict[str, str]:
    """Return the plan that a model brings, with the prefixes of its parts."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        own = {**(getattr(getattr(module, "config", None), "base_model_tp_plan", None) or {})}
        base = getattr(module, "base_model_prefix", None)  # modules inside have the same config, and no such prefix
        prefix = f"{name}." if name else ""
        if own and isinstance(base, str) and not (base and hasattr(module, base)):
            found |= {f"{prefix}{pattern}": style for pattern, style in own.items()}
        heads = vars(type(module)).get("_tp_plan") or {}
        if isinstance(heads, Mapping):
            found |= {f"{prefix}{pattern}": style for pattern, style in heads.items()}
    return found


def _matched(model: nn.Module, patterns: Mapping[str, str], *, is_own: bool = False) -> dict[str, str]:
    """Return the names that patterns match, with their styles; raise if a pattern of the user's matches nothing."""
    names = [name for name, _ in model.named_modules()] + [name for name, _ in model.named_parameters()]
    found: dict[str, str] = {}
    matched = 0
    for pattern, style in patterns.items():
        known = _OLD_NAMES.get(style, style)
        if known in _SEVERAL_RANKS:
            raise ShardwellError(
                f"tensor_parallel.plan: {pattern}: {style} is a style of expert parallelism, not of the tensor "
                "axis: give a plan without it, or share the experts by shardwell.expert_parallel_size instead"
            )
        if not _SHAPE.fullmatch(known) or kind_of(known) not in STYLES:
            raise ConfigError(f"tensor_parallel.plan: {pattern}: {style!r} is no style; use one of {', '.join(STYLES)}")
        shape = re.compile(r"\.".join("[^.]+" if part == "*" else re.escape(part) for part in pattern.split(".")))
        here = [name for name in names if shape.fullmatch(name)]
        matched += len(here)
        found |= dict.fromkeys(here, known)
    if not matched and not is_own:
        raise ConfigError(
            f"tensor_parallel.plan: none of its {len(patterns)} pattern(s) matches a module, such as "
            f"'{next(iter(patterns))}'; names begin with those of the model, such as '{names[1] if names[1:] else ''}'"
        )
    return found


def _of_layer_specs(model: nn.Module, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the plan of DeepSpeed's `partition_config`: the first of its specs that matches a weight counts."""
    known = {"use_default_specs", "layer_specs", "strict_mode"}
    if strange := [key for key in config if key not in known]:
        raise ConfigError(f"tensor_parallel.partition_config.{strange[0]}: unknown key; expected layer_specs")
    specs = [_spec(number, spec) for number, spec in enumerate(config.get("layer_specs") or ())]
    found: dict[str, str] = {}
    for name, _ in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        style = next((style for shapes, style in specs if any(shape.match(name) for shape in shapes)), None)
        if style is not None and style != "skip" and leaf == "weight":
            found[owner] = style
    if not found:
        raise ConfigError("tensor_parallel.partition_config.layer_specs: no pattern matches a weight of the model")
    return found


def _spec(number: int, spec: Any) -> tuple[list[re.Pattern[str]], str]:
    where = f"tensor_parallel.partition_config.layer_specs[{number}]"
    if not isinstance(spec, Mapping) or not spec.get("patterns"):
        raise ConfigError(f"{where}: expected an object with patterns and partition_type")
    kind = str(spec.get("partition_type", "column")).lower()
    if kind not in ("row", "column", "skip"):
        raise ConfigError(f"{where}.partition_type: {kind!r}; expected row, column or skip")
    style = {"row": "rowwise", "column": "colwise"}.get(kind, kind)
    if spec.get("shape") is not None and kind != "skip":
        style = f"packed_{style}:{_packing(spec['shape'], where)}"
    patterns = [spec["patterns"]] if isinstance(spec["patterns"], str) else list(spec["patterns"])
    return [re.compile(pattern) for pattern in patterns], style


def _packing(shape: Any, where: str) -> str:
    """Return the blocks that DeepSpeed's `shape` names: a number of them, or their sizes, along the dimension cut."""
    for size in shape if isinstance(shape, list | tuple) else ():
        if isinstance(size, list | tuple) and size and all(isinstance(one, int) and one > 0 for one in size):
            return ",".join(map(str, size))
        if isinstance(size, int) and size > 1:
            return str(size)
    raise ConfigError(f"{where}.shape: {shape!r}; expected a number of blocks, [3, -1], or sizes, [[8, 4, 4], -1]")
