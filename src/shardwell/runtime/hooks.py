"""Hooks that tell the scheduler when units are used: on modules, on outputs and inputs, and on parameters."""

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
    """A hook on a module. The copy of a hook does nothing, so that a copy of the module is an ordinary module."""

    def __init__(self, function: Callable[..., Any], scheduler: Scheduler, unit: Unit) -> None:
        self._call: Callable[..., Any] | None = partial(function, scheduler, unit)

    def __call__(self, *args: Any) -> Any:
        return self._call(*args) if self._call is not None else None

    def __reduce__(self) -> Any:
        """Make copies and pickles a hook that does nothing."""
        return _without_call, ()


def _without_call() -> _Hook:
    hook = object.__new__(_Hook)
    hook._call = None
    return hook


def attach(scheduler: Scheduler, unit: Unit) -> list[RemovableHandle]:
    """Register the hooks of a unit of `scheduler` on its module; return the handles that remove them."""
    before, after = _Hook(_before_forward, scheduler, unit), _Hook(_after_forward, scheduler, unit)
    handles: list[RemovableHandle] = [
        unit.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
        unit.module.register_forward_hook(after, with_kwargs=True),
        unit.module.register_forward_hook(_Hook(_end_forward, scheduler, unit), always_call=True),
    ]
    if not unit.name:
        handles += _attach_inside(scheduler, unit)
    for group in unit.trainable:
        for index, parameter in enumerate(group.parameters):
            hook = _gradient_hook(scheduler, unit, group, index)
            trains = parameter.requires_grad
            parameter.requires_grad_(True)  # torch registers the hook on no other parameters
            handles.append(parameter.register_post_accumulate_grad_hook(hook))
            parameter.requires_grad_(trains)
    return handles


def _attach_inside(scheduler: Scheduler, root: Unit) -> list[RemovableHandle]:
    """Hook submodules that hold parameters of the root unit: `generate`, for one, calls parts of a model directly."""
    owned = {id(parameter) for group in root.releasable for parameter in group.parameters}
    handles: list[RemovableHandle] = []
    for module in root.module.modules():
        if module is not root.module and any(id(p) in owned for p in module.parameters()):
            handles.append(module.register_forward_pre_hook(_Hook(_enter_inside, scheduler, root), prepend=True))
            handles.append(module.register_forward_hook(_Hook(_leave_inside, scheduler, root), always_call=True))
    return handles


def _gradient_hook(scheduler: Scheduler, unit: Unit, group: ShardedGroup, index: int) -> Callable[[Tensor], None]:
    """Return the gradient hook of one parameter.

    It holds weak references, because a parameter's hooks live in C++ where the garbage collector cannot follow a cycle.
    """
    owners = weakref.ref(scheduler), weakref.ref(unit), weakref.ref(group)

    def hook(parameter: Tensor) -> None:
        living = owners[0](), owners[1](), owners[2]()
        if living[0] is not None and living[1] is not None and living[2] is not None:
            living[0].accumulate_gradient(living[1], living[2], index, parameter)

    return hook


def _enter_inside(scheduler: Scheduler, root: Unit, module: nn.Module, args: Any) -> None:
    scheduler.pre_inner_forward(root)


def _leave_inside(scheduler: Scheduler, root: Unit, module: nn.Module, args: Any, output: Any) -> None:
    scheduler.post_inner_forward(root)


def _before_forward(scheduler: Scheduler, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> None:
    call = ForwardCall(unit, is_counted=current_task() == -1)
    scheduler.calls.append(call)
    scheduler.pre_forward(unit)
    if not torch.is_grad_enabled():
        return
    if unit.releasable:
        call.is_hooked = scheduler.saved.push()
    if unit.in_forward > 1:
        return  # the module called itself: its backward ends with the outermost call
    # Autograd runs the nodes that were recorded last first. So when the gradient of any input is known, everything that
    # this forward recorded has run. The gradient of a leaf says nothing about that order: then the end of the graph
    # task ends the unit's backward (reentrant checkpointing runs a graph task of its own for each unit).
    for tensor in tensors_in((args, kwargs)):
        if tensor.requires_grad and not tensor.is_leaf:
            tensor.register_hook(lambda grad: scheduler.post_backward(unit))


def _after_forward(scheduler: Scheduler, unit: Unit, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    # An output that is a view of the unit's parameters is a view of memory that is about to be freed: it is cloned.
    if unit.releasable and any(_is_view(unit, tensor) for tensor in tensors_in(output)):
        output = map_tensors(output, lambda tensor: tensor.clone() if _is_view(unit, tensor) else tensor)
    scheduler.post_forward(unit)
    if scheduler.calls and scheduler.calls[-1].unit is unit:
        scheduler.calls[-1].is_counted = False
    if not unit.name and scheduler.reducer.accumulation_steps > 1 and torch.is_grad_enabled():
        # Gradients that the user set are not divided by the accumulation steps: they must be taken out of `p.grad`
        # before autograd adds to them.
        for node in {tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None}:
            node.register_prehook(lambda grads: scheduler.announce_backward())
    if (unit.releasable or unit.is_named or unit.may_be_hidden) and torch.is_grad_enabled():
        nodes = {tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None}
        for node in nodes:
            # A node's own pre-hook runs after the tensor hooks on the same tensor: the unit that consumed the tensor
            # is reduced and resharded before this unit is unsharded.
            node.register_prehook(lambda grads: scheduler.pre_backward(unit, keeps_graph=torch.is_grad_enabled()))
    return output


def _end_forward(scheduler: Scheduler, unit: Unit, module: nn.Module, args: Any, output: Any) -> None:
    """End a forward call, also one that failed."""
    if not scheduler.calls or scheduler.calls[-1].unit is not unit:
        return
    call = scheduler.calls.pop()
    if call.is_hooked:
        scheduler.saved.pop()
    if call.is_counted:
        scheduler.abandon_forward(unit)


def _is_view(unit: Unit, tensor: Tensor) -> bool:
    """Return whether a tensor is a view of a releasable group's flat buffer."""
    if tensor.layout is not torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    storage = tensor.untyped_storage()._cdata
    return any(storage == group.flat.tensor.untyped_storage()._cdata for group in unit.releasable)


def remove(handles: list[RemovableHandle]) -> None:
    """Remove the hooks of these handles."""
    for handle in handles:
        handle.remove()
