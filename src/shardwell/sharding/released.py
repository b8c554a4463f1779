"""Released parameters: a use of their values is caught, and a change that their release loses is reported.

A released parameter keeps its shape, dtype and identity, but is a view of freed storage: reading it would crash the
process. While it is released its class is `ReleasedParameter`, whose `__torch_function__` answers metadata and asks the
owner of the parameter for everything else. `ChangeWatch` looks at unsharded parameters before they are released: a
change in place would be lost.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardwell.errors import ReleasedParameterError
from shardwell.kernels.rounding import narrow
from shardwell.memory import Tier

if TYPE_CHECKING:
    from shardwell.sharding.group import ShardedGroup
    from shardwell.sharding.unit import Unit


class ParameterOwner(Protocol):
    """The object that can bring the values of a parameter back."""

    def request_values(self, parameter: nn.Parameter, wanted_by: str) -> None:
        """Make the values readable until `end_request`, or raise a clear error."""

    def end_request(self, parameter: nn.Parameter) -> None:
        """End the use of the values that `request_values` began."""

    def hand_over(self, parameter: nn.Parameter) -> Tensor:
        """Return the full values for a new owner, and forget the parameter."""

    def open(self) -> None:
        """Make the parameter unsharded until `close`; every rank must call it."""

    @property
    def num_sharing(self) -> int:
        """Return the number of ranks among which `modifier_rank` is counted."""

    def close(self, modifier_rank: int | None) -> None:
        """End `open`; with a rank, its values become those of all ranks."""


def _descriptor(name: str) -> Any:
    return getattr(Tensor, name)


METADATA: frozenset[Any] = frozenset(  # what a tensor answers without its values
    [
        _descriptor(name).__get__
        for name in (
            *("shape", "dtype", "device", "ndim", "layout", "requires_grad", "grad", "grad_fn", "is_leaf", "itemsize"),
            *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "nbytes", "output_nr"),
            *("retains_grad", "_backward_hooks", "_post_accumulate_grad_hooks"),
        )
        if hasattr(Tensor, name)
    ]
    + [
        *(Tensor.size, Tensor.stride, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.ndimension),
        *(Tensor.element_size, Tensor.is_contiguous, Tensor.is_floating_point, Tensor.is_complex, Tensor.is_signed),
        *(Tensor.storage_offset, Tensor.requires_grad_, Tensor.get_device, Tensor.__len__, Tensor.__hash__),
        *(Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.retain_grad),
        *(torch.numel, torch.is_floating_point, torch.is_complex, torch.is_tensor),
        *(_descriptor("grad").__set__, _descriptor("grad").__delete__, _descriptor("requires_grad").__set__),
        *(_descriptor("_backward_hooks").__set__, _descriptor("_post_accumulate_grad_hooks").__set__),
    ]
)


class ReleasedParameter(nn.Parameter):
    """A parameter whose values are released."""

    home: type[nn.Parameter] = nn.Parameter  # its class while it is unsharded

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Parameter(away, shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return an ordinary parameter with the full values, if they are available now."""
        owner = owner_of(self)
        owner.request_values(self, "deepcopy")
        try:
            with torch._C.DisableTorchFunctionSubclass():
                values = self.data.clone(memory_format=torch.preserve_format)
                copy: nn.Parameter = Tensor._make_subclass(_home_of(self), values, self.requires_grad)
        finally:
            owner.end_request(self)
        memo[id(self)] = copy
        return copy

    def __format__(self, spec: str) -> str:
        return repr(self)

    def detach(self) -> Tensor:
        """Return the detached tensor, with the original class inside `nn.Parameter(...)`.

        `nn.Parameter(this)` would otherwise take it for a custom tensor type, and require its class. The model's own
        `state_dict()`, which clients call on ranks that save nothing, gets an entry without values.
        """
        try:
            values = super().detach()
        except ReleasedParameterError:
            if sys._getframe(1).f_code is not nn.Module._save_to_state_dict.__code__:
                raise
            return ValuesElsewhere(self)
        if sys._getframe(1).f_code is nn.Parameter.__new__.__code__:
            return Tensor._make_subclass(_home_of(self), values)
        return values

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        away = [leaf for leaf in tree_leaves((args, kwargs)) if is_released(leaf)]
        for parameter in away:
            owner_of(parameter).request_values(parameter, _name_of(func))
        try:
            return func(*args, **kwargs)
        finally:
            for parameter in away:
                owner_of(parameter).end_request(parameter)


