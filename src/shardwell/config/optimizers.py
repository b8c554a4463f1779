"""Which arguments the optimizers of a configuration take, and which values those may have.

It repeats what torch's own constructors say, so that a file can be checked without torch; a test compares the two. What
is not here yet can be passed to `initialize` as a class.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from shardwell.config.values import flag, number

_MOST_NAMES = 10


def _finite(value: Any) -> float:
    found = number(value)
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise ValueError("expected a number")
    try:
        if not math.isfinite(found):
            raise OverflowError
        return float(found)
    except OverflowError:
        raise ValueError("expected a finite number") from None


def _any(value: Any) -> float:
    return _finite(value)


def _real(value: Any) -> float:
    found = _finite(value)
    if found < 0:
        raise ValueError("expected at least 0")
    return found


def _share(value: Any) -> float:
    found = _finite(value)
    if not 0 <= found <= 1:
        raise ValueError("expected a number from 0 to 1")
    return found


def _count(value: Any) -> int:
    found = _real(value)
    if not found.is_integer():
        raise ValueError("expected a whole number")
    return int(found)


def _flag(value: Any) -> bool:
    found = flag(value)
    if not isinstance(found, bool):
        raise ValueError("expected true or false")
    return found


def _flag_or_null(value: Any) -> bool | None:
    return None if value is None else _flag(value)


def _numbers(value: Any, length: int) -> list[float]:
    if not isinstance(value, list | tuple) or len(value) != length:
        raise ValueError(f"expected a list of {length} numbers")
    return [_finite(item) for item in value]


def _betas(value: Any) -> list[float]:
    found = _numbers(value, 2)
    if not all(0 <= beta < 1 for beta in found):
        raise ValueError("expected 2 numbers of at least 0 and below 1")
    return found


def _etas(value: Any) -> list[float]:
    found = _numbers(value, 2)
    if not 0 < found[0] < 1 < found[1]:
        raise ValueError("expected a number between 0 and 1, and one above 1")
    return found


def _three(value: Any) -> list[float]:
    return _numbers(value, 3)


def _pair(value: Any) -> list[float]:
    return _numbers(value, 2)


def _name_or_null(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ValueError("expected a name")
    return value


Rule = Callable[[Any], Any]  # the value as the optimizer takes it, or a ValueError
_USUAL: dict[str, Rule] = {"lr": _real, "weight_decay": _real}
_HOW: dict[str, Rule] = {"foreach": _flag_or_null, "maximize": _flag, "differentiable": _flag}
_GRAPH: dict[str, Rule] = {"capturable": _flag}
_FUSED: dict[str, Rule] = {"fused": _flag_or_null}
_ADAM: dict[str, Rule] = {**_USUAL, "betas": _betas, "eps": _real}

RULES: dict[str, dict[str, Rule]] = {
    "Adadelta": {**_USUAL, "rho": _share, "eps": _real, **_HOW, **_GRAPH},
    "Adagrad": {
        **_USUAL, "lr_decay": _real, "initial_accumulator_value": _real, "eps": _real, **_HOW, **_FUSED,
    },
    "Adam": {**_ADAM, "amsgrad": _flag, "decoupled_weight_decay": _flag, **_HOW, **_GRAPH, **_FUSED},
    "AdamW": {**_ADAM, "amsgrad": _flag, **_HOW, **_GRAPH, **_FUSED},
    "Adamax": {**_ADAM, **_HOW, **_GRAPH},
    "ASGD": {**_USUAL, "lambd": _any, "alpha": _any, "t0": _any, **_HOW, **_GRAPH},
    "Lamb": {**_ADAM, "bias_correction": _flag, "max_coeff": _real, "min_coeff": _real},
    "Lion": {**_USUAL, "betas": _betas},
    "Muon": {
        **_ADAM, "momentum": _real, "nesterov": _flag, "ns_coefficients": _three, "ns_steps": _count,
        "adjust_lr_fn": _name_or_null, "adam_eps": _real,
    },
    "NAdam": {**_ADAM, "momentum_decay": _real, "decoupled_weight_decay": _flag, **_HOW, **_GRAPH},
    "RAdam": {**_ADAM, "decoupled_weight_decay": _flag, **_HOW, **_GRAPH},
    "RMSprop": {
        **_USUAL, "alpha": _real, "eps": _real, "momentum": _real, "centered": _flag, **_HOW, **_GRAPH,
    },
    "Rprop": {"lr": _real, "etas": _etas, "step_sizes": _pair, **_HOW, **_GRAPH},
    "SGD": {
        **_USUAL, "momentum": _real, "dampening": _any, "nesterov": _flag, **_HOW, **_FUSED,
    },
}  # fmt: skip
WHOLE = ("Adafactor", "LBFGS", "SparseAdam")  # of torch; they need whole tensors, or sparse ones

# What DeepSpeed's optimizers take besides: which kernel, when to free, how to clip. See `optim/build.py`.
_THEIRS: dict[str, Rule] = {
    **dict.fromkeys(
        ("torch_adam", "set_grad_none", "adam_w_mode", "adamw_mode", "fp32_optimizer_states"), _flag_or_null
    ),
    **dict.fromkeys(("per_head_muon", "bias_correction", "amsgrad"), _flag_or_null),
    "max_grad_norm": lambda value: value if value is None else _real(value),
    "ns_method": lambda value: value,
}
_FOR_MUON: dict[str, Rule] = {"muon_lr": _real, "adam_lr": _real}


def checked(kind: str, params: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """The arguments as the optimizer takes them, and (key, sentence) for all that are wrong."""
    names = {name.lower(): name for name in (*RULES, *WHOLE)}
    name = names.get(kind.strip().lower())
    if name is None:
        known = ", ".join(sorted(RULES))
        sentence = f"{_show(kind)} is not known; known are {known}. Pass any other to initialize"
        return dict(params), [("optimizer.type", sentence)]
    if name in WHOLE:
        sentence = f"{_show(kind)} is not elementwise: it needs whole tensors where there are shards; use AdamW, say"
        return dict(params), [("optimizer.type", sentence)]
    own = {**RULES[name], **(_FOR_MUON if name == "Muon" else {})}
    rules = {**_THEIRS, **own}
    clean, problems = {}, []
    unknown = []
    for key, value in params.items():
        if key not in rules:
            unknown.append(key)
            continue
        try:
            clean[key] = rules[key](value)
        except ValueError as error:
            remedy = "; remove it for the optimizer's default" if value is None else ""
            problems.append((f"optimizer.params.{key}", f"{error}, found {_show(value)}{remedy}"))
    for key in unknown[:_MOST_NAMES]:
        near = difflib.get_close_matches(key, own, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(sorted(own))}"
        problems.append((f"optimizer.params.{key}", f"{name} does not take it; {hint}"))
    if len(unknown) > _MOST_NAMES:
        problems.append(("optimizer.params", f"{name} does not take {len(unknown) - _MOST_NAMES} more"))
    return clean, problems + _against_each_other(name, clean)


def _against_each_other(name: str, params: Mapping[str, Any]) -> list[tuple[str, str]]:
    if name == "SGD" and params.get("nesterov") and (not params.get("momentum") or params.get("dampening")):
        return [("optimizer.params.nesterov", "true needs a momentum above 0, and a dampening of 0")]
    if params.get("fused") and params.get("foreach"):
        return [("optimizer.params.fused", "contradicts foreach, both are true; keep one")]
    low, high = params.get("min_coeff", 0.01), params.get("max_coeff", 10.0)
    if name == "Lamb" and low > high:
        return [("optimizer.params.min_coeff", f"{low} is above max_coeff {high}")]
    return []


def _show(value: Any) -> str:
    words = json.dumps(value, default=str)
    return words if len(words) <= 80 else f"{words[:80]}..."
