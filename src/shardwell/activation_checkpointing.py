"""Activation checkpointing: a function's inputs are stored, the rest of its forward is computed again in backward.

`torch.utils.checkpoint` (non-reentrant) recomputes. This file adds where the inputs are stored until then: in host
memory, or split over ranks that hold the same values. They pass through hooks that see nothing but the inputs. Inside
another checkpoint, or where saved-tensor hooks of other code are at work, those decide and nothing is done here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.weak import WeakTensorKeyDictionary

from shardwell.config import Config, load
from shardwell.errors import ConfigError, ShardwellError
from shardwell.memory import Device, Event, MemoryStats, TemporaryBuffers
from shardwell.memory.local_gpus import num_gpus
from shardwell.parallel import Collectives, RankGroup, TrafficStats

_OPTIONS = ("preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")  # torch's own


class ModelParallel(Protocol):
    """Megatron's `mpu`, as far as it tells which ranks work on the same rows. The names with `tensor` go first."""

    def get_model_parallel_group(self) -> Any: ...
    def get_model_parallel_rank(self) -> int: ...
    def get_model_parallel_world_size(self) -> int: ...


@dataclass(frozen=True)
class ActivationPolicy:
    """The place in which the inputs of a checkpoint wait between its forward and its recomputation.

    `partition` names ranks whose inputs are identical, as those of a tensor-parallel group are. Each keeps 1/N of every
    floating-point input. If the values differ between these ranks, the gradients are wrong.
    """

    partition: RankGroup | None = None
    on_host: bool = False

    def __bool__(self) -> bool:
        """Return whether the policy asks for anything."""
        return self.on_host or self.splits

    @property
    def splits(self) -> bool:
        return self.partition is not None and self.partition.size > 1


_configured: ActivationPolicy | None = None
_default = ActivationPolicy()  # what the last engine's configuration says


