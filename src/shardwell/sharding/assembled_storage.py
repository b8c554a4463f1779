"""Storage forms whose fp32 master weights exist only while they are open: bf16 plus remainder, and quantised."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from shardwell.kernels.quantize import Codec
from shardwell.kernels.quantize_stably import quantize_stably
from shardwell.kernels.rounding import join, split
from shardwell.memory import FlatBuffer, Tier
from shardwell.sharding.storage import FormStorage, StorageForm, StoredPart


class AssembledStorage(FormStorage):
    """A storage whose fp32 master weights exist only while they are open, in a staging buffer."""

    def __init__(self, part: StoredPart, staging: FlatBuffer, beside: tuple[Tier, FlatBuffer] | None = None) -> None:
        super().__init__(part, staging.tensor, beside)
        self.staging = staging
        self._num_openings = 0
        staging.free()

    @abc.abstractmethod
    def _assemble(self) -> None:
        """Fill the staging buffer from what is stored."""

    @abc.abstractmethod
    def _take_over(self) -> None:
        """Store the values of the staging buffer."""

    @contextlib.contextmanager
    def open(self, *, changes: bool = False) -> Iterator[Tensor]:
        """Yield the assembled master weights; the context may be nested."""
        self._num_openings += 1
        try:
            if self._num_openings == 1:
                self.staging.allocate()
                self._assemble()
            try:
                yield self.master
            finally:
                if changes:
                    self._take_over()
        finally:
            self._num_openings -= 1
            if not self._num_openings:
                self.staging.free()

    def slice_master(self, start: int, numel: int) -> Tensor:
        """Return a view of a slice of the master weights; freed memory allows no views, so it is allocated first."""
        is_free = not self.staging.present
        self.staging.allocate()
        view = super().slice_master(start, numel)
        if is_free:
            self.staging.free()
        return view

    def free(self) -> None:
        """Free all buffers."""
        super().free()
        self.staging.free()


class SplitStorage(AssembledStorage):
    """bf16 parameters, and a remainder with the lower halves of their fp32 master weights."""

    form = StorageForm.SPLIT_BF16

    def __init__(self, part: StoredPart, staging: FlatBuffer, remainder: FlatBuffer, tier: Tier) -> None:
        super().__init__(part, staging, (tier, remainder))
        self.remainder = remainder.tensor

    def _assemble(self) -> None:
        join(self.parameters, self.remainder, self.master)

    def _take_over(self) -> None:
        split(self.master, self.parameters, self.remainder)

    def write(self, master: Tensor, compute: Tensor) -> None:
        """Store new master weights; `compute` is written to as well, with the values that it has."""
        is_here = self.remainder.device == master.device
        low = self.remainder if is_here else torch.empty_like(self.remainder, device=master.device)
        split(master, compute, low)
        if not is_here:
            self.remainder.copy_(low)
        if self.part.is_shard:
            self.parameters.copy_(compute)

    def zero_remainder(self, start: int, changed: Tensor) -> None:
        """Make parameters from `start` on, where `changed` (1D, bool) is true, their own master weights."""
        self.remainder[start : start + changed.numel()].masked_fill_(changed, 0)


class QuantizedStorage(AssembledStorage):
    """A quantised shard of frozen parameters; its master weights are what the codes stand for."""

    form = StorageForm.QUANTIZED

    def __init__(self, part: StoredPart, staging: FlatBuffer, codec: Codec) -> None:
        super().__init__(part, staging)
        self._codec = codec

    def _assemble(self) -> None:
        self._codec.decode(self.parameters, self.master)

    def _take_over(self) -> None:
        self.write(self.master, self.master)

    def write(self, master: Tensor, compute: Tensor) -> None:
        """Quantise new values (fp32) and store them."""
        is_here = self.parameters.device == master.device
        codes = self.parameters if is_here else torch.empty_like(self.parameters, device=master.device)
        quantize_stably(self._codec, master, codes)
        if not is_here:
            self.parameters.copy_(codes)
