"""The ways to store the states of a model, from the fastest to the smallest: what every search goes through.

`shardwell plan --auto`, `"stage": "auto"` and `shardwell train --memory` take the ways from here; they differ in how
they count activations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shardwell.memory import Tier
from shardwell.sharding.model_states import Bytes, GroupKey, ModelStates, StateFormula, TierPlacement, total
from shardwell.sharding.spec import CommPrecision, GroupPrecision
from shardwell.sharding.wrap import UnitSpec


@dataclass(frozen=True)
class Way:
    """One way to store the states of a model."""

    stage: int
    recomputes: bool
    place: TierPlacement

    def config(self, nvme_path: str | None) -> dict[str, Any]:
        """Return the block `zero_optimization`."""
        block: dict[str, Any] = {"stage": self.stage}
        for key, tier in (("offload_optimizer", self.place.optimizer), ("offload_param", self.place.parameters)):
            if tier is not Tier.DEVICE:
                block[key] = {"device": tier.offload_device, **({"nvme_path": nvme_path} if tier is Tier.DISK else {})}
        return block

    def __str__(self) -> str:
        words = [f"stage {self.stage}"]
        if self.place.optimizer is not Tier.DEVICE:
            words.append(f"optimizer state on {self.place.optimizer.value}")
        if self.place.parameters is not Tier.DEVICE:
            words.append(f"parameters on {self.place.parameters.value}")
        return ", ".join([*words, *(["blocks recomputed"] if self.recomputes else [])])


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


def peak_of_states(states: ModelStates, place: TierPlacement) -> Bytes:
    """Return the most bytes of states that a rank has on each tier at a time, if all units are placed so.

    A unit computes unsharded while the next one is all-gathered; below stage 2 gradients are unsharded until the
    boundary.
    """
    found = total(states.needs(name, place) for name in states.units)
    found[Tier.DEVICE] += passing_bytes(states)
    return found


def passing_bytes(states: ModelStates) -> int:
    """Return the bytes on the device of what is there for a part of a step: unsharded units and gradients."""
    passing = 2 * states.largest_unsharded()
    if states.formula.stage < 2:
        kinds = [pair for one in states.units.values() for pair in one.items()]
        passing += sum(numel * kind.precision.compute.itemsize for kind, numel in kinds if kind.trains)
    return passing


def states_of(
    specs: list[UnitSpec],
    stage: int,
    num_ranks: int,
    mixed: torch.dtype | None,
    accumulates: bool,
    num_states: int = 2,
) -> ModelStates:
    """Return the sizes of a model's states without an engine; the optimizer is Adam unless `num_states` says else."""
    units: dict[str, dict[GroupKey, int]] = {}
    for one in specs:
        kinds = units.setdefault(one.name, {})
        for _, parameter in one.parameters:
            dtype = mixed if mixed is not None else parameter.dtype
            precision = GroupPrecision.of(dtype, mixed, parameter.requires_grad, None, CommPrecision(None, 1.0))
            key = GroupKey(precision, parameter.requires_grad, False)
            kinds[key] = kinds.get(key, 0) + parameter.numel()
    formula = StateFormula(stage, num_ranks, num_states=num_states, accumulates=stage >= 2 and accumulates)
    return ModelStates(units, formula)
