"""What the Trainer's and Fabric's strategies share: an engine for each model, and how a model changes engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import shardwell
from shardwell.engine import Engine
from shardwell.errors import CheckpointError, ShardwellError
from shardwell.utils import safe_set_full_optimizer_state

_KEPT = "_shardwell_engine"


class EngineOfModel:
    """Keeps an engine alive as long as its model, beside the model's own state; copies of a model have none."""

    def __init__(self, engine: Engine | None = None) -> None:
        self.engine = engine

    def __reduce__(self) -> Any:
        return EngineOfModel, ()


def engine_of(model: nn.Module) -> Engine | None:
    """Return the engine that a strategy made for this model, if it is still in use."""
    kept = model.__dict__.get(_KEPT)
    return kept.engine if isinstance(kept, EngineOfModel) else None


def release(model: nn.Module) -> None:
    """End the engine of a model, which is then an ordinary one with unsharded parameters. All ranks must call it."""
    engine = engine_of(model)
    if engine is not None:
        model.__dict__.pop(_KEPT)
        engine.destroy()


def parameters_of(optimizer: Optimizer) -> tuple[nn.Parameter, ...]:
    """Return the parameters that an optimizer was made over, before an engine replaces them by shards."""
    return tuple(parameter for group in optimizer.param_groups for parameter in group["params"])


def make_engine(model: nn.Module, optimizer: Optimizer | None, config: dict[str, Any], device: torch.device) -> Engine:
    """Make an engine for a model; one that it had from another strategy or stage is ended first."""
    release(model)
    _check_optimizer(model, optimizer)
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=config, device=device).engine
    model.__dict__[_KEPT] = EngineOfModel(engine)
    return engine


def _check_optimizer(model: nn.Module, optimizer: Optimizer | None) -> None:
    if optimizer is None:
        return
    own = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in own for parameter in parameters_of(optimizer)):
        raise ShardwellError(
            f"none of the parameters of this {type(optimizer).__name__} belongs to the model any more: make the "
            "optimizer over model.parameters() after the model is complete"
        )


def load_full_state(engine: Engine, parameters: Sequence[nn.Parameter], saved: Mapping[str, Any]) -> None:
    """Load the `state_dict` of a torch optimizer over unsharded parameters; all ranks must have the same.

    `parameters` are those of the engine's optimizer in the order in which it was made over them.
    """
    assert engine.optimizer is not None
    groups = engine.optimizer.param_groups
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    if len(saved["param_groups"]) != len(groups) or len(numbers) != len(parameters):
        raise CheckpointError(
            f"the file's optimizer has {len(saved['param_groups'])} parameter groups with {len(numbers)} parameters; "
            f"this one has {len(groups)} with {len(parameters)}. Make it as it was made for the file"
        )
    for group, before in zip(groups, saved["param_groups"], strict=True):
        group.update({key: value for key, value in before.items() if key != "params"})
    for parameter, number in zip(parameters, numbers, strict=True):
        for key, value in saved["state"].get(number, {}).items():
            if value is not None:
                safe_set_full_optimizer_state(parameter, value, key)


@contextmanager
def not_at_a_boundary(engine: Engine) -> Iterator[None]:
    """Accumulate the gradients of the micro-batches inside, whose loop has divided the loss.

    At stages 0 and 1 they are not reduced before the boundary. From stage 2 on each is reduce-scattered, since holding
    full gradients is what these stages avoid.
    """
    engine.set_gradient_accumulation_boundary(False)
    try:
        yield
    finally:
        engine.set_gradient_accumulation_boundary(True)


def one_optimizer(optimizers: list[Any]) -> Optimizer:
    """Return the single optimizer, or refuse."""
    if len(optimizers) != 1:
        raise ShardwellError(
            f"a shardwell strategy trains a model with one optimizer, and found {len(optimizers)}. Make one optimizer "
            "with several parameter groups; models that are trained in turn, as in a GAN, are an engine each "
            "(shardwell.initialize, or fabric.setup of each model with its optimizer)."
        )
    return one_optimizer_object(optimizers[0])


def one_optimizer_object(optimizer: Any) -> Optimizer:
    """Return the torch optimizer inside of Lightning's wrapper, or refuse what is none."""
    found = getattr(optimizer, "_optimizer", optimizer)
    if type(found).__name__ == "_MockOptimizer" or not isinstance(found, Optimizer):
        raise ShardwellError(
            "configure_optimizers returned no optimizer, so there is nothing to train; use trainer.validate, test or "
            "predict to evaluate a model"
        )
    return found
