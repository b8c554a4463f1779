"""`deepspeed.initialize`: DeepSpeed's arguments over `shardwell.initialize`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import shardwell
from shardwell.compat.deepspeed_api import configuration
from shardwell.compat.deepspeed_api.engine import DeepSpeedEngine
from shardwell.compat.deepspeed_api.zero import is_zero_supported_optimizer
from shardwell.config.field_types import flag, number
from shardwell.errors import ConfigError, ShardwellError
from shardwell.zero import is_released


class ArgumentError(ShardwellError, AssertionError):
    """`initialize` was called in a way that DeepSpeed answers with an AssertionError."""


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Callable[..., Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """Return `(engine, optimizer, training_dataloader, lr_scheduler)` as DeepSpeed does.

    The arguments are DeepSpeed's. Objects that are passed have precedence over the configuration. `mpu` says which
    ranks share tensors or sequences; `mesh_param` has the number of data-parallel ranks, and of those that share rows.
    """
    if model is None:
        raise ArgumentError("deepspeed.initialize needs a model")
    source = _configuration(args, config, config_params)
    user = configuration.as_dictionary(source)
    if isinstance(lr_scheduler, LRScheduler) and not isinstance(optimizer, Optimizer):
        raise ArgumentError(
            f"lr_scheduler is a {type(lr_scheduler).__name__} over an optimizer that is not passed: it would change "
            "rates that nothing reads. Pass that optimizer too, or a function of the optimizer as lr_scheduler"
        )
    from shardwell.compat.deepspeed_api import comm
    from shardwell.compat.deepspeed_api.config_reading import dtype_of_model, for_engine

    comm.init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    mpu = _shared_sequences(mesh_param, user) if mpu is None else mpu
    read_as, schedule = for_engine(user, optimizer=optimizer, lr_scheduler=lr_scheduler)
    _check_tested(optimizer, user)
    _round_parameters(model, dtype_of_model(read_as))
    made = shardwell.initialize(
        model=model,
        optimizer=optimizer,
        model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=schedule,
        collate_fn=collate_fn,
        config=read_as,
        mpu=mpu,
        engine_class=DeepSpeedEngine,
    )
    engine = made.engine
    assert isinstance(engine, DeepSpeedEngine)
    engine.use_arguments(
        user,
        args=args,
        mpu=mpu,
        client_optimizer=optimizer,
        client_lr_scheduler=lr_scheduler,
        training_data=training_data,
        collate_fn=collate_fn,
    )
    return engine, made.optimizer, made.training_dataloader, made.lr_scheduler


def _round_parameters(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Round the values of a model to 16 bits where it computes in them: DeepSpeed's master weights begin with those."""
    for parameter in model.parameters() if dtype is not None else ():
        is_here = not parameter.is_meta and not is_released(parameter)
        if is_here and parameter.is_floating_point() and parameter.dtype.itemsize > 2:
            parameter.data.copy_(parameter.data.to(dtype))


def _check_tested(optimizer: Any, config: Any) -> None:
    """Refuse an optimizer that DeepSpeed does not list, if the configuration asks for that."""
    is_asked = isinstance(config, dict) and flag(number(config.get("zero_allow_untested_optimizer"))) is False
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    shards = isinstance(zero, dict) and number(zero.get("stage", 0)) != 0
    if is_asked and shards and isinstance(optimizer, Optimizer) and not is_zero_supported_optimizer(optimizer):
        raise ArgumentError(
            f"{type(optimizer).__name__} is not one of the optimizers that DeepSpeed has tested with ZeRO, and "
            "zero_allow_untested_optimizer is false: set it to true, or remove it"
        )


def _configuration(args: Any, config: Any, config_params: Any) -> Any:
    """Return the configuration from the one place that names it."""
    given = config if config is not None else config_params
    in_args = getattr(args, "deepspeed_config", None)
    old = getattr(args, "deepscale_config", None)
    if old is not None and in_args is not None:
        raise ArgumentError("args has both deepspeed_config and deepscale_config, its old name; keep the first")
    in_args = old if in_args is None else in_args
    if in_args is not None and given is not None:
        raise ArgumentError("there are two configurations: args.deepspeed_config and the argument config; keep one")
    found = given if given is not None else in_args
    if found is None:
        raise ArgumentError(
            "deepspeed.initialize needs a configuration: config=..., or --deepspeed_config FILE in args"
        )
    return found


def _shared_sequences(mesh_param: Any, config: Any) -> Any:
    """Return an `mpu` of ranks that share sequences if DeepSpeed's mesh or the configuration asks for it, else None."""
    given = config if isinstance(config, dict) else {}
    asked = given.get("sequence_parallel_size", 1)
    data, size = (given.get("data_parallel_size"), asked) if not mesh_param else (*mesh_param, 1)[:2]
    others = given.get("tensor_parallel") or given.get("pipeline")
    if not isinstance(size, int) or size <= 1 or others:
        return None
    from shardwell.compat.deepspeed_api import comm, groups
    from shardwell.compat.deepspeed_api.sequence import SequenceUnit

    if data not in (None, comm.get_world_size() // size) or comm.get_world_size() % size:
        raise ConfigError(
            f"mesh_param: {data} data-parallel ranks x {size} that share sequences are not the {comm.get_world_size()} "
            "rank(s) of this job"
        )
    groups.mpu = SequenceUnit(size)
    return groups.mpu
