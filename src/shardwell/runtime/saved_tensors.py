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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwell.sharding import Residency, ShardedGroup, Unit

_RECOMPUTING = ("torch.utils.checkpoint", "shardwell.checkpointing")  # their hooks save nothing, and count the tensors

_Pack = Callable[[Tensor], Any]
_Unpack = Callable[[Any], Tensor]


@dataclass(slots=True, eq=False)
class SavedView:
    """The description of a view of a group's flat buffer, without the buffer."""

    unit: Unit
    group: ShardedGroup
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    version: int
    parameter: Tensor | None  # the parameter that shares the view's version counter
    is_parameter: bool  # the view is that parameter itself
    num_updates: int  # of the unit, when the view was saved


class SavedViews:
    """The saved-tensor hooks of one engine, which are on while one of its releasable units runs with gradients."""

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
                return SavedView(
                    unit,
                    group,
                    tensor.shape,
                    tensor.stride(),
                    tensor.storage_offset(),
                    tensor._version,
                    base if id(base) in self._parameters else None,
                    base is tensor,
                    unit.updates.count,
                )
        # A node's own result is detached, because it would hold the node that holds it. A leaf belongs to no node.
        return (tensor.detach() if tensor.grad_fn is not None else tensor), tensor._version

    def _unpack(self, packed: Any) -> Tensor:
        """Return what was packed; the unit of a view is unsharded first."""
        if type(packed) is not SavedView:
            tensor: Tensor
            tensor, version = packed
            if tensor._version != version:
                raise _changed(_versions(tensor, version))
            return tensor
        unit, parameter = packed.unit, packed.parameter
        if unit.residency is not Residency.UNSHARDED or not (unit.use.in_backward or unit.use.is_retained):
            self._need(unit)
        if packed.num_updates != unit.updates.count:
            raise _changed(f"the parameters of unit '{unit.name or '(root)'}' were updated by step()")
        if parameter is not None:
            if parameter._version != packed.version:
                raise _changed(_versions(parameter, packed.version))
            if packed.is_parameter:
                return parameter
        return packed.group.flat.tensor.as_strided(packed.shape, packed.stride, packed.offset)

    def _around(self, pack: _Pack, unpack: _Unpack) -> tuple[_Pack, _Unpack]:
        """Return hooks that pass everything that is no view of a unit to other hooks."""

        def both(tensor: Tensor) -> Any:
            packed = self._pack(tensor)
            return packed if type(packed) is SavedView else pack(tensor)

        def back(packed: Any) -> Tensor:
            return self._unpack(packed) if type(packed) is SavedView else unpack(packed)

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
