"""Suggestions for keys that are not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from shardwell.config.block import ConfigBlock, block_of
from shardwell.config.deepspeed_keys import KEYS, Inert, Limited, Unsupported
from shardwell.config.old_budgets import OLD_BUDGETS
from shardwell.config.schema import Config

COMMENTS = ("_", "//", "#")  # a key that begins so is a comment, because JSON has none
# Objects whose keys are arguments of an optimizer or schedule; each may be "auto". With the names to suggest.
PARAMS: dict[str, tuple[str, ...]] = {
    "optimizer.params": ("lr", "betas", "eps", "weight_decay"),
    "scheduler.params": ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "total_num_steps"),
}


def suggest(key: str) -> str:
    """Return a hint at the key that was probably meant: the same name elsewhere, a near one here, or anywhere."""
    old = difflib.get_close_matches(key, OLD_BUDGETS, n=1, cutoff=0.9)
    if old:
        return f"did you mean {OLD_BUDGETS[old[0]].new}?"
    prefix, _, name = key.rpartition(".")
    every = list(all_keys())
    here = [other for other in every if other.rpartition(".")[0] == prefix]
    same = [other for other in every if other.rpartition(".")[2].lower() == name.lower()]
    nearest = same or _nearest(name, here) or _nearest(name, every)
    if nearest:
        return f"did you mean {' or '.join(nearest[:3])}?"
    keys = ", ".join(other.rpartition(".")[2] for other in here)
    return f"the keys of {prefix} are: {keys}" if prefix else "remove it"


def is_known_at_top(key: str) -> bool:
    """Tell whether a key at the top of a file is a key or a comment here, or names one in a block by dots."""
    first = key.partition(".")[0]
    known = {row.partition(".")[0] for row in KEYS} | set(Config.model_fields)
    if "." in key:
        return key in KEYS or key in OLD_BUDGETS or key in set(all_keys())
    return first in known or key.startswith(COMMENTS)


def _nearest(name: str, keys: list[str]) -> list[str]:
    last = {key.rpartition(".")[2].lower(): key for key in reversed(keys)}
    name = name.lower()
    containing = [
        key for other, key in last.items() if len(name) > 3 and len(other) > 3 and (name in other or other in name)
    ]
    close = difflib.get_close_matches(name, last, n=1, cutoff=0.7)
    return containing if len(containing) == 1 else [last[other] for other in close] or containing


def all_keys(block: type[ConfigBlock] = Config, prefix: str = "") -> Iterator[str]:
    """Yield every dotted key that a file may have."""
    for name, info in block.model_fields.items():
        yield prefix + name
        inner = block_of(info)
        if inner is not None:
            yield from all_keys(inner, f"{prefix}{name}.")
    if block is Config:
        yield from (key for key, row in KEYS.items() if isinstance(row, Inert | Limited) and row.type != "any")
        yield from (key for key, row in KEYS.items() if isinstance(row, Unsupported) and "." not in key)
        yield from (f"{params}.{name}" for params, names in PARAMS.items() for name in names)
