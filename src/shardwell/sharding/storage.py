"""How a group stores its parameters and master weights, a class for each form, and how stored values are all-gathered.

The classes know no tier: `offload/storage.py` wraps them where parameters or master weights are stored below the
device. The forms whose master weights exist only while they are open are in `assembled_storage.py`.
"""

from __future__ import annotations

import abc
import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shardwell.kernels.quantize import Codec
from shardwell.kernels.rounding import adopt, narrow
from shardwell.memory import FlatBuffer, Stream, Tier
from shardwell.parallel import Collectives, Work
from shardwell.parallel.joined import Joined
from shardwell.sharding.secondary import SecondaryShard
from shardwell.sharding.storage_form import StorageForm


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
    """The base of the forms; see `MasterStorage`."""

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


class DefaultAllGather:
    """The all-gather of stored values, in the compute dtype."""

    is_exact = True
    secondary: SecondaryShard | None = None

    def __init__(self, name: str, flat: FlatBuffer, storage: MasterStorage, comm: Collectives, local: slice) -> None:
        self._token = f"GATHER {name}"
        self._codec: Codec | None = None
        self._flat, self._storage, self._local = flat, storage, local
        self._comm, self._device = comm, comm.device
        self._is_alone = comm.rank_group.size == 1

    def __call__(self, *, exact: bool = False, joined: Joined | None = None) -> Work:
        """Start to fill the flat buffer: this rank's slice by a copy, the others in place."""
        flat, stream = self._flat, self._device.all_gather_stream
        flat.allocate()
        with stream.after_current():
            self._storage.to_compute(flat.tensor[self._local])
        comm = self._comm if joined is None else joined.over(self._comm)
        work = comm.all_gather(flat.tensor, self._token, codec=self._codec)
        return Work(stream.record().wait) if self._is_alone else work
