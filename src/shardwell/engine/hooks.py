"""Where the engine is told that a unit is used: hooks on modules, on outputs and inputs, and on parameters."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from shardwell.engine.flow import Flow
from shardwell.unit import Group, Unit


def attach(flow: Flow) -> list[RemovableHandle]:
    """Hook every unit of `flow` into its module; the handles undo it."""
    handles: list[RemovableHandle] = []
    for unit in flow.units:
        before, after = partial(_before_forward, flow, unit), partial(_after_forward, flow, unit)
        handles.append(unit.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        handles.append(unit.module.register_forward_hook(after, with_kwargs=True))
        for group in unit.trainable:
            for index, parameter in enumerate(group.parameters):
                hook = _gradient_hook(flow, unit, group, index)
                handles.append(parameter.register_post_accumulate_grad_hook(hook))
    return handles


def _gradient_hook(flow: Flow, unit: Unit, group: Group, index: int) -> Callable[[Tensor], None]:
    """Weak, because a parameter's hooks live in C++ where the garbage collector cannot follow a cycle."""
    owners = weakref.ref(flow), weakref.ref(unit), weakref.ref(group)

    def hook(parameter: Tensor) -> None:
        living = owners[0](), owners[1](), owners[2]()
        if living[0] is not None and living[1] is not None and living[2] is not None:
            living[0].take_gradient(living[1], living[2], index, parameter)

    return hook


def _before_forward(flow: Flow, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> None:
    flow.enter_forward(unit)
    if unit.releasable and torch.is_grad_enabled():
        inputs = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
        unit.waits_for_inputs = unit.waits_for_inputs or bool(inputs)
        # A leaf's gradient may come before those of parameters used by the same op: then the end of the graph task
        # ends the unit (reentrant checkpointing runs a graph task of its own for each unit).
        inner = [tensor for tensor in inputs if not tensor.is_leaf]
        missing = len(inner)

        def one_known(grad: Tensor) -> None:
            nonlocal missing
            missing -= 1
            if missing == 0:
                flow.end_backward(unit)

        for tensor in inner:
            tensor.register_hook(one_known)


def _after_forward(flow: Flow, unit: Unit, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    if any(_is_view(unit, tensor) for tensor in tensors_in(output)):  # of memory that is about to be freed
        output = tree_map_only(Tensor, lambda tensor: tensor.clone() if _is_view(unit, tensor) else tensor, output)
    flow.leave_forward(unit)
    if unit.releasable and torch.is_grad_enabled():
        nodes = {tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None}
        for node in nodes:
            # A node's own pre-hook runs after the tensor hooks on the same tensor: the unit that consumed it is
            # reduced and released before this one is gathered.
            node.register_prehook(lambda grads: flow.enter_backward(unit))
    return output


def _is_view(unit: Unit, tensor: Tensor) -> bool:
    """Whether a tensor looks into a releasable group's flat buffer."""
    storage = tensor.untyped_storage()._cdata
    return any(storage == group.flat.tensor.untyped_storage()._cdata for group in unit.releasable)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in nested containers, dictionaries and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))
