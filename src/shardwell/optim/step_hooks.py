"""Hooks on the steps of the optimizer that the user gave: once for each step, whoever does its work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from shardwell.errors import ShardwellError


class StepHooks:
    """A torch optimizer runs its hooks in each call of `step`. Here a step is several calls, or none."""

    def __init__(self, inner: Optimizer, given: Optimizer | None) -> None:
        """`inner`: the one that steps shards. `given`: the user's, if that is another one."""
        self._inner = inner
        self._own = vars(inner).get("step")  # somebody replaced it, before calls of it mean the engine's step
        self._hooked = [inner] if given is None or given is inner else [given, inner]

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """A step, under the name that torch's profiler has for it."""
        with torch.autograd.profiler.record_function(f"Optimizer.step#{type(self._hooked[0]).__name__}.step"):
            for optimizer in self._hooked:
                for hook in list(optimizer._optimizer_step_pre_hooks.values()):
                    self._check(hook(optimizer, (optimizer,), {}))
            yield
            for optimizer in self._hooked:
                for after in list(optimizer._optimizer_step_post_hooks.values()):
                    after(optimizer, (optimizer,), {})

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
