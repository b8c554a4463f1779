"""The model's state as full tensors, read from the units and written to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from shardwell.errors import ShardwellError
from shardwell.optim.param_access import ParamAccess
from shardwell.parallel import TrafficKind
from shardwell.sharding import ShardedGroup, Unit, released
from shardwell.sharding.gathered_parameters import GatheredParameters
from shardwell.sharding.tensor_part import part_of


def whole_state(found: Mapping[str, Any], units: Iterable[Unit], *, keeps: bool) -> dict[str, Any]:
    """Copy the entries of a state dictionary to host memory. Parameters are all-gathered, one unit at a time.

    A rank that does not keep the copies takes part in the all-gathers and gets an empty dictionary.
    """
    whole: dict[int, Tensor] = {}
    for unit in units:
        with GatheredParameters(parameter for group in unit.groups for parameter in group.parameters):
            for group in unit.groups:
                for parameter in group.parameters:
                    value = whole_value(parameter.detach(), parameter, group)
                    if keeps:
                        whole[id(parameter)] = value.to("cpu", copy=True)
    if not keeps:
        return {}
    return {key: whole[id(value)] if id(value) in whole else _on_host(value) for key, value in found.items()}


def snapshot(units: Iterable[Unit], *, keeps: bool) -> dict[str, Tensor]:
    """Copy the unsharded master weights of all parameters to host memory by name, in fp32 instead of 16 bits."""
    found: dict[str, Tensor] = {}
    for unit in units:
        for group in unit.groups:
            for slot, parameter in zip(group.layout.slots, group.parameters, strict=True):
                value = whole_value(ParamAccess(parameter).master(), parameter, group)
                if keeps:
                    is_half = value.dtype in (torch.float16, torch.bfloat16)
                    found[slot.name] = value.to("cpu", torch.float32 if is_half else value.dtype, copy=True)
    return found


def load_whole_state(mine: Mapping[str, Any], given: Mapping[str, Any], *, strict: bool) -> _IncompatibleKeys:
    """Set parameters and buffers from full tensors."""
    if not isinstance(given, Mapping):
        raise ShardwellError(f"load_state_dict takes names and tensors in a mapping, and got a {type(given).__name__}")
    missing, unexpected = sorted(set(mine) - set(given)), sorted(set(given) - set(mine))
    if strict and (missing or unexpected):
        raise ShardwellError(f"the state does not fit the model: missing {missing}, unexpected {unexpected}")
    with torch.no_grad():
        for key in mine:
            if key in given and isinstance(mine[key], nn.Parameter) and released.is_owned(mine[key]):
                ParamAccess(mine[key]).set_master(part_of_value(given[key], mine[key], key))
            elif key in given and isinstance(mine[key], Tensor):
                if mine[key].shape != given[key].shape:
                    raise ShardwellError(
                        f"'{key}' has shape {tuple(mine[key].shape)}; a value of shape "
                        f"{tuple(given[key].shape)} does not fit"
                    )
                mine[key].copy_(given[key])
    return _IncompatibleKeys(missing, unexpected)


def whole_value(value: Tensor, parameter: nn.Parameter, group: ShardedGroup) -> Tensor:
    """Return the whole tensor of which a parameter is a part. All ranks of its axis must call it."""
    part, comm = part_of(parameter), group.context.roles.parts
    if part is None or comm is None:
        return value
    from shardwell.parallel.model_axis import ModelAxis
    from shardwell.sharding.whole_tensor import whole_of

    return whole_of(value, part, ModelAxis(comm, TrafficKind.TENSOR), f"WHOLE {group.name}")


def part_of_value(given: Tensor, parameter: nn.Parameter, name: str) -> Tensor:
    """Return this rank's part of a whole tensor."""
    part = part_of(parameter)
    if part is None:
        return given
    if tuple(given.shape) != part.shape:
        raise ShardwellError(f"'{name}' has shape {part.shape}; a value of shape {tuple(given.shape)} does not fit")
    return part.cut(given).contiguous()


def _on_host(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
