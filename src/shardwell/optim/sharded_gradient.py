"""The `p.grad` of a parameter whose gradient the engine holds: a tensor that stands for the full gradient.

Between a backward and its step each rank holds its part of the averaged gradient, in a flat buffer, on some tier.
`ShardedGradient` stands for the full gradient. Elementwise in-place operations change this rank's part, norms are
summed over the ranks, and any other operation collects the full gradient from all ranks. All ranks must do the same, as
with any collective. This module does not know when gradients come and go: `optim/gradient_views.py` does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from shardwell.errors import ShardwellError
from shardwell.optim.param_access import ParamAccess
from shardwell.sharding.released import METADATA

if TYPE_CHECKING:
    from shardwell.optim.gradient_views import GradientViews

aten = torch.ops.aten

_ALIASES = {aten.detach.default, aten.alias.default}
_LIKE = {
    getattr(aten, name).default
    for name in (
        *("empty_like", "zeros_like", "ones_like", "rand_like", "randn_like", "full_like"),
        *("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"),
    )
}
_ELEMENT_BY_ELEMENT = {aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.copy_.default}
_FOREACH = {
    "aten::_foreach_mul_": aten.mul_,
    "aten::_foreach_div_": aten.div_,
    "aten::_foreach_zero_": aten.zero_,
    "aten::_foreach_clamp_max_": aten.clamp_max_,
    "aten::_foreach_clamp_min_": aten.clamp_min_,
}
_NEED_MEMORY = {  # methods that torch does not dispatch
    *(Tensor.numpy, Tensor.tolist),
    *(Tensor.__array__, Tensor.__repr__, Tensor.__format__, Tensor.__reduce_ex__),
}
_VIEWS = {"T", "mT", "H", "mH", "real", "imag"}  # attributes
_IN_PLACE = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")}
_KNOWN = {  # functions that read no values, or only norms
    *(
        "untyped_storage",
        "data_ptr",
        "detach",
        "norm",
        "vector_norm",
        "linalg_vector_norm",
        "_foreach_norm",
        "is_same_size",
        "type",
        "is_shared",
    ),
    *("empty_like", "zeros_like", "ones_like", "rand_like", "randn_like", "full_like"),
    *("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided", "__set__", "__delete__"),
}
_READ_WHOLE = (
    "A full gradient was read: `p.grad` holds this rank's part of it, so all ranks all-gathered it, and it stays "
    "in memory until the step. Norms, clip_grad_norm_, clip_grad_value_ and in-place arithmetic need no gather. This "
    "is said once."
)
_SCALED = (
    "GradScaler cannot unscale gradients that are split over the ranks, and the engine needs none: set "
    '"fp16": {"enabled": true} in the configuration, which scales the loss by itself (bf16 needs no scale).'
)
_FOREIGN = (
    "an optimizer's kernel met the gradient of a parameter that a shardwell engine trains. Give that optimizer to "
    "shardwell.initialize(optimizer=...), then call engine.step() or the optimizer's own step()."
)


class HeldGradient:
    """The gradient of one parameter, as its engine holds it."""

    def __init__(self, views: GradientViews, parameter: nn.Parameter) -> None:
        # Weak, because `p.grad` lives in C++, where the garbage collector cannot follow a cycle.
        self._views, self._parameter = weakref.ref(views), weakref.ref(parameter)
        self.gathered: Tensor | None = None  # ND, the full gradient; the user may have views of it and change them
        self._seen_version = 0
        self.incoming: Tensor | None = None  # ND, the gradient that autograd adds now
        self.is_spent = False  # a step has used it

    @property
    def views(self) -> GradientViews:
        """Return the views of the engine; an error if the engine is gone."""
        views = self._views()
        if views is None:
            raise ShardwellError("the engine that held this gradient is gone")
        return views

    @property
    def parameter(self) -> nn.Parameter:
        """Return the parameter; an error if it is gone."""
        parameter = self._parameter()
        if parameter is None:
            raise ShardwellError("the parameter of this gradient is gone")
        return parameter

    @property
    def access(self) -> ParamAccess:
        """Return the access to the parameter's shards."""
        return ParamAccess(self.parameter, of_gradient=True)

    def whole(self) -> Tensor:
        """Return the full gradient (ND) of all ranks, in the parameter's dtype. Changes of it are taken over."""
        self.check_there()
        self.write_back()
        if self.gathered is None:
            self.views.say_once(_READ_WHOLE)
            parameter = self.parameter
            found = self.access.gradient(asks=self.views.sums_may_wait())
            if found is None:
                found = torch.zeros(parameter.shape, device=parameter.device)
            self.gathered = found.to(parameter.device, parameter.dtype)
            self._seen_version = self.gathered._version
        return self.gathered

    def check_there(self) -> None:
        """Raise an error if the gradient may not be read or changed now."""
        _refuse_inside_backward()
        self.check_not_used_up()

    def check_not_used_up(self) -> None:
        """Raise an error if a step has used the gradient."""
        if self.is_spent:
            raise ShardwellError(
                "the optimizer's step has used this gradient up: the engine holds it no more. Read or change `p.grad` "
                "between backward and step."
            )

    @property
    def has_edits(self) -> bool:
        """Whether the full gradient was changed since it was last written back."""
        return self.gathered is not None and self.gathered._version != self._seen_version

    def write_back(self, *, is_changed: bool = False) -> None:
        """Write changes of the full gradient to this rank's part; unchanged elements stay exact.

        `is_changed`: the change happened below autograd, where changes are not counted.
        """
        if self.gathered is None or not (is_changed or self.has_edits):
            return
        self._seen_version = self.gathered._version
        access = self.access
        with access.open_gradient(asks=self.views.sums_may_wait()) as part:
            if part is not None:
                new = access.part_of(self.gathered).to(part.device)
                torch.where(new == part.to(new.dtype), part, new.to(part.dtype), out=part)
        self.views.note_change()

    def forget_whole(self) -> None:
        """Drop the full gradient, because the gradient has changed."""
        self.gathered = None

    def change(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Apply an elementwise in-place operation to the gradient."""
        if func is aten.zero_.default and self.is_spent:
            return  # as training loops do that set gradients to zero after each step
        self.check_there()
        self.write_back()
        if self.gathered is not None:  # other readers must see the change, too
            func(self.gathered, *_plain(args), **_plain(kwargs))
            self.write_back(is_changed=True)
            return
        access = self.access
        others, options = tree_map(access.argument, (args, kwargs))
        with access.open_gradient(asks=self.views.sums_may_wait()) as part:
            if part is not None:
                others, options = tree_map(
                    lambda a: a.to(part.device) if isinstance(a, Tensor) else a, (others, options)
                )
                func(part, *others, **options)
        self.views.note_change()


class ShardedGradient(Tensor):
    """A tensor that stands for the gradient of a sharded parameter."""

    held: HeldGradient

    @staticmethod
    def __new__(cls, held: HeldGradient, parameter: Tensor) -> ShardedGradient:
        made: ShardedGradient = Tensor._make_wrapper_subclass(
            cls,
            parameter.shape,
            strides=parameter.stride(),
            dtype=parameter.dtype,
            device=parameter.device,
            storage_size=0,
        )
        made.held = held
        return made

    def __init__(self, held: HeldGradient, parameter: Tensor) -> None: ...

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            return args[0].held.whole().clone()
        if func in _NEED_MEMORY:
            return func(args[0].held.whole(), *args[1:], **(kwargs or {}))
        if func is _set_data:
            args[0].copy_(args[1])
            return None
        if _is_for_parts(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        # Above autograd, as here, views of the full gradient share its version counter.
        return _on_whole(func, args, kwargs or {}, is_changed=False)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if torch._C._current_graph_task_id() != -1:
            return _accumulate(func, args)
        first = args[0] if args else None
        name = func._schema.name
        if name.startswith("aten::_amp_"):
            raise ShardwellError(_SCALED)
        if name.startswith("aten::_fused_"):
            raise ShardwellError(_FOREIGN)
        if not isinstance(first, ShardedGradient):
            return _foreach(func, args, kwargs)
        if func in _ALIASES:
            return ShardedGradient(first.held, first)
        if func in _LIKE:
            return func(
                torch.empty_strided(first.shape, first.stride(), dtype=first.dtype, device=first.device),
                *args[1:],
                **kwargs,
            )
        if func is aten.linalg_vector_norm.default and _is_of_all(args, kwargs):
            return first.held.views.norm(first.held, *_norm_arguments(args, kwargs))
        if func in _ELEMENT_BY_ELEMENT or (name.endswith("_") and torch.Tag.pointwise in func.tags):
            first.held.change(func, tuple(args[1:]), kwargs)
            return first
        result = _on_whole(func, args, kwargs, is_changed=func._schema.is_mutable)
        return first if name.endswith("_") else result


_set_data = Tensor.data.__set__  # type: ignore[attr-defined]


def _is_for_parts(func: Any) -> bool:
    """Return whether a function reads no values, changes them in place or takes norms, as `__torch_dispatch__` can."""
    if func in METADATA:
        return True
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", "") not in _VIEWS
    is_in_place = name.endswith("_") and not name.endswith("__")
    return is_in_place or name in _IN_PLACE or name in _KNOWN


def _refuse_inside_backward() -> None:
    if torch._C._current_graph_task_id() != -1:
        raise ShardwellError(
            "a gradient that the engine holds was read or changed while backward still runs, before it is averaged "
            "over the ranks. Do so after backward; inside it, use `p.register_hook`, which sees this rank's own."
        )


def _accumulate(func: Any, args: tuple[Any, ...]) -> Any:
    """Take the gradient that autograd adds to `p.grad`; the hook that runs next fetches it."""
    if func is aten.add_.Tensor and isinstance(args[0], ShardedGradient):
        args[0].held.incoming = args[1]
        return args[0]
    if func is aten.add.Tensor and isinstance(args[0], ShardedGradient):  # create_graph=True
        args[0].held.incoming = args[1]
        return args[1].clone()
    if func in _ALIASES:
        return ShardedGradient(args[0].held, args[0])
    _refuse_inside_backward()
    raise AssertionError("a backward runs")


def _foreach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply an operation on lists of tensors one by one where it is elementwise."""
    one_by_one = _FOREACH.get(func._schema.name)
    simple = (
        len(args) < 3 and not kwargs and not any(isinstance(leaf, ShardedGradient) for leaf in tree_leaves(args[1:]))
    )
    if one_by_one is not None and simple:
        for index, tensor in enumerate(args[0]):
            other = [arg[index] if isinstance(arg, (list, tuple)) else arg for arg in args[1:]]
            one_by_one(tensor, *other)
        return None
    return _on_whole(func, args, kwargs, is_changed=func._schema.is_mutable)


def _on_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_changed: bool) -> Any:
    """Apply an operation to full gradients, and write changes back. `is_changed` as for `write_back`."""
    mine = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, ShardedGradient)]
    result = func(*_plain(args), **_plain(kwargs))
    for gradient in mine:
        gradient.held.write_back(is_changed=is_changed)
    return result


def _plain(value: Any) -> Any:
    return tree_map(lambda leaf: leaf.held.whole() if isinstance(leaf, ShardedGradient) else leaf, value)


def _is_of_all(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a norm is over all dimensions, to a scalar."""
    dim = args[2] if len(args) > 2 else kwargs.get("dim")
    keeps = args[3] if len(args) > 3 else kwargs.get("keepdim", False)
    return dim is None and not keeps


def _norm_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[float, torch.dtype | None]:
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    return float(order), kwargs.get("dtype")


def check_not_used_up(parameter: nn.Parameter) -> None:
    """Raise an error if `parameter.grad` is still set and a step of the user's own optimizer has used it."""
    with torch._C.DisableTorchFunctionSubclass():
        grad = parameter.grad
    if isinstance(grad, ShardedGradient):
        grad.held.check_not_used_up()
