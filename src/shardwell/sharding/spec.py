"""The table of ZeRO stages: each stage is one sharding spec.

For each of the three model states (parameters, gradients, optimizer state) a spec names the device mesh axis over which
the state is sharded and the tier on which it is stored. For gradients it also says when they are reduce-scattered, and
for the optimizer when an update is committed. The optimizer step runs on the tier where the optimizer state is stored.

Everything else follows from the spec, so a new spec adds no new path through the engine. A spec belongs to a *group* of
parameters, not to the model.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from shardwell.kernels.quantize import Codec
from shardwell.memory import Tier
from shardwell.parallel.mesh import Axis


class ReduceAt(enum.Enum):
    """The time at which gradients are averaged over the ranks."""

    MICRO_STEP = "every micro-step"
    BOUNDARY = "the boundary"


class CommitPolicy(enum.Enum):
    """The time at which an optimizer update is committed to the master weights."""

    IMMEDIATE = "at once"
    AFTER_NORM = "after the norm is known"
    SPECULATIVE = "into a shadow slot, committed after the norm"
    # resolved by `offload.auto_commit.AutoCommit`
    AUTO = "at once where steps have shown to be plain, else after the norm"

    __hash__ = object.__hash__  # each member is one object; Enum's own hash is slow, and these are keys everywhere


@dataclass(frozen=True)
class StatePlacement:
    """The storage of one model state between its uses: the axis it is sharded over, and the tier.

    An axis of None means that every rank stores the full state.
    """

    axis: Axis | None
    tier: Tier = Tier.DEVICE

    def __str__(self) -> str:
        where = "whole" if self.axis is None else f"split over the {self.axis.value}"
        return where if self.tier is Tier.DEVICE else f"{where}, on the {self.tier.value}"


REPLICATED = StatePlacement(None)
SHARDED = StatePlacement(Axis.SHARD)


@dataclass(frozen=True)
class ShardingSpec:
    """The rule by which the parameters, gradients and optimizer state of a group are sharded and stored."""

    parameters: StatePlacement
    gradients: StatePlacement
    optimizer: StatePlacement
    reduce_at: ReduceAt
    # hpZ: a shard of the parameters within the node; one all-gather fills it, and the next one reads it
    secondary: StatePlacement | None = None
    commit: CommitPolicy = CommitPolicy.AFTER_NORM
    all_gather_codec: Codec | None = None  # qwZ: quantises parameters for the all-gather only
    storage_codec: Codec | None = None  # quantises stored parameters; the all-gather sends the same bytes
    reduce_codecs: tuple[Codec, Codec] | None = None  # qgZ: quantises gradients, within a node and between nodes
    feedback: bool = False  # error feedback: the quantisation error of gradients is added to the next ones
    copies: int = (
        1  # ranks of the group's axis that train on the same rows: those of the tensor axis, if they are in it
    )
    sums_copies: bool = False  # these ranks have parts of the gradient; else each has all of it

    @cached_property
    def share(self) -> float:
        """The factor by which a rank's gradients count in the sum over the group's axis."""
        return 1.0 if self.sums_copies else 1.0 / self.copies

    @cached_property
    def reshards(self) -> bool:
        """Whether parameters are unsharded only while they are used."""
        return self.parameters.axis is not None

    @cached_property
    def publishes(self) -> bool:
        """Whether every rank must all-gather the parameters that the other ranks have updated."""
        return not self.reshards and self.optimizer.axis is not None

    @property
    def allows_split_master(self) -> bool:
        """Whether bf16 parameters and their master weights may be stored as bf16 plus remainder.

        A 16-bit parameter that is the upper half of its fp32 master is stored and stepped where the lower half is.
        Speculation excludes this for parameters that are resharded: a reader of the parameter would not see the upper
        half that is in the shadow slot.
        """
        if not self.reshards:
            return self.optimizer.tier is Tier.DEVICE
        is_below = self.optimizer.tier is self.parameters.tier is not Tier.DEVICE
        return is_below and self.commit is not CommitPolicy.SPECULATIVE


STAGES: dict[int, ShardingSpec] = {
    0: ShardingSpec(parameters=REPLICATED, gradients=REPLICATED, optimizer=REPLICATED, reduce_at=ReduceAt.BOUNDARY),
    1: ShardingSpec(parameters=REPLICATED, gradients=SHARDED, optimizer=SHARDED, reduce_at=ReduceAt.BOUNDARY),
    2: ShardingSpec(parameters=REPLICATED, gradients=SHARDED, optimizer=SHARDED, reduce_at=ReduceAt.MICRO_STEP),
    3: ShardingSpec(parameters=SHARDED, gradients=SHARDED, optimizer=SHARDED, reduce_at=ReduceAt.MICRO_STEP),
}


@dataclass(frozen=True)
class SpecOverrides:
    """The settings of a configuration that change the spec of a stage."""

    secondary_in_node: bool = False
    parameter_tier: Tier = Tier.DEVICE
    optimizer_tier: Tier = Tier.DEVICE
    gradient_tier: Tier = Tier.DEVICE
    commit: CommitPolicy = CommitPolicy.AFTER_NORM
    all_gather_codec: Codec | None = None
    storage_codec: Codec | None = None  # for frozen parameters only
    reduce_codecs: tuple[Codec, Codec] | None = None
    feedback: bool = False

    def of(self, dtype: torch.dtype, trains: bool) -> SpecOverrides:
        """Return the overrides that apply to parameters of `dtype`.

        A codec does not accept every dtype, and only frozen parameters are stored quantised.
        """
        if not Codec.takes(dtype):
            return replace(self, all_gather_codec=None, storage_codec=None, reduce_codecs=None)
        return replace(self, storage_codec=None if trains else self.storage_codec)


def spec_for(
    stage: int,
    *,
    persistent: bool = False,
    num_ranks: int = 2,
    shard_at_world_one: bool = False,
    overrides: SpecOverrides | None = None,
) -> ShardingSpec:
    """Return the spec of a group at `stage`.

    Persistent groups (small parameters) stay unsharded, with the spec of stage 2. With one rank, sharding over the
    world does not split anything: parameters are then stored unsharded, in the same number of bytes. They are stored
    sharded all the same if `shard_at_world_one` is set, or if they are quantised, which takes fewer bytes.
    """
    overrides = overrides or SpecOverrides()
    spec = STAGES[stage]
    if not persistent:  # offload does not pay for small parameters
        spec = replace(spec, optimizer=replace(spec.optimizer, tier=overrides.optimizer_tier), commit=overrides.commit)
        spec = replace(spec, gradients=replace(spec.gradients, tier=overrides.gradient_tier))
    if spec.reshards and not persistent:
        spec = replace(spec, parameters=replace(spec.parameters, tier=overrides.parameter_tier))
    if not persistent and spec.gradients.axis is not None:
        spec = replace(spec, reduce_codecs=overrides.reduce_codecs, feedback=overrides.feedback)
    if spec.reshards and not persistent:
        travels = overrides.all_gather_codec if overrides.storage_codec is None else None
        spec = replace(spec, all_gather_codec=travels, storage_codec=overrides.storage_codec)
    if spec.reshards and overrides.secondary_in_node:
        spec = replace(spec, secondary=StatePlacement(Axis.NODE))
    alone = num_ranks == 1 and not shard_at_world_one and spec.storage_codec is None
    if spec.reshards and (persistent or alone) and spec.parameters.tier is Tier.DEVICE:
        spec = replace(spec, parameters=REPLICATED, secondary=None, all_gather_codec=None)
    return spec


@dataclass(frozen=True)
class CommPrecision:
    """The dtype of gradients in a reduce-scatter (None: as they are), and the divisor applied before the sum.

    The rest of the division follows the sum, in fp32.
    """

    dtype: torch.dtype | None = None
    predivide: float = 1.0


def casts(dtype: torch.dtype) -> bool:
    """Return whether values of a dtype are cast to the compute dtype: not integers, nor quantised ones as in fp8."""
    return dtype.is_floating_point and dtype.itemsize > 1


@dataclass(frozen=True)
class GroupPrecision:
    """The dtypes in which a group computes, is stored and accumulates gradients, and how its gradients are sent."""

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
        *,
        narrow_masters: bool = False,
    ) -> GroupPrecision:
        """Return the precision for parameters of `dtype` in a model that computes in `mixed`.

        `mixed` is None if the model computes in the dtypes of its parameters. With `narrow_masters` master weights and
        gradients have the dtype that the model computes in.
        """
        wire = wire or CommPrecision()
        compute = mixed if mixed is not None and casts(dtype) else dtype
        if not trainable or not compute.is_floating_point:
            return cls(compute, compute, compute, wire)
        is_narrow = compute.itemsize <= 2
        if narrow_masters or not is_narrow:
            return cls(compute, compute, accumulate or compute, wire)
        return cls(compute, compute if mixed is None else torch.float32, accumulate or torch.float32, wire)

    @property
    def is_mixed(self) -> bool:
        """Whether the master weights are wider than the parameters that the model computes with."""
        return self.master != self.compute

    @property
    def is_bf16_split(self) -> bool:
        """Whether each parameter is the upper half of its fp32 master weight."""
        return self.is_mixed and self.compute is torch.bfloat16
