"""The one idea: a ZeRO stage is a row of a table.

For each of the three model states a row says over which axis it is split and on which tier it rests; for gradients
when they are reduced; for the optimizer when its step commits (it runs on the tier where its state rests). Everything
else follows from the row, and adding one adds no path through the engine. A row belongs to a *group* of parameters, not
to the model.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

import torch

from shardwell.kernels.quantize import Codec
from shardwell.memory import Tier
from shardwell.parallel.mesh import Axis


class ReduceAt(enum.Enum):
    """When gradients are averaged over the ranks."""

    MICRO_STEP = "every micro-step"
    BOUNDARY = "the boundary"


class CommitPolicy(enum.Enum):
    """When an optimizer update becomes the truth."""

    IMMEDIATE = "at once"
    AFTER_NORM = "after the norm is known"
    SPECULATIVE = "into a shadow slot, committed after the norm"
    AUTO = "at once where steps have shown to be plain, else after the norm"  # until the optimizer has it: see Habit

    __hash__ = object.__hash__  # each member is one object; Enum's own hash is slow, and these are keys everywhere


@dataclass(frozen=True)
class StatePlacement:
    """How a state rests between its uses: split over an axis or whole on every rank (None), and on which tier."""

    axis: Axis | None
    tier: Tier = Tier.DEVICE

    def __str__(self) -> str:
        where = "whole" if self.axis is None else f"split over the {self.axis.value}"
        return where if self.tier is Tier.DEVICE else f"{where}, on the {self.tier.value}"


WHOLE = StatePlacement(None)
SPLIT = StatePlacement(Axis.WORLD)


@dataclass(frozen=True)
class ShardingSpec:
    """One line of the table."""

    parameters: StatePlacement
    gradients: StatePlacement
    optimizer: StatePlacement
    reduce_at: ReduceAt
    secondary: StatePlacement | None = None  # of the parameters, closer by; filled by a gather, read by the next one
    commit: CommitPolicy = CommitPolicy.AFTER_NORM
    all_gather_codec: Codec | None = None  # of parameters that are gathered
    storage_codec: Codec | None = None  # of parameters that rest encoded, and travel as they rest
    reduce_codecs: tuple[Codec, Codec] | None = None  # of gradients, inside a node and between nodes
    feedback: bool = False  # what codes of gradients do not say, the next ones do

    @property
    def reshards(self) -> bool:
        """Parameters are whole only while they are used."""
        return self.parameters.axis is not None

    @property
    def publishes(self) -> bool:
        """Every rank must be sent what the others updated."""
        return not self.reshards and self.optimizer.axis is not None

    @property
    def allows_split_master(self) -> bool:
        """A 16-bit parameter that is the upper half of its master rests and is stepped where the lower half is.

        Not with a shadow: who reads the parameter would not see that of it.
        """
        if not self.reshards:
            return self.optimizer.tier is Tier.DEVICE
        is_below = self.optimizer.tier is self.parameters.tier is not Tier.DEVICE
        return is_below and self.commit is not CommitPolicy.SPECULATIVE


STAGES: dict[int, ShardingSpec] = {
    0: ShardingSpec(parameters=WHOLE, gradients=WHOLE, optimizer=WHOLE, reduce_at=ReduceAt.BOUNDARY),
    1: ShardingSpec(parameters=WHOLE, gradients=SPLIT, optimizer=SPLIT, reduce_at=ReduceAt.BOUNDARY),
    2: ShardingSpec(parameters=WHOLE, gradients=SPLIT, optimizer=SPLIT, reduce_at=ReduceAt.MICRO_STEP),
    3: ShardingSpec(parameters=SPLIT, gradients=SPLIT, optimizer=SPLIT, reduce_at=ReduceAt.MICRO_STEP),
}


@dataclass(frozen=True)
class SpecOverrides:
    """What a configuration adds to a stage's row."""

    second_copy_in_node: bool = False
    parameter_tier: Tier = Tier.DEVICE
    optimizer_tier: Tier = Tier.DEVICE
    gradient_tier: Tier = Tier.DEVICE
    commit: CommitPolicy = CommitPolicy.AFTER_NORM
    gather_codec: Codec | None = None
    rest_codec: Codec | None = None  # of what is frozen
    reduce_codecs: tuple[Codec, Codec] | None = None
    feedback: bool = False

    def of(self, dtype: torch.dtype, trains: bool) -> SpecOverrides:
        """What of it is for parameters of a dtype: no codec takes all of them, and only frozen ones rest encoded."""
        if not Codec.takes(dtype):
            return replace(self, gather_codec=None, rest_codec=None, reduce_codecs=None)
        return replace(self, rest_codec=None if trains else self.rest_codec)


