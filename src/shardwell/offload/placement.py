"""Which tier each unit's states rest on, from the bytes that they need and the bytes that there are.

    device | unit 0 | unit 1 |
    host                     | unit 2 | unit 3 | unit 4 |
    disk                                                | unit 5 | unit 6 |

Pure arithmetic, in units' forward order: the first ones are updated last and needed first, so they rest highest. All
bytes are those of one rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardwell.kernels import Moment8bit
from shardwell.kernels.quantize import Codec
from shardwell.memory import Tier
from shardwell.memory.statistics import human
from shardwell.sharding import GroupPrecision, spec_for
from shardwell.sharding.spec import CommitPolicy, ShardingSpec, SpecOverrides
from shardwell.sharding.storage import form_of, state_bytes

Bytes = Counter[Tier]
_DEPTHS = list(Tier)  # from the device down
_FP32 = 4


class TierPlacement(NamedTuple):
    """Where the parameters of a unit rest, and where its masters and optimizer state do.

    Gradients that such state waits for are on the host or on disk, if it is not on the device.
    """

    parameters: Tier = Tier.DEVICE
    optimizer: Tier = Tier.DEVICE
    gradients: Tier = Tier.HOST

    @property
    def depth(self) -> int:
        return max(_DEPTHS.index(tier) for tier in (self.parameters, self.optimizer))

    @property
    def gradient_tier(self) -> Tier:
        return Tier.DEVICE if self.optimizer is Tier.DEVICE else self.gradients


def tier_ladder(deepest: TierPlacement) -> list[TierPlacement]:
    """The places that units may have, from the device down: both states go down together as far as each may.

    Last come the gradients of state on disk, if they may.
    """
    limits = [_DEPTHS.index(tier) for tier in (deepest.parameters, deepest.optimizer)]
    found = [TierPlacement(*(_DEPTHS[min(rung, limit)] for limit in limits)) for rung in range(max(limits) + 1)]
    return [*found, deepest] if deepest.gradients is deepest.optimizer is Tier.DISK else found


@dataclass(frozen=True)
class GroupKey:
    """What the parameters of a group have in common."""

    precision: GroupPrecision
    trains: bool
    persistent: bool  # small, and whole on every rank


@dataclass(frozen=True)
class StateFormula:
    """How many bytes parameters need on which tier."""

    stage: int
    num_ranks: int
    shard_at_world_one: bool = False
    num_states: int = 2  # tensors that the optimizer keeps for each parameter
    eight_bits: bool = False  # of those, below the device
    accumulates: bool = False  # gradients over several micro-steps
    commit: CommitPolicy = CommitPolicy.AFTER_NORM  # of updates below the device; on it, shadow is after the norm
    ranks_per_copy: int = 0  # that split a second copy of the parameters, where they are fewest; 0: there is none
    rest_codec: Codec | None = None  # of what is frozen
    ranks_per_loss: int = 0  # that split what codes of gradients lose; 0: that is not kept

    def row(self, kind: GroupKey, place: TierPlacement) -> ShardingSpec:
        return spec_for(
            self.stage,
            persistent=kind.persistent,
            num_ranks=self.num_ranks,
            shard_at_world_one=self.shard_at_world_one,
            wish=SpecOverrides(
                self.ranks_per_copy > 0,
                place.parameters,
                place.optimizer,
                commit=self.commit,
                rest_codec=self.rest_codec,
            ).of(kind.precision.compute, kind.trains),
        )

    def shard(self, kind: GroupKey, numel: int, row: ShardingSpec) -> int:
        """A rank's share of the parameters, as it travels."""
        if row.storage_codec is not None:
            return row.storage_codec.num_bytes(self.share(numel))
        return self.share(numel) * kind.precision.compute.itemsize

    def share(self, numel: int) -> int:
        return -(-numel // self.num_ranks)

    def moments(self, numel: int, kind: GroupKey, tier: Tier) -> int:
        """The optimizer's state of some masters."""
        narrow = self.eight_bits and tier is not Tier.DEVICE
        each = numel + Moment8bit.num_blocks(numel) if narrow else numel * kind.precision.master.itemsize
        return self.num_states * each

    def at_rest(self, kind: GroupKey, numel: int, place: TierPlacement) -> Bytes:
        """Parameters, masters and optimizer state between steps, as `ShardedGroup` holds them."""
        row = self.row(kind, place)
        stored = state_bytes(form_of(row, kind.precision, kind.trains), row, kind.precision, numel, self.num_ranks)
        if not kind.trains:
            return total([stored, self.second_copy(kind, numel, row)])
        own = self.share(numel) if row.optimizer.axis is not None else numel
        stored[row.optimizer.tier] += self.moments(own, kind, row.optimizer.tier)
        return stored

    def second_copy(self, kind: GroupKey, numel: int, row: ShardingSpec) -> Bytes:
        """From a forward to the next update; for good, of what is frozen."""
        if row.secondary is None:
            return Counter()
        if row.storage_codec is not None:
            return Counter({Tier.DEVICE: -(-self.num_ranks * self.shard(kind, numel, row) // self.ranks_per_copy)})
        return Counter({Tier.DEVICE: -(-numel // self.ranks_per_copy) * kind.precision.compute.itemsize})

    def needs(self, kind: GroupKey, numel: int, place: TierPlacement) -> Bytes:
        """What rests, what waits for a step (gradients, a second copy), a second state where updates speculate."""
        found = self.at_rest(kind, numel, place)
        if not kind.trains:
            return found
        row, own = self.row(kind, place), self.share(numel)
        found.update(self.second_copy(kind, numel, row))
        if self.ranks_per_loss and not kind.persistent:
            found[Tier.DEVICE] += -(-numel // self.ranks_per_loss) * _FP32
        if row.optimizer.tier is Tier.DEVICE:
            if self.accumulates or self.commit is not CommitPolicy.IMMEDIATE or kind.persistent:
                waiting = kind.precision.accumulate if self.accumulates else kind.precision.compute
                found[Tier.DEVICE] += own * waiting.itemsize
            return found
        found[place.gradients] += self.waiting(kind, numel, place)
        if self.commit is CommitPolicy.SPECULATIVE and row.optimizer.tier is Tier.HOST:
            found[Tier.HOST] += self.stepped(kind, numel, place)
        return found

    def waiting(self, kind: GroupKey, numel: int, place: TierPlacement) -> int:
        """Gradients that updates below the device wait for: for their norm, or for more of them."""
        if self.row(kind, place).optimizer.tier is Tier.DEVICE or not kind.trains:
            return 0
        if self.accumulates:
            return self.share(numel) * _FP32
        return self.share(numel) * kind.precision.compute.itemsize if self.commit is not CommitPolicy.IMMEDIATE else 0

    def stepped(self, kind: GroupKey, numel: int, place: TierPlacement) -> int:
        """Masters and optimizer state that are stepped below the device."""
        tier, own = self.row(kind, place).optimizer.tier, self.share(numel)
        if tier is Tier.DEVICE or not kind.trains:
            return 0
        return own * kind.precision.master.itemsize + self.moments(own, kind, tier)


@dataclass(frozen=True)
class ModelStates:
    """What the units of a model hold, in numbers: elements by kind."""

    units: dict[str, dict[GroupKey, int]]  # in forward order
    formula: StateFormula

    def trained(self) -> dict[str, int]:
        """Elements that are trained, by unit."""
        return {name: sum(numel for kind, numel in kinds.items() if kind.trains) for name, kinds in self.units.items()}

    def at_rest(self, places: Mapping[str, TierPlacement]) -> Bytes:
        return total(
            self.formula.at_rest(kind, numel, places[name])
            for name, kinds in self.units.items()
            for kind, numel in kinds.items()
        )

    def needs(self, name: str, place: TierPlacement) -> Bytes:
        return total(self.formula.needs(kind, numel, place) for kind, numel in self.units[name].items())

    def stepped(self, name: str, place: TierPlacement) -> int:
        """Masters and optimizer state of a unit that are stepped below the device."""
        return sum(self.formula.stepped(kind, numel, place) for kind, numel in self.units[name].items())

    def waiting(self, name: str, place: TierPlacement) -> int:
        """Gradients of a unit that its update below the device waits for."""
        return sum(self.formula.waiting(kind, numel, place) for kind, numel in self.units[name].items())

    def shares(self) -> dict[str, int]:
        """Elements of each unit that a rank holds where units are split."""
        return {name: sum(self.formula.share(numel) for numel in kinds.values()) for name, kinds in self.units.items()}

    def held(self, name: str) -> int:
        """A rank's share of a unit's parameters, as they travel."""
        formula = self.formula
        return sum(
            formula.shard(kind, numel, formula.row(kind, TierPlacement())) for kind, numel in self.units[name].items()
        )

    def sent(self, name: str, place: TierPlacement) -> int:
        """Parameters of a unit, in the compute dtype, that are stepped below the device."""
        return sum(
            self.formula.share(numel) * kind.precision.compute.itemsize
            for kind, numel in self.units[name].items()
            if self.formula.stepped(kind, numel, place)
        )


def total(parts: Iterable[Bytes]) -> Bytes:
    found: Bytes = Counter()
    for part in parts:
        found.update(part)
    return found


@dataclass(frozen=True)
class PlacementPlan:
    """A rung of the ladder for each unit, and the bytes that all of it needs."""

    rungs: list[int]
    needed: Bytes

    def fits(self, free: Mapping[Tier, float]) -> bool:
        return all(size <= free.get(tier, 0) for tier, size in self.needed.items())


def plan(needs: Sequence[Sequence[Bytes]], buffers: Sequence[Bytes], free: Mapping[Tier, float]) -> PlacementPlan:
    """Place units as high as they fit, the first ones highest; no deeper than it must be.

    `needs` has the bytes of each unit on each rung, `buffers` what is needed beside them if a rung is the deepest one.
    The plan that is returned fits, or there is none that does.
    """
    for depth in range(len(buffers)):
        found = _down_to(depth, needs, buffers[depth], free)
        if found.fits(free):
            break
    return found


def _down_to(depth: int, needs: Sequence[Sequence[Bytes]], buffers: Bytes, free: Mapping[Tier, float]) -> PlacementPlan:
    """All units begin at the deepest rung, and are raised from the first on, while there is room above."""
    needed = total([buffers, *(unit[depth] for unit in needs)])
    rungs = [depth] * len(needs)
    first = 0
    for rung in range(depth):
        while first < len(needs):
            after = total([needed, needs[first][rung]])
            after.subtract(needs[first][depth])
            if any(size > max(needed[tier], free.get(tier, 0)) for tier, size in after.items()):
                break
            needed, rungs[first] = after, rung
            first += 1
    return PlacementPlan(rungs, needed)


def table(needed: Bytes, free: Mapping[Tier, float]) -> str:
    """What is needed and free on each tier that is used."""
    used = [tier for tier in Tier if needed[tier] > 0]
    return ", ".join(f"{tier.value} {human(needed[tier])} (free {human(free.get(tier, 0))})" for tier in used)
