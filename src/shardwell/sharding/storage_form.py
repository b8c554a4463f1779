"""The forms in which a group stores its parameters and master weights: which one it is, and its bytes.

This is pure arithmetic. `ShardedGroup` allocates by it, placement counts by it, and tests hold both against what an
engine really holds. `storage.py` has a class for each form.

| form | stored parameters | master weights |
|---|---|---|
| IN_PLACE | the flat buffer, unsharded | the same memory |
| SHARD | this rank's shard, in the master dtype | the same memory |
| SPLIT_BF16 | bf16: the upper 16 bits of the masters | a remainder: their lower 16 bits |
| SEPARATE | in the compute dtype | a buffer of their own, on the optimizer's tier |
| QUANTIZED | this rank's shard, quantised (frozen parameters only) | what the codes stand for, in fp32 |
"""

from __future__ import annotations

import enum
from collections import Counter

from shardwell.memory import Tier
from shardwell.sharding.spec import GroupPrecision, ShardingSpec


class StorageForm(enum.Enum):
    """The forms in which parameters and their master weights are stored between steps."""

    IN_PLACE = "in place"
    SHARD = "shard"
    SPLIT_BF16 = "bf16 and remainder"
    SEPARATE = "separate"
    QUANTIZED = "quantised"

    @property
    def is_assembled(self) -> bool:
        """Whether fp32 masters exist only while they are open."""
        return self in (StorageForm.SPLIT_BF16, StorageForm.QUANTIZED)


def form_of(spec: ShardingSpec, precision: GroupPrecision, trains: bool) -> StorageForm:
    """Return the form in which a group of this spec and precision is stored; `trains`: it has masters and state."""
    if spec.storage_codec is not None:
        return StorageForm.QUANTIZED
    if trains and spec.allows_split_master and precision.is_bf16_split:
        return StorageForm.SPLIT_BF16
    is_below = spec.optimizer.tier is not Tier.DEVICE or spec.parameters.tier is not Tier.DEVICE
    is_narrow = precision.is_mixed and not precision.is_bf16_split  # fp16 is no part of an fp32 number
    if trains and (is_below or (is_narrow and not spec.reshards)):
        return StorageForm.SEPARATE
    return StorageForm.SHARD if spec.reshards else StorageForm.IN_PLACE


def state_bytes(
    form: StorageForm, spec: ShardingSpec, precision: GroupPrecision, numel: int, num_shards: int
) -> Counter[Tier]:
    """Return the bytes of parameters and masters of `numel` elements on one rank, by tier, between steps.

    Shards are padded to equal sizes. Optimizer state, gradients and secondary shards are not counted.
    """
    shard = -(-numel // num_shards)
    compute, master = precision.compute.itemsize, precision.master.itemsize
    held = shard if spec.reshards else numel
    own = shard if spec.optimizer.axis is not None else numel
    stored: Counter[Tier] = Counter()
    if form is StorageForm.QUANTIZED:
        assert spec.storage_codec is not None
        stored[spec.parameters.tier] += spec.storage_codec.num_bytes(shard)
    elif form in (StorageForm.IN_PLACE, StorageForm.SHARD):
        stored[spec.parameters.tier] += held * master
    else:
        stored[spec.parameters.tier] += held * compute
        stored[spec.optimizer.tier] += own * (master - compute if form is StorageForm.SPLIT_BF16 else master)
    return stored
