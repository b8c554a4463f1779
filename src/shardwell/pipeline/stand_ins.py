"""Follows values that stand for what another stage computes: no layer of this stage and no loss may be made of them.

Gradients that arrive there are refused as well (`passage.py`). They do not see evaluation, masks, and values without
gradients, so the first forwards of a stage are followed operation by operation, outside of its layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from shardwell.runtime.pytree import tensors_in

# Operations whose results have the shape or the dtype of their input, and not its values.
_OF_SHAPES = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like")
_NEW = ("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided")


class StandIns(TorchDispatchMode):
    """The tensors of one forward whose values stand for those of another stage."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: dict[int, Any] = {}  # kept: the address of one that is gone may be that of another tensor
        self.returned: Any = None  # by the last layer that ran
        self._others: tuple[Any, list[tuple[Tensor, int]]] = (), []
        self._is_on = False

    def mark(self, values: Any) -> None:
        """Note that these tensors are stand-ins."""
        for tensor in tensors_in(values):
            if type(tensor) in (Tensor, torch.nn.Parameter):
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = storage

    def are_in(self, values: Any) -> bool:
        """Return whether there is a stand-in, or what was computed from one, among these tensors."""
        return any(
            type(tensor) in (Tensor, torch.nn.Parameter) and tensor.untyped_storage()._cdata in self._storages
            for tensor in tensors_in(values)
        )

    def pause(self) -> None:
        """Follow nothing while a layer of this stage runs."""
        if self._is_on and _get_current_dispatch_mode() is self:
            self._is_on = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def resume(self) -> None:
        """Follow operations again."""
        if not self._is_on:
            self._is_on = True
            self.__enter__()  # type: ignore[no-untyped-call]

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow operations inside."""
        self.resume()
        try:
            yield
        finally:
            self.pause()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation; what it computes from stand-ins is one."""
        given = kwargs or {}
        found = func(*args, **given)
        name = func._schema.name.partition("::")[2]
        if self._storages and name not in (*_OF_SHAPES, *_NEW) and self.are_in((args, given)):
            self.mark(found)
            for argument, value in zip(func._schema.arguments, args, strict=False):
                is_statistic = name.endswith("batch_norm") and argument.name.startswith("running_")
                if is_statistic or (argument.alias_info is not None and argument.alias_info.is_write):
                    self.mark(value)
        return found

    def note_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note what a layer of this stage is called with, beside the hidden state."""
        others = args[1:], list(kwargs.values())[0 if args else 1 :]
        self._others = others, [(one, _version(one)) for one in tensors_in(others)]

    def are_arguments_changed(self) -> bool:
        """Return whether the layer has changed a tensor of its arguments or put another in its place.

        Stages do not send that. What it adds is for layers of this stage, or reaches the loss (`leads_beside`).
        """
        others, before = self._others
        now = {id(one): _version(one) for one in tensors_in(others)}
        self._others = (), []
        return any(now.get(id(one)) != version for one, version in before)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def leads_beside(loss: Tensor, outputs: Any, parameters: set[int]) -> bool:
    """Return whether a loss depends on parameters, given by id, in another way than through these outputs."""
    nodes = [loss.grad_fn]
    seen = {node for one in tensors_in(outputs) if (node := one.grad_fn) is not None}
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", None)) in parameters:
            return True
        nodes += [following for following, _ in node.next_functions]
    return False
