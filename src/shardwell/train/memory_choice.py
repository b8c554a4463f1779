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
from shardwell.sharding import GroupPrecision, UnitSpec, wrap_model
from shardwell.sharding.model_states import GroupKey, ModelStates, StateFormula, TierPlacement, total
from shardwell.sharding.spec import CommPrecision
from shardwell.sharding.wrap import LeafRules
from shardwell.train.recipe import Recipe

_RESERVE = 0.06  # share of a device for the runtime, fragmentation and staging
_ACTIVATIONS = 17  # numbers for each token, layer and unit of width that backward needs
_LOGITS = 3  # copies of the logits in fp32: as they are, their softmax, their gradient


@dataclass(frozen=True)
class Way:
    """One way to store the states of a model."""

    stage: int
    recomputes: bool
    place: TierPlacement

    def config(self, nvme_path: str | None) -> dict[str, Any]:
        """Return the block `zero_optimization`."""
        devices = {Tier.HOST: "cpu", Tier.DISK: "nvme"}
        block: dict[str, Any] = {"stage": self.stage}
        for key, tier in (("offload_optimizer", self.place.optimizer), ("offload_param", self.place.parameters)):
            if tier is not Tier.DEVICE:
                block[key] = {"device": devices[tier], **({"nvme_path": nvme_path} if tier is Tier.DISK else {})}
        return block

    def __str__(self) -> str:
        words = [f"stage {self.stage}"]
        if self.place.optimizer is not Tier.DEVICE:
            words.append(f"optimizer state on {self.place.optimizer.value}")
        if self.place.parameters is not Tier.DEVICE:
            words.append(f"parameters on {self.place.parameters.value}")
        return ", ".join([*words, *(["blocks recomputed"] if self.recomputes else [])])


@dataclass(frozen=True)
class Choice:
    """The way that was chosen, and what it takes on a device."""

    way: Way
    states: int
    activations: int
    limit: int

    def __str__(self) -> str:
        needed = human(self.states + self.activations)
        return (
            f"memory {human(self.limit)} a device: {self.way}; {needed} needed ({human(self.states)} of states, about "
            f"{human(self.activations)} of activations)"
        )


def ladder(num_ranks: int, *, has_disk: bool, recomputes: bool | None) -> list[Way]:
    """Return the ways from the fastest to the smallest: shard more, recompute, then leave the device."""
    device, host, disk = Tier.DEVICE, Tier.HOST, Tier.DISK
    stages = [0] if num_ranks == 1 else [1, 2, 3]
    above = [(stage, TierPlacement()) for stage in stages]
    below = [
        (2, TierPlacement(device, host)),
        (3, TierPlacement(device, host)),
        (3, TierPlacement(host, host)),
        *([(3, TierPlacement(host, disk)), (3, TierPlacement(disk, disk))] if has_disk else []),
    ]
    tried = [False, True] if recomputes is None else [recomputes]
    kept = [Way(stage, again, place) for again in tried for stage, place in above]
    return [*kept, *(Way(stage, tried[-1], place) for stage, place in below)]


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
    states = model_states(wrap_model(model, LeafRules()), way.stage, num_ranks, mixed, accumulation)
    stored = total(states.needs(name, way.place) for name in states.units)[Tier.DEVICE]
    if way.stage < 2:  # gradients of all units, until the boundary
        kinds = [pair for one in states.units.values() for pair in one.items()]
        stored += sum(numel * kind.precision.compute.itemsize for kind, numel in kinds if kind.trains)
    return stored + 2 * states.largest_unsharded()  # a unit computes, and the next one is gathered


def model_states(
    cuts: list[UnitSpec], stage: int, num_ranks: int, mixed: torch.dtype | None, accumulation: int
) -> ModelStates:
    """Return the sizes of a model's states with Adam."""
    units: dict[str, dict[GroupKey, int]] = {}
    for one in cuts:
        kinds = units.setdefault(one.name, {})
        for _, parameter in one.parameters:
            dtype = mixed if mixed is not None else parameter.dtype
            precision = GroupPrecision.of(dtype, mixed, parameter.requires_grad, None, CommPrecision(None, 1.0))
            key = GroupKey(precision, parameter.requires_grad, False)
            kinds[key] = kinds.get(key, 0) + parameter.numel()
    return ModelStates(units, StateFormula(stage, num_ranks, accumulates=stage >= 2 and accumulation > 1))


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
