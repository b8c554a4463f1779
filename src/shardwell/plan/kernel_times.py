"""What operations of a simulation take: FLOPs of matrix products, bytes of everything else, copies between tiers.

Views and allocations take nothing. The formulas of FLOPs are those of torch's own counter; a fused attention that is
causal does half of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from shardwell.memory import Device
from shardwell.memory.machine import SimulatedMachine, simulated
from shardwell.plan.meta_kernels import run, tensors_in

_COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._foreach_copy_.default)
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
_FREE = (
    *("empty", "new_empty", "empty_strided", "empty_like", "detach", "_local_scalar_dense", "set_", "resize_"),
    *("is_same_size", "_unsafe_view", "_reshape_alias", "lift_fresh"),
)
_MOVING = ("cat", "stack", "clone", "_to_copy")  # beside those that compute each element by itself


class KernelClock(Protocol):
    """An object that takes the kernels of a simulation: a `VirtualClock`, or a `KernelCount`."""

    def kernel(
        self,
        num_bytes: int,
        flops: float = 0.0,
        dtype: str = "bf16",
        *,
        is_attention: bool = False,
        num_strided: int = 0,
    ) -> None: ...

    def touch(self, tensors: Sequence[Tensor], flops: float = 0.0, dtype: str = "bf16") -> None: ...

    def host_work(self, name: str, num_bytes: int, *, out_of_place: bool = False, eight_bit: bool = False) -> None: ...


class KernelCount:
    """Adds up the kernels of some work on a device without giving them a time."""

    def __init__(self) -> None:
        self.num_bytes = 0  # of kernels over tensors whose elements are in one order
        self.num_strided = 0  # elements that the others write

    def kernel(
        self,
        num_bytes: int,
        flops: float = 0.0,
        dtype: str = "bf16",
        *,
        is_attention: bool = False,
        num_strided: int = 0,
    ) -> None:
        """Count a kernel."""
        self.num_strided += num_strided
        self.num_bytes += 0 if num_strided else num_bytes

    def touch(self, tensors: Sequence[Tensor], flops: float = 0.0, dtype: str = "bf16") -> None:
        """Count a kernel that reads and writes tensors."""
        self.kernel(sum(one.nbytes for one in tensors), flops, dtype)

    def host_work(self, name: str, num_bytes: int, *, out_of_place: bool = False, eight_bit: bool = False) -> None:
        """Count nothing: the host is no device."""


def counted(work: Callable[[], object]) -> KernelCount:
    """Return the kernels of work on meta tensors, counted as the plans of a GPU count them."""
    count = KernelCount()
    with simulated(SimulatedMachine(1e12, 1e12)), TimedKernels(count, Device(torch.device("meta"))):
        work()
    return count


class TimedKernels(TorchDispatchMode):
    """Gives every operation on meta tensors to the clock."""

    def __init__(self, clock: KernelClock, device: Device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._clock, self._device = clock, device

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return false: nothing is compiled in a simulation, and to leave Dynamo for each operation takes long."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # a mode for functions would see every size that is asked for
            result = run(func, args, kwargs or {})
            if func in _COPIES:
                self._copy(args)
            elif not _is_free(func):
                self._compute(func, args, kwargs or {}, result)
            return result

    def _copy(self, args: Any) -> None:
        target, source = args[:2]
        for to, one in zip(target, source, strict=True) if isinstance(target, list) else [(target, source)]:
            if not (to.is_meta and one.is_meta):
                continue
            if self._device.is_on_device(to) and self._device.is_on_device(one) and _are_strided([one], to):
                self._clock.kernel(one.nbytes + to.nbytes, num_strided=to.numel())
            else:
                self._clock.touch((one, to))

    def _compute(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        read = {id(one): one for one in tensors_in((args, kwargs)) if one.is_meta}
        written = {id(one): one for one in tensors_in(result) if one.is_meta}
        if not read and not written:
            return
        size = sum(map(_num_bytes, read.values())) + sum(map(_num_bytes, written.values()))
        if read and not any(self._device.is_on_device(one) for one in read.values()) and self._device.has_device_memory:
            self._clock.host_work("host update", size)
            return
        count = flop_registry.get(func._overloadpacket)
        if count is None:
            self._clock.kernel(size, num_strided=_num_strided(func, list(read.values()), result))
            return
        flops = float(count(*args, **kwargs, out_val=result))
        is_attention = "scaled_dot_product" in func._overloadpacket._qualified_op_name
        if is_attention and _argument(func, args, kwargs, "is_causal"):
            flops /= 2
        dtype = next((_NAMES[one.dtype] for one in read.values() if one.dtype in _NAMES), "fp32")
        self._clock.kernel(size, flops, dtype, is_attention=is_attention)


def _num_strided(func: Any, read: list[Tensor], result: Any) -> int:
    """Return the elements that a kernel writes one by one: its tensors have gaps, or are not all in one order."""
    if not isinstance(result, Tensor) or not _is_by_element(func):
        return 0
    if func._overloadpacket._qualified_op_name in ("aten::cat", "aten::stack"):
        return 0 if all(one.is_contiguous() for one in read) else result.numel()
    return result.numel() if _are_strided(read, result) else 0


def _are_strided(read: list[Tensor], result: Tensor) -> bool:
    """Return whether tensors have other places for their elements than the result; single numbers have any."""
    places = _places(result)
    return any(one.numel() > 1 and (one.shape != result.shape or _places(one) != places) for one in read)


def _places(tensor: Tensor) -> list[int]:
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


@functools.cache
def _is_by_element(func: Any) -> bool:
    name = func._overloadpacket._qualified_op_name.removeprefix("aten::")
    return torch.Tag.pointwise in func.tags or name in _MOVING


def _num_bytes(tensor: Tensor) -> int:
    """Return the bytes that a kernel moves: of an expanded tensor, those that there are."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


@functools.cache
def _is_free(func: Any) -> bool:
    """Return whether an operation starts no kernel: it makes a view, or memory without contents."""
    name = func._overloadpacket._qualified_op_name.removeprefix("aten::")
    return name in _FREE or name.startswith("sym_") or bool(func.is_view)


@functools.cache
def _index(func: Any, name: str) -> int:
    return next((place for place, one in enumerate(func._schema.arguments) if one.name == name), -1)


def _argument(func: Any, args: Any, kwargs: Any, name: str) -> bool:
    place = _index(func, name)
    return bool(kwargs.get(name, args[place] if 0 <= place < len(args) else False))
