"""The user's own optimizer object: its `step` and `zero_grad` after an engine has taken it over.

An engine steps shards with it. A call of `optimizer.step()`, as in a plain training loop, is the engine's step. An
optimizer over parameters of an engine's model that was not passed to the engine is taken over at its first step if the
engine has none, and refused if it has one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from shardwell.errors import ShardwellError
from shardwell.optim.unit_optimizer import optimizer_of
from shardwell.sharding import Unit, released


class SteppingEngine(Protocol):
    """The engine that steps the shards of an optimizer."""

    optimizer: Any  # the one that knows when state is up to date

    def fit_to_model(self) -> None:
        """Rebuild units if the model has changed."""

    def step_now(self) -> None:
        """Apply the gradients, at any count of micro-steps."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""


def redirect(optimizer: Optimizer, trainer: SteppingEngine) -> None:
    """Redirect `step`, `zero_grad`, new groups and the state dicts of the user's optimizer to the engine."""
    engine = weakref.ref(trainer)

    def living() -> SteppingEngine:
        found = engine()
        if found is None:
            raise ShardwellError(
                f"the engine that took this {type(optimizer).__name__} over is gone: make a new optimizer"
            )
        return found

    def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        return step_with(living(), closure)

    def zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
        living().zero_grad(set_to_none)

    def state_dict(self: Optimizer) -> dict[str, Any]:
        found: dict[str, Any] = living().optimizer.state_dict()
        return found

    def load_state_dict(self: Optimizer, state_dict: dict[str, Any]) -> None:
        living().optimizer.load_state_dict(state_dict)

    def add_param_group(self: Optimizer, param_group: dict[str, Any]) -> None:
        living().optimizer.add_param_group(param_group)

    # Schedulers read this to know that steps are counted. The engine counts them.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    # These are methods, because schedulers wrap `optimizer.step.__func__`.
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
    optimizer.zero_grad = MethodType(zero_grad, optimizer)  # type: ignore[method-assign]
    optimizer.state_dict = MethodType(state_dict, optimizer)  # type: ignore[method-assign]
    optimizer.load_state_dict = MethodType(load_state_dict, optimizer)  # type: ignore[method-assign]
    optimizer.add_param_group = MethodType(add_param_group, optimizer)  # type: ignore[method-assign]


def step_with(trainer: SteppingEngine | None, closure: Callable[[], Any] | None) -> Any:
    """Take a step as torch's optimizers do: call the closure once, and return its result."""
    if trainer is None:
        raise ShardwellError("the engine of this optimizer is gone")
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    trainer.step_now()
    return loss


# -------------------------------------------------------------- optimizers that were not passed to initialize

_watching: RemovableHandle | None = None


def watch_optimizers() -> None:
    """Detect from now on an optimizer that steps parameters of an engine's model."""
    global _watching
    if _watching is None:
        _watching = register_optimizer_step_pre_hook(meet_foreign_step)


def meet_foreign_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Take over, or refuse, an optimizer that is about to step parameters of an engine's model."""
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            if "_shardwell_owner" in tensor.__dict__:
                _adopt_or_refuse(optimizer, released.owner_of(tensor), args, kwargs)
                return


def _adopt_or_refuse(optimizer: Optimizer, unit: Any, args: Any, kwargs: Any) -> None:
    name = type(optimizer).__name__
    if not isinstance(unit, Unit) or unit.owner is None or unit.owner.adopt is None:
        raise ShardwellError(
            f"this {name} steps parameters of a model that was built in shardwell.zero.Init and not given to "
            "shardwell.initialize yet: do that first, with optimizer=..."
        )
    if unit.optimizer is not None:
        raise ShardwellError(
            f"this {name} was made over parameters of a model that a shardwell engine trains with an optimizer of its "
            f"own ({type(optimizer_of(unit).inner).__name__}). Values and gradients are split over the ranks: it would "
            "train nothing. Call engine.step(), or give this optimizer to shardwell.initialize(optimizer=...) and name "
            "none in the configuration."
        )
    if any(one is not None for one in (*args[1:], kwargs.get("closure"))):
        raise ShardwellError(
            f"a step with a closure must not be the first one of this {name}: give the optimizer to "
            "shardwell.initialize(optimizer=...)"
        )
    unit.owner.adopt(optimizer)  # its parameters are shards without gradients now: the rest of this step does nothing


# --------------------------------------------------------------------------------------------- gradients of shards


class NoGradientLeft(Tensor):
    """The `grad` of an optimizer's shards while there are gradients: every use raises an error that names `p.grad`."""

    @staticmethod
    def __new__(cls, shard: Tensor) -> NoGradientLeft:
        made: NoGradientLeft = Tensor._make_wrapper_subclass(
            cls, shard.shape, dtype=shard.dtype, device=shard.device, storage_size=0
        )
        return made

    def __init__(self, shard: Tensor) -> None: ...

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"NoGradient(of a shard of {tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        name = func._schema.name
        if name.startswith("aten::_amp_"):
            raise ShardwellError(
                "GradScaler cannot unscale gradients that are split over the ranks, and the engine needs none: set "
                '"fp16": {"enabled": true} in the configuration, which scales the loss by itself (bf16 needs no scale).'
            )
        raise ShardwellError(
            f"'{name.removeprefix('aten::')}' was asked for the gradient of a tensor in an optimizer's param_groups. "
            "They are this rank's shards, and their gradients say nothing about the whole. Use model.parameters(): "
            "their `p.grad` can be read, clipped and changed. For clipping there is also gradient_clipping in the "
            "configuration."
        )
