"""The step hooks of the user's optimizer: they run once for each step, whatever does the work."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from shardwell.errors import ShardwellError
from shardwell.optim.user_optimizer import meet_foreign_step


class StepHooks:
    """The hooks of an optimizer whose step is several calls of the inner `step`, or none.

    A torch optimizer would run its hooks in each of these calls.
    """

    def __init__(self, sharded: Any, given: Optimizer | None) -> None:
        """Collect the optimizers: `sharded` is the engine's, `given` is the user's, if there is one."""
        self._inner: Optimizer = sharded.inner
        self._given = [] if given is None or given is self._inner else [given]
        self._sharded = weakref.ref(sharded)

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Run the hooks around a step, under the name that torch's profiler has for it.

        Hooks that are registered for all optimizers get the inner one.
        """
        sharded = self._sharded()
        hooked = [*self._given, self._inner, *([] if sharded is None else [sharded])]
        with torch.autograd.profiler.record_function(f"Optimizer.step#{type(hooked[0]).__name__}.step"):
            for hook in list(_global_optimizer_pre_hooks.values()):
                if hook is not meet_foreign_step and (result := hook(self._inner, (self._inner,), {})) is not None:
                    self._check(result)
            for one in hooked:
                for hook in list(one._optimizer_step_pre_hooks.values()):
                    if (result := hook(one, (one,), {})) is not None:
                        self._check(result)
            yield
            for one in hooked:
                for after in list(one._optimizer_step_post_hooks.values()):
                    after(one, (one,), {})
            for after in list(_global_optimizer_post_hooks.values()):
                after(self._inner, (self._inner,), {})

    @staticmethod
    def _check(result: Any) -> None:
        """Refuse arguments from a hook: `step` has only a closure."""
        if not isinstance(result, tuple) or len(result) != 2:
            raise RuntimeError(f"a step pre-hook must return None or a tuple of (args, kwargs), but returned {result}")
        args, kwargs = result
        if any(value is not None for value in [*args[1:], *kwargs.values()]):
            raise ShardwellError(
                "a step pre-hook gave the step a closure: sharded optimizers evaluate one before the step begins. Call "
                "it before the step, or pass it to step()."
            )
