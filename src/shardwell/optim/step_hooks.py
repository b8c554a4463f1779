"""Hooks on the steps of the optimizer that the user gave: once for each step, whoever does its work."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from shardwell.errors import ShardwellError


class StepHooks:
    """A torch optimizer runs its hooks in each call of `step`. Here a step is several calls, or none."""

    def __init__(self, sharded: Any, given: Optimizer | None) -> None:
        """`sharded`: the one that the engine has, around the one that steps shards. `given`: the user's, if any."""
        self._inner: Optimizer = sharded.inner
        self._own = vars(self._inner).get("step")  # somebody replaced it, before calls of it mean the engine's step
        self._given = [] if given is None or given is self._inner else [given]
        self._sharded = weakref.ref(sharded)

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """A step, under the name that torch's profiler has for it. Hooks for all optimizers are told of the inner."""
        sharded = self._sharded()
        hooked = [*self._given, self._inner, *([] if sharded is None else [sharded])]
        with torch.autograd.profiler.record_function(f"Optimizer.step#{type(hooked[0]).__name__}.step"):
            for hook in list(_global_optimizer_pre_hooks.values()):
                self._check(hook(self._inner, (self._inner,), {}))
            for one in hooked:
                for hook in list(one._optimizer_step_pre_hooks.values()):
                    self._check(hook(one, (one,), {}))
            yield
            for one in hooked:
                for after in list(one._optimizer_step_post_hooks.values()):
                    after(one, (one,), {})
            for after in list(_global_optimizer_post_hooks.values()):
                after(self._inner, (self._inner,), {})

    @staticmethod
    def _check(result: Any) -> None:
        """A hook may hand on arguments; `step` has none but a closure."""
        if result is None:
            return
        if not isinstance(result, tuple) or len(result) != 2:
            raise RuntimeError(f"a step pre-hook must return None or a tuple of (args, kwargs), but returned {result}")
        args, kwargs = result
        if any(value is not None for value in [*args[1:], *kwargs.values()]):
            raise ShardwellError(
                "a step pre-hook gave the step a closure: sharded optimizers evaluate one before the step begins. Call "
                "it before the step, or pass it to step()."
            )

    def step(self) -> None:
        """Let the torch optimizer do a part of a step, without its hooks."""
        if self._own is not None and not hasattr(self._own, "_wrapped_by_lr_sched"):
            self._own()
            return
        step: Any = type(self._inner).step
        (step.__wrapped__ if getattr(step, "hooked", False) else step)(self._inner)
