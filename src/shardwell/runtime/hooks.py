"""Hooks that tell the scheduler when units are used: on modules, their outputs and inputs, parameters, saved tensors.

The hooks on modules and parameters are made for the model as it was handed over. `ModelFit` checks before every forward
that it still is.

Hooks on a unit's outputs announce its backward. No hook announces it for an output that is not found (kept on `self`,
changed in place by the caller). So saved-tensor hooks store a description of a view of a flat buffer in its place, and
unshard the unit when autograd reads it: in the order of autograd's nodes, which is the same on all ranks. Since
autograd keeps no view, every tensor that looks at a released buffer belongs to the user (`free_if_unaliased`).
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shardwell.optim import ShardedOptimizer
from shardwell.parallel import Agreement
from shardwell.runtime.pytree import map_tensors, tensors_in
from shardwell.runtime.rebuild import UnitBuilder, refit
from shardwell.runtime.saved_views import DESCRIBED, SavedView, SavedWrapper, changed, pack_wrapper, versions
from shardwell.sharding import Residency, ShardedGroup, Unit, released
from shardwell.sharding.edits import take_edits_before_step, take_edits_closely

if TYPE_CHECKING:
    from shardwell.runtime.scheduler import Scheduler

current_task: Callable[[], int] = torch._C._current_graph_task_id  # of the running autograd graph; -1 outside backward
_RECOMPUTING = ("torch.utils.checkpoint", "shardwell.checkpointing")  # their hooks save nothing, and count the tensors

_Pack = Callable[[Tensor], Any]
_Unpack = Callable[[Any], Tensor]


@dataclass
class ForwardCall:
    """A running forward of a unit."""

    unit: Unit
    is_counted: bool  # counted in the unit's `in_forward`
    is_hooked: bool = False  # it switched on the saved-tensor hooks


_NUM_HOOKS = 3  # forward hooks of a unit on each of its modules


class _ModuleHook:
    """A hook on a module. The copy of a hook does nothing, so that a copy of the module is an ordinary module.

    `ends`: the pass of the unit ends with this module. In a bundle that is a forward of the last module, and a backward
    of the first one.
    """

    def __init__(self, scheduler: Scheduler, unit: Unit, *, ends: bool = True) -> None:
        self._scheduler, self._unit, self._ends = scheduler, unit, ends

    def __reduce__(self) -> Any:
        """Make copies and pickles a hook that does nothing."""
        return _InertHook, ()


class _InertHook:
    """A hook that does nothing."""

    def __call__(self, *args: Any) -> None: ...


class PreForwardHook(_ModuleHook):
    """Begins a forward of a unit."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        scheduler, unit = self._scheduler, self._unit
        call = ForwardCall(unit, is_counted=current_task() == -1)
        scheduler.calls.append(call)
        scheduler.pre_forward(unit)
        if not torch.is_grad_enabled():
            return
        if unit.resharding_groups:
            call.is_hooked = scheduler.saved.push()
        if unit.use.in_forward > 1 or not self._ends:
            return  # the module called itself, and its backward ends with the outermost call; or it is in a bundle
        # Autograd runs the nodes that were recorded last first. So when the gradient of any input is known, everything
        # that this forward recorded has run. The gradient of a leaf says nothing about that order: then the end of the
        # graph task ends the unit's backward (reentrant checkpointing runs a graph task of its own for each unit).
        for tensor in tensors_in((args, kwargs)):
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(partial(scheduler.post_backward, unit))


class PostForwardHook(_ModuleHook):
    """Ends a forward of a unit that has a result."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        scheduler, unit = self._scheduler, self._unit
        if unit.resharding_groups:
            for tensor in tensors_in(output):
                if _viewed_group(unit, tensor) is not None:  # a view of memory that is about to be freed
                    output = map_tensors(output, partial(_cloned_view, unit))
                    break
        scheduler.post_forward(unit, ends=self._ends)
        if scheduler.calls and scheduler.calls[-1].unit is unit:
            scheduler.calls[-1].is_counted = False
        if not torch.is_grad_enabled():
            return output
        # Gradients that the user set are not divided by the accumulation steps: they must be taken out of `p.grad`
        # before autograd adds to them.
        announces = not unit.name and scheduler.reducer.micro_step.accumulation_steps > 1
        may_be_hidden = unit.updates.is_watched or unit.sets.is_speculative  # by an update that is not committed
        is_prepared = unit.resharding_groups or unit.spec.is_user_unit or may_be_hidden
        if announces or is_prepared:
            nodes = set()
            for tensor in tensors_in(output):
                if tensor.grad_fn is not None:
                    nodes.add(tensor.grad_fn)
            for node in nodes:
                if announces:
                    node.register_prehook(scheduler.announce_backward)
                if is_prepared:
                    # A node's own pre-hook runs after the tensor hooks on the same tensor: the unit that consumed the
                    # tensor is reduced and resharded before this unit is unsharded.
                    node.register_prehook(partial(scheduler.pre_backward, unit))
        return output


class EndForwardHook(_ModuleHook):
    """Ends a forward call, also one that failed."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        scheduler, unit = self._scheduler, self._unit
        if not scheduler.calls or scheduler.calls[-1].unit is not unit:
            return
        call = scheduler.calls.pop()
        if call.is_hooked:
            scheduler.saved.pop()
        if call.is_counted:
            scheduler.abandon_forward(unit)


