"""Saved-tensor hooks that store descriptions in place of views of released parameters, so a backward tells its needs.

Hooks on a unit's outputs announce its backward. No hook announces it for an output that is not found (kept on `self`,
put into an object of the user's, changed in place by the caller). So while a unit's forward runs, saved-tensor hooks
replace a view of a group's flat buffer by its group, shape, stride and offset. When autograd reads it, the unit is
unsharded first, in the order of autograd's nodes, which follows from the forward and so is the same on all ranks. Since
autograd keeps no view, every tensor that looks at a released buffer belongs to the user: see `FlatBuffer.free_unseen`.

All other tensors pass through as they are. Torch's check that they were not changed in place is made here, because
torch makes none where there are hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwell.sharding import Residency, ShardedGroup, Unit

_RECOMPUTING = ("torch.utils.checkpoint", "shardwell.checkpointing")  # their hooks save nothing, and count the tensors

_Pack = Callable[[Tensor], Any]
_Unpack = Callable[[Any], Tensor]


class SavedView:
    """The description of a view of a group's flat buffer, without the buffer."""

    __slots__ = ("group", "is_parameter", "offset", "shape", "stride", "unit", "updates", "version", "whose")

    def __init__(self, unit: Unit, group: ShardedGroup, tensor: Tensor, whose: Tensor | None) -> None:
        self.unit, self.group = unit, group
        self.shape, self.stride, self.offset = tensor.shape, tensor.stride(), tensor.storage_offset()
        self.whose, self.version = whose, tensor._version  # the parameter that shares its version counter
        self.is_parameter = tensor is whose
        self.updates = unit.num_updates

    def see(self) -> Tensor:
        """Return the view; the unit must be unsharded."""
        if self.updates != self.unit.num_updates:
            raise _changed(f"the parameters of unit '{self.unit.name or '(root)'}' were updated by step()")
        if self.whose is not None and self.whose._version != self.version:
            raise _changed(_versions(self.whose, self.version))
        if self.whose is not None and self.is_parameter:
            return self.whose
        return self.group.flat.tensor.as_strided(self.shape, self.stride, self.offset)


class SavedViews:
    """The saved-tensor hooks of one engine, which are on while one of its releasable units runs with gradients."""

    def __init__(self, need: Callable[[Unit], None]) -> None:
        """Create the hooks; `need` unshards a unit for the running backward."""
        self._need = need
        self._groups: dict[int, tuple[Unit, ShardedGroup]] = {}  # by the address of the flat buffer's storage
        self._parameters: set[int] = set()
        self._plain: tuple[_Pack, _Unpack] = (self._pack, self._unpack)
        self._pushed: list[_Pack] = []

    def take(self, units: Sequence[Unit]) -> None:
        """Look for views of these units from now on."""
        self._groups.clear()
        self._parameters = {id(p) for unit in units for group in unit.releasable for p in group.parameters}
        for unit in units:
            self.find(unit)

    def find(self, unit: Unit) -> None:
        """Register the storages of a unit's buffers, which may have changed."""
        for group in unit.releasable:
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
            if (self._pushed and top[0] is self._pushed[-1]) or getattr(top[0], "__module__", "") in _RECOMPUTING:
                return False
            hooks = self._around(*top)
        elif torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None:
            return False
        torch._C._autograd._push_saved_tensors_default_hooks(*hooks)
        self._pushed.append(hooks[0])
        return True

    def pop(self) -> None:
        """Switch off the hooks that were pushed last, unless they are off already."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if self._pushed and top is not None and top[0] is self._pushed.pop():
            torch._C._autograd._pop_saved_tensors_default_hooks()

    def clear(self) -> None:
        """Switch off all hooks that an aborted forward left on."""
        while self._pushed:
            self.pop()

    # ----------------------------------------------------------------------------------------- pack and unpack

    def _group_of(self, tensor: Tensor) -> tuple[Unit, ShardedGroup] | None:
        try:
            return self._groups.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):
            return None  # not a strided tensor, or one that a transform wraps

    def _describe(self, tensor: Tensor, unit: Unit, group: ShardedGroup) -> SavedView | None:
        flat = group.flat.tensor
        if flat.untyped_storage()._cdata != tensor.untyped_storage()._cdata:
            return None  # the storage of another tensor, at the address of an earlier buffer's storage
        if group not in unit.releasable or tensor.dtype != flat.dtype or tensor.dtype.is_complex:
            return None
        base = tensor if tensor._base is None else tensor._base
        return SavedView(unit, group, tensor, base if id(base) in self._parameters else None)

    def _pack(self, tensor: Tensor) -> Any:
        try:  # as in `_group_of`, inlined: every saved tensor comes here, and a call has a cost
            found = self._groups.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):
            found = None
        if found is not None and (view := self._describe(tensor, *found)) is not None:
            return view
        # A node's own result is detached, because it would hold the node that holds it. A leaf belongs to no node.
        return (tensor.detach() if tensor.grad_fn is not None else tensor), tensor._version

    def _unpack(self, packed: Any) -> Tensor:
        if type(packed) is SavedView:
            return self._see(packed)
        tensor, version = packed
        if tensor._version != version:
            raise _changed(_versions(tensor, version))
        result: Tensor = tensor
        return result

    def _see(self, view: SavedView) -> Tensor:
        unit = view.unit
        if unit.residency is not Residency.UNSHARDED or not (unit.in_backward or unit.is_retained):
            self._need(unit)
        return view.see()

    def _around(self, pack: _Pack, unpack: _Unpack) -> tuple[_Pack, _Unpack]:
        """Return hooks that pass everything that is no view of a unit to other hooks."""

        def both(tensor: Tensor) -> Any:
            found = self._group_of(tensor)
            return (self._describe(tensor, *found) if found is not None else None) or pack(tensor)

        def back(packed: Any) -> Tensor:
            return self._see(packed) if type(packed) is SavedView else unpack(packed)

        return both, back


def _versions(tensor: Tensor, expected: int) -> str:
    return (
        f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version {expected} instead"
    )


def _changed(what: str) -> RuntimeError:
    """Return an error in torch's own wording, so that users who know it find the cause."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{what}. Run the forward again, or change a copy."
    )
