"""Where the engine is told that a unit is used: hooks on modules, on outputs and inputs, and on parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shardwell.runtime.pytree import map_tensors, tensors_in
from shardwell.runtime.scheduler import ForwardCall, Scheduler, current_task
from shardwell.sharding import ShardedGroup, Unit


class _Hook:
    """A module's hook. A copy of the module is an ordinary one: the hook's copy does nothing."""

    def __init__(self, function: Callable[..., Any], flow: Scheduler, unit: Unit) -> None:
        self._call: Callable[..., Any] | None = partial(function, flow, unit)

    def __call__(self, *args: Any) -> Any:
        return self._call(*args) if self._call is not None else None

    def __reduce__(self) -> Any:
        """As copies and files have it."""
        return _without_call, ()


def _without_call() -> _Hook:
    hook = object.__new__(_Hook)
    hook._call = None
    return hook


def attach(flow: Scheduler, unit: Unit) -> list[RemovableHandle]:
    """Hook a unit of `flow` into its module; the handles undo it."""
    before, after = _Hook(_before_forward, flow, unit), _Hook(_after_forward, flow, unit)
    handles: list[RemovableHandle] = [
        unit.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
        unit.module.register_forward_hook(after, with_kwargs=True),
        unit.module.register_forward_hook(_Hook(_end_forward, flow, unit), always_call=True),
    ]
    if not unit.name:
        handles += _attach_inside(flow, unit)
    for group in unit.trainable:
        for index, parameter in enumerate(group.parameters):
            hook = _gradient_hook(flow, unit, group, index)
            trains = parameter.requires_grad
            parameter.requires_grad_(True)  # torch hooks nothing else
            handles.append(parameter.register_post_accumulate_grad_hook(hook))
            parameter.requires_grad_(trains)
    return handles


def _attach_inside(flow: Scheduler, root: Unit) -> list[RemovableHandle]:
    """Hook the modules with parameters of the root's: `generate`, for one, calls parts of a model directly."""
    owned = {id(parameter) for group in root.releasable for parameter in group.parameters}
    handles: list[RemovableHandle] = []
    for module in root.module.modules():
        if module is not root.module and any(id(p) in owned for p in module.parameters()):
            handles.append(module.register_forward_pre_hook(_Hook(_enter_inside, flow, root), prepend=True))
            handles.append(module.register_forward_hook(_Hook(_leave_inside, flow, root), always_call=True))
    return handles


def _gradient_hook(flow: Scheduler, unit: Unit, group: ShardedGroup, index: int) -> Callable[[Tensor], None]:
    """Weak, because a parameter's hooks live in C++ where the garbage collector cannot follow a cycle."""
    owners = weakref.ref(flow), weakref.ref(unit), weakref.ref(group)

    def hook(parameter: Tensor) -> None:
        living = owners[0](), owners[1](), owners[2]()
        if living[0] is not None and living[1] is not None and living[2] is not None:
            living[0].take_gradient(living[1], living[2], index, parameter)

    return hook


def _enter_inside(flow: Scheduler, root: Unit, module: nn.Module, args: Any) -> None:
    flow.enter_inside(root)


def _leave_inside(flow: Scheduler, root: Unit, module: nn.Module, args: Any, output: Any) -> None:
    flow.leave_inside(root)


def _before_forward(flow: Scheduler, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> None:
    call = ForwardCall(unit, is_counted=current_task() == -1)
    flow.calls.append(call)
    flow.enter_forward(unit)
    if not torch.is_grad_enabled():
        return
    if unit.releasable:
        call.is_hooked = flow.saved.push()
    if unit.in_forward > 1:
        return  # it called itself, and is done when the outermost is
    # Autograd runs what was recorded last first. So when the gradient of any input is known, everything that this
    # forward recorded has run. A leaf's gradient says nothing about that order: then the end of the graph task ends
    # the unit (reentrant checkpointing runs a graph task of its own for each unit).
    for tensor in tensors_in((args, kwargs)):
        if tensor.requires_grad and not tensor.is_leaf:
            tensor.register_hook(lambda grad: flow.end_backward(unit))


def _after_forward(flow: Scheduler, unit: Unit, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    if unit.releasable and any(
        _is_view(unit, tensor) for tensor in tensors_in(output)
    ):  # of memory that is about to be freed
        output = map_tensors(output, lambda tensor: tensor.clone() if _is_view(unit, tensor) else tensor)
    flow.leave_forward(unit)
    if flow.calls and flow.calls[-1].unit is unit:
        flow.calls[-1].is_counted = False
    if not unit.name and flow.reducer.accumulation_steps > 1 and torch.is_grad_enabled():
        # Gradients that the user set are not divided by the steps: they must not be there when autograd adds to them.
        for node in {tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None}:
            node.register_prehook(lambda grads: flow.announce_backward())
    if (unit.releasable or unit.is_named or unit.may_be_hidden) and torch.is_grad_enabled():
        nodes = {tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None}
        for node in nodes:
            # A node's own pre-hook runs after the tensor hooks on the same tensor: the unit that consumed it is
            # reduced and released before this one is gathered.
            node.register_prehook(lambda grads: flow.enter_backward(unit, keeps_graph=torch.is_grad_enabled()))
    return output


def _end_forward(flow: Scheduler, unit: Unit, module: nn.Module, args: Any, output: Any) -> None:
    """Called also if the forward failed."""
    if not flow.calls or flow.calls[-1].unit is not unit:
        return
    call = flow.calls.pop()
    if call.is_hooked:
        flow.saved.pop()
    if call.is_counted:
        flow.abandon_forward(unit)


def _is_view(unit: Unit, tensor: Tensor) -> bool:
    """Whether a tensor looks into a releasable group's flat buffer."""
    if tensor.layout is not torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    storage = tensor.untyped_storage()._cdata
    return any(storage == group.flat.tensor.untyped_storage()._cdata for group in unit.releasable)


def remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
