"""`get_accelerator()`: DeepSpeed's name for what differs between devices, on torch's own functions.

There are two accelerators, `cpu` and `cuda`. The choice is the one that the engine makes: SHARDWELL_DEVICE, else a GPU
if there is one. This module is, beside those of `memory/`, the only one that names `torch.cuda`.
"""

from __future__ import annotations

import contextlib
import os
from contextlib import AbstractContextManager
from typing import Any

import psutil
import torch
from torch import Tensor

from shardwell.errors import ShardwellError

_TENSORS = {f"{kind}Tensor" for kind in ("BFloat16", "Byte", "Double", "Float", "Half", "Int", "Long")}


class DeepSpeedAccelerator:
    """The base of both accelerators, under the name of DeepSpeed's base class."""

    _name = "cpu"
    _communication_backend_name = "gloo"

    def __init__(self) -> None:
        self._compile_backend = "inductor"

    def __getattr__(self, name: str) -> Any:
        if name in _TENSORS:
            return getattr(torch if self._name == "cpu" else torch.cuda, name)
        raise AttributeError(
            f"get_accelerator() has no {name!r} here: it offers devices, streams, random numbers and memory as torch "
            f"has them; use torch.{self._name if self._name == 'cuda' else 'cpu'} for more"
        )

    def communication_backend_name(self) -> str:
        """Return the backend of `torch.distributed` for this device."""
        return self._communication_backend_name

    def is_synchronized_device(self) -> bool:
        """Return whether a call returns when its work is done."""
        return self._name == "cpu"

    def use_host_timers(self) -> bool:
        return self.is_synchronized_device()

    def resolves_data_dependency(self) -> bool:
        return self.is_synchronized_device()

    def handles_memory_backpressure(self) -> bool:
        return self.is_synchronized_device()

    def on_accelerator(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on this kind of device."""
        return tensor.device.type == self._name

    def is_bf16_supported(self) -> bool:
        return True

    def is_fp16_supported(self) -> bool:
        return True

    def is_fp64_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.float16, torch.bfloat16]

    def get_compile_backend(self) -> str:
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        """Set the name of the backend for `torch.compile` that `get_compile_backend` returns."""
        known = torch._dynamo.list_backends(exclude_tags=())
        if backend not in known:
            raise ValueError(f"{backend!r} is no backend of torch.compile; known are {', '.join(known)}")
        self._compile_backend = backend

    def visible_devices_envs(self) -> list[str]:
        return ["CUDA_VISIBLE_DEVICES"]

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: list[int]) -> None:
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))

    def export_envs(self) -> list[str]:
        return ["NCCL"] if self._name == "cuda" else []

    def op_builder_dir(self) -> str:
        return "deepspeed.ops.op_builder"

    def create_op_builder(self, class_name: str) -> Any:
        """Return a builder of DeepSpeed's extensions by its class name; see `op_builders`."""
        return self.get_op_builder(class_name)()

    def get_op_builder(self, class_name: str) -> Any:
        from shardwell.compat.deepspeed_api import op_builders

        return op_builders.by_class_name(class_name)

    def build_extension(self) -> Any:
        from torch.utils.cpp_extension import BuildExtension

        return BuildExtension

    def is_pinned(self, tensor: Tensor) -> bool:
        return bool(tensor.is_pinned()) if torch.cuda.is_available() else False

    def pin_memory(self, tensor: Tensor, align_bytes: int = 1, make_copy: bool = True) -> Tensor:
        """Return the tensor in pinned host memory; without a GPU there is nothing to pin it for."""
        return tensor.pin_memory() if torch.cuda.is_available() and tensor.device.type == "cpu" else tensor


class CPU_Accelerator(DeepSpeedAccelerator):  # noqa: N801 - DeepSpeed's name
    """Ranks on the CPU: streams are the program order, and memory is that of the process."""

    def __init__(self) -> None:
        super().__init__()
        self._most_bytes = 0

    Stream = None
    Event = None

    def is_available(self) -> bool:
        return True

    def device_name(self, device_index: int | None = None) -> str:
        return "cpu"

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device("cpu")

    def set_device(self, device_index: int) -> None:
        """Do nothing: all ranks share the CPU."""

    def current_device(self) -> int:
        return int(os.environ.get("LOCAL_RANK", "0"))

    def current_device_name(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        """Return the number of ranks on this machine, as the launcher says; without one, that of its cores."""
        for name in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
            if (size := os.environ.get(name, "")).isdigit() and int(size) > 0:
                return int(size)
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def synchronize(self, device_index: int | None = None) -> None:
        """Do nothing: a call returns when its work is done."""

    def random(self) -> Any:
        return torch.random

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        torch.set_rng_state(new_state)

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        return torch.get_rng_state()

    def manual_seed(self, seed: int) -> Any:
        return torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> Any:
        return torch.manual_seed(seed)

    def initial_seed(self, seed: int | None = None) -> int:
        return torch.initial_seed()

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.default_generator

    def stream(self, stream: Any) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def current_stream(self, device_index: int | None = None) -> None:
        return None

    def default_stream(self, device_index: int | None = None) -> None:
        return None

    def empty_cache(self) -> None:
        """Do nothing: freed memory belongs to malloc."""

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Return the resident bytes of this process."""
        now = int(psutil.Process().memory_info().rss)
        self._most_bytes = max(self._most_bytes, now)
        return now

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Return the most resident bytes that a call of this accelerator has seen."""
        self.memory_allocated()
        return self._most_bytes

    def reset_max_memory_allocated(self, device_index: int | None = None) -> None:
        self._most_bytes = 0
        self.memory_allocated()

    def memory_stats(self, device_index: int | None = None) -> dict[str, int]:
        now = self.memory_allocated()
        return {"allocated_bytes.all.current": now, "allocated_bytes.all.peak": self._most_bytes}

    memory_cached = memory_reserved = memory_allocated
    max_memory_cached = max_memory_reserved = max_memory_allocated
    reset_max_memory_cached = reset_peak_memory_stats = reset_max_memory_allocated

    def total_memory(self, device_index: int | None = None) -> int:
        return int(psutil.virtual_memory().total)

    def available_memory(self, device_index: int | None = None) -> int:
        return int(psutil.virtual_memory().available)

    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> None:
        """Do nothing: use torch.profiler.record_function."""

    def range_pop(self, domain: Any = None) -> None:
        """Do nothing: use torch.profiler.record_function."""

    def lazy_call(self, callback: Any) -> Any:
        return callback()

    def is_triton_supported(self) -> bool:
        return False

    def is_current_stream_capturing(self) -> bool:
        return False

    def create_graph(self) -> None:
        return None

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def replay_graph(self, graph: Any) -> None:
        """Do nothing: the CPU records no graphs."""


class CUDA_Accelerator(DeepSpeedAccelerator):  # noqa: N801 - DeepSpeed's name
    """A GPU of this process: `torch.cuda`, whose functions are found under their own names."""

    _name = "cuda"
    _communication_backend_name = "nccl"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(torch.cuda, name):
            return super().__getattr__(name)
        return getattr(torch.cuda, name)

    def communication_backend_version(self) -> Any:
        return torch.cuda.nccl.version()

    def device_name(self, device_index: int | None = None) -> str:
        return "cuda" if device_index is None else f"cuda:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        return torch.cuda.device(torch.cuda.current_device() if device_index is None else device_index)

    def current_device_name(self) -> str:
        return f"cuda:{torch.cuda.current_device()}"

    def random(self) -> Any:
        return torch.random

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        torch.cuda.set_rng_state(new_state, "cuda" if device_index is None else device_index)

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        return torch.cuda.get_rng_state("cuda" if device_index is None else device_index)

    def default_generator(self, device_index: int) -> Any:
        return torch.cuda.default_generators[device_index]

    def memory_cached(self, device_index: int | None = None) -> int:
        return torch.cuda.memory_reserved(device_index)

    def max_memory_cached(self, device_index: int | None = None) -> int:
        return torch.cuda.max_memory_reserved(device_index)

    def total_memory(self, device_index: int | None = None) -> int:
        where = torch.cuda.current_device() if device_index is None else device_index
        return int(torch.cuda.get_device_properties(where).total_memory)

    def available_memory(self, device_index: int | None = None) -> int:
        """Return the bytes that this process can still allocate, with what torch holds in its cache."""
        free, _ = torch.cuda.mem_get_info(device_index)
        return int(free + torch.cuda.memory_reserved(device_index) - torch.cuda.memory_allocated(device_index))

    def is_bf16_supported(self) -> bool:
        return bool(torch.cuda.is_bf16_supported())

    def is_triton_supported(self) -> bool:
        return bool(torch.cuda.get_device_capability()[0] >= 8)

    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> Any:
        return torch.cuda.nvtx.range_push(msg)

    def range_pop(self, domain: Any = None) -> Any:
        return torch.cuda.nvtx.range_pop()

    def lazy_call(self, callback: Any) -> Any:
        return torch.cuda._lazy_call(callback)

    def create_graph(self) -> Any:
        return torch.cuda.CUDAGraph()

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> Any:
        return torch.cuda.graph(graph, pool, stream)

    def replay_graph(self, graph: Any) -> None:
        graph.replay()


_current: DeepSpeedAccelerator | None = None


def get_accelerator() -> Any:
    """Return the accelerator of this process; the first call chooses it."""
    global _current
    if _current is None:
        named = os.environ.get("SHARDWELL_DEVICE") or os.environ.get("DS_ACCELERATOR")
        kind = torch.device(named).type if named else "cuda" if torch.cuda.is_available() else "cpu"
        if kind not in ("cpu", "cuda"):
            raise ShardwellError(f"the accelerator {named!r} is not supported; use cpu or cuda")
        _current = CUDA_Accelerator() if kind == "cuda" else CPU_Accelerator()
    return _current


def set_accelerator(accel_obj: DeepSpeedAccelerator) -> None:
    """Use this accelerator from now on."""
    global _current
    if not isinstance(accel_obj, DeepSpeedAccelerator):
        raise ShardwellError(
            f"set_accelerator takes a DeepSpeedAccelerator, not a {type(accel_obj).__name__}; inherit from it"
        )
    _current = accel_obj


def is_current_accelerator_supported() -> bool:
    """Tell whether there is an accelerator for the device of this process; `get_accelerator` refuses others."""
    return get_accelerator()._name in ("cpu", "cuda")
