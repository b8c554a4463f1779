"""Checks of a model before it is sharded: unsupported modules and parameters are refused by name."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shardwell.errors import ShardwellError
from shardwell.sharding import released
from shardwell.sharding.dtensor_parameters import check_dtensor, is_dtensor
from shardwell.sharding.unit import Unit

_WRAPPERS = {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"}
_COMPOSED = {"FSDPModule", "ReplicateModule"}  # classes that `fully_shard` and `replicate` mix in


def check_is_model(model: Any) -> nn.Module:
    """Return what was passed as the model if it is one."""
    if isinstance(model, nn.Module):
        return model
    if model is None:
        raise ShardwellError("initialize needs a model: shardwell.initialize(model=..., config=...)")
    found = (
        f"the class {model.__name__}: make a model of it" if isinstance(model, type) else f"a {type(model).__name__}"
    )
    raise ShardwellError(f"initialize(model=...): expected a torch.nn.Module, found {found}")


def check_model(model: nn.Module) -> None:
    """Refuse a model that an engine could not train as it is."""
    _check_tree(model, "", {})
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            where = f"its part '{name}' is" if name else "it is"
            raise ShardwellError(
                f"the model cannot be hooked: {where} a TorchScript module. Pass the Python module that was scripted "
                "or traced; engine.compile() compiles it."
            )
        if kinds := [kind for kind in type(module).__mro__ if kind.__name__ in _WRAPPERS and _is_torch(kind)]:
            where = f"its part '{name}' is" if name else "it is"
            raise ShardwellError(
                f"the model averages its gradients or splits its parameters itself: {where} wrapped in "
                f"{kinds[0].__name__}. Pass what is inside (wrapped.module), before it is wrapped."
            )
        if any(kind.__name__ in _COMPOSED and _is_torch(kind) for kind in type(module).__mro__):
            raise ShardwellError(
                f"torch's fully_shard or replicate has taken {f'the part {name!r} of ' if name else ''}the model: the "
                "engine shards and replicates itself. Hand over the model before; parallelize_module (tensor "
                "parallelism) may have run."
            )
    named = list(model.named_parameters())
    for name, parameter in named:
        check_parameter(name, parameter)
        if released.is_owned(parameter) and isinstance(released.owner_of(parameter), Unit):
            raise ShardwellError(
                f"parameter '{name}' belongs to another engine already. Call destroy() of that engine before the model "
                "is handed to initialize again."
            )
    _check_memory(named)
    _check_meta(named)


def _check_tree(module: nn.Module, name: str, above: dict[nn.Module, str], done: set[nn.Module] | None = None) -> None:
    """Refuse a module that is inside of itself: torch's own train(), to() and apply() never come back from it."""
    done = set() if done is None else done
    if module in above:
        raise ShardwellError(
            f"the model's module '{name}' is '{above[module] or '(root)'}', which it is inside of: keep such a "
            "reference in a tuple, or in a weakref, so that it is no child module"
        )
    if module in done:
        return
    done.add(module)
    for child, inside in module._modules.items():
        if inside is not None:
            _check_tree(inside, f"{name}.{child}" if name else child, {**above, module: name}, done)


def _check_meta(named: list[tuple[str, nn.Parameter]]) -> None:
    """Refuse a model of which a part is on the meta device, without values."""
    plain = [(name, parameter) for name, parameter in named if not released.is_owned(parameter)]
    empty = [name for name, parameter in plain if parameter.is_meta]
    if empty and len(empty) < len(plain):
        raise ShardwellError(
            f"{len(empty)} of {len(plain)} parameters are on the meta device, without values (the first is "
            f"'{empty[0]}'), and the others are not. Give them values (module.to_empty(device=...), then initialise or "
            "load them), or make the model under zero.Init"
        )


def check_parameter(name: str, parameter: Tensor) -> None:
    """Refuse a parameter whose values are not plain numbers in memory of its own."""
    kind = type(parameter)
    if is_lazy(parameter):
        raise ShardwellError(
            f"parameter '{name}' has no shape yet: it belongs to a lazy module. Run the model once on a sample batch "
            "before it is handed over."
        )
    with torch._C.DisableTorchFunctionSubclass():  # it may be released
        is_inference = parameter.is_inference()
    if is_inference:
        raise ShardwellError(
            f"parameter '{name}' was made inside torch.inference_mode(), so autograd cannot train it. Make or load the "
            "model outside of it."
        )
    if is_dtensor(parameter):
        check_dtensor(name, parameter)
        return
    if parameter.layout is not torch.strided:
        raise ShardwellError(
            f"parameter '{name}' is sparse ({str(parameter.layout).removeprefix('torch.')}), and shards are cut from "
            "dense tensors: pass its to_dense(), or make it a buffer if it is not trained."
        )
    if parameter.requires_grad and parameter.is_floating_point() and parameter.itemsize < 2:
        raise ShardwellError(
            f"parameter '{name}' is trainable and {str(parameter.dtype).removeprefix('torch.')}, in which torch cannot "
            "add: freeze it (requires_grad_(False)), or train it in 16 or 32 bits."
        )
    if hasattr(kind, "__tensor_flatten__") or kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise ShardwellError(
            f"parameter '{name}' is a {kind.__module__}.{kind.__qualname__}, which keeps its values in other tensors: "
            "these cannot be cut into shards. Hand over the model before it is quantised or converted; to keep frozen "
            "weights in 8 bits, set zero_optimization.zero_quantized_nontrainable_weights."
        )


def _is_torch(kind: type) -> bool:
    return kind.__module__.split(".")[0] == "torch"


def _check_memory(named: list[tuple[str, nn.Parameter]]) -> None:
    """Refuse parameters that share elements: both would update them, but their shards would not."""
    by_storage: defaultdict[int, list[tuple[str, nn.Parameter]]] = defaultdict(list)
    for name, parameter in named:
        is_elsewhere = released.is_owned(parameter) or parameter.is_meta or parameter.layout is not torch.strided
        is_elsewhere |= is_dtensor(parameter)  # `distribute_tensor` copies
        if not is_elsewhere and parameter.numel():
            by_storage[parameter.untyped_storage()._cdata].append((name, parameter))
    for several in by_storage.values():
        for (name, one), (other, two) in itertools.combinations(several, 2):
            if _overlap(one, two):
                raise ShardwellError(
                    f"parameters '{name}' and '{other}' share memory. Assign one parameter to both places to tie them "
                    "(a.weight = b.weight), or give each its own values (.clone())."
                )


def _overlap(one: Tensor, two: Tensor) -> bool:
    first, second = sorted((_reach(one), _reach(two)))
    if one.dtype != two.dtype:
        return first[1] * one.itemsize > second[0] * two.itemsize
    if second[0] >= first[1]:
        return False
    taken = torch.zeros(max(first[1], second[1]), dtype=torch.bool, device="cpu")
    taken.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(taken.as_strided(two.shape, two.stride(), two.storage_offset()).any())


def _reach(tensor: Tensor) -> tuple[int, int]:
    """Return the index of the tensor's first element in its storage, and the index behind its last."""
    start = int(tensor.storage_offset())
    return start, start + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
