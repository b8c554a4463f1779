"""What autograd saves of released parameters: descriptions in place of views. So a backward itself says what it needs.

A unit's backward is announced by hooks on its outputs. An output that nobody finds (kept on `self`, put into an object
of the user's, changed in place by the caller) is announced by nobody. So while a unit's forward runs, saved-tensor
hooks write down "so much of that group, from here" where autograd saves a view of a group's flat buffer. When autograd
reads it, the unit is made whole first, in the order of autograd's nodes, which is that of the forward and so the same
on all ranks. And since no view stays behind, whatever looks at a released buffer is the user's own: see
`FlatBuffer.drop_unseen`.

All other tensors pass through as they are; torch's check that they were not changed in place is made here, because
torch makes none where there are hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwell.sharding import Residency, ShardedGroup, Unit

_RECOMPUTING = ("torch.utils.checkpoint", "shardwell.checkpointing")  # their hooks save nothing, and count what comes

_Pack = Callable[[Tensor], Any]
_Unpack = Callable[[Any], Tensor]


class SavedView:
    """A view of a group's flat buffer, without the buffer."""

    __slots__ = ("group", "is_parameter", "offset", "shape", "stride", "unit", "updates", "version", "whose")

    def __init__(self, unit: Unit, group: ShardedGroup, tensor: Tensor, whose: Tensor | None) -> None:
        self.unit, self.group = unit, group
        self.shape, self.stride, self.offset = tensor.shape, tensor.stride(), tensor.storage_offset()
        self.whose, self.version = whose, tensor._version  # the parameter that shares its count of changes
        self.is_parameter = tensor is whose
        self.updates = unit.num_updates

    def see(self) -> Tensor:
        """The view, of a unit that is whole."""
        if self.updates != self.unit.num_updates:
            raise _changed(f"the parameters of unit '{self.unit.name or '(root)'}' were updated by step()")
        if self.whose is not None and self.whose._version != self.version:
            raise _changed(_versions(self.whose, self.version))
        if self.whose is not None and self.is_parameter:
            return self.whose
        return self.group.flat.tensor.as_strided(self.shape, self.stride, self.offset)


class SavedViews:
    """The hooks of one engine. They are on while one of its units that can be released runs with gradients."""

    def __init__(self, need: Callable[[Unit], None]) -> None:
        """`need`: make a unit whole for the backward that runs."""
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
        """A unit's buffers may have other storage than before."""
        for group in unit.releasable:
            self._groups[group.flat.tensor.untyped_storage()._cdata] = unit, group

    # ------------------------------------------------------------------------------------------------- on and off

    def push(self) -> bool:
        """Switch the hooks on; false if they are on already, or have to stand aside.

        Torch applies the innermost hooks only. Where others are on, they get what is no view. Hooks that recompute
        must see all that is saved, and save nothing; torch.func allows no hooks. There views stay views, which at worst
        keep their memory.
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
        """Switch off what was pushed last, unless somebody did already."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if self._pushed and top is not None and top[0] is self._pushed.pop():
            torch._C._autograd._pop_saved_tensors_default_hooks()

    def clear(self) -> None:
        """Switch off whatever an aborted forward left on."""
        while self._pushed:
            self.pop()

    # ---------------------------------------------------------------------------------------------- in and out

    def _group_of(self, tensor: Tensor) -> tuple[Unit, ShardedGroup] | None:
        try:
            return self._groups.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):
            return None  # no strided tensor, or one that a transform wraps

    def _describe(self, tensor: Tensor, unit: Unit, group: ShardedGroup) -> SavedView | None:
        flat = group.flat.tensor
        if flat.untyped_storage()._cdata != tensor.untyped_storage()._cdata:
            return None  # the storage of another tensor, where that of an earlier buffer was
        if group not in unit.releasable or tensor.dtype != flat.dtype or tensor.dtype.is_complex:
            return None
        base = tensor if tensor._base is None else tensor._base
        return SavedView(unit, group, tensor, base if id(base) in self._parameters else None)

    def _pack(self, tensor: Tensor) -> Any:
        try:  # as in `_group_of`: calls cost here, where every saved tensor comes by
            found = self._groups.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):
            found = None
        if found is not None and (view := self._describe(tensor, *found)) is not None:
            return view
        # A node's own result would hold the node that holds it; a leaf is nobody's.
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
        """Hooks that hand others what is no view of a unit."""

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
    """Torch's own words, so that who knows them finds the cause."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{what}. Run the forward again, or change a copy."
    )
