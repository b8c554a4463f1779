"""The bytes of a model's states, by tier, and the plan of where they are stored.

This is pure arithmetic over the units in forward order, from `state_bytes` of `sharding/storage_form.py`. All bytes are
those of one rank. Allocation, placement and reports use it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from shardwell.kernels import Moment8bit
from shardwell.kernels.quantize import Codec
from shardwell.memory import Tier
from shardwell.memory.statistics import human
from shardwell.sharding.spec import CommitPolicy, GroupPrecision, ReduceAt, ShardingSpec, SpecOverrides, spec_for
from shardwell.sharding.storage_form import form_of, state_bytes

Bytes = Counter[Tier]
TIERS_DOWN = list(Tier)  # from the device down
_FP32 = 4


class TierPlacement(NamedTuple):
    """The tiers of a unit's parameters, and of its master weights and optimizer state.

    Gradients that an update waits for are on the host or on disk, if the optimizer state is not on the device.
    """

    parameters: Tier = Tier.DEVICE
    optimizer: Tier = Tier.DEVICE
    gradients: Tier = Tier.HOST

    @property
    def depth(self) -> int:
        """The lowest tier of parameters and optimizer state, as a number; 0 is the device."""
        return max(TIERS_DOWN.index(tier) for tier in (self.parameters, self.optimizer))

    @property
    def gradient_tier(self) -> Tier:
        """The tier where gradients wait for the update."""
        return Tier.DEVICE if self.optimizer is Tier.DEVICE else self.gradients


@dataclass(frozen=True)
class GroupKey:
    """The properties that the parameters of a group have in common."""

    precision: GroupPrecision
    trains: bool
    persistent: bool  # small, and unsharded on every rank
    is_cut: bool = True  # the ranks of a tensor axis hold different parameters; without one, there are no such ranks
    is_partial: bool = False  # these ranks compute parts of the gradient, whose sum is the gradient
    tied: str = ""  # the name of a parameter that other pipeline stages hold, too: it is alone in its group


@dataclass(frozen=True)
class StateFormula:
    """The number of bytes that parameters need on each tier."""

    stage: int
    num_ranks: int
    shard_at_world_one: bool = False
    num_states: int = 2  # tensors that the optimizer keeps for each parameter
    eight_bits: bool = False  # whether those below the device are 8-bit
    accumulates: bool = False  # gradients are summed over several micro-steps
    commit: CommitPolicy = CommitPolicy.AFTER_NORM  # of updates below the device; on it, speculation waits for the norm
    ranks_per_copy: int = 0  # ranks that split a secondary shard, in the smallest node; 0: there is none
    storage_codec: Codec | None = None  # of frozen parameters
    ranks_per_loss: int = 0  # ranks that split the residual of quantised gradients; 0: it is not kept

    def spec(self, kind: GroupKey, place: TierPlacement) -> ShardingSpec:
        """Return the sharding spec of a group with this placement."""
        return spec_for(
            self.stage,
            persistent=kind.persistent,
            num_ranks=self.num_ranks,
            shard_at_world_one=self.shard_at_world_one,
            overrides=SpecOverrides(
                self.ranks_per_copy > 0,
                place.parameters,
                place.optimizer,
                commit=self.commit,
                storage_codec=self.storage_codec,
            ).of(kind.precision.compute, kind.trains),
        )

    def shard(self, kind: GroupKey, numel: int, spec: ShardingSpec) -> int:
        """Return the bytes of a rank's shard of the parameters, as they are transferred."""
        if spec.storage_codec is not None:
            return spec.storage_codec.num_bytes(self.share(numel))
        return self.share(numel) * kind.precision.compute.itemsize

    def share(self, numel: int) -> int:
        """Return the elements of a rank's shard."""
        return -(-numel // self.num_ranks)

    def stepped_numel(self, numel: int, spec: ShardingSpec) -> int:
        """Return the elements that a rank steps: its shard, or all of them at stage 0."""
        return self.share(numel) if spec.optimizer.axis is not None else numel

    def averaged_numel(self, numel: int, spec: ShardingSpec) -> int:
        """Return the elements of which a rank has averaged gradients: its shard, or all of them at stage 0."""
        return self.share(numel) if spec.gradients.axis is not None else numel

    def moments(self, numel: int, kind: GroupKey, tier: Tier) -> int:
        """Return the bytes of the optimizer's state for some master weights."""
        narrow = self.eight_bits and tier is not Tier.DEVICE
        each = numel + Moment8bit.num_blocks(numel) if narrow else numel * kind.precision.master.itemsize
        return self.num_states * each

    def stored_bytes(self, kind: GroupKey, numel: int, place: TierPlacement) -> Bytes:
        """Return the bytes of parameters, master weights and optimizer state that a group holds between steps."""
        spec = self.spec(kind, place)
        stored = state_bytes(form_of(spec, kind.precision, kind.trains), spec, kind.precision, numel, self.num_ranks)
        if not kind.trains:
            return total([stored, self.secondary_bytes(kind, numel, spec)])
        stored[spec.optimizer.tier] += self.moments(self.stepped_numel(numel, spec), kind, spec.optimizer.tier)
        return stored

    def secondary_bytes(self, kind: GroupKey, numel: int, spec: ShardingSpec) -> Bytes:
        """Return the bytes of the secondary shard.

        It exists from a forward to the next update, and permanently for frozen parameters.
        """
        if spec.secondary is None:
            return Counter()
        if spec.storage_codec is not None:
            return Counter({Tier.DEVICE: -(-self.num_ranks * self.shard(kind, numel, spec) // self.ranks_per_copy)})
        return Counter({Tier.DEVICE: -(-numel // self.ranks_per_copy) * kind.precision.compute.itemsize})

    def needs(self, kind: GroupKey, numel: int, place: TierPlacement) -> Bytes:
        """Return the bytes of all states.

        These are stored states, those that wait for a step (gradients, secondary shard), and speculative state.
        """
        found = self.stored_bytes(kind, numel, place)
        if not kind.trains:
            return found
        spec = self.spec(kind, place)
        found.update(self.secondary_bytes(kind, numel, spec))
        has_sums = self.accumulates and spec.reduce_at is ReduceAt.BOUNDARY  # of this rank, over micro-steps
        if has_sums:
            found[Tier.DEVICE] += numel * kind.precision.accumulate.itemsize
        if self.ranks_per_loss and not kind.persistent:
            found[Tier.DEVICE] += -(-numel // self.ranks_per_loss) * _FP32
        if spec.optimizer.tier is Tier.DEVICE:
            waits = self.accumulates or self.commit is not CommitPolicy.IMMEDIATE or kind.persistent or self.stage < 3
            if waits and not has_sums:  # the average of a unit takes the place of its sums
                waiting = kind.precision.accumulate if self.accumulates else kind.precision.compute
                found[Tier.DEVICE] += self.averaged_numel(numel, spec) * waiting.itemsize
            return found
        found[place.gradients] += self.waiting(kind, numel, place)
        if self.commit is CommitPolicy.SPECULATIVE and spec.optimizer.tier is Tier.HOST:
            found[Tier.HOST] += self.stepped(kind, numel, place)
        return found

    def waiting(self, kind: GroupKey, numel: int, place: TierPlacement) -> int:
        """Return the bytes of gradients that wait, below the device, for the norm or for more micro-steps."""
        spec = self.spec(kind, place)
        if spec.optimizer.tier is Tier.DEVICE or not kind.trains:
            return 0
        numel = self.averaged_numel(numel, spec)
        if self.accumulates:
            return numel * _FP32
        return numel * kind.precision.compute.itemsize if self.commit is not CommitPolicy.IMMEDIATE else 0

    def stepped(self, kind: GroupKey, numel: int, place: TierPlacement) -> int:
        """Return the bytes of master weights and optimizer state that are stepped below the device."""
        spec = self.spec(kind, place)
        tier, own = spec.optimizer.tier, self.stepped_numel(numel, spec)
        if tier is Tier.DEVICE or not kind.trains:
            return 0
        return own * kind.precision.master.itemsize + self.moments(own, kind, tier)


@dataclass(frozen=True)
class ModelStates:
    """The sizes of a model's units: elements by group."""

    units: dict[str, dict[GroupKey, int]]  # in forward order
    formula: StateFormula

    def trained(self) -> dict[str, int]:
        """Return the number of trained elements of each unit."""
        return {name: sum(numel for kind, numel in kinds.items() if kind.trains) for name, kinds in self.units.items()}

    def stored_bytes(self, places: Mapping[str, TierPlacement]) -> Bytes:
        """Return the bytes of parameters, master weights and optimizer state between steps."""
        return total(
            self.formula.stored_bytes(kind, numel, places[name])
            for name, kinds in self.units.items()
            for kind, numel in kinds.items()
        )

    def needs(self, name: str, place: TierPlacement) -> Bytes:
        """Return the bytes of all states of a unit with this placement."""
        return total(self.formula.needs(kind, numel, place) for kind, numel in self.units[name].items())

    def largest_unsharded(self) -> int:
        """Return the bytes of the largest unit's parameters and their gradients while it computes."""
        compute = {
            name: sum(numel * kind.precision.compute.itemsize * (1 + kind.trains) for kind, numel in kinds.items())
            for name, kinds in self.units.items()
        }
        return max(compute.values(), default=0)

    def stepped(self, name: str, place: TierPlacement) -> int:
        """Return the bytes of a unit's master weights and optimizer state that are stepped below the device."""
        return sum(self.formula.stepped(kind, numel, place) for kind, numel in self.units[name].items())

    def waiting(self, name: str, place: TierPlacement) -> int:
        """Return the bytes of a unit's gradients that wait below the device."""
        return sum(self.formula.waiting(kind, numel, place) for kind, numel in self.units[name].items())

    def shares(self) -> dict[str, int]:
        """Return the elements of each unit that a rank holds where units are sharded."""
        return {name: sum(self.formula.share(numel) for numel in kinds.values()) for name, kinds in self.units.items()}

    def held(self, name: str) -> int:
        """Return the bytes of a rank's shard of a unit's parameters, as they are transferred."""
        formula = self.formula
        return sum(
            formula.shard(kind, numel, formula.spec(kind, TierPlacement())) for kind, numel in self.units[name].items()
        )

    def sent(self, name: str, place: TierPlacement) -> int:
        """Return the bytes of a unit's parameters, in the compute dtype, that are stepped below the device."""
        formula = self.formula
        return sum(
            formula.stepped_numel(numel, formula.spec(kind, place)) * kind.precision.compute.itemsize
            for kind, numel in self.units[name].items()
            if formula.stepped(kind, numel, place)
        )


def total(parts: Iterable[Bytes]) -> Bytes:
    """Return the sum of some byte counts."""
    found: Bytes = Counter()
    for part in parts:
        found.update(part)
    return found


@dataclass(frozen=True)
class OffloadPlan:
    """The tier of each unit, and the commit policy of units whose optimizer state is stored on the host or on disk."""

    commits: dict[str, CommitPolicy]  # by the name of the unit
    places: dict[str, TierPlacement]
    states: ModelStates
    above: CommitPolicy = CommitPolicy.AFTER_NORM  # the policy of units whose optimizer state is stored on the device
    kept: tuple[str, ...] = ()  # units that were to be on the host, whose state is on the device: it is needed first

    @classmethod
    def on_device(cls, states: ModelStates) -> OffloadPlan:
        """Return the plan that stores all states on the device and updates them there."""
        return cls({}, dict.fromkeys(states.units, TierPlacement()), states)

    def commit_of(self, name: str) -> CommitPolicy:
        """Return the commit policy of a unit."""
        return self.commits.get(name, self.above)

    def stored_bytes(self) -> Bytes:
        """Return the bytes of parameters, master weights and optimizer state on each tier of this rank.

        Optimizer state counts even before the first step creates it.
        """
        return self.states.stored_bytes(self.places)

    def needs(self, name: str) -> Bytes:
        """Return the bytes of all states of a unit."""
        return self.states.needs(name, self.places[name])

    def kept_bytes(self) -> int:
        """Return the device bytes that the state of kept units takes, with the gradients that wait for its step."""
        below = {name: self.places[name]._replace(optimizer=Tier.HOST) for name in self.kept}
        above = total(self.needs(name) for name in self.kept)
        return above[Tier.DEVICE] - total(self.states.needs(*pair) for pair in below.items())[Tier.DEVICE]

    def __str__(self) -> str:
        commits = Counter(self.commits.values())
        policies = ", ".join(f"{commits[commit]} {commit.value}" for commit in CommitPolicy if commits[commit])
        tiers = Counter(place.optimizer for place in self.places.values())
        units = ", ".join(f"{tiers[tier]} {tier.words}" for tier in Tier if tiers[tier])
        held = self.stored_bytes()
        sizes = ", ".join(f"{human(held[tier])} {tier.words}" for tier in Tier if held[tier])
        updates = f"updates on the host, by unit: {policies}" if policies else "no updates on the host"
        waiting = [name for name, place in self.places.items() if place.gradient_tier is Tier.DISK]
        num_waiting = sum(self.states.waiting(name, self.places[name]) > 0 for name in waiting)
        deep = f"; gradients that wait on disk: of {num_waiting} units" if num_waiting else ""
        return f"{updates}; units by optimizer state: {units}; stored on each rank: {sizes}{deep}"
