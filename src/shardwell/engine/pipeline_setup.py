"""How `initialize` prepares a pipeline: this rank's stages, its links, and the settings that a pipeline changes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from shardwell import activation_checkpointing
from shardwell.config import Config, ShardwellConfig, ZeroConfig
from shardwell.engine.consistency import before_dividing
from shardwell.errors import ConfigError, ShardwellError
from shardwell.parallel import Collectives
from shardwell.parallel.consistency import check_alike
from shardwell.parallel.grid import Grid
from shardwell.parallel.mesh import mesh_of
from shardwell.parallel.point_to_point import PointToPoint
from shardwell.parallel.roles import MeshRoles, lines_to_make
from shardwell.pipeline.late_weights import LateWeights
from shardwell.pipeline.messages import StageMessages, channels
from shardwell.pipeline.module import PipelineModule
from shardwell.pipeline.split import SplitModel, split
from shardwell.pipeline.stage_modules import Layers, StageModules
from shardwell.sharding import EngineContext, released
from shardwell.sharding.context import TiedCopies

_BUNDLE = 1 << 26  # elements of a stage whose gradients are reduced together, once a step: 128 MiB in 16 bits
_MANY = 4  # micro-batches from which stages 2 and 3 cost much on the data axis


class DividedModel(Protocol):
    """A model with its layers: a `SplitModel` or a `PipelineModule`."""

    @property
    def model(self) -> nn.Module: ...
    @property
    def layers(self) -> Layers: ...
    def borders(self, num_stages: int, method: str) -> list[int]: ...


@dataclass(frozen=True)
class PipelinePlan:
    """The part of a pipeline that this rank has."""

    context: EngineContext
    modules: StageModules
    messages: StageMessages | None  # None: all stages are on this rank
    loss_fn: Callable[..., Any] | None
    rank: int  # along the pipeline
    num_ranks: int
    dropped: frozenset[int]  # ids of the parameters that only other ranks have
    late: LateWeights | None  # weight gradients that are computed late, for schedules that split backwards

    @property
    def has_late_weights(self) -> bool:
        """Whether backwards can be split."""
        return self.late is not None

    def own(self, given: Any) -> Any:
        """Return an optimizer over the whole model, or parameters or groups of it, without those of other ranks."""
        if isinstance(given, Optimizer):
            for group in given.param_groups:
                group["params"] = self._kept(group["params"])
        elif given is not None and not callable(given):
            listed = list(given)
            if listed and isinstance(listed[0], dict):
                return [{**group, "params": self._kept(group["params"])} for group in listed]
            return self._kept(listed)
        return given

    def _kept(self, parameters: Iterable[Any]) -> list[Any]:
        return [one for one in parameters if id(one) not in self.dropped]


def divided_model(model: Any) -> DividedModel | None:
    """Return the model with its layers, if it comes so."""
    return model if isinstance(model, SplitModel | PipelineModule) else None


def stages_of(divided: DividedModel | None) -> dict[str, int] | None:
    """Return the ranks along the pipeline that a model was built for; None if any number will do."""
    return {"pipe": divided.num_stages} if isinstance(divided, PipelineModule) else None


def with_pipeline(settings: Config, grid: Grid | None, divided: DividedModel | None) -> Config:
    """Return the settings with the stages of a mesh or of a model; in a pipeline, ZeRO stage 1 is the default."""
    stages = settings.pipeline.stages if grid is None else grid.pipe
    changes: dict[str, Any] = {"stages": stages}
    if isinstance(divided, PipelineModule):
        changes = {"stages": divided.num_stages, "chunks": divided.num_chunks}
    if changes["stages"] == 1:
        return settings
    pipeline, zero = settings.pipeline.model_copy(update=changes), settings.zero_optimization
    if "stage" not in zero.model_fields_set:
        zero = zero.model_copy(update={"stage": 1})
    own = settings.shardwell
    if zero.stage in (0, 1) and zero.offload_optimizer.device == "none" and own.placement != "auto":
        own, zero = _with_few_units(own, zero)
    return settings.model_copy(update={"pipeline": pipeline, "zero_optimization": zero, "shardwell": own})


def _with_few_units(own: ShardwellConfig, zero: ZeroConfig) -> tuple[ShardwellConfig, ZeroConfig]:
    """Return the settings with large units, where nobody has asked for others.

    Gradients are reduced once a step, in the last backward, and parameters are not resharded: small units gain little
    overlap for many collectives, in each of which the ranks of a stage wait for one another.
    """
    if own.bundle_size == "auto":
        own = own.model_copy(update={"bundle_size": _BUNDLE})
    if zero.stage3_param_persistence_threshold == "auto" and zero.stage3_model_persistence_threshold is None:
        zero = zero.model_copy(update={"stage3_param_persistence_threshold": 0})  # norms stay with their blocks
    return own, zero


def plan_pipeline(
    divided: DividedModel | None, model: nn.Module, settings: Config, context: EngineContext
) -> PipelinePlan:
    """Leave this rank its stages of the model, and open its links. All ranks must call it."""
    divided = divided if divided is not None else split(model)
    block, roles = settings.pipeline, context.roles
    if any(released.is_owned(parameter) for parameter in model.parameters()):
        raise ConfigError(
            "a pipeline of a model that was built inside zero.Init is not supported: build it on the meta device or on "
            "the host, or as a PipelineModule of LayerSpecs, of which each rank builds its own"
        )
    interval = block.activation_checkpoint_interval or getattr(divided, "interval", 0)
    if interval > 1:
        raise ConfigError(
            f"pipeline.activation_checkpoint_interval: {interval} is not supported; use 1, which recomputes one layer "
            "at a time and keeps the input of each, or 0"
        )
    num_ranks, chunks = roles.grid.pipe, block.chunks
    rank = roles.grid.position(roles.all.rank_group.rank)["pipe"]
    if isinstance(divided, PipelineModule):
        _check_layout(roles.grid)
    if divided.layers.are_divided:
        raise ShardwellError(
            "pipeline: an earlier engine has divided this model, and the layers of other ranks are gone: build it "
            "again, and load the checkpoint of that engine"
        )
    loss_fn = divided.__dict__["loss_fn"]
    _check_loss(loss_fn, model)
    if not context.device.is_meta:  # a simulation leaves them as they are
        move_loss(loss_fn, model, context.device.torch_device)
    borders = divided.borders(num_ranks * chunks, block.partition)
    check_alike(roles.all, "initialize", before_dividing(divided, borders))
    whole = list(model.parameters())
    modules = StageModules(divided.layers, borders, rank, num_ranks)
    dropped = frozenset(map(id, whole)) - frozenset(map(id, model.parameters()))
    messages = None
    if roles.pipe is not None:
        links = PointToPoint(roles.pipe, _lines(roles), channels(num_ranks, chunks))
        messages = StageMessages(links, num_ranks, context.device.torch_device)
    late = LateWeights(modules) if block.schedule == "zb-h1" else None
    if interval:
        modules.recompute(activation_checkpointing.checkpoint)
    _say_costs(settings, context)
    context = replace(context, tied=_tie(modules, divided, context))
    return PipelinePlan(context, modules, messages, loss_fn, rank, num_ranks, dropped, late)


def _check_loss(loss_fn: Any, model: nn.Module) -> None:
    """Raise if a loss has parameters of its own, which no stage would train."""
    known = {id(parameter) for parameter in model.parameters()}
    inside = loss_fn.named_parameters() if isinstance(loss_fn, nn.Module) else ()
    own = [name for name, parameter in inside if parameter.requires_grad and id(parameter) not in known]
    if own:
        raise ConfigError(
            f"pipeline: loss_fn is a {type(loss_fn).__name__} with parameters of its own ('{own[0]}'), which belong to "
            "no stage and would not be trained: make them a part of the last layer, or freeze them"
        )


def move_loss(loss_fn: Any, model: nn.Module, device: torch.device) -> None:
    """Move the weights of classes and the frozen parameters of a loss, which no stage has, to the device."""
    if not isinstance(loss_fn, nn.Module):
        return
    known = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for parameter in loss_fn.parameters():
        if id(parameter) not in known:
            parameter.data = parameter.data.to(device)
    for module in loss_fn.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in known:
                module._buffers[name] = buffer.to(device)


def _check_layout(grid: Grid) -> None:
    """Raise if ranks have other stages than those whose layers a PipelineModule has built, in the order of ranks."""
    size = grid.size // grid.pipe
    if strange := [rank for place, rank in enumerate(grid.ranks) if place // size != rank // size]:
        rank = strange[0]
        raise ConfigError(
            f"rank {rank} has stage {grid.position(rank)['pipe']} by the mesh or mpu, and its PipelineModule has built "
            f"the layers of stage {rank // size}: the pipeline must be the first dimension, of neighbouring ranks for "
            "each stage"
        )


def _tie(modules: StageModules, divided: DividedModel, context: EngineContext) -> TiedCopies | None:
    """Give the copies of tied parameters the values of the first, and return the ranks that hold them."""
    tied = divided.tied_ranks() if isinstance(divided, PipelineModule) else modules.tied
    roles = context.roles
    world, own = roles.all.rank_group, roles.all.rank_group.rank
    # A stage in between has none, and takes part in making the groups only.
    told = roles.all.all_reduce_min(float(not tied), "TIED") if roles.pipe is not None else 1.0
    if told:
        return None
    first, last = 0, roles.grid.pipe - 1
    if strange := [(name, ranks) for name, ranks in tied.items() if ranks != (first, last)]:
        name, ranks = strange[0]
        raise ConfigError(
            f"pipeline: parameter '{name}' is shared by layers on pipeline ranks {', '.join(map(str, ranks))}; only "
            f"the first and the last one ({first} and {last}) may share parameters. Divide the layers in another way "
            "(split(at=...), pipeline.partition)."
        )
    lines = _lines(roles)
    ends = [[line[first], line[last]] for line in lines]
    middle = [[rank] for line in lines for rank in line if rank not in (line[first], line[last])]
    comm = roles.all.over(mesh_of(world, [*ends, *middle]))
    parameters = dict(modules.layers.model.named_parameters(remove_duplicate=False))
    found = {name: parameters[name] for name in sorted(tied) if name in parameters}
    for parameter in found.values():
        _copy_first(parameter, comm, is_first=own in (line[first] for line in lines))
    return TiedCopies({id(parameter): name for name, parameter in found.items()}, comm)


def _lines(roles: MeshRoles) -> list[list[int]]:
    return lines_to_make(roles.grid, roles.all.rank_group, "pipe")


def _copy_first(parameter: nn.Parameter, comm: Collectives, *, is_first: bool) -> None:
    """Overwrite the copies of a parameter with the first one: the other copies add nothing to it."""
    if parameter.is_meta:
        return
    values = parameter.detach().to(comm.device.torch_device, copy=True)
    values = (values if is_first else values.zero_()).flatten()
    total = torch.empty_like(values)
    comm.direct.all_reduce(values, total, 1.0, False).wait()
    parameter.data.copy_(total.view(parameter.shape))


def _say_costs(settings: Config, context: EngineContext) -> None:
    """Say what stages 2 and 3 send with many micro-batches."""
    stage, number = settings.zero_optimization.stage, settings.gradient_accumulation_steps or 1
    roles = context.roles
    if stage < 2 or number <= _MANY or roles.data.rank_group.size == 1 or roles.all.rank_group.rank:
        return
    parts = 3 * number if stage == 3 else number + 1
    logging.getLogger("shardwell").warning(
        "zero_optimization.stage %d in a pipeline with %d micro-batches: each step moves a stage's parameters %d times "
        "over the data-parallel ranks, and at stage 1 twice. Use stage 1 if its memory suffices.",
        stage,
        number,
        parts,
    )
