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
from shardwell.plan.meta_kernels import run, tensors_in
from shardwell.plan.recording import Recording

_BLOCK = 512  # bytes: CUDA's allocator rounds sizes up to a multiple of it
_COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._foreach_copy_.default)
_TO_COPY = torch.ops.aten._to_copy.default


class LiveTensors(TorchDispatchMode):
    """The bytes of tensors on the device that no statistics count, now and at the peak of everything together."""

    def __init__(self, stats: MemoryStats, device: Device, recording: Recording | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stats, self._device = stats, device
        self._sizes: dict[int, int] = {}  # by the id of a living storage
        self._new: list[weakref.ref[torch.UntypedStorage]] = []  # which the statistics may count after all
        self.now = self.host_now = 0
        self.peak, self.at_peak = 0, 0  # bytes of all, and those of them that are counted here
        self.host_peak = 0  # bytes of all in host memory
        self.to_host = self.to_device = 0  # bytes of copies
        self.copied_to_host = weakref.WeakSet[torch.UntypedStorage]()  # by `to`, which names no memory that would tell
        self.recording = recording

    # ------------------------------------------------------------------------------------- what the statistics tell

    def changed(self, state: StateKind, unit: str, tier: Tier, size: int) -> None:
        """Note that the statistics of an engine count more bytes than before, or fewer."""
        if self.recording is not None:
            self.recording.changed(state, unit, tier, size)
        if tier is Tier.DEVICE and size > 0:
            self._leave_to_statistics()
            self._look()
        elif tier is Tier.HOST and size > 0:
            self._look_at_host()

    # -------------------------------------------------------------------------------------------------- operations

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return false: nothing is compiled in a simulation, and to leave Dynamo for each operation takes long."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # a mode for functions would see every size that is asked for
            return self._run(func, args, kwargs)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = run(func, args, kwargs or {})
        inputs = [one for one in tensors_in((args, kwargs)) if one.is_meta]
        if func in _COPIES:
            self._note_copy(args)
        is_on_host = bool(inputs) and not any(self._device.is_on_device(one) for one in inputs)
        if func is _TO_COPY and inputs and not is_on_host and inputs[0].untyped_storage() in self.copied_to_host:
            self.to_host += inputs[0].nbytes
            is_on_host = True
        if isinstance(result, list) and args and isinstance(args[0], list) and len(args[0]) == len(result):
            for tensor, one in zip(result, args[0], strict=True):  # for each: some may be on the host, some not
                self._enter(tensor, not self._device.is_on_device(one))
            return result
        for tensor in tensors_in(result):
            if tensor.is_meta:
                self._enter(tensor, is_on_host)
        return result

    def _enter(self, tensor: Tensor, is_on_host: bool) -> None:
        storage = tensor.untyped_storage()
        if id(storage) in self._sizes or storage in self._device.counted:
            return
        if not self._device.is_on_device(tensor):
            self._enter_on_host(storage)
            return
        if is_on_host:
            self._device.mark_as_host(tensor)
            return
        size = -(-storage.nbytes() // _BLOCK) * _BLOCK
        self._sizes[id(storage)] = size
        if self.recording is not None:
            self.recording.entered(id(storage), storage.nbytes())
        weakref.finalize(storage, self._forget, id(storage))
        self.now += size
        self._new.append(weakref.ref(storage))
        self._look()

    def _enter_on_host(self, storage: torch.UntypedStorage) -> None:
        if storage in self._device.uncounted_on_host:
            self._device.uncounted_on_host.discard(storage)  # is entered once
            self.host_now += storage.nbytes()
            weakref.finalize(storage, self._forget_on_host, storage.nbytes())
            self._look_at_host()

    def _forget_on_host(self, size: int) -> None:
        self.host_now -= size

    def _look_at_host(self) -> None:
        self.host_peak = max(self.host_peak, self.host_now + self._stats.total(Tier.HOST))

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)
        if self.recording is not None:
            self.recording.left(key)

    def _leave_to_statistics(self) -> None:
        """Forget the storages that the statistics have begun to count since they were made."""
        new, self._new = [ref() for ref in self._new], []
        for storage in new:
            if storage is not None and storage in self._device.counted:
                self._forget(id(storage))

    def _look(self) -> None:
        if self.recording is not None:
            self.recording.look()
        total = self.now + self._stats.total(Tier.DEVICE)
        if total > self.peak:
            self.peak, self.at_peak = total, self.now

    def _note_copy(self, args: Any) -> None:
        target, source = args[:2]
        pairs = zip(target, source, strict=True) if isinstance(target, list) else [(target, source)]
        for to, one in pairs:
            is_up, is_down = self._device.is_on_device(to), self._device.is_on_device(one)
            if is_up != is_down:
                size = one.numel() * one.element_size()
                self.to_device += size if is_up else 0
                self.to_host += size if is_down else 0

    # ------------------------------------------------------------------------------------------------------- peaks

    def begin_moment(self, name: str) -> None:
        """Begin to look for the peak anew."""
        if self.recording is not None:
            self.recording.begin_moment(name)
        self._stats.reset_peak()
        self.peak = self.host_peak = 0
        self._look()
        self._look_at_host()
