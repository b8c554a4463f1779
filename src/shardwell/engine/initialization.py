"""`initialize`: build an engine from a model and a configuration."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, IterableDataset

from shardwell import activation_checkpointing
from shardwell.config import Config, load
from shardwell.engine.autotune import autotune
from shardwell.engine.compilation import follow_compiled_parts
from shardwell.engine.consistency import before_building, before_grouping, once_built
from shardwell.engine.data_loader import ShardedLoader
from shardwell.engine.divergence_advice import divergence_advice
from shardwell.engine.engine import Engine
from shardwell.engine.given_arguments import check_calls, configuration_of, device_for
from shardwell.engine.mesh_setup import (
    axes_of_arguments,
    axes_of_settings,
    axes_to_load,
    check_line,
    make_context,
    open_nodes,
    ranks_per_copy,
    reconnect,
)
from shardwell.engine.model_axes import bind_to_sequences, keep_own_experts
from shardwell.engine.module_buffers import place_buffers
from shardwell.engine.monitor_setup import monitor_for, profile_if_asked
from shardwell.engine.offload_setup import plan_states, registry_for, replan_states, settle_stage, with_tiers
from shardwell.engine.optimizer_setup import make_optimizer
from shardwell.engine.persistence import persistent_in
from shardwell.engine.pipeline_engine import PipelinedEngine, pipelined
from shardwell.engine.pipeline_setup import divided_model, plan_pipeline, stages_of, with_pipeline
from shardwell.engine.schedule_setup import schedule_for
from shardwell.engine.scheduler_setup import make_scheduler
from shardwell.engine.startup_report import UserArguments, announce
from shardwell.engine.teardown import ModelBefore, Teardown, end_engines_of, when_handed_on
from shardwell.engine.unit_specs import unit_specs
from shardwell.engine.user_data_loader import UserDataLoader, loader_like, with_batch_of
from shardwell.engine.whole_saves import save_whole_models
from shardwell.errors import ConfigError, DivergenceError
from shardwell.kernels.quantize import Codec
from shardwell.long_work import LongWork
from shardwell.memory import Device
from shardwell.optim import OptimizerFactory, ShardedOptimizer, factory_for
from shardwell.optim.factory import NO_LABEL
from shardwell.optim.given_parameters import check_optimizer_parameters, listed_parameters
from shardwell.optim.gradient_views import GradientViews
from shardwell.optim.user_optimizer import watch_optimizers
from shardwell.parallel import Agreement, Collectives, start_process_group
from shardwell.parallel.consistency import check_alike
from shardwell.parallel.mesh import world_mesh
from shardwell.runtime.commit_policy import commit_policy, settle_commit
from shardwell.runtime.precision import dtype_of, has_narrow_masters, mixed_dtype, settle_precision
from shardwell.runtime.rebuild import UnitBuilder
from shardwell.runtime.scheduler import Scheduler
from shardwell.sharding import EngineContext, GroupPrecision, ShardedGroup, Unit, UnitSpec, spec_for
from shardwell.sharding.dtensor_parameters import line_of_dtensors
from shardwell.sharding.init_parameters import meet_for_initialize
from shardwell.sharding.model_checks import check_is_model, check_model
from shardwell.sharding.model_states import GroupKey, ModelStates, OffloadPlan, StateFormula
from shardwell.sharding.parameter_views import GroupMember
from shardwell.sharding.spec import CommPrecision, SpecOverrides, casts
from shardwell.sharding.tensor_part import check_parts, is_partial, part_of


class Initialized(NamedTuple):
    """The tuple that `initialize` returns: engine, optimizer, data loader and learning-rate scheduler."""

    engine: Engine
    optimizer: ShardedOptimizer | None
    training_dataloader: ShardedLoader | UserDataLoader | None
    lr_scheduler: Any


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Callable[..., Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | DataLoader[Any] | None = None,
    lr_scheduler: Any = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    *,
    config_params: Any = None,
    device: torch.device | str | None = None,
    mesh: DeviceMesh | None = None,
    mpu: Any = None,
    engine_class: type[Engine] = Engine,
) -> Initialized:
    """Shard `model` as `config` says, and return `(engine, optimizer, training_dataloader, lr_scheduler)`.

    The process group that the launcher describes is joined; without a launcher there is a single rank.

    Args:
        model: The model, whose parameters become shards.
        model_parameters: Parameters or parameter groups of an optimizer that is built; by default all trainable ones.
        optimizer: An optimizer, its class, or a function of parameter groups; by default that of the configuration.
        lr_scheduler: A scheduler, or a function of the optimizer; by default that of the configuration.
        training_data: A data set or a DataLoader. Ranks share its samples, unless it has a sampler of its own.
        config: A path, a dictionary or a `Config` (also `config_params`); by default `args.deepspeed_config`.
        device: The device of this rank; by default SHARDWELL_DEVICE, its GPU if there is one, or the CPU.
        mesh: A DeviceMesh over all ranks. With one dimension, which is the default, states are sharded over all ranks.
            With two, they are sharded over the last ("dp_shard") and replicated over the first ("dp_replicate"), also
            if the dimensions have other names. Other axes have names: "pp", "dp" (shards), "sp", "tp". The engine makes
            process groups of its own for it.
        mpu: Megatron's object that knows the axes, instead of a mesh.
        engine_class: The class of the engine: `Engine`, or a subclass with the same constructor.
    """
    divided = divided_model(model)
    model = check_is_model(model.module if isinstance(model, Engine) else model if divided is None else divided.model)
    end_engines_of(model)
    check_model(model)
    check_calls(engine_class, collate_fn)
    source = configuration_of(args, config, config_params)
    where = device_for(model, device)
    start_process_group(where)
    meet_for_initialize(model)
    world = world_mesh(where)
    agreement = Agreement(world)
    with agreement.failing_together("initialize", common=(DivergenceError,)):
        check_optimizer_parameters(model, optimizer)
        model_parameters = listed_parameters(model, model_parameters)
        given = axes_of_arguments(mesh, mpu, world, Device(where), agreement)
        line = line_of_dtensors(model)
        asked = load(
            source,
            world_size=world.size,
            axes=axes_to_load(given, stages_of(divided), line),
            optimizer_given=optimizer is not None,
            scheduler_given=lr_scheduler is not None,
        )
        settings = settle_precision(with_pipeline(asked, given, divided), model.parameters())
        home = Device(where, keep_pages=settings.shardwell.keep_pages)
        grid = axes_of_settings(settings, world.size, line) if given is None else given
        check_line(grid, line, world.rank)
        context = make_context(home, world, settings, agreement, grid, before_grouping(settings, grid))
        cut, plan = _take_dtensors(model, context) if line else None, None
        if divided is not None or grid.pipe > 1:
            plan = plan_pipeline(divided, model, settings, context)
            context = plan.context
            optimizer, model_parameters = plan.own(optimizer), plan.own(model_parameters)
            engine_class = pipelined(engine_class)
        sequences = bind_to_sequences(model, context, mpu)
        experts = keep_own_experts(model, context)
        cut = cut or _cut_over_tensor_axis(model, settings, context)
        block = settings.optimizer if optimizer is None else None  # an optimizer in code has precedence
        named = partial(engine_class.optimizer_named, settings)
        factory = factory_for(optimizer, model, model_parameters, block, home, named)
        engine = _engine(engine_class, model, settings, factory, context)
        engine._teardown.cut, engine._teardown.sequences = experts or cut, sequences
        if engine._teardown.cut is not None or plan is not None or sequences is not None:
            save_whole_models(model, is_stage=plan is not None)
        if plan is not None and isinstance(engine, PipelinedEngine):
            engine.use_pipeline(plan)
        if factory is not None:
            engine.optimizer = make_optimizer(factory, engine, engine._scheduler, engine._context)
        engine.lr_scheduler = schedule_for(lr_scheduler, settings.scheduler, engine.optimizer)
        engine.training_dataloader = _loader(training_data, engine, collate_fn)
        check_alike(context.roles.all, "initialize", once_built(engine))
        context.roles.all.end_step()
        context.roles.end_step_of_axes()
        engine.startup_report = announce(engine, UserArguments(optimizer is not None, lr_scheduler is not None))
        engine.monitor = monitor_for(engine)
        profile_if_asked(engine)
    return Initialized(engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler)


def _take_dtensors(model: nn.Module, context: EngineContext) -> Any:
    """Take a model that comes as DTensors: everything below sees local tensors."""
    from shardwell.tensor_parallel.dtensor_model import take_dtensors

    return take_dtensors(model, context.roles)


def _cut_over_tensor_axis(model: nn.Module, settings: Config, context: EngineContext) -> Any:
    """Cut the model over the ranks of the tensor axis, if there is one."""
    if context.roles.tensor is None:
        check_parts(model, context.roles.grid.expert)
        return None
    from shardwell.tensor_parallel.setup import PlanRequest, cut_model

    block = settings.tensor_parallel
    asked = PlanRequest(block.plan, block.partition_config, block.sequence_parallel, block.tp_overlap_comm)
    return cut_model(model, context, asked)


def _engine(
    engine_class: type[Engine],
    model: nn.Module,
    settings: Config,
    factory: OptimizerFactory | None,
    context: EngineContext,
) -> Engine:
    """Wrap the model in units and build them after a check that all ranks build the same; the optimizer comes later."""
    agreement = context.roles.agreement
    settings = settle_stage(settings, partial(_sizes, model, factory, context), model, context)
    specs = unit_specs(model, settings)
    check_alike(context.roles.stage, "initialize", before_building(settings, model, specs, factory))
    persistent = persistent_in(specs, settings.zero_optimization)
    states = _states(specs, settings, factory, context, persistent)
    settings = autotune(settle_commit(settings, factory), context, states)
    context = open_nodes(context, settings)
    offload = plan_states(_states(specs, settings, factory, context, persistent), specs, settings, factory, context)
    context = with_tiers(context, settings, offload)
    before = ModelBefore(model)
    units = build_units(specs, settings, factory, context, offload)
    kept, by_user = settings.shardwell.keep_fp32_buffers, "keep_fp32_buffers" in settings.shardwell.model_fields_set
    place_buffers(model, context, mixed_dtype(settings), kept, kept_by_user=by_user)
    scheduler = make_scheduler(units, settings, context)
    builder = UnitBuilder(
        lambda: unit_specs(model, settings),
        lambda one, specs, trained: _groups(
            one,
            settings,
            builder.factory,
            _places(specs, settings, builder.factory, context, offload, trained),
            context,
            trained,
        ),
        lambda engine, factory: make_optimizer(factory, engine, scheduler, context),
        lambda given: factory_for(given, model, None, None, context.device),
        factory,
        offload,
    )
    engine = engine_class(model, settings, scheduler, context, builder)
    engine._teardown = Teardown(
        model,
        before,
        scheduler,
        context,
        partial(reconnect, context, settings),
        partial(registry_for, context, settings),
        engine._fit.hooks,
    )
    _meet_the_user(engine, scheduler)
    agreement.advise = _advice(model, settings.zero_optimization.stage)
    activation_checkpointing.use_config(settings, model)
    return engine


def _advice(model: nn.Module, stage: int) -> Callable[[str, str], str]:
    """Return a function that advises ranks on different paths. Disk transfers hold it, so it holds the model weakly."""
    reference = weakref.ref(model)

    def advise(ours: str, theirs: str) -> str:
        living = reference()
        return "" if living is None else divergence_advice(living, stage, ours, theirs)

    return advise


def _meet_the_user(engine: Engine, scheduler: Scheduler) -> None:
    """Connect the engine to what users do to gradients and to optimizers of their own."""
    scheduler.adopt, scheduler.reducer.drop_gradients = _weakly(engine.adopt), _weakly(engine.zero_grad)
    scheduler.end = when_handed_on(engine)
    if not engine._context.device.is_meta:
        scheduler.reducer.views = GradientViews(engine._context, scheduler.reducer)
    follow_compiled_parts(engine.module, scheduler)
    scheduler.adopt_units(scheduler.units)
    watch_optimizers()


def _ranks_per_loss(settings: Config, shard: Collectives) -> int:
    """Return over how many ranks the residual of quantised gradients is split; 0 if it is not kept."""
    if not (settings.zero_optimization.zero_quantized_gradients and settings.shardwell.codecs.feedback):
        return 0
    return shard.hops.inside.rank_group.size if shard.hops is not None else int(shard.rank_group.size > 1)


def build_units(
    specs: list[UnitSpec],
    settings: Config,
    factory: OptimizerFactory | None,
    context: EngineContext,
    offload: OffloadPlan,
) -> list[Unit]:
    """Move parameters into groups, units on the lowest tiers first: they leave memory before others allocate it."""
    places = _places(specs, settings, factory, context, offload)
    order = sorted(range(len(specs)), key=lambda index: -offload.places[specs[index].name].depth)
    speaks = context.roles.all.rank_group.rank == 0 and not context.device.is_meta
    sharding, units = LongWork("initialize: units sharded", len(order), speaks=speaks), []
    for index in order:
        units.append(Unit(index, specs[index], _groups(specs[index], settings, factory, places, context)))
        sharding.add()
    return sorted(units, key=lambda unit: unit.index)


def _groups(
    one: UnitSpec,
    settings: Config,
    factory: OptimizerFactory | None,
    places: _Placements,
    context: EngineContext,
    trained: Set[int] = frozenset(),
) -> list[ShardedGroup]:
    zero, own = settings.zero_optimization, settings.shardwell
    place = places.offload.places[one.name]
    overrides = SpecOverrides(
        secondary_in_node=context.roles.secondary is not None,
        parameter_tier=place.parameters,
        optimizer_tier=place.optimizer,
        gradient_tier=place.gradient_tier,
        commit=places.offload.commit_of(one.name),
        all_gather_codec=Codec(own.codecs.weights) if zero.zero_quantized_weights else None,
        storage_codec=_storage_codec(settings),
        reduce_codecs=(Codec(own.codecs.inside), Codec(own.codecs.between)) if zero.zero_quantized_gradients else None,
        feedback=own.codecs.feedback,
    )
    groups = []
    kinds = _kinds(one, settings, factory, context, places.persistent, trained)
    for number, (kind, members) in enumerate(kinds.items()):
        own_context = context.of_group(is_cut=kind.is_cut)
        spec = spec_for(
            zero.stage,
            persistent=kind.persistent,
            num_ranks=own_context.roles.shard.rank_group.size,
            shard_at_world_one=own.shard_at_world_one,
            # Copies of a tied parameter are summed at the step: nothing of it may move away or be updated before.
            overrides=SpecOverrides() if kind.tied else overrides.of(kind.precision.compute, kind.trains),
        )
        if own_context is not context:
            spec = replace(spec, copies=context.roles.grid.tensor, sums_copies=kind.is_partial)
        name = (one.name or "(root)") + (f"#{number}" if number else "")
        groups.append(ShardedGroup(name, one.name, members, spec, kind.precision, own_context))
    return groups


def _storage_codec(settings: Config) -> Codec | None:
    """Return the codec that frozen parameters are stored in, or None."""
    is_on = settings.zero_optimization.zero_quantized_nontrainable_weights
    return Codec(settings.shardwell.codecs.frozen) if is_on else None


def _kinds(
    one: UnitSpec,
    settings: Config,
    factory: OptimizerFactory | None,
    context: EngineContext,
    persistent: set[int],
    trained: Set[int] = frozenset(),
) -> dict[GroupKey, list[GroupMember]]:
    """Return the parameters of a unit by the group that they belong to."""
    mixed, narrow = mixed_dtype(settings), has_narrow_masters(settings)
    accumulate = dtype_of(settings.data_types.grad_accum_dtype)
    wire = _wire(settings, context.roles.averaged.rank_group.size)
    kinds: defaultdict[GroupKey, list[GroupMember]] = defaultdict(list)
    for name, parameter in one.parameters:
        label = factory.label(parameter) if factory is not None else NO_LABEL
        dtype = mixed if mixed is not None and casts(parameter.dtype) else parameter.dtype
        trains = parameter.requires_grad or id(parameter) in trained
        precision = GroupPrecision.of(dtype, mixed, trains, accumulate, wire, narrow_masters=narrow)
        kind = GroupKey(
            precision,
            trains,
            id(parameter) in persistent,
            part_of(parameter) is not None,
            is_partial(parameter),
            context.tied_name(parameter),
        )
        kinds[kind].append(GroupMember(name, parameter, label, trains))
    return kinds


def _states(
    specs: list[UnitSpec],
    settings: Config,
    factory: OptimizerFactory | None,
    context: EngineContext,
    persistent: set[int],
    trained: Set[int] = frozenset(),
) -> ModelStates:
    """Return the sizes of the model's states."""
    num_shards = context.roles.shard.rank_group.size
    units = {
        one.name: {
            kind: sum(member.parameter.numel() for member in members)
            for kind, members in _kinds(one, settings, factory, context, persistent, trained).items()
        }
        for one in specs
    }
    formula = StateFormula(
        settings.zero_optimization.stage,
        num_shards,
        settings.shardwell.shard_at_world_one,
        factory.num_states if factory is not None else 0,
        settings.shardwell.moments == "8bit",
        (settings.gradient_accumulation_steps or 1) > 1,
        commit_policy(settings),
        ranks_per_copy(settings, num_shards),
        _storage_codec(settings),
        _ranks_per_loss(settings, context.roles.shard),
    )
    return ModelStates(units, formula)