def configure(
    mpu_: ModelParallel | None = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Decide where `checkpoint` keeps inputs: as the `activation_checkpointing` block says, arguments go first.

    Inputs are split only if `mpu_` names more than one rank. `contiguous_checkpointing`, `num_checkpoints` and
    `synchronize` are accepted and change nothing: nothing is reserved ahead, and streams keep the order.
    """
    global _configured
    if profile:
        raise ConfigError("checkpointing.configure(profile=True) is not there yet; leave it out")
    block = load(deepspeed_config).activation_checkpointing
    split = block.partition_activations if partition_activations is None else partition_activations
    on_host = block.cpu_checkpointing if checkpoint_in_cpu is None else checkpoint_in_cpu
    _configured = ActivationPolicy(_mesh_of(mpu_) if split and mpu_ is not None else None, on_host)
    reset()


def is_configured() -> bool:
    """Return whether `configure` was called."""
    return _configured is not None


def policy() -> ActivationPolicy:
    """Return what `configure` decided, or else what the configuration of the last engine says."""
    return _configured or _default


def use_config(config: Config, model: nn.Module) -> None:
    """Follow the configuration of a new engine, unless `configure` was called, also in Hugging Face's checkpoints."""
    global _default
    _default = ActivationPolicy(on_host=config.activation_checkpointing.cpu_checkpointing)
    patch_transformers(model, policy())


def reset() -> None:
    """Drop what was stored for a backward that will not come. The configuration stays."""
    global _last
    _last = None
    _saved_inputs.cache_clear()


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return `function(*args, **kwargs)`; its activations are computed again in backward.

    Like `torch.utils.checkpoint.checkpoint` without reentrance, options included. What `configure` asked for holds for
    all floating-point tensors in the arguments, also in nested containers; parameters stay where they are.
    """
    return _run(policy(), function, args, kwargs)


def patch_transformers(model: nn.Module, policy: ActivationPolicy) -> int:
    """Let a Hugging Face model checkpoint by `policy`, if it asks for anything; returns how many modules changed.

    Call it after `gradient_checkpointing_enable`, which puts torch's own checkpoint there.
    """

    def by_policy(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return _run(policy, function, args, kwargs)

    modules = [module for module in model.modules() if policy and hasattr(module, "_gradient_checkpointing_func")]
    for module in modules:
        module._gradient_checkpointing_func = by_policy  # type: ignore[assignment]
    return len(modules)


def _run(policy: ActivationPolicy, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
    kwargs.pop("use_reentrant", None)
    if not policy or not torch.is_grad_enabled() or _others_decide():
        return torch_checkpoint(function, *args, use_reentrant=False, **options, **kwargs)
    leaves, structure = tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter)]
    inputs = [leaves[place] for place in places]
    for place in places:
        leaves[place] = None  # torch holds them, through our hooks

    def rebuilt(*inputs: Any) -> Any:
        whole = list(leaves)
        for place, tensor in zip(places, inputs, strict=True):
            whole[place] = tensor
        args, kwargs = tree_unflatten(whole, structure)
        return function(*args, **kwargs)

    call = _Call(policy)
    with saved_tensors_hooks(call.pack, call.unpack):
        return torch_checkpoint(rebuilt, *inputs, use_reentrant=False, **options)


def _others_decide() -> bool:
    """Return whether saved tensors go through hooks already: those of an enclosing checkpoint, or the user's."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return top is not None and getattr(top[0], "__module__", "") != "shardwell.runtime.hooks"


def _mesh_of(mpu: ModelParallel) -> RankGroup:
    def ask(what: str) -> Any:
        tensor_parallel = getattr(mpu, f"get_tensor_model_parallel_{what}", None)
        return tensor_parallel() if tensor_parallel is not None else getattr(mpu, f"get_model_parallel_{what}")()

    size, group = int(ask("world_size")), ask("group")
    if size == 1:
        return RankGroup(0, 1, 1, "none")
    kind = "cuda" if num_gpus() else "cpu"
    backends = dict(one.split(":") for one in str(dist.get_backend_config(group)).split(","))  # "cpu:gloo,cuda:nccl"
    backend = backends.get(kind) or next(iter(backends.values()))
    return RankGroup(int(ask("rank")), size, size, backend, group, tuple(dist.get_process_group_ranks(group)))


# ------------------------------------------------------------------------------------------------ where inputs are


class _SavedInputs:
    """Inputs of one device that wait for their backward, stored by one policy."""

    def __init__(self, where: torch.device, policy: ActivationPolicy) -> None:
        self.device = Device(where, keep_pages=False)
        self.policy = policy
        self.route: Collectives | None = None
        if policy.splits and policy.partition is not None:
            self.route = Collectives(
                policy.partition, self.device, TrafficStats(), TemporaryBuffers(self.device, MemoryStats())
            )
        self._known = WeakTensorKeyDictionary()  # tensor -> a weak reference to how it is stored
        self._leaving: list[tuple[Tensor, int, Event]] = []  # on the way to the host: tensor, version, arrival

    def save(self, tensor: Tensor) -> _SavedInput:
        """Store an input; one that several checkpoints share, such as a mask, is stored once."""
        found = self._known[tensor]() if tensor in self._known else None
        if found is None or found.version != tensor._version:
            found = _SavedInput(self, tensor)
            self._known[tensor] = weakref.ref(found)
        return found

    def send(self, source: Tensor) -> Tensor:
        copy, mark = self.device.copy_to_host(source)
        if mark.event is not None:
            self._leaving.append((source, source._version, mark))
        return copy

    def free_copied(self) -> None:
        """Free what was in flight. The device goes on when it has arrived; the host does not wait."""
        leaving, self._leaving = self._leaving, []
        for source, version, mark in leaving:
            mark.wait()
            if source._version != version:
                raise ShardwellError(
                    "an input of a checkpointed function was changed in place while it was copied to the host; "
                    "change a copy of it instead"
                )


@cache
def _saved_inputs(where: torch.device, policy: ActivationPolicy) -> _SavedInputs:
    return _SavedInputs(where, policy)


class _SavedInput:
    """One input, flat, as it is stored: a copy on the host, this rank's part, or this rank's part on the host."""

    def __init__(self, saved: _SavedInputs, tensor: Tensor) -> None:
        self.version = tensor._version
        self._saved = saved
        self._shape, self._stride = tuple(tensor.shape), tensor.stride()
        values = _without_repeats(tensor.detach())
        self._stored_shape, self._numel = tuple(values.shape), values.numel()
        self._dense = _reach(self._stored_shape, self._stride) == self._numel
        flat = values.as_strided((self._numel,), (1,)) if self._dense else values.flatten()
        self.is_split = saved.route is not None and self._numel >= saved.route.rank_group.size
        if self.is_split:
            flat = self._part_of(flat)
        self.stored = saved.send(flat) if saved.policy.on_host else flat
        self._coming: tuple[Tensor, Event] | None = None

    def _part_of(self, flat: Tensor) -> Tensor:
        assert self._saved.route is not None
        mesh = self._saved.route.rank_group
        size = -(-self._numel // mesh.size)
        part = flat.new_zeros(size)
        mine = flat[mesh.rank * size : (mesh.rank + 1) * size]
        part[: mine.numel()].copy_(mine)
        return part

    def start(self) -> None:
        """Start to bring it back to the device. No rank waits for another one here, so ranks may differ in it."""
        if self._saved.policy.on_host and self._coming is None:
            self._coming = self._saved.device.copy_from_host(self.stored)

    def take(self) -> Tensor:
        """Return the input as it was. Ranks that share it must take it together."""
        self.start()
        flat = self.stored
        if self._coming is not None:
            flat, mark = self._coming
            self._coming = None
            mark.wait()
        if self.is_split:
            flat = self._all_gathered(flat)
        if self._dense:
            return flat.as_strided(self._shape, self._stride)
        spread = torch.empty_strided(self._stored_shape, self._stride, dtype=flat.dtype, device=flat.device)
        spread.copy_(flat[: self._numel].view(self._stored_shape))
        return spread.as_strided(self._shape, self._stride)

    def _all_gathered(self, part: Tensor) -> Tensor:
        route = self._saved.route
        assert route is not None
        whole = part.new_empty(part.numel() * route.rank_group.size)
        whole.chunk(route.rank_group.size)[route.rank_group.rank].copy_(part)
        route.all_gather(whole, "GATHER (activation)").wait()
        return whole


class _Call:
    """One checkpoint: packs its inputs in forward, unpacks them in backward and starts those of the call before it."""

    def __init__(self, policy: ActivationPolicy) -> None:
        global _last
        self._policy = policy
        self._inputs: list[_SavedInput] = []
        self._seen: set[_SavedInputs] = set()
        self._before = _last
        _last = weakref.ref(self)

    def pack(self, tensor: Tensor) -> Tensor | _SavedInput:
        if not _can_be_saved(tensor):
            return tensor
        saved = _saved_inputs(tensor.device, self._policy)
        if saved not in self._seen:  # what the calls before sent has had a whole forward to arrive
            self._seen.add(saved)
            saved.free_copied()
        with torch.no_grad():
            saved_input = saved.save(tensor)
        self._inputs.append(saved_input)
        return saved_input

    def unpack(self, packed: Tensor | _SavedInput) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        with torch.no_grad():
            for saved in self._seen:
                saved.free_copied()
            tensor = packed.take()
            before = self._before() if self._before is not None else None
            for saved_input in before._inputs if before is not None else ():
                saved_input.start()
        return tensor


_last: weakref.ref[_Call] | None = None


def _can_be_saved(tensor: Tensor) -> bool:
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.is_floating_point()
        and tensor.numel() > 0
        and _reach(_without_repeats(tensor).shape, tensor.stride()) > 0
    )


def _without_repeats(tensor: Tensor) -> Tensor:
    """Return a view of the elements that are in memory, each once: what `expand` repeated has one element there."""
    for dim, (size, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if step == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _reach(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the elements of memory from the first one to the last one; 0 if two share a place."""
    reach = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size > 1:
            if step < reach:
                return 0
            reach += step * (size - 1)
    return reach
