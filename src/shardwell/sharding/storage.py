"""How a group stores its parameters and master weights: the forms, their bytes, and a class for each form.

`form_of` chooses the form and `state_bytes` counts its bytes. `ShardedGroup` allocates by them, placement counts by
them, and tests hold both against what an engine really holds. The classes know no tier: `offload/storage.py` wraps
them where parameters or master weights are stored below the device.

| form | stored parameters | master weights |
|---|---|---|
| IN_PLACE | the flat buffer, unsharded | the same memory |
| SHARD | this rank's shard, in the master dtype | the same memory |
| SPLIT_BF16 | bf16: the upper 16 bits of the masters | a remainder: their lower 16 bits |
| SEPARATE | in the compute dtype | a buffer of their own, on the optimizer's tier |
| QUANTIZED | this rank's shard, quantised (frozen parameters only) | what the codes stand for, in fp32 |
"""

from __future__ import annotations

import abc
import contextlib
import enum
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shardwell.kernels.rounding import adopt, narrow
from shardwell.memory import FlatBuffer, Stream, Tier
from shardwell.sharding.spec import GroupPrecision, ShardingSpec


class StorageForm(enum.Enum):
    """How parameters and their master weights are stored between steps."""

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


@dataclass(frozen=True)
class StoredPart:
    """This rank's part of a group's parameters as it is stored."""

    tensor: Tensor  # 1D, in the compute dtype, the master dtype, or quantised
    buffer: FlatBuffer  # its memory: a shard, or the flat buffer of an unsharded group
    tier: Tier
    is_shard: bool


class MasterStorage(Protocol):
    """The parameters of a group that this rank stores, and their master weights."""

    @property
    def form(self) -> StorageForm:
        """Return the form."""

    @property
    def is_always_open(self) -> bool:
        """Whether master weights may be read and changed without `open`."""

    @property
    def parameters(self) -> Tensor:
        """Return this rank's part of the parameters (1D), as it is stored."""

    @property
    def master(self) -> Tensor:
        """Return the master weights (1D) as the optimizer steps them; their values may be used inside `open`."""

    def open(self, *, changes: bool = False) -> AbstractContextManager[Tensor]:
        """Return a context with the master weights (1D). With `changes`, the parameters follow them at its end."""

    def write(self, master: Tensor, compute: Tensor) -> None:
        """Store new master weights; `compute` are the same values in the compute dtype, on the same device (1D)."""

    def to_compute(self, out: Tensor) -> None:
        """Copy the parameters to `out` (1D, compute dtype). The current stream is that of all-gathers."""

    def reading(self, stream: Stream) -> AbstractContextManager[Tensor]:
        """Return a context with the parameters (1D); the caller has queued its copy on `stream` when it ends."""

    def nbytes(self) -> Counter[Tier]:
        """Return the bytes of parameters and master weights between steps, by tier."""

    def free(self) -> None:
        """Free parameters and master weights."""


