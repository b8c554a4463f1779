"""A look at the operations of a model's first forwards, for uses that would give other numbers without a word.

Compiled modules are not looked at: their graphs would be made once more for the forwards without a look.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from shardwell.errors import ShardwellError
from shardwell.runtime.aborted_forwards import AbortHook

_FORWARDS = 2  # of each kind, that are looked at
_MOST_KINDS = 64
# The names under which torch's functions take tensors, in the order in which they take them.
_OPERANDS = (
    *("input", "self", "tensors", "tensor", "query", "key", "value", "x", "a", "x1", "batch1", "mat1", "weight"),
    *("other", "batch2", "mat2", "vec2", "vec", "tensor2", "target", "x2", "b", "bias"),
)


def name_of(func: Any) -> str:
    """Return the name of one of torch's functions, or of the attribute that is read (`mT`, say)."""
    name: str = getattr(func, "__name__", "")
    return getattr(getattr(func, "__self__", None), "__name__", name) if name == "__get__" else name


def positional(args: tuple[Any, ...], given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the arguments of one of torch's functions with those tensors behind them that are given by name."""
    if not given:
        return args
    return (*args, *(given[name] for name in _OPERANDS if name in given))


class KindsOfForward:
    """Counts forwards by how the model is used: training, evaluation and generation may use its outputs differently."""

    def __init__(self) -> None:
        self._counts: dict[tuple[Any, ...], int] = {}
        self.kind: tuple[Any, ...] = ()  # of the last forward that was counted

    def count(self, model: nn.Module, args: tuple[Any, ...], given: Mapping[str, Any]) -> int:
        """Return how many forwards of this kind there were before."""
        names = sorted(name for name, value in given.items() if value is not None)
        self.kind = (model.training, torch.is_grad_enabled(), len(args), *names)
        if self.kind not in self._counts and len(self._counts) >= _MOST_KINDS:
            return _FORWARDS
        self._counts[self.kind] = self._counts.get(self.kind, 0) + 1
        return self._counts[self.kind] - 1

    def is_first(self, model: nn.Module, args: tuple[Any, ...], given: Mapping[str, Any]) -> bool:
        """Count a forward, and return whether it is among the first of its kind."""
        return self.count(model, args, given) < _FORWARDS


class FirstForwards(TorchFunctionMode):
    """Sees each operation of torch in the first forwards of each kind of a model, before it runs."""

    def __init__(self) -> None:
        super().__init__()
        self._kinds = KindsOfForward()
        self._is_looking = False

    def hook(self, model: nn.Module, inside: nn.Module | None = None) -> list[Any]:
        """Look at the forwards of a model, or of one `inside` of it; return the hooks."""
        looked_at = model if inside is None else inside
        return [
            looked_at.register_forward_pre_hook(self._begin, with_kwargs=True),
            looked_at.register_forward_hook(self._end, always_call=True),
            AbortHook(model, self.stop),
        ]

    def _begin(self, module: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        if not self._is_looking and self._kinds.is_first(module, args, given) and not _is_compiled(module):
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

    def after(self, name: str, args: tuple[Any, ...], given: dict[str, Any], found: Any) -> None:
        """Look at what an operation has returned."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation."""
        given = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **given)
        name = name_of(func)
        seen = positional(args, given)
        self.before(name, seen, given)
        try:
            found = func(*args, **given)
        except RuntimeError as error:
            if (words := self.explain(name, seen, error)) is None:
                raise
            raise ShardwellError(words) from error
        self.after(name, seen, given, found)
        return found


def generating_models(model: nn.Module) -> list[nn.Module]:
    """Return the models inside of another whose `generate` calls them, and not what is around them (PEFT, say)."""
    inside = [one for one in model.modules() if one is not model]
    return [one for one in inside if callable(getattr(type(one), "generate", None))]


def _is_compiled(model: nn.Module) -> bool:
    """Return whether a module of the model has a compiled forward."""
    return any(
        module._compiled_call_impl is not None or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
        for module in model.modules()
    )
