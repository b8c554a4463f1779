"""Share the experts of a model: each rank of the expert axis keeps some of each layer's, and the rest of the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from shardwell.errors import ConfigError, ShardwellError
from shardwell.expert_parallel.layers import (
    ExpertShare,
    ParallelExperts,
    become,
    calls_all,
    listed_experts,
    restore,
    takes_experts,
)
from shardwell.parallel import Collectives, TrafficKind
from shardwell.parallel.model_axis import ModelAxis
from shardwell.sharding import EngineContext, released
from shardwell.sharding.init_parameters import PartKeeper
from shardwell.sharding.tensor_part import TensorPart, mark_part, part_of
from shardwell.sharding.whole_tensor import first_values, whole_of
from shardwell.sharding.wrap import repeated_blocks, set_leaf

_KEY = "shardwell.expert_parallel_size"
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # attributes of modules of experts


@dataclass(frozen=True)
class SharedExperts:
    """A model whose ranks hold different experts, until its engine ends."""

    model: nn.Module
    axis: ModelAxis

    @torch.no_grad()
    def undo(self) -> None:
        """Give every rank all experts again; parameters are plain tensors by now. All ranks must call it."""
        for module in [one for one in self.model.modules() if isinstance(one, ParallelExperts)]:
            for name, parameter in module.named_parameters():
                part = part_of(parameter)
                if part is not None:
                    parameter.data = whole_of(parameter.data, part, self.axis, f"WHOLE {module.share.name}.{name}")
                    mark_part(parameter, None)
            count_experts(module, module.share.num_experts // self.axis.size, module.share.num_experts)
            restore(module)

    def close(self) -> None:
        """Let go of the process groups: the experts cannot run until the model is passed to `initialize` again."""
        for module in self.model.modules():
            if isinstance(module, ParallelExperts):
                module.share.axis = None


def share_experts(model: nn.Module, context: EngineContext) -> SharedExperts:
    """Give this rank its experts of each layer. All ranks must call it."""
    roles, keeper = context.roles, PartKeeper(context)
    assert roles.expert is not None
    axis = ModelAxis(roles.expert, TrafficKind.EXPERT)
    found = {name: module for name, module in model.named_modules() if _has_experts(module)}
    if not found:
        raise ShardwellError(
            f"{_KEY}: {axis.size}, and the model has no experts that ranks can share: a module whose forward takes "
            "(hidden_states, top_k_index, top_k_weights), with experts in parameters whose first dimension is their "
            "number, or in a ModuleList"
        )
    blocks = tuple(f"{block}." for block in repeated_blocks(model))
    for name, module in found.items():
        if isinstance(module, ParallelExperts):  # cut by an earlier engine, which handed the model over
            module.share.axis = axis
        else:
            cut = partial(_cut, stage=roles.stage, keeper=keeper)
            _share(name, module, axis, cut, is_in_block=name.startswith(blocks))
    return SharedExperts(model, axis)


def _has_experts(module: nn.Module) -> bool:
    if isinstance(module, ParallelExperts):
        return True
    if not takes_experts(module):
        return False
    own = list(module.parameters(recurse=False))
    is_packed = bool(own) and all(one.ndim > 1 and one.shape[0] == own[0].shape[0] for one in own)
    return is_packed or listed_experts(module) is not None


def _share(name: str, module: nn.Module, axis: ModelAxis, cut: Callable[..., None], *, is_in_block: bool) -> None:
    listed = listed_experts(module)
    own = dict(module.named_parameters(recurse=False))
    number = len(listed) if listed is not None else next(iter(own.values())).shape[0]
    if name.rpartition(".")[2] == "base_layer":
        raise ConfigError(
            f"{_KEY}: adapters wrap the parameters of '{name.partition('.base_layer')[0]}' (target_parameters of "
            "PEFT), and are of all its experts, of which a rank would have some: adapt other layers, or use 1"
        )
    if number % axis.size:
        raise ConfigError(f"{_KEY}: {axis.size} ranks cannot share the {number} experts of '{name}' evenly")
    calls_every = listed is not None and calls_all(module, listed)
    if listed is None:
        for inner, parameter in own.items():
            part = TensorPart(tuple(parameter.shape), 0, axis.size, axis.rank)
            cut(f"{name}.{inner}", parameter, part)
        count_experts(module, number, number // axis.size)
    else:
        if not is_in_block:
            set_leaf(module)  # one unit: ranks call other experts
        for place, expert in enumerate(listed):
            for inner, parameter in expert.named_parameters():
                part = TensorPart(tuple(parameter.shape), 0, axis.size, axis.rank, owner=place * axis.size // number)
                cut(f"{name}.{place}.{inner}", parameter, part)
    become(module, ExpertShare(name, number, axis, listed, calls_every))


@torch.no_grad()
def _cut(name: str, parameter: nn.Parameter, part: TensorPart, *, stage: Collectives, keeper: PartKeeper) -> None:
    """Replace the values of a parameter, which are those of the first rank, by this rank's experts."""
    if part_of(parameter) is not None or parameter.ndim == 0:
        raise ShardwellError(
            f"{_KEY}: '{name}' is shared by experts, or has no dimension; experts need their own tensors"
        )
    before = released.owner_or_none(parameter)
    parameter.data = part.cut(first_values(name, parameter, stage)).clone(memory_format=torch.contiguous_format)
    mark_part(parameter, part)
    keeper.keep(name, parameter, before)


def count_experts(module: nn.Module, before: int, after: int) -> None:
    """Let a module count its own experts: its loops and masks go by that."""
    for name in _COUNTS:
        if module.__dict__.get(name) == before:
            setattr(module, name, after)