class PreInnerForwardHook(_ModuleHook):
    """Begins a forward of a part of the root unit's module. Called directly, it needs the unit as a whole."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        unit = self._unit
        unit.use.in_parts += 1
        if not unit.use.in_forward and unit.residency is not Residency.UNSHARDED:
            self._scheduler.retain_for_part(unit)


class PostInnerForwardHook(_ModuleHook):
    """Ends a forward of a part of the root unit's module, or one that failed; retention may end with the outermost."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        unit = self._unit
        unit.use.in_parts = max(unit.use.in_parts - 1, 0)
        if unit.use.is_retained and not unit.use.in_parts and not unit.use.in_forward:
            self._scheduler.end_forward()


def keep_out_of_graphs() -> None:
    """Let Dynamo call all hooks on modules instead of tracing them, in this process: no graph can gather."""
    kinds = PreForwardHook, PostForwardHook, EndForwardHook, PreInnerForwardHook, PostInnerForwardHook
    for kind in kinds:
        if not hasattr(kind.__call__, "_torchdynamo_disable"):
            kind.__call__ = torch.compiler.disable(kind.__call__)  # type: ignore[method-assign]


def attach(scheduler: Scheduler, unit: Unit) -> list[RemovableHandle]:
    """Register the hooks of a unit of `scheduler` on its modules; return the handles that remove them.

    The first handles are those of the forward hooks of each module in turn, `_NUM_HOOKS` of them.
    """
    handles: list[RemovableHandle] = []
    for module in unit.spec.modules:
        is_first, is_last = module is unit.spec.modules[0], module is unit.spec.modules[-1]
        before, after = PreForwardHook(scheduler, unit, ends=is_first), PostForwardHook(scheduler, unit, ends=is_last)
        handles += [
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
            module.register_forward_hook(after, with_kwargs=True),
            module.register_forward_hook(EndForwardHook(scheduler, unit), always_call=True),
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
    owned = {id(parameter) for group in root.resharding_groups for parameter in group.parameters}
    handles: list[RemovableHandle] = []
    for module in root.module.modules():
        if module is not root.module and any(id(p) in owned for p in module.parameters()):
            handles.append(module.register_forward_pre_hook(PreInnerForwardHook(scheduler, root), prepend=True))
            handles.append(module.register_forward_hook(PostInnerForwardHook(scheduler, root), always_call=True))
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


def _viewed_group(unit: Unit, tensor: Tensor) -> ShardedGroup | None:
    """Return the releasable group whose flat buffer a tensor is a view of; None if it is no view."""
    if tensor.layout is not torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return None
    storage = tensor.untyped_storage()._cdata
    for group in unit.resharding_groups:
        if storage == group.flat.tensor.untyped_storage()._cdata:
            return group
    return None


def _cloned_view(unit: Unit, tensor: Tensor) -> Tensor:
    return tensor if _viewed_group(unit, tensor) is None else tensor.clone()


# --------------------------------------------------------------------------------------------------- saved tensors


class SavedViews:
    """The saved-tensor hooks of one engine, which are on while one of its releasable units runs with gradients.

    Tensors that are no views of a unit pass through. Torch's check that they were not changed in place is made here,
    because torch makes none where there are hooks.
    """

    def __init__(self, need: Callable[[Unit], None]) -> None:
        """Create the hooks; `need` unshards a unit for the running backward."""
        self._need = need
        self._groups: dict[int, tuple[Unit, ShardedGroup]] = {}  # by the address of the flat buffer's storage
        self._parameters: set[int] = set()
        self._plain: tuple[_Pack, _Unpack] = (self._pack, self._unpack)
        self.pushed: list[_Pack] = []  # hooks that are on, the innermost last

    def take(self, units: Sequence[Unit]) -> None:
        """Look for views of these units from now on."""
        self._groups.clear()
        self._parameters = {id(p) for unit in units for group in unit.resharding_groups for p in group.parameters}
        for unit in units:
            self.find(unit)

    def find(self, unit: Unit) -> None:
        """Register the storages of a unit's buffers, which may have changed."""
        for group in unit.resharding_groups:
            self._groups[group.flat.tensor.untyped_storage()._cdata] = unit, group

    # --------------------------------------------------------------------------------------- switching on and off

    def push(self) -> bool:
        """Switch the hooks on; return false if they are on already, or must not be used.

        Torch applies the innermost hooks only. Where other hooks are on, they get all tensors that are no views of a
        unit. Hooks that recompute must see everything that is saved, and save nothing; torch.func allows no hooks. In
        these cases views stay views, which at worst keep their memory allocated.
        """
        top: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        hooks = self._plain
        if top is not None:
            if (self.pushed and top[0] is self.pushed[-1]) or getattr(top[0], "__module__", "") in _RECOMPUTING:
                return False
            hooks = self._around(*top)
        elif torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None:
            return False
        torch._C._autograd._push_saved_tensors_default_hooks(*hooks)
        self.pushed.append(hooks[0])
        return True

    def pop(self) -> None:
        """Switch off the hooks that were pushed last, unless they are off already."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if self.pushed and top is not None and top[0] is self.pushed.pop():
            torch._C._autograd._pop_saved_tensors_default_hooks()

    def clear(self) -> None:
        """Switch off all hooks that an aborted forward left on."""
        while self.pushed:
            self.pop()

    # ----------------------------------------------------------------------------------------- pack and unpack

    def _pack(self, tensor: Tensor) -> Any:
        """Return the description of a view of a unit; any other tensor, and its version."""
        if hasattr(type(tensor), "__tensor_flatten__"):
            return pack_wrapper(tensor, self._pack)
        try:
            found = self._groups.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):
            found = None  # not a strided tensor, or one that a transform wraps
        if found is not None:
            unit, group = found
            flat = group.flat.tensor
            if (
                # otherwise it is the storage of another tensor, at the address of an earlier buffer's storage
                flat.untyped_storage()._cdata == tensor.untyped_storage()._cdata
                and group in unit.resharding_groups
                and tensor.dtype == flat.dtype
                and not tensor.dtype.is_complex
            ):
                base = tensor if tensor._base is None else tensor._base
                parameter = base if id(base) in self._parameters else None
                view = tensor.shape, tensor.stride(), tensor.storage_offset(), tensor._version
                return SavedView(unit, group, *view, parameter, base is tensor, unit.updates.count)
        # A node's own result is detached, because it would hold the node that holds it. A leaf belongs to no node.
        return (tensor.detach() if tensor.grad_fn is not None else tensor), tensor._version

    def _unpack(self, packed: Any) -> Tensor:
        """Return what was packed; the unit of a view is unsharded first."""
        if type(packed) is SavedWrapper:
            return packed.unpack(self._unpack)
        if type(packed) is not SavedView:
            tensor: Tensor
            tensor, version = packed
            if tensor._version != version:
                raise changed(versions(tensor, version))
            return tensor
        unit, parameter = packed.unit, packed.parameter
        if unit.residency is not Residency.UNSHARDED or not (unit.use.in_backward or unit.use.is_retained):
            self._need(unit)
        if packed.num_updates != unit.updates.count:
            raise changed(f"the parameters of unit '{unit.name or '(root)'}' were updated by step()")
        if parameter is not None:
            if parameter._version != packed.version:
                raise changed(versions(parameter, packed.version))
            if packed.is_parameter:
                return parameter
        return packed.group.flat.tensor.as_strided(packed.shape, packed.stride, packed.offset)

    def _around(self, pack: _Pack, unpack: _Unpack) -> tuple[_Pack, _Unpack]:
        """Return hooks that pass everything that is no view of a unit to other hooks."""

        def both(tensor: Tensor) -> Any:
            packed = self._pack(tensor)
            return packed if type(packed) in DESCRIBED else pack(tensor)

        def back(packed: Any) -> Tensor:
            return self._unpack(packed) if type(packed) in DESCRIBED else unpack(packed)

        return both, back


class UnitHooks:
    """The hooks of a scheduler on the modules and parameters of its units."""

    def __init__(self, scheduler: Scheduler, units: Sequence[Unit]) -> None:
        self._scheduler = scheduler
        self._handles: dict[Unit, list[RemovableHandle]] = {}
        self._has_warned = False
        self.follow(units)

    def follow(self, units: Sequence[Unit]) -> None:
        """Hook these units, and no others any more."""
        for unit in set(self._handles) - set(units):
            for handle in self._handles.pop(unit):
                handle.remove()  # which does nothing if other code has removed the hook
        for unit in units:
            if unit not in self._handles:
                self._handles[unit] = attach(self._scheduler, unit)

    def restore(self) -> None:
        """Hook units again whose hooks other code has removed, and say so: without them a unit trains nothing."""
        gone = []
        for unit, handles in self._handles.items():
            for number, module in enumerate((unit.spec.module, *unit.spec.followers)):
                before, after = handles[number * _NUM_HOOKS], handles[number * _NUM_HOOKS + 1]
                if before.id not in module._forward_pre_hooks or after.id not in module._forward_hooks:
                    gone.append(unit)
                    break
        if not gone:
            return
        if not self._has_warned:
            self._has_warned = True
            logging.getLogger("shardwell").warning(
                "other code has removed the forward hooks of %d unit(s) of a model that an engine trains (%s first). "
                "They are there again; let that code keep the hooks that it has not made.",
                len(gone),
                gone[0].name or "(root)",
            )
        units = list(self._handles)
        self.follow([unit for unit in units if unit not in gone])
        self.follow(units)


class ModelFingerprint:
    """A record of the parameters and submodules of every module, and of the parameters without training state."""

    def __init__(self, model: nn.Module) -> None:
        ready = {
            id(parameter)
            for unit in {released.owner_of(p) for p in model.parameters() if released.is_owned(p)}
            for group in getattr(unit, "trainable", [])
            for parameter in group.parameters
        }
        modules = list(model.modules())
        self._children = [(module, dict(module._modules)) for module in modules]
        self._parameters = [
            (module, list(module._parameters), list(map(id, module._parameters.values()))) for module in modules
        ]
        self._frozen = [p for p in model.parameters() if id(p) not in ready]  # they have no training state
        self._alive = [dict(module._parameters) for module in modules]  # keeps the objects, so that no id is reused

    def matches(self) -> bool:
        """Return whether the model is unchanged; this takes about 0.1 µs per parameter.

        Freezing is no change, but unfreezing what was never trained is.
        """
        with torch._C.DisableTorchFunctionSubclass():  # released parameters answer through a slow path
            for module, children in self._children:
                if module._modules != children:
                    return False
            for module, names, ids in self._parameters:
                now = module._parameters
                if (now or names) and (list(now) != names or list(map(id, now.values())) != ids):
                    return False
            return not any(map(_requires_grad, self._frozen))


_is_set_to: Callable[[Tensor, Tensor], bool] = Tensor.is_set_to
_requires_grad: Callable[[Tensor], bool] = Tensor.requires_grad.__get__  # type: ignore[attr-defined]


class ModelFit:
    """Keeps the units and hooks of a scheduler fitted to a model that the user may change."""

    def __init__(self, model: nn.Module, scheduler: Scheduler, builder: UnitBuilder, agreement: Agreement) -> None:
        self._model, self._scheduler, self._agreement = model, scheduler, agreement
        self.builder = builder
        self.hooks = UnitHooks(scheduler, scheduler.units)
        self._fingerprint = ModelFingerprint(model)

    def is_current(self) -> bool:
        """Return whether the units fit the model as it is now. Removed hooks and replaced values are taken over."""
        self.hooks.restore()
        units, has_moved, needs_rebuild = self._scheduler.units, False, False
        with torch._C.DisableTorchFunctionSubclass():  # as for `ModelFingerprint`
            for unit in units:
                for group in unit.groups:
                    views, base = group.views, group.flat.tensor.data_ptr()  # 0 while it is freed
                    if base != views.base:
                        views.find_addresses(base)
                    has_moved = has_moved or list(map(Tensor.data_ptr, views.with_values)) != views.addresses
        if has_moved:
            take_edits_closely(units)
        for unit in units:
            needs_rebuild = needs_rebuild or unit.changes.needs_rebuild
        return self._fingerprint.matches() and not needs_rebuild

    def take_edits(self, units: Sequence[Unit]) -> None:
        """Take over values that replaced parameters of these units before their step, by all properties of a view."""
        has_edits = False
        with torch._C.DisableTorchFunctionSubclass():
            for unit in units:
                has_edits = has_edits or unit.changes.was_retained or unit.changes.needs_rebuild
                for group in unit.groups:
                    views = group.views
                    is_meta = group.flat.tensor.is_meta  # without memory to compare
                    has_edits = has_edits or is_meta or not all(map(_is_set_to, views.parameters, views.tensors))
        if has_edits:
            take_edits_before_step(units)

    def refit(self, optimizer: ShardedOptimizer | None, *, keep_frozen_state: bool) -> None:
        """Rebuild the units that do not fit the model, see `rebuild.refit`. All ranks must call it."""
        scheduler = self._scheduler
        scheduler.end_passes()
        scheduler.end_retention()
        with self._agreement.failing_together("refit"):
            scheduler.reducer.views.take_edits()
            units = refit(list(scheduler.units), self.builder, optimizer, keep_frozen_state)
        scheduler.adopt_units(units)
        self.hooks.follow(units)
        self._fingerprint = ModelFingerprint(self._model)
        if optimizer is not None:
            optimizer.count_states()
