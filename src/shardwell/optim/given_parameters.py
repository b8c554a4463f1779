"""What users pass for an optimizer: parameters or groups of them, which must be the model's, and their options."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwell.errors import ShardwellError

_GIVEN = "model_parameters"
_EXPECTED = "expected parameters, (name, parameter) pairs or parameter groups, as torch.optim takes them"
_KNOWN = ("torch", "shardwell")  # packages whose optimizers have options of the same kinds as their defaults


def listed_parameters(model: nn.Module, given: Any) -> list[Any] | None:
    """Return `model_parameters` as a list of parameters or of groups with lists of them, all without their names.

    What is no parameter, and what belongs to another model, is an error.
    """
    if given is None:
        return None
    if isinstance(given, Tensor | Mapping | str | bytes | nn.Module) or not isinstance(given, Iterable):
        raise ShardwellError(f"{_GIVEN} is a {type(given).__name__}; {_EXPECTED}, in a list{_way_out(given)}")
    items = list(given)
    if not any(isinstance(item, dict) for item in items):
        found: list[Any] = _listed(items, _GIVEN)
        _check_groups(model, [{"params": found}], _GIVEN)
        return found
    groups = []
    for number, item in enumerate(items):
        if not isinstance(item, dict):
            raise ShardwellError(
                f"{_GIVEN}[{number}] is a {type(item).__name__} among parameter groups; put it into a group"
            )
        if "params" not in item:
            raise ShardwellError(f"{_GIVEN}[{number}] is a parameter group without 'params'; add its parameters")
        params = item["params"]
        inside = [params] if isinstance(params, Tensor) else params
        groups.append({**item, "params": _listed(inside, f"{_GIVEN}[{number}]['params']")})
    _check_groups(model, groups, _GIVEN)
    return groups


def check_optimizer_parameters(model: nn.Module, optimizer: Any) -> None:
    """Refuse an optimizer of parameters that are not the model's, whose training would be lost without a word."""
    if isinstance(optimizer, Optimizer):
        groups = getattr(optimizer, "param_groups", None)
        if not groups:
            raise ShardwellError(
                f"the {type(optimizer).__name__} that was passed has no parameter groups; its constructor must call "
                "torch.optim.Optimizer.__init__ with the model's parameters"
            )
        _check_groups(model, groups, f"the {type(optimizer).__name__} that was passed")
    elif isinstance(optimizer, nn.Module):
        raise ShardwellError(
            f"the optimizer is a model ({type(optimizer).__name__}); expected a torch.optim.Optimizer, its class, or a "
            "function of parameter groups"
        )


def check_made(optimizer: Optimizer, shards: list[list[Tensor]]) -> None:
    """Refuse an optimizer that the user's function has made of other tensors than it got, which are shards."""
    given = {id(tensor) for tensors in shards for tensor in tensors}
    held = [id(tensor) for group in optimizer.param_groups for tensor in group["params"]]
    if any(tensor not in given for tensor in held) or (given and not held):
        raise ShardwellError(
            f"the optimizer factory made a {type(optimizer).__name__} of {'other' if held else 'no'} parameters: it is "
            "called with parameter groups of shards, and must pass these on, as "
            "lambda groups: torch.optim.AdamW(groups, lr=1e-4) does"
        )
    check_options(optimizer)


def check_options(optimizer: Optimizer) -> None:
    """Refuse options of parameter groups that are of another kind than the defaults of the optimizer.

    Torch checks what its constructor is given, not what groups have of their own.
    """
    if type(optimizer).__module__.partition(".")[0] not in _KNOWN:
        return
    for number, group in enumerate(optimizer.param_groups):
        for name, default in optimizer.defaults.items():
            expected = _expected(default)
            if expected and not (name in group and _is_like(group[name], default)):
                found = _shown(group[name]) if name in group else "nothing"
                raise ShardwellError(
                    f"parameter group {number} of the {type(optimizer).__name__}: {name} must be {expected}, found "
                    f"{found}"
                )


def check_capturable(optimizer: Optimizer, has_device_memory: bool) -> None:
    """Refuse steps for graphs of CUDA on the CPU, where torch asserts in the first step."""
    for number, group in enumerate(optimizer.param_groups):
        if group.get("capturable") and not has_device_memory:
            raise ShardwellError(
                f"parameter group {number} of the {type(optimizer).__name__}: capturable=True is for graphs of CUDA, "
                "and this run is on the CPU; leave it out"
            )


def _way_out(given: Any) -> str:
    if isinstance(given, nn.Module):
        return ": pass its parameters()"
    return ": pass its values()" if isinstance(given, Mapping) else ""


def _listed(items: Any, where: str) -> list[Any]:
    if isinstance(items, str | bytes | Mapping | nn.Module) or not isinstance(items, Iterable):
        raise ShardwellError(f"{where} is a {type(items).__name__}; {_EXPECTED}")
    found = []
    for number, item in enumerate(items):
        parameter = item[1] if isinstance(item, tuple) and len(item) == 2 else item
        if not isinstance(parameter, Tensor):
            raise ShardwellError(f"{where}[{number}] is a {type(parameter).__name__}; {_EXPECTED}")
        found.append(parameter)
    return found


def _check_groups(model: nn.Module, groups: list[dict[str, Any]], where: str) -> None:
    names = _names_of(model)
    seen: dict[int, int] = {}
    foreign: list[tuple[int, Tensor]] = []
    for number, group in enumerate(groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                foreign.append((number, parameter))
            elif id(parameter) in seen:
                other = seen[id(parameter)]
                both = f"group {number}" if number == other else f"groups {other} and {number}"
                raise ShardwellError(
                    f"{where}: parameter '{names[id(parameter)]}' is there twice (parameter {both}); name it once"
                )
            seen[id(parameter)] = number
    total = len(seen)
    if foreign:
        number, parameter = foreign[0]
        few = "none" if len(foreign) == total else f"only {total - len(foreign)}"
        raise ShardwellError(
            f"{where}: of its {total} parameters {few} belong{'' if few != 'only 1' else 's'} to the model. The first "
            f"that does not is in parameter group {number} and has shape {list(parameter.shape)}: it would not be "
            "trained. Take parameters of the model itself, after its last change (not of a copy, nor of "
            "state_dict()), and make what else is trained a module of it"
        )
    if not total and names:
        raise ShardwellError(
            f"{where}: there are no parameters, so that nothing would be trained. An iterator gives them only once: "
            "call model.parameters() again, or leave the argument out for all that are trainable"
        )


def _names_of(model: nn.Module) -> dict[int, str]:
    """Return the names of all parameters, also of modules that give out others."""
    return {
        id(parameter): f"{place}.{name}" if place else name
        for place, module in model.named_modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    }


def _expected(default: Any) -> str:
    """Return what an option with this default must be; an empty string if that is not known."""
    if _is_number(default):
        return "a finite number"
    if isinstance(default, tuple) and default and all(map(_is_number, default)):
        return f"{len(default)} finite numbers"
    return ""


def _is_like(value: Any, default: Any) -> bool:
    if not isinstance(default, tuple):
        return _is_number(value)
    return isinstance(value, tuple | list) and len(value) == len(default) and all(map(_is_number, value))


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex() and (value.is_meta or bool(torch.isfinite(value).all()))
    if isinstance(value, bool | str | bytes | complex) or value is None:
        return False
    try:
        return math.isfinite(value)
    except (TypeError, ValueError, OverflowError):
        return False


def _shown(value: Any) -> str:
    words = repr(value)
    return words if len(words) <= 80 else f"{words[:80]}..."