def spec_for(
    stage: int,
    *,
    persistent: bool = False,
    num_ranks: int = 2,
    shard_at_world_one: bool = False,
    wish: SpecOverrides | None = None,
) -> ShardingSpec:
    """The row of a group at `stage`.

    Persistent groups (small parameters) stay whole, on stage 2's row. With one rank a split over the world is no
    split: parameters then rest whole, at the same bytes, unless asked otherwise or encoded, which takes fewer.
    """
    wish = wish or SpecOverrides()
    row = STAGES[stage]
    if not persistent:  # small parameters are not worth the way
        row = replace(row, optimizer=replace(row.optimizer, tier=wish.optimizer_tier), commit=wish.commit)
        row = replace(row, gradients=replace(row.gradients, tier=wish.gradient_tier))
    if row.reshards and not persistent:
        row = replace(row, parameters=replace(row.parameters, tier=wish.parameter_tier))
    if not persistent and row.gradients.axis is not None:
        row = replace(row, reduce_codecs=wish.reduce_codecs, feedback=wish.feedback)
    if row.reshards and not persistent:
        travels = wish.gather_codec if wish.rest_codec is None else None
        row = replace(row, all_gather_codec=travels, storage_codec=wish.rest_codec)
    if row.reshards and wish.second_copy_in_node:
        row = replace(row, secondary=StatePlacement(Axis.NODE))
    alone = num_ranks == 1 and not shard_at_world_one and row.storage_codec is None
    if row.reshards and (persistent or alone) and row.parameters.tier is Tier.DEVICE:
        row = replace(row, parameters=WHOLE, secondary=None, all_gather_codec=None)
    return row


@dataclass(frozen=True)
class CommPrecision:
    """How gradients travel: in which dtype (None: as they are), and what they are divided by before they are summed.

    The rest of the division follows the sum, in fp32.
    """

    dtype: torch.dtype | None = None
    predivide: float = 1.0


@dataclass(frozen=True)
class GroupPrecision:
    """Which dtype a group computes, rests and accumulates in, and how its gradients travel."""

    compute: torch.dtype
    master: torch.dtype
    accumulate: torch.dtype
    wire: CommPrecision = CommPrecision()

    @classmethod
    def of(
        cls,
        dtype: torch.dtype,
        mixed: torch.dtype | None,
        trainable: bool,
        accumulate: torch.dtype | None = None,
        wire: CommPrecision | None = None,
    ) -> GroupPrecision:
        """For parameters of `dtype` when the model runs in `mixed` (None: as it is)."""
        wire = wire or CommPrecision()
        compute = mixed if mixed is not None and dtype.is_floating_point else dtype
        if not trainable or not compute.is_floating_point:
            return cls(compute, compute, compute, wire)
        is_narrow = compute.itemsize <= 2
        master = torch.float32 if mixed is not None and is_narrow else compute
        return cls(compute, master, accumulate or (torch.float32 if is_narrow else compute), wire)

    @property
    def is_mixed(self) -> bool:
        """The optimizer steps wider numbers than the model computes with."""
        return self.master != self.compute

    @property
    def is_bf16_split(self) -> bool:
        """The parameter is the upper half of its fp32 master."""
        return self.is_mixed and self.compute is torch.bfloat16
