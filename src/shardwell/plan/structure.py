"""The classes of plans that a search goes through: what two plans have in common that differ in the micro-batch only.

A class is a way to store the states (`sharding/ways.py`) with or without what ZeRO++ adds, or with axes: tensor or
sequence ranks inside the node, or a pipeline with or without tensor ranks. Classes that another one dominates are not
made: with several ranks stage 0 moves what stage 1 moves and stores more; without accumulation stage 1 moves what
stage 2 moves, and with the micro-batches of a pipeline less than the others; ZeRO++ is for several nodes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardwell.config import Config, ConfigBlock, load
from shardwell.memory import Tier
from shardwell.memory.machine import SimulatedMachine
from shardwell.plan.axes import with_axes
from shardwell.sharding.model_states import TierPlacement
from shardwell.sharding.ways import Way

NVME = "/nvme"  # the path of simulated drives
MICRO, TRAIN, ACCUMULATION = "train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps"
# Placements by stage, from the device down: parameters, then optimizer state.
_BELOW_3 = [TierPlacement(), TierPlacement(Tier.DEVICE, Tier.HOST), TierPlacement(Tier.DEVICE, Tier.DISK)]
_AT_3 = [
    *_BELOW_3[:2],
    TierPlacement(Tier.HOST, Tier.HOST),
    TierPlacement(Tier.HOST, Tier.DISK),
    TierPlacement(Tier.DISK, Tier.DISK),
]
_SAY_MORE = ("ratio", "placement")  # keys that decide something where they are written, also with their defaults
_CHOSEN = (
    "stage",
    "offload_optimizer",
    "offload_param",
    "zero_hpz_partition_size",
    "zero_quantized_weights",
    "zero_quantized_gradients",
)


@dataclass(frozen=True)
class PlanClass:
    """A way to store states, the ranks of a secondary shard (hpZ), quantised collectives (qwZ, qgZ), and axes.

    The ranks along an axis are None where they are what the configuration says.
    """

    way: Way
    hpz: int = 1
    quantised: bool = False
    tensor: int | None = None  # ranks that share each tensor
    sequence: int | None = None  # ranks that share each sequence
    pipe: int | None = None  # stages of a pipeline
    keeps: bool = True  # optimizer state of the first units stays on the device, as it does by default

    @property
    def is_plain(self) -> bool:
        """Whether it has nothing of ZeRO++."""
        return self.hpz == 1 and not self.quantised

    @property
    def depth(self) -> int:
        """How far down states are stored: 0 is the device."""
        return _AT_3.index(self.way.place) if self.way.place in _AT_3 else len(_AT_3)

    def plain(self) -> PlanClass:
        """Return the class without ZeRO++."""
        return replace(self, hpz=1, quantised=False)

    @property
    def rows_shared_by(self) -> int:
        """The ranks along axes of this class, which train on the same rows."""
        return (self.tensor or 1) * (self.sequence or 1) * (self.pipe or 1)

    def config(self, base: Mapping[str, Any], micro_batch: int) -> dict[str, Any]:
        """Return a configuration of this class, with everything else as in `base`."""
        zero = {key: value for key, value in base.get("zero_optimization", {}).items() if key not in _CHOSEN}
        zero |= self.way.config(NVME)
        if not self.keeps:
            zero["offload_optimizer"]["ratio"] = 1.0
        if self.hpz > 1:
            zero["zero_hpz_partition_size"] = self.hpz
        if self.quantised:
            zero |= {"zero_quantized_weights": True, "zero_quantized_gradients": True}
        found = {**base, MICRO: micro_batch, "zero_optimization": zero}
        return with_axes(found, tensor=self.tensor, sequence=self.sequence, pipe=self.pipe)

    def __str__(self) -> str:
        words = [str(self.way), *([] if self.keeps else ["all of it"])]
        if self.hpz > 1:
            words.append(f"secondary shards over {self.hpz} ranks (hpZ)")
        if self.quantised:
            words.append("quantised collectives (qwZ, qgZ)")
        if self.tensor is not None:
            words.append(f"{self.tensor} tensor ranks")
        if self.sequence is not None:
            words.append(f"{self.sequence} sequence ranks")
        if self.pipe is not None:
            words.append(f"a pipeline of {self.pipe} stages")
        return ", ".join(words)


def structure_classes(
    machine: SimulatedMachine,
    accumulation: int,
    recomputes: bool | None,
    *,
    has_disk: bool,
    has_axes: bool = False,
    layers: int = 0,
) -> list[PlanClass]:
    """Return the classes that may be the fastest, those with states on the device first.

    `has_axes`: also such with a tensor or a sequence axis, which stay inside a node, and with pipelines of so many
    stages as divide the ranks and the `layers`.
    """
    num_ranks = machine.ranks.size
    per_node = machine.local_world_size(num_ranks)
    stages = [0] if num_ranks == 1 else [1, 2, 3] if accumulation > 1 else [2, 3]
    if num_ranks == 1:  # parameters that leave the device take stage 3, also with one rank
        stages.append(3)
    again = (False, True) if recomputes is None else (recomputes,)
    found = [
        one
        for stage in stages
        for place in (_AT_3 if stage == 3 else _BELOW_3)
        if has_disk or Tier.DISK not in place[:2]
        if num_ranks > 1 or (stage == 3) == (place.parameters is not Tier.DEVICE)
        for is_again in again
        for one in _with_zeropp(Way(stage, is_again, place), num_ranks, per_node)
    ]
    if has_axes:
        degrees = _powers(per_node, per_node)
        plain = [one for one in found if one.is_plain and not one.depth and one.way.stage]
        found += [replace(one, tensor=degree) for degree in degrees for one in plain]
        found += [replace(one, sequence=degree) for degree in degrees for one in plain]
        found += [
            PlanClass(Way(1, is_again, TierPlacement()), tensor=tensor, pipe=pipe)
            for pipe in _powers(num_ranks, min(layers, num_ranks))
            for tensor in (None, *degrees)
            if num_ranks % (pipe * (tensor or 1)) == 0
            for is_again in again
        ]
    return sorted(found, key=lambda one: one.depth)


def _powers(number: int, most: int) -> list[int]:
    """Return the powers of 2, from 2 up to a number, that divide another one."""
    return [2**power for power in range(1, most.bit_length()) if number % 2**power == 0]


def _with_zeropp(way: Way, num_ranks: int, per_node: int) -> Iterator[PlanClass]:
    yield PlanClass(way)
    if way.stage == 3 and 1 < per_node < num_ranks:
        yield PlanClass(way, per_node)
        yield PlanClass(way, 1, True)
        yield PlanClass(way, per_node, True)


def minimal(config: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    """Return the keys of a configuration whose values differ from the defaults; the optimizer stays as it is."""
    loaded = load(config, world_size=world_size)
    found: dict[str, Any] = {}
    for key, value in config.items():
        block, default = getattr(loaded, key, None), getattr(Config(), key, None)
        if isinstance(block, ConfigBlock) and isinstance(default, ConfigBlock):
            found[key] = _differing(value, default)
        elif value != (1 if key in (MICRO, ACCUMULATION) else default):
            found[key] = value
    return {key: value for key, value in found.items() if value != {}}


def _differing(given: Mapping[str, Any], default: ConfigBlock) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in given.items():
        usual = getattr(default, key, None)
        if isinstance(usual, ConfigBlock) and isinstance(value, Mapping):
            inner = _differing(value, usual)
            found |= {key: inner} if inner else {}
        elif value != usual or key in _SAY_MORE:
            found[key] = value
    return found


def as_text(config: Mapping[str, Any]) -> str:
    """Return a configuration as JSON."""
    return json.dumps(config, indent=2)
