"""The arguments that optimizers in a configuration take, and the values that these may have.

The tables repeat torch's own constructors, so that a file can be checked without torch; a test compares the two. An
optimizer that is not listed can be passed to `initialize` as a class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwell.config.arguments import (
    Problem,
    Rule,
    check,
    finite,
    integer,
    numbers,
    or_null,
    real,
    share,
    show,
    yes_or_no,
)


def _betas(value: Any) -> list[float]:
    found = numbers(value, 2)
    if not all(0 <= beta < 1 for beta in found):
        raise ValueError("expected 2 numbers of at least 0 and below 1")
    return found


def _etas(value: Any) -> list[float]:
    found = numbers(value, 2)
    if not 0 < found[0] < 1 < found[1]:
        raise ValueError("expected a number between 0 and 1, and one above 1")
    return found


def _three(value: Any) -> list[float]:
    return numbers(value, 3)


def _pair(value: Any) -> list[float]:
    return numbers(value, 2)


def _name(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("expected a name")
    return value


_flag_or_null = or_null(yes_or_no)
_COMMON: dict[str, Rule] = {"lr": real, "weight_decay": real}
_IMPLEMENTATION: dict[str, Rule] = {"foreach": _flag_or_null, "maximize": yes_or_no, "differentiable": yes_or_no}
_GRAPH: dict[str, Rule] = {"capturable": yes_or_no}
_FUSED: dict[str, Rule] = {"fused": _flag_or_null}
_ADAM: dict[str, Rule] = {**_COMMON, "betas": _betas, "eps": real}

RULES: dict[str, dict[str, Rule]] = {
    "Adadelta": {**_COMMON, "rho": share, "eps": real, **_IMPLEMENTATION, **_GRAPH},
    "Adagrad": {
        **_COMMON, "lr_decay": real, "initial_accumulator_value": real, "eps": real, **_IMPLEMENTATION, **_FUSED,
    },
    "Adam": {**_ADAM, "amsgrad": yes_or_no, "decoupled_weight_decay": yes_or_no, **_IMPLEMENTATION, **_GRAPH, **_FUSED},
    "AdamW": {**_ADAM, "amsgrad": yes_or_no, **_IMPLEMENTATION, **_GRAPH, **_FUSED},
    "Adamax": {**_ADAM, **_IMPLEMENTATION, **_GRAPH},
    "ASGD": {**_COMMON, "lambd": finite, "alpha": finite, "t0": finite, **_IMPLEMENTATION, **_GRAPH},
    "Lamb": {**_ADAM, "bias_correction": yes_or_no, "max_coeff": real, "min_coeff": real},
    "Lion": {**_COMMON, "betas": _betas},
    "Muon": {
        **_ADAM, "momentum": real, "nesterov": yes_or_no, "ns_coefficients": _three, "ns_steps": integer,
        "adjust_lr_fn": or_null(_name), "adam_eps": real,
    },
    "NAdam": {**_ADAM, "momentum_decay": real, "decoupled_weight_decay": yes_or_no, **_IMPLEMENTATION, **_GRAPH},
    "RAdam": {**_ADAM, "decoupled_weight_decay": yes_or_no, **_IMPLEMENTATION, **_GRAPH},
    "RMSprop": {
        **_COMMON, "alpha": real, "eps": real, "momentum": real, "centered": yes_or_no, **_IMPLEMENTATION, **_GRAPH,
    },
    "Rprop": {"lr": real, "etas": _etas, "step_sizes": _pair, **_IMPLEMENTATION, **_GRAPH},
    "SGD": {
        **_COMMON, "momentum": real, "dampening": finite, "nesterov": yes_or_no, **_IMPLEMENTATION, **_FUSED,
    },
}  # fmt: skip
NOT_ELEMENTWISE = ("Adafactor", "LBFGS", "SparseAdam")  # torch optimizers that need full tensors, or sparse ones

# Other arguments of DeepSpeed's optimizers: which kernel, when to free, how to clip. See `optim/factory.py`.
_DEEPSPEED_ONLY: dict[str, Rule] = {
    **dict.fromkeys(
        ("torch_adam", "set_grad_none", "adam_w_mode", "adamw_mode", "fp32_optimizer_states"), _flag_or_null
    ),
    **dict.fromkeys(("per_head_muon", "bias_correction", "amsgrad"), _flag_or_null),
    "max_grad_norm": or_null(real),
    "ns_method": lambda value: value,
}
_FOR_MUON: dict[str, Rule] = {"muon_lr": real, "adam_lr": real}


def checked(kind: str, params: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Return the arguments in the form that the optimizer takes, and (key, sentence) for each problem."""
    names = {name.lower(): name for name in (*RULES, *NOT_ELEMENTWISE)}
    name = names.get(kind.strip().lower())
    if name is None:
        known = ", ".join(sorted(RULES))
        sentence = f"{show(kind)} is not known; known are {known}. Pass any other to initialize"
        return dict(params), [("optimizer.type", sentence)]
    if name in NOT_ELEMENTWISE:
        sentence = (
            f"{show(kind)} is not elementwise: it needs full tensors, and ranks have shards; use AdamW, for example"
        )
        return dict(params), [("optimizer.type", sentence)]
    own = {**RULES[name], **(_FOR_MUON if name == "Muon" else {})}
    clean, problems = check("optimizer", name, {**_DEEPSPEED_ONLY, **own}, params, own)
    return clean, problems + _contradictions(name, clean)


def _contradictions(name: str, params: Mapping[str, Any]) -> list[Problem]:
    if name == "SGD" and params.get("nesterov") and (not params.get("momentum") or params.get("dampening")):
        return [("optimizer.params.nesterov", "true needs a momentum above 0, and a dampening of 0")]
    if params.get("fused") and params.get("foreach"):
        return [("optimizer.params.fused", "contradicts foreach, both are true; keep one")]
    if params.get("differentiable"):
        return [("optimizer.params.differentiable", "true needs steps that autograd records, and none are; remove it")]
    low, high = params.get("min_coeff", 0.01), params.get("max_coeff", 10.0)
    if name == "Lamb" and low > high:
        return [("optimizer.params.min_coeff", f"{low} is above max_coeff {high}")]
    return []
