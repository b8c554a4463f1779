"""The axes of a plan's ranks, in the words of the configuration: tensor, pipeline, sequence, expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwell.errors import ConfigError

_KEYS = {
    "tensor": ("tensor_parallel", "autotp_size"),
    "pipe": ("pipeline", "stages"),
    "sequence": ("sequence_parallel_size",),
    "expert": ("shardwell", "expert_parallel_size"),
}


def with_axes(
    config: dict[str, Any],
    *,
    tensor: int | None = None,
    pipe: int | None = None,
    sequence: int | None = None,
    expert: int | None = None,
) -> dict[str, Any]:
    """Return a configuration with so many ranks along axes; None leaves what it says."""
    found = dict(config)
    if tensor is not None:
        found["tensor_parallel"] = {**found.get("tensor_parallel", {}), "autotp_size": tensor}
    if pipe is not None:
        found["pipeline"] = {**found.get("pipeline", {}), "stages": pipe}
        if not isinstance(found.get("train_batch_size"), int):  # which says how many micro-batches there are
            found.setdefault("gradient_accumulation_steps", 2 * pipe if pipe > 1 else 1)
    if sequence is not None:
        found["sequence_parallel_size"] = sequence
    if expert is not None:
        found["shardwell"] = {**found.get("shardwell", {}), "expert_parallel_size": expert}
    return found


def part_of_sequence(config: dict[str, Any], tokens: int) -> int:
    """Return the tokens of a sequence that a rank gets: all of them, or its part along the sequence axis."""
    ranks = ranks_along(config, "sequence")
    if tokens % ranks:
        raise ConfigError(f"--seq {tokens}: {ranks} ranks cannot share a sequence of so many tokens evenly")
    return tokens // ranks


def ranks_along(config: Any, axis: str) -> int:
    """Return how many ranks a configuration has along an axis: tensor, pipe, sequence or expert."""
    found: Any = config
    for key in _KEYS[axis]:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, int) and found > 1 else 1
