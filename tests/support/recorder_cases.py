"""The cases that the recorder records: which settings, and which of them together."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Case = dict[str, str]  # the value of each factor

FACTORS: dict[str, tuple[str, ...]] = {
    "stage": ("0", "1", "2", "3"),
    "tier": ("device", "host", "host+params", "nvme", "nvme+params"),
    "precision": ("fp32", "bf16", "fp16"),
    "zeropp": ("plain", "weights", "gradients", "hpz", "all"),
    "optimizer": ("adamw", "sgd", "lamb", "muon", "adamw8"),
    "ranks": ("1", "2", "3", "2x2"),  # 2x2: two nodes of two
    "accumulation": ("1", "3"),
    "clipping": ("off", "0.5"),
    "recompute": ("off", "torch", "own"),
    "frozen": ("none", "some", "coded"),
    "small": ("split", "whole"),  # small parameters at stage 3; with one rank: all parameters
    "birth": ("whole", "sharded"),
    "commit": ("auto", "after_norm", "at_once", "shadow"),
}
TOGETHER: tuple[tuple[str, ...], ...] = (
    *itertools.combinations(FACTORS, 2),
    *(("stage", "tier", third) for third in ("precision", "zeropp", "optimizer", "ranks")),
)

# What the configuration refuses, and what would only repeat another case: factors, and when they do not go together.
RULES: tuple[tuple[tuple[str, ...], Callable[..., bool]], ...] = (
    (("stage", "tier"), lambda stage, tier: stage != "3" and "params" in tier),
    (("stage", "zeropp"), lambda stage, kind: stage != "3" and kind in ("weights", "hpz", "all")),
    (("stage", "zeropp"), lambda stage, kind: stage in "01" and kind == "gradients"),
    (("ranks", "zeropp"), lambda ranks, kind: ranks == "1" and kind in ("hpz", "all")),
    (("tier", "optimizer"), lambda tier, kind: tier == "device" and kind == "adamw8"),
    (("tier", "optimizer"), lambda tier, kind: "nvme" in tier and kind in ("lamb", "muon")),
    (("tier", "commit"), lambda tier, commit: tier == "device" and commit != "auto"),
    (("optimizer", "commit"), lambda kind, commit: kind in ("lamb", "muon") and commit in ("at_once", "shadow")),
    (("clipping", "commit"), lambda clipping, commit: clipping != "off" and commit == "at_once"),
    (("precision", "commit"), lambda precision, commit: precision == "fp16" and commit == "at_once"),
    (("stage", "frozen"), lambda stage, frozen: stage != "3" and frozen == "coded"),
    (("stage", "small"), lambda stage, small: stage != "3" and small == "whole"),
    (("stage", "birth"), lambda stage, birth: stage != "3" and birth == "sharded"),
)

# Checkpoints: what is saved under the first settings is loaded under the second; what they leave out is as in `USUAL`.
USUAL: Case = {factor: values[0] for factor, values in FACTORS.items()}
RESUMED: tuple[tuple[Case, Case], ...] = (
    ({"stage": "0", "ranks": "2"}, {"stage": "3", "ranks": "3"}),
    ({"stage": "3", "ranks": "3", "precision": "bf16"}, {"stage": "1", "ranks": "2", "precision": "bf16"}),
    ({"stage": "2", "ranks": "2", "tier": "host", "optimizer": "adamw8"}, {"stage": "3", "ranks": "2", "tier": "nvme"}),
    (
        {"stage": "3", "ranks": "2", "tier": "nvme+params", "frozen": "coded"},
        {"stage": "3", "ranks": "2", "tier": "host+params", "frozen": "coded", "zeropp": "all"},
    ),
    ({"stage": "1", "ranks": "2", "precision": "fp16"}, {"stage": "2", "ranks": "1", "precision": "fp16"}),
    ({"stage": "3", "ranks": "2x2", "optimizer": "muon"}, {"stage": "0", "ranks": "1", "optimizer": "muon"}),
    ({"stage": "2", "ranks": "3", "optimizer": "lamb"}, {"stage": "3", "ranks": "2", "optimizer": "lamb"}),
    (
        {"stage": "3", "ranks": "1", "optimizer": "sgd"},
        {"stage": "2", "ranks": "2", "optimizer": "sgd", "tier": "host"},
    ),
)


def allowed(case: Mapping[str, str]) -> bool:
    """Whether no rule speaks against these values; factors that are not chosen yet are no offence."""
    return not any(
        refuses(*(case[factor] for factor in factors)) for factors, refuses in RULES if all(f in case for f in factors)
    )


def choose_cases(seed: int = 1) -> list[Case]:
    """A few cases in which all values that may go together do, by pairs and by some triples; always the same ones."""
    drawing = random.Random(seed)
    wanted = {
        tuple(zip(factors, values, strict=True)): None
        for factors in TOGETHER
        for values in itertools.product(*(FACTORS[factor] for factor in factors))
        if allowed(dict(zip(factors, values, strict=True)))
    }
    chosen = []
    for first in sorted(wanted, key=lambda one: -len(one)):  # triples first: they bring most pairs along
        if first in wanted:
            case = _complete(dict(first), drawing.sample(list(FACTORS), len(FACTORS)), wanted, drawing)
            wanted = {one: None for one in wanted if case is None or not set(one) <= set(case.items())}
            wanted.pop(first, None)  # where nothing completes it, it cannot be had
            if case is not None:
                chosen.append({factor: case[factor] for factor in FACTORS})
    return chosen


def _complete(case: Case, order: Sequence[str], wanted: Iterable[Any], drawing: random.Random) -> Case | None:
    """The case with its other factors chosen such that much of what is wanted is in it; None if rules forbid all."""
    factor = next((factor for factor in order if factor not in case), None)
    if factor is None:
        return case
    news = {}
    for value in drawing.sample(FACTORS[factor], len(FACTORS[factor])):
        items = {**case, factor: value}
        news[value] = sum((factor, value) in one and set(one) <= set(items.items()) for one in wanted)
    for value in sorted(news, key=lambda value: -news[value]):
        longer = {**case, factor: value}
        if allowed(longer) and (found := _complete(longer, order, wanted, drawing)) is not None:
            return found
    return None


def name_of(case: Case) -> str:
    """The name says the value of each factor, as in `stage=3 tier=host`."""
    return " ".join(f"{factor}={value}" for factor, value in case.items())


def all_cases() -> dict[str, tuple[Case, ...]]:
    """Each name has one case, or two: one that saves and one that goes on from there."""
    found: dict[str, tuple[Case, ...]] = {name_of(case): (case,) for case in choose_cases()}
    for before, after in RESUMED:
        found[f"{name_of(before)} -> {name_of(after)}"] = ({**USUAL, **before}, {**USUAL, **after})
    return found


def num_ranks(case: Case) -> int:
    return 4 if case["ranks"] == "2x2" else int(case["ranks"])


def ranks_of_a_node(case: Case) -> int:
    return 2 if case["ranks"] == "2x2" else int(case["ranks"])
