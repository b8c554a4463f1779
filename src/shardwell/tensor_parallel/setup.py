"""Cut a model as its configuration says, or take one that comes cut."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwell.errors import ConfigError, ShardwellError
from shardwell.parallel import TrafficKind
from shardwell.parallel.model_axis import ModelAxis
from shardwell.runtime.aborted_forwards import AbortHook
from shardwell.runtime.first_forwards import generating_models
from shardwell.runtime.randomness import align_randomness, draws_in
from shardwell.sharding import EngineContext
from shardwell.sharding.tensor_part import (
    check_parts,
    is_marked,
    mark_part,
    mark_partial,
    part_of,
    read_megatron_marks,
)
from shardwell.sharding.whole_tensor import whole_of
from shardwell.tensor_parallel import layers
from shardwell.tensor_parallel.cut import Cutter
from shardwell.tensor_parallel.gradients import GradientCheck
from shardwell.tensor_parallel.inputs import InputCheck
from shardwell.tensor_parallel.packed_use import PackedUseCheck
from shardwell.tensor_parallel.plan import plan_of
from shardwell.tensor_parallel.region import CutRegion
from shardwell.tensor_parallel.sequence import blocks_in_plan, gather_before, split_sequences
from shardwell.tensor_parallel.whole_modules import run_on_whole_sequences, uncut_mixers

_LOG = logging.getLogger("shardwell")


@dataclass(frozen=True)
class PlanRequest:
    """The settings of tensor parallelism in a configuration."""

    plan: str | Mapping[str, str] = "auto"
    layer_specs: Mapping[str, Any] | None = None
    sequence_parallel: bool = False
    overlaps: bool = False  # gradients of inputs are summed beside the products of weight gradients


@dataclass(frozen=True)
class CutModel:
    """A model whose layers are cut, until its engine ends."""

    model: nn.Module
    regions: tuple[CutRegion, ...]
    hooks: tuple[Any, ...]

    @torch.no_grad()
    def undo(self) -> None:
        """Make the layers that were cut whole again; parameters are plain tensors by now. All ranks must call it."""
        axis = self.regions[0].axis
        cut = [layer for layer in self.model.modules() if isinstance(layer, layers.CutLayer)]
        mine = {id(parameter) for layer in cut for parameter in layer.parameters()}
        for name, parameter in self.model.named_parameters():
            part = part_of(parameter)
            if part is not None and id(parameter) in mine:
                parameter.data = whole_of(parameter.data, part, axis, f"WHOLE {name}")
                mark_part(parameter, None)
        for layer in cut:
            layers.restore(layer)

    def close(self) -> None:
        """Let go of the process groups: the layers cannot run until the model is passed to `initialize` again."""
        for hook in self.hooks:
            hook.remove()
        for region in self.regions:
            region.close()


def cut_model(model: nn.Module, context: EngineContext, asked: PlanRequest) -> CutModel:
    """Cut a model over the tensor axis, unless its parameters say that they are parts. All ranks must call it."""
    roles = context.roles
    assert roles.tensor is not None
    axis = ModelAxis(roles.tensor, TrafficKind.TENSOR)
    align_randomness(roles.tensor)
    draws = draws_in(model)
    region = partial(CutRegion, axis, draws=draws, overlaps=asked.overlaps)
    outside = region(splits_sequences=False)
    inside = region(splits_sequences=True) if asked.sequence_parallel else outside
    regions = (outside,) if inside is outside else (outside, inside)
    if asked.sequence_parallel:
        regions = (*regions, region(splits_sequences=True, around=inside))
    check_parts(model, axis.size)
    inner = generating_models(model)
    same = [one.register_forward_pre_hook(InputCheck(roles.tensor), with_kwargs=True) for one in (model, *inner)]
    ends = [AbortHook(model, one.randomness.end) for one in regions if one.randomness is not None]
    if read_megatron_marks(model, axis.size, axis.rank):
        if asked.overlaps and not any(isinstance(module, layers.CutLayer) for module in model.modules()):
            _LOG.warning("tensor_parallel.tp_overlap_comm has no effect: the model comes cut, and communicates itself")
        return CutModel(model, _come_cut(model, regions, asked), (*same, *ends, *_check_gradients(model, axis)))
    if asked.plan == "none" and asked.layer_specs is None:
        raise ShardwellError(
            f'the tensor axis has {axis.size} ranks, tensor_parallel.plan is "none", and no parameter says that it '
            "is a part of a larger one: set tensor_model_parallel and partition_dim of those that are, or give a plan"
        )
    _check_heads(model, axis.size)
    plan = plan_of(model, asked.plan, asked.layer_specs)
    cut_blocks = blocks_in_plan(model, plan)
    gathered = regions[-1] if asked.sequence_parallel else None
    cutter = Cutter(model, plan, context, inside, outside, cut_blocks, gathered)
    cutter.cut()
    if asked.sequence_parallel:
        cutter.hooks += _split_over(model, cutter, inside)
    cutter.hooks += PackedUseCheck(model).hook(model)
    cutter.hooks += [hook for one in inner for hook in PackedUseCheck(one).hook(model, one)]
    return CutModel(model, regions, (*same, *ends, *cutter.hooks, *_check_gradients(model, axis)))


def _split_over(model: nn.Module, cutter: Cutter, region: CutRegion) -> list[Any]:
    """Split sequences between the blocks that are cut, and gather them where modules need all tokens."""
    modules = dict(model.named_modules(remove_duplicate=False))
    gathering, hooks = cutter.gathering(), list[Any]()
    whole = [*cutter.closed(), *uncut_mixers(modules, cutter.blocks, cutter.plan)]
    for name in gathering:
        hooks += gather_before(name, modules[name], region)
    for name in whole:
        hooks += run_on_whole_sequences(name, modules[name], region)
    hooks += split_sequences(model, cutter.blocks, region)
    own = [one for name in whole for one in modules[name].parameters() if part_of(one) is None]
    for parameter in [*own, *(one for name in gathering for one in cutter.whole_in(name))]:
        mark_partial(parameter, False)
    return hooks


def _check_gradients(model: nn.Module, axis: ModelAxis) -> list[Any]:
    check = GradientCheck(model, axis)
    return [model.register_forward_pre_hook(check), check]


def _come_cut(model: nn.Module, regions: tuple[CutRegion, ...], asked: PlanRequest) -> tuple[CutRegion, ...]:
    """Take a model that comes cut: by an earlier engine, or by its own layers."""
    cut = [module for module in model.modules() if isinstance(module, layers.CutLayer)]
    of_layers = {id(parameter) for layer in cut for parameter in layer.parameters()}
    of_hooks = [
        name
        for name, parameter in model.named_parameters()
        if part_of(parameter) is not None and id(parameter) not in of_layers and not is_marked(parameter)
    ]
    if of_hooks or (cut and (asked.sequence_parallel or any(layer.region.splits_sequences for layer in cut))):
        raise ShardwellError(
            "the model was cut by an earlier engine, with hooks that ended with it (sequence_parallel, experts): call "
            "destroy() of that engine, which makes the model whole, before it is handed over again"
        )
    for layer in cut:
        layer.region = regions[0]
    return regions


def _check_heads(model: nn.Module, size: int) -> None:
    """Refuse a number of heads that the ranks cannot share, by the names that configurations of models use."""
    config = getattr(model, "config", None)
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % size:
            raise ConfigError(f"tensor_parallel.autotp_size: {size} ranks cannot share {heads} heads ({name})")
