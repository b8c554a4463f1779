"""`--memory 24GB`: the first way of a ladder whose bytes fit on a device, from the fastest to the smallest.

States are counted by the same formulas as placement (`sharding/model_states.py`). Activations are estimated from the
sizes in the model's configuration: 34 bytes a token, layer and unit of width in 16 bits, twice that in 32, or only the
inputs of blocks if they are recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwell.checkpoint.parsing import parse_byte_size
from shardwell.errors import ConfigError
from shardwell.memory import Tier
from shardwell.memory.statistics import human
from shardwell.sharding import wrap_model
from shardwell.sharding.ways import Way, ladder, peak_of_states, states_of
from shardwell.sharding.wrap import LeafRules
from shardwell.train.recipe import Recipe

_RESERVE = 0.06  # share of a device for the runtime, fragmentation and staging
_ACTIVATIONS = 17  # numbers for each token, layer and unit of width that backward needs
_LOGITS = 3  # copies of the logits in fp32: as they are, their softmax, their gradient


@dataclass(frozen=True)
class Choice:
    """The way that was chosen, and what it takes on a device."""

    way: Way
    states: int
    activations: int
    limit: int

    def zero(self, nvme_path: str | None) -> dict[str, Any]:
        """Return the block `zero_optimization`: of what is on the host nothing stays on the device."""
        block = self.way.config(nvme_path)
        if self.way.place.optimizer is Tier.HOST:
            block["offload_optimizer"]["ratio"] = 1.0
        return block

    def __str__(self) -> str:
        needed = human(self.states + self.activations)
        return (
            f"memory {human(self.limit)} a device: {self.way}; {needed} needed ({human(self.states)} of states, about "
            f"{human(self.activations)} of activations)"
        )


def choose(recipe: Recipe, model: nn.Module, num_ranks: int, mixed: torch.dtype | None) -> Choice:
    """Return the first way that fits into the memory that the recipe names. All ranks find the same."""
    assert recipe.memory is not None
    limit = parse_byte_size(recipe.memory, "--memory")
    ways = ladder(num_ranks, has_disk=recipe.nvme_path is not None, recomputes=recipe.checkpoint_activations)
    least: Choice | None = None
    for way in ways:
        found = Choice(
            way, device_bytes(model, way, num_ranks, mixed, recipe.accumulation), activations(recipe, model, way), limit
        )
        if found.states + found.activations <= limit * (1 - _RESERVE):
            return found
        if least is None or found.states + found.activations < least.states + least.activations:
            least = found
    assert least is not None
    raise ConfigError(
        f"--memory {recipe.memory}: the least that was found is {human(least.states + least.activations)} with "
        f"{least.way}, of which {human(least.activations)} are activations. Use a smaller micro_batch or "
        "sequence_length, more ranks" + ("" if recipe.nvme_path else ", or --nvme-path")
    )


def device_bytes(model: nn.Module, way: Way, num_ranks: int, mixed: torch.dtype | None, accumulation: int) -> int:
    """Return the most bytes of states that a rank has on the device at a time."""
    states = states_of(wrap_model(model, LeafRules()), way.stage, num_ranks, mixed, accumulation > 1)
    return peak_of_states(states, way.place)[Tier.DEVICE]


def activations(recipe: Recipe, model: nn.Module, way: Way) -> int:
    """Return about how many bytes of activations the backward of a micro-batch needs."""
    config: Any = getattr(model, "config", None)
    layers, width, words = (
        int(getattr(config, name, 0) or 0) for name in ("num_hidden_layers", "hidden_size", "vocab_size")
    )
    tokens = recipe.micro_batch * recipe.sequence_length
    number = 4 if recipe.precision == "fp32" else 2
    block = _ACTIVATIONS * number * tokens * width
    blocks = layers * number * tokens * width + block if way.recomputes else layers * block
    return blocks + _LOGITS * 4 * tokens * words