def _sizes(model: nn.Module, factory: OptimizerFactory | None, context: EngineContext, settings: Config) -> ModelStates:
    """Return the sizes of the states that a model would have with a configuration."""
    specs = unit_specs(model, settings)
    return _states(specs, settings, factory, context, persistent_in(specs, settings.zero_optimization))


@dataclass(frozen=True)
class _Placements:
    """The placements that differ from what the stage alone prescribes."""

    persistent: set[int]  # ids of small parameters that stay unsharded
    offload: OffloadPlan


def _places(
    specs: list[UnitSpec],
    settings: Config,
    factory: OptimizerFactory | None,
    context: EngineContext,
    offload: OffloadPlan,
    trained: Set[int] = frozenset(),
) -> _Placements:
    persistent = persistent_in(specs, settings.zero_optimization)
    states = _states(specs, settings, factory, context, persistent, trained)
    return _Placements(persistent, replan_states(offload, states, settings))


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Wrap a method of the engine for objects that the engine owns, without a reference cycle."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        living = reference()
        if living is not None:
            living(*args)

    return call


def _wire(settings: Config, num_averaged: int) -> CommPrecision:
    predivide = float(num_averaged) if settings.prescale_gradients else settings.gradient_predivide_factor
    return CommPrecision(dtype_of(settings.communication_data_type), predivide)


def _loader(
    data: Dataset[Any] | DataLoader[Any] | None, engine: Engine, collate_fn: Any
) -> ShardedLoader | UserDataLoader | None:
    if data is None:
        return None
    where = engine.data_rank, engine.data_size, engine.device
    if isinstance(data, DataLoader):
        asked, config = with_batch_of(data, engine.settings, engine.data_size)
        engine.use_config(config)
        return loader_like(data, asked, *where, collate_fn)
    has_samples = hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, str | bytes)
    if not has_samples and not isinstance(data, IterableDataset):
        raise ConfigError(
            f"training_data: expected a data set (with indices and a length, or an IterableDataset) or a DataLoader, "
            f"found a {type(data).__name__}"
        )
    return ShardedLoader(data, engine.train_micro_batch_size_per_gpu(), *where, collate_fn)
