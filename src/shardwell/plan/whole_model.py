"""The model of a running engine as it was handed to `initialize`: on the meta device, without the engine's hooks.

Layers that are cut over a tensor axis are whole again in the copy, modules of experts have all of them, and attention
knows no sequence axis. The running model stays as it is.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwell.engine.whole_saves import copied_nevertheless
from shardwell.errors import ShardwellError
from shardwell.expert_parallel.layers import ParallelExperts
from shardwell.expert_parallel.layers import restore as restore_experts
from shardwell.expert_parallel.setup import SharedExperts, count_experts
from shardwell.sequence_parallel.attention import DistributedAttention
from shardwell.sequence_parallel.transformers_models import attention_before
from shardwell.sharding.tensor_part import is_marked, part_of
from shardwell.tensor_parallel import layers
from shardwell.tensor_parallel.setup import CutModel

if TYPE_CHECKING:
    from shardwell.engine import Engine

_HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs"),
)
_GONE = object()  # in the place of what the running engine holds
_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def check_copyable(engine: Engine) -> None:
    """Raise if this rank does not know what the whole model was."""
    grid, cut = engine._context.roles.grid, engine._teardown.cut
    if grid.pipe > 1:
        raise ShardwellError(
            "engine.plan(): this rank has one stage of the pipeline, and not the model that was divided. Plan it with "
            "`shardwell plan`."
        )
    comes_cut = cut is not None and not isinstance(cut, CutModel | SharedExperts)
    if comes_cut or any(is_marked(parameter) for parameter in engine.module.parameters()):
        raise ShardwellError(
            "engine.plan(): the model came cut over the tensor axis, by DTensors or by layers of its own that talk to "
            "other ranks, which a simulation of one rank cannot run. Plan the whole model with `shardwell plan`."
        )


def whole_model(engine: Engine) -> nn.Module:
    """Return a copy of a running engine's model, as it was before."""
    model = engine.module
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        part = part_of(parameter)
        shape = parameter.shape if part is None else part.shape
        empty = torch.empty(shape, dtype=parameter.dtype, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().to("meta")
    for module in model.modules():
        for name in _HOOKS:
            hooks = getattr(module, name, None)
            if hooks:
                memo[id(hooks)] = OrderedDict((key, hook) for key, hook in hooks.items() if not _is_ours(module, key))
        memo |= {id(one): _GONE for one in _held_by(module) if one is not None}
    with copied_nevertheless(model):
        found = copy.deepcopy(model, memo)
    for before, module in zip(model.modules(), list(found.modules()), strict=True):
        if isinstance(module, layers.CutLayer):
            layers.restore(module)
        if isinstance(module, ParallelExperts):
            number = module.share.num_experts
            count_experts(module, number // engine._context.roles.grid.expert, number)
            restore_experts(module)
        if isinstance(module, DistributedAttention):
            module.binding = None
        attention = attention_before(getattr(before, "config", None))
        if attention is not None:
            module.config._attn_implementation_internal = attention  # type: ignore[union-attr]
    return found


def _held_by(module: nn.Module) -> list[Any]:
    """Return what a module holds of the ranks that share it."""
    if isinstance(module, layers.CutLayer):
        return [module.region]
    if isinstance(module, ParallelExperts):
        return [module.share.axis]
    return [module.binding] if isinstance(module, DistributedAttention) else []


def _is_ours(module: nn.Module, key: int) -> bool:
    """Return whether a hook of a module is the engine's; the tables of flags have its keys, too."""
    found = next((hook for name in _TABLES if (hook := getattr(module, name).get(key)) is not None), None)
    return type(found).__module__.startswith("shardwell.") or getattr(found, "__module__", "").startswith("shardwell.")