class FormStorage(abc.ABC):
    """What the forms have in common; see `MasterStorage`."""

    form: StorageForm
    is_always_open = False

    def __init__(self, part: StoredPart, master: Tensor, beside: tuple[Tier, FlatBuffer] | None = None) -> None:
        """`beside` holds what is stored of the master weights in other memory than the parameters."""
        self.part, self.parameters, self.master = part, part.tensor, master
        self._beside = beside
        self._slices: list[tuple[weakref.ref[Tensor], int]] = []  # views of the master weights, and where they start

    @abc.abstractmethod
    def open(self, *, changes: bool = False) -> AbstractContextManager[Tensor]:
        """Return a context with the master weights (1D). With `changes`, the parameters follow them at its end."""

    @abc.abstractmethod
    def write(self, master: Tensor, compute: Tensor) -> None:
        """Store new master weights; `compute` are the same values in the compute dtype, on the same device (1D)."""

    def to_compute(self, out: Tensor) -> None:
        """Copy the parameters to `out` (1D, compute dtype)."""
        if out.dtype == self.parameters.dtype:
            out.copy_(self.parameters)
        else:
            narrow(self.parameters, out)

    def reading(self, stream: Stream) -> AbstractContextManager[Tensor]:
        """Return a context with the parameters (1D)."""
        return contextlib.nullcontext(self.parameters)

    def slice_master(self, start: int, numel: int) -> Tensor:
        """Return a view of a slice of the master weights, which stays valid when they get other memory."""
        view = self.master[start : start + numel]
        self._slices.append((weakref.ref(view), start))
        return view

    def reslice(self) -> None:
        """Point slices of the master weights to their new memory."""
        self._slices = [(view, start) for view, start in self._slices if view() is not None]
        for view, start in self._slices:
            tensor = view()
            if tensor is not None:
                tensor.data = self.master[start : start + tensor.numel()]

    def with_separate_masters(self, masters: FlatBuffer, tier: Tier, compute: torch.dtype) -> SeparateStorage:
        """Return a storage of the same parameters whose master weights are in `masters`, with the slices so far."""
        found = SeparateStorage(self.part, masters, tier, compute)
        found._slices = self._slices
        found.reslice()
        return found

    @property
    def beside(self) -> Tensor | None:
        """Return what is stored of the master weights beside the parameters (1D)."""
        return None if self._beside is None else self._beside[1].tensor

    def master_bytes(self) -> dict[Tier, int]:
        """Return the bytes of master weights beside the parameters, by tier."""
        return {} if self._beside is None else {self._beside[0]: self._beside[1].nbytes}

    def nbytes(self) -> Counter[Tier]:
        """Return the bytes of parameters and master weights between steps, by tier."""
        return Counter({self.part.tier: self.part.buffer.nbytes}) + Counter(self.master_bytes())

    def free_masters(self) -> None:
        """Free what is stored of the master weights beside the parameters."""
        if self._beside is not None:
            self._beside[1].free()

    def free(self) -> None:
        """Free parameters and master weights."""
        self.free_masters()
        self.part.buffer.free()


class InPlaceStorage(FormStorage):
    """Unsharded parameters that are their own master weights."""

    form = StorageForm.IN_PLACE
    is_always_open = True

    def __init__(self, part: StoredPart) -> None:
        super().__init__(part, part.tensor)

    def open(self, *, changes: bool = False) -> AbstractContextManager[Tensor]:
        """Return a context with the parameters themselves."""
        return contextlib.nullcontext(self.master)

    def write(self, master: Tensor, compute: Tensor) -> None:
        """Do nothing: the flat buffer, which the caller has filled, is the storage."""


class ShardStorage(InPlaceStorage):
    """A shard in the master dtype."""

    form = StorageForm.SHARD

    def write(self, master: Tensor, compute: Tensor) -> None:
        """Store new master weights."""
        self.parameters.copy_(master)


class SeparateStorage(FormStorage):
    """Parameters in the compute dtype, and master weights in a buffer of their own."""

    form = StorageForm.SEPARATE

    def __init__(self, part: StoredPart, masters: FlatBuffer, tier: Tier, compute: torch.dtype) -> None:
        super().__init__(part, masters.tensor, (tier, masters))
        self._compute = compute
        self._num_openings = 0

    @contextlib.contextmanager
    def open(self, *, changes: bool = False) -> Iterator[Tensor]:
        """Yield the master weights. Unsharded parameters that were changed by hand are taken over first."""
        if not self.part.is_shard and not self._num_openings:  # else masters may be ahead of the stored parameters
            adopt(self.master, self.parameters.to(self.master.device))
        self._num_openings += 1
        try:
            yield self.master
        finally:
            self._num_openings -= 1
            if changes:
                self._round_masters()

    def _round_masters(self) -> None:
        rounded = self.master
        if rounded.dtype != self._compute:
            rounded = narrow(rounded, torch.empty_like(rounded, dtype=self._compute))
        self.parameters.copy_(rounded)

    def write(self, master: Tensor, compute: Tensor) -> None:
        """Store new master weights, and the parameters beside them."""
        self.master.copy_(master)
        if self.part.is_shard:
            self.parameters.copy_(compute)

    def swap_masters(self, spare: Tensor) -> None:
        """Exchange the memory of the master weights with `spare`, which has the same size and dtype."""
        before, self.master.data = self.master.data, spare.data
        spare.data = before
        self.reslice()
