"""What a simulated device holds beside the engine's own buffers: activations, gradients on their way, temporaries.

The mode sees every operation on meta tensors. A storage that an operation makes counts until nothing refers to it,
rounded as CUDA's allocator rounds; a storage that the engine's statistics count is left to them. Operations on nothing
but host memory make host memory. Host memory that no statistics count, such as inputs of checkpoints, is counted too.
Copies between host and device are added up.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwell.memory import Device, MemoryStats, StateKind, Tier
from shardwell.plan.instants import Instants, with_more
from shardwell.plan.meta_kernels import run, tensors_in
from shardwell.plan.recording import Recording

_BLOCK = 512  # bytes: CUDA's allocator rounds sizes up to a multiple of it
_COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._foreach_copy_.default)
_TO_COPY = torch.ops.aten._to_copy.default


class _Living(weakref.ref[torch.UntypedStorage]):
    """A storage that is counted, with the id that it has while it lives."""

    __slots__ = ("key", "since")
    key: int
    since: int  # the first instant of this moment at which it is there


class LiveTensors(TorchDispatchMode):
    """The bytes of tensors on the device that no statistics count, and the instants of a moment with those of all."""

    def __init__(self, stats: MemoryStats, device: Device, recording: Recording | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stats, self._device = stats, device
        self._sizes: dict[int, int] = {}  # by the id of a living storage
        self._living: dict[int, _Living] = {}  # the same storages
        self._new: list[_Living] = []  # which the statistics may count after all
        self.now = self.host_now = 0
        self._states = tuple(stats.report().total(state, tier=Tier.DEVICE) for state in StateKind)
        self._held = sum(self._states)  # bytes that the statistics count on the device
        self.instants = {tier: Instants() for tier in Tier}  # of the moment that goes on
        self._on_device = self.instants[Tier.DEVICE]
        self.to_host = self.to_device = 0  # bytes of copies
        self.copied_to_host = weakref.WeakSet[torch.UntypedStorage]()  # by `to`, which names no memory that would tell
        self.recording = recording

    # ------------------------------------------------------------------------------------- what the statistics tell

    def changed(self, state: StateKind, unit: str, tier: Tier, size: int) -> None:
        """Note that the statistics of an engine count more bytes than before, or fewer."""
        if self.recording is not None:
            self.recording.changed(state, unit, tier, size)
        if tier is Tier.DEVICE:
            self._states = with_more(self._states, state, size)
            self._held += size
            if size > 0:
                self._leave_to_statistics(state)
                self._look()
        elif size > 0:
            self._look_below(tier)

    # -------------------------------------------------------------------------------------------------- operations

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return false: nothing is compiled in a simulation, and to leave Dynamo for each operation takes long."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # a mode for functions would see every size that is asked for
            result = run(func, args, kwargs or {})
            if func in _COPIES:
                self._note_copy(args)
            elif func is _TO_COPY:
                self._note_move(args[0], result)
            if type(result) is Tensor:
                if (
                    result.is_meta
                    and result.layout is torch.strided
                    and id(result.untyped_storage()) not in self._sizes
                ):
                    self._enter(result, args, kwargs)
            else:
                for place, tensor in enumerate(tensors_in(result)):
                    if tensor.is_meta and tensor.layout is torch.strided:  # others have no storage
                        self._enter(tensor, *_inputs_of(place, result, args, kwargs))
            return result

    def _enter(self, tensor: Tensor, args: Any, kwargs: Any) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._sizes or storage in self._device.counted:
            return
        if not self._device.is_on_device(tensor):
            self._enter_on_host(storage)
            return
        if self._is_of_host(args, kwargs):
            self._device.mark_as_host(tensor)
            return
        num_bytes = storage.nbytes()
        size = -(-num_bytes // _BLOCK) * _BLOCK
        self._sizes[key] = size
        self._living[key] = living = _Living(storage, self._forgotten)
        living.key, living.since = key, len(self._on_device.totals)
        if self.recording is not None:
            self.recording.entered(key, num_bytes)
        self.now += size
        self._new.append(living)
        self._look()

    def _is_of_host(self, args: Any, kwargs: Any) -> bool:
        """Return whether an operation has tensors, all of them in host memory."""
        is_on_device = self._device.is_on_device
        inputs = [one for one in tensors_in((args, kwargs)) if one.is_meta]
        return bool(inputs) and not any(map(is_on_device, inputs))

    def _enter_on_host(self, storage: torch.UntypedStorage) -> None:
        if storage in self._device.uncounted_on_host:
            self._device.uncounted_on_host.discard(storage)  # is entered once
            self.host_now += storage.nbytes()
            weakref.finalize(storage, self._forget_on_host, storage.nbytes())
            self._look_below(Tier.HOST)

    def _forget_on_host(self, size: int) -> None:
        self.host_now -= size

    def _look_below(self, tier: Tier) -> None:
        self.instants[tier].totals.append(self._stats.total(tier) + (self.host_now if tier is Tier.HOST else 0))

    def _forgotten(self, living: _Living) -> None:
        self._forget(living.key)

    def _forget(self, key: int) -> None:
        self._living.pop(key, None)
        self.now -= self._sizes.pop(key, 0)
        if self.recording is not None:
            self.recording.left(key)

    def _leave_to_statistics(self, state: StateKind) -> None:
        """Forget the storages that the statistics have begun to count since they were made: they were of this state."""
        new, self._new = self._new, []
        for living in new:
            storage = living()
            if storage is not None and storage in self._device.counted:
                self._on_device.count_as(state, storage.nbytes(), living.since)
                if self.recording is not None:
                    self.recording.counted(living.key, state)
                self._forget(living.key)

    def _look(self) -> None:
        if self.recording is not None:
            self.recording.look()
        instants = self._on_device
        instants.totals.append(self.now + self._held)
        instants.activations.append(self.now)
        instants.states.append(self._states)

    def _note_copy(self, args: Any) -> None:
        target, source = args[:2]
        pairs = zip(target, source, strict=True) if isinstance(target, list) else [(target, source)]
        for to, one in pairs:
            is_up, is_down = self._device.is_on_device(to), self._device.is_on_device(one)
            if is_up != is_down:
                size = one.numel() * one.element_size()
                self.to_device += size if is_up else 0
                self.to_host += size if is_down else 0

    def _note_move(self, one: Tensor, result: Tensor) -> None:
        if one.is_meta and self._device.is_on_device(one) and one.untyped_storage() in self.copied_to_host:
            self.to_host += one.nbytes
            self._device.mark_as_host(result)

    # ------------------------------------------------------------------------------------------------------- peaks

    def begin_moment(self, name: str) -> None:
        """Begin to look for the peaks anew."""
        if self.recording is not None:
            self.recording.begin_moment(name)
        self._stats.reset_peak()
        self.instants = {tier: Instants() for tier in Tier}
        self._on_device = self.instants[Tier.DEVICE]
        for living in self._new:
            living.since = 0
        self._look()
        for tier in (Tier.HOST, Tier.DISK):
            self._look_below(tier)


def _inputs_of(place: int, result: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments that one tensor of a result comes from: its own where an operation is for each of a list."""
    is_for_each = isinstance(result, list) and bool(args) and isinstance(args[0], list) and len(args[0]) == len(result)
    return ((args[0][place],), None) if is_for_each else (args, kwargs)
