"""Small functions of `deepspeed.utils` and `deepspeed.moe.utils` that scripts import."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from shardwell.compat.deepspeed_api.names_refused import MOE
from shardwell.errors import ShardwellError

Function = TypeVar("Function", bound=Callable[..., Any])


def recursive_getattr(model: nn.Module, module_name: str) -> Any:
    """Return the part of a model that has this dotted name."""
    found: Any = model
    for part in module_name.split("."):
        found = getattr(found, part)
    return found


def recursive_setattr(model: nn.Module, module_name: str, module: Any) -> None:
    """Replace the part of a model that has this dotted name."""
    parent, _, last = module_name.rpartition(".")
    setattr(recursive_getattr(model, parent) if parent else model, last, module)


def instrument_w_nvtx(func: Function) -> Function:
    """Return the function: the engine marks its own phases for the profiler."""
    return func


def register_grad_hook(param: Any, hook: Callable[[Any], None]) -> Any:
    """Call `hook` with a parameter after its gradient was accumulated; return the handle that removes it."""
    return param.register_post_accumulate_grad_hook(hook)


def required_torch_version(min_version: float | None = None, max_version: float | None = None) -> bool:
    """Return whether torch's version, as major.minor, is within the bounds."""
    found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])

    def as_pair(version: float) -> tuple[int, ...]:
        return tuple(int(part) for part in str(version).split("."))

    too_low = min_version is not None and found < as_pair(min_version)
    too_high = max_version is not None and found > as_pair(max_version)
    return not (too_low or too_high)


def is_compile_supported() -> bool:
    """Return whether torch.compile is there."""
    return hasattr(torch, "compile")


def has_moe_layers(module: nn.Module) -> tuple[bool, int]:
    """Return that a model has no layers of DeepSpeed's own MoE class, and 0 experts in them."""
    return False, 0


def is_moe_param(param: Any) -> bool:
    """Return whether a parameter belongs to experts that only some ranks have: none does."""
    return hasattr(param, "allreduce") and not param.allreduce


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    """Return whether a parameter group is one of experts."""
    return bool(param_group.get("moe", False))


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | tuple[dict[str, Any], ...] | list[dict[str, Any]],
    max_group_size: float | None = None,
) -> list[dict[str, Any]]:
    """Return the parameter groups as a list: without experts that only some ranks have, there is nothing to split."""
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    for group in groups:
        group["params"] = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
        if any(is_moe_param(one) for one in group["params"]):
            raise ShardwellError(f"a parameter group has parameters with allreduce=False: {MOE}")
    return groups


def configure_moe_param_groups(model_parameters: list[Any]) -> list[Any]:
    """Return parameter groups for an optimizer, of parameters or of groups."""
    if model_parameters and isinstance(model_parameters[0], torch.Tensor):
        model_parameters = [{"params": model_parameters, "name": "dense-params"}]
    return split_params_into_different_moe_groups_for_optimizer(model_parameters)