def _name_of(func: Callable[..., Any]) -> str:
    """Return the name of an operation as users write it: that of `.data` is the attribute's, not `__get__`."""
    name = getattr(func, "__name__", str(func))
    return getattr(getattr(func, "__self__", None), "__name__", name) if name in ("__get__", "__set__") else name


class ValuesElsewhere(Tensor):
    """An entry of a state dictionary: the shape, dtype and device of a released parameter, without its values."""

    @staticmethod
    def __new__(cls, parameter: Tensor) -> ValuesElsewhere:
        with torch._C.DisableTorchFunctionSubclass():
            size, stride, where = parameter.shape, parameter.stride(), parameter.device
            made: ValuesElsewhere = Tensor._make_wrapper_subclass(
                cls, size, stride, dtype=parameter.dtype, device=where, storage_size=0
            )
        return made

    def __init__(self, parameter: Tensor) -> None: ...

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ValuesElsewhere(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._refuse("pickling")

    # torch has its own errors for these, which do not say what to do

    def tolist(self) -> NoReturn:
        """Raise: there are no values."""
        self._refuse("tolist")

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Raise: there are no values."""
        self._refuse("numpy")

    def __array__(self, dtype: Any = None, copy: Any = None) -> NoReturn:
        self._refuse("numpy")

    def data_ptr(self) -> NoReturn:
        """Raise: there is no memory."""
        self._refuse("data_ptr")

    def __dlpack__(self, **options: Any) -> NoReturn:
        self._refuse("__dlpack__")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return ValuesElsewhere(args[0])
        return cls._refuse(func._schema.name.removeprefix("aten::"))

    @staticmethod
    def _refuse(wanted_by: str) -> NoReturn:
        raise ReleasedParameterError(
            f"'{wanted_by}' needs the values of an entry of model.state_dict(), but that parameter is released: each "
            "rank holds only its shard. All values are in engine.state_dict(), which all ranks must call."
        )


def owner_of(parameter: nn.Parameter) -> ParameterOwner:
    """Return the owner of a parameter that has one."""
    owner: ParameterOwner = parameter._shardwell_owner  # type: ignore[attr-defined]
    return owner


def owner_or_none(parameter: nn.Parameter) -> ParameterOwner | None:
    """Return the owner of a parameter, or None."""
    owner: ParameterOwner | None = parameter.__dict__.get("_shardwell_owner")
    return owner


def is_owned(parameter: nn.Parameter) -> bool:
    """Return whether a unit or `zero.Init` owns the parameter."""
    return parameter.__dict__.get("_shardwell_owner") is not None


def set_owner(parameter: nn.Parameter, owner: ParameterOwner) -> None:
    """Set the owner of a parameter."""
    parameter._shardwell_owner = owner  # type: ignore[attr-defined]


def is_released(value: Any) -> bool:
    """Return whether a value is a released parameter."""
    return issubclass(type(value), ReleasedParameter)


def clear_owner(parameter: nn.Parameter) -> None:
    """Make the parameter an ordinary one without an owner."""
    parameter.__class__ = _home_of(parameter)
    parameter.__dict__.pop("_shardwell_owner", None)


def release(parameters: Iterable[nn.Parameter]) -> None:
    """Change the class of parameters so that a use of their values is caught."""
    for parameter in parameters:
        kind = type(parameter)
        parameter.__class__ = ReleasedParameter if kind is nn.Parameter else _away_class(kind)


def restore(parameters: Iterable[nn.Parameter]) -> None:
    """Give released parameters their own class back."""
    for parameter in parameters:
        kind = type(parameter)
        parameter.__class__ = nn.Parameter if kind is ReleasedParameter else _home_of(parameter)


def _home_of(parameter: nn.Parameter) -> type[nn.Parameter]:
    kind = type(parameter)
    return kind.home if issubclass(kind, ReleasedParameter) else kind


def _away_class(kind: type[nn.Parameter]) -> type[ReleasedParameter]:
    """Return the released class of a user's own parameter class, which is a subclass of both."""
    if issubclass(kind, ReleasedParameter):
        return kind
    if kind not in _away_classes:
        _away_classes[kind] = type(f"Away{kind.__name__}", (ReleasedParameter, kind), {"home": kind})
    return _away_classes[kind]


_away_classes: dict[type[nn.Parameter], type[ReleasedParameter]] = {}


# ----------------------------------------------------------------------------------- changes that a release loses

_CLOSE_LOOKS = 4  # reshards that compare values: a forward that changes its own parameters does so from the start

_version: Callable[[Tensor], int] = Tensor._version.__get__  # type: ignore[attr-defined]


class ChangeWatch:
    """Finds changes of a unit's parameters: of their shapes, and of values that are lost when their memory is freed."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._has_warned = False
        self.is_off = False  # the parameters get another owner: what happens to them is no edit of the user
        self.gathered_at = 0  # the number of the unit's updates at its all-gather
        self.is_rounded = False  # the all-gather was quantised
        self.was_retained = False  # since its all-gather
        self.was_opened = False  # since its all-gather, by a context: the user may have views of it
        self.has_warned_of_views = False
        self.needs_rebuild = False  # a parameter was given another shape
        self._num_looks = 0  # reshards; the first `_CLOSE_LOOKS` of them compare values
        self.reset(parameters)

    def reset(self, parameters: list[nn.Parameter]) -> None:
        """Expect the parameters to stay as they are now."""
        with torch._C.DisableTorchFunctionSubclass():
            self._versions = list(map(_version, parameters))  # how often each was changed in place by the user

    def check(self, unit: Unit, *, closely: bool | None = None) -> None:
        """Warn if unsharded parameters were changed in place, because the change is lost when they are freed.

        Torch does not count changes of `p.data`. `closely`: values are compared with the stored ones. By default this
        is done where a change is likely, and the unit is about to be resharded.
        """
        if closely is None:
            closely = self.was_retained or self._num_looks < _CLOSE_LOOKS
            self._num_looks, self.was_retained = self._num_looks + 1, False
        with torch._C.DisableTorchFunctionSubclass():
            now = list(map(_version, unit.sets.parameters))
        is_lost = closely and self._differs(unit)
        if (is_lost or now != self._versions) and not self._has_warned:
            self._warn(unit, now, is_lost=is_lost)
        self._versions = now

    def _differs(self, unit: Unit) -> bool:
        """Return whether values differ from the stored ones, and only the user can have changed them."""
        is_updated = unit.updates.count != self.gathered_at or unit.updates.is_early or unit.updates.pending is not None
        if is_updated or not unit.is_unsharded:
            return False
        return any(is_unlike_its_shard(group) for group in unit.resharding_groups)

    def _warn(self, unit: Unit, now: list[int], *, is_lost: bool) -> None:
        """Warn once, with the names of the parameters that were changed and will be freed."""
        slots = [slot for group in unit.groups for slot in group.layout.slots]
        freed = {id(slot) for group in unit.resharding_groups for slot in group.layout.slots}
        changed = zip(slots, now, self._versions, strict=True)
        names = [slot.name for slot, after, before in changed if after != before and id(slot) in freed]
        if names or is_lost:
            self._has_warned = True
            warn_of_lost(unit.name, names)


def is_unlike_its_shard(group: ShardedGroup) -> bool:
    """Return whether unsharded parameters differ from the stored ones, where that is cheap to know.

    The parameters must have been all-gathered unquantised.
    """
    stored, mine = group.storage.parameters, group.flat.tensor[slice(*group.local_range)]
    is_on_disk = group.spec.parameters.tier is Tier.DISK
    if group.is_quantized or not group.all_gather.is_exact or is_on_disk or stored.is_meta:
        return False
    if stored.device != mine.device:
        return False
    rounded = narrow(stored, torch.empty_like(mine)) if stored.dtype != mine.dtype else stored
    return not torch.equal(rounded.view(torch.uint8), mine.view(torch.uint8))


def warn_of_lost(unit: str, names: list[str]) -> None:
    """Warn that a change in place of parameters of this unit is lost."""
    logging.getLogger("shardwell").warning(
        "%s of unit '%s' changed in place while unsharded for a moment, and the change is lost: each rank holds only "
        "its shard. Change parameters inside `with shardwell.zero.GatheredParameters(parameters, modifier_rank=0):`, "
        "or use engine.load_state_dict; what a forward changes by itself belongs in a buffer.",
        ", ".join(f"'{name}'" for name in names) or "a parameter",
        unit or "(root)",
    )
