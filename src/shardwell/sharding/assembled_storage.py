"""Storage forms whose fp32 master weights exist only while they are open: bf16 plus remainder, and quantised."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from shardwell.errors import ShardwellError
from shardwell.kernels.quantize import Codec
from shardwell.kernels.quantize_stably import quantize_stably
from shardwell.kernels.rounding import join, split
from shardwell.memory import FlatBuffer, Tier
from shardwell.sharding.released import METADATA
from shardwell.sharding.storage import FormStorage, StoredPart
from shardwell.sharding.storage_form import StorageForm

_MODELS = {torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, Tensor.new_empty, Tensor.new_zeros}


class ClosedMaster(Tensor):
    """A slice of master weights that are not assembled now. It is a view of freed storage: to read it would crash.

    It tells its metadata, and may be the model of another tensor (`zeros_like`, `other.to(this)`).
    """

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_model = func in _MODELS or (func is Tensor.to and not isinstance(args[0], cls))
        with torch._C.DisableTorchFunctionSubclass():
            if is_model or func in METADATA:
                return func(*args, **(kwargs or {}))
        raise ShardwellError(
            "these fp32 master weights exist only while a step runs: between steps they are stored as 16-bit "
            "parameters and the rest of their bits. Read them by shardwell.utils.safe_get_full_fp32_param(parameter), "
            "on all ranks, or by safe_get_local_fp32_param(parameter)."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ClosedMaster(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"


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
                self._allocate()
                self._assemble()
            try:
                yield self.master
            finally:
                if changes:
                    self._take_over()
        finally:
            self._num_openings -= 1
            if not self._num_openings:
                self._release()

    def _allocate(self) -> None:
        self.staging.allocate()
        self._set_class(Tensor)

    def _release(self) -> None:
        self._set_class(ClosedMaster)
        self.staging.free()

    def _set_class(self, kind: type[Tensor]) -> None:
        for reference, _ in self._slices:  # users reach them in the optimizer's parameter groups
            view = reference()
            if view is not None:
                view.__class__ = kind

    def slice_master(self, start: int, numel: int) -> Tensor:
        """Return a view of a slice of the master weights; freed memory allows no views, so it is allocated first."""
        is_free = not self.staging.present
        self._allocate()
        view = super().slice_master(start, numel)
        if is_free:
            self._release()
        return view

    def reslice(self) -> None:
        """Point slices of the master weights to their new memory."""
        self._set_class(Tensor)
        super().reslice()
        if not self._num_openings:
            self._set_class(ClosedMaster)

    def free(self) -> None:
        """Free all buffers."""
        super().free()
        self._release()


class SplitStorage(AssembledStorage):
    """A storage of bf16 parameters, and of a remainder with the lower halves of their fp32 master weights."""

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
