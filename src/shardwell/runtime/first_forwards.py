"""A look at the operations of a model's first forwards, for uses that would give other numbers without a word.

Compiled modules are not looked at: their graphs would be made once more for the forwards without a look.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from shardwell.errors import ShardwellError
from shardwell.runtime.aborted_forwards import AbortHook

_FORWARDS = 2  # that are looked at


class FirstForwards(TorchFunctionMode):
    """Sees each operation of torch in the first forwards of a model, before it runs."""

    def __init__(self) -> None:
        super().__init__()
        self._num_forwards = 0
        self._is_looking = False

    def hook(self, model: nn.Module) -> list[Any]:
        """Look at the forwards of this model; return the hooks."""
        return [
            model.register_forward_pre_hook(self._begin),
            model.register_forward_hook(self._end, always_call=True),
            AbortHook(model, self.stop),
        ]

    def _begin(self, module: nn.Module, args: Any) -> None:
        if self._num_forwards < _FORWARDS and not self._is_looking and not _is_compiled(module):
            self._num_forwards += 1
            self._is_looking = True
            self.__enter__()  # type: ignore[no-untyped-call]

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self.stop()

    def stop(self) -> None:
        """Look at no more operations of the forward that runs."""
        if self._is_looking:
            self._is_looking = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def before(self, name: str, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        """Look at an operation before it runs."""

    def explain(self, name: str, args: tuple[Any, ...], error: RuntimeError) -> str | None:
        """Return words for an operation that has failed, or None if they would say no more than the error."""
        return None

    def after(self, name: str, args: tuple[Any, ...], found: Any) -> None:
        """Look at what an operation has returned."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation."""
        given = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **given)
        name = getattr(func, "__name__", "")
        self.before(name, args, given)
        try:
            found = func(*args, **given)
        except RuntimeError as error:
            if (words := self.explain(name, args, error)) is None:
                raise
            raise ShardwellError(words) from error
        self.after(name, args, found)
        return found


def _is_compiled(model: nn.Module) -> bool:
    """Return whether a module of the model has a compiled forward."""
    return any(
        module._compiled_call_impl is not None or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
        for module in model.modules()
    )
