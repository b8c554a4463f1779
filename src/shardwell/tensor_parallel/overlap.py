"""Sums of input gradients that run beside products of weight gradients (`tp_overlap_comm`).

Without it a region's begin sums the gradient of its input, and waits, after the layers that share the input have
computed their weights' gradients. Here these products are nodes of their own, which autograd runs after the sum has
started and before it is waited for:

    forward      wait   weights        start          products
    backward     products (of inputs)  start  weights  wait

Autograd runs the nodes that are ready by their sequence numbers, the highest first: products of weights get one between
those of the start and of the wait, which begin the region. Whatever the order is, the numbers are the same: a sum is
waited for before its result is read, and a weight's gradient is computed when its node runs. In a backward that is
differentiated again (`create_graph`) sums are waited for where they are.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from shardwell.parallel import Work
from shardwell.parallel.model_axis import ModelAxis
from shardwell.tensor_parallel import functions

_ORDER = "_shardwell_order"  # an attribute of what begins a region: the sequence number of its products of weights


class _Flight:
    """The sum of a gradient that may be in flight."""

    def __init__(self) -> None:
        self.work: Work | None = None

    def finish(self) -> None:
        """Wait for the sum, if it was started."""
        work, self.work = self.work, None
        if work is not None:
            work.wait()


class _Wait(Function):
    """A function whose backward waits for the sum of the gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, flight: _Flight) -> Tensor:
        ctx.flight = flight
        return values.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        ctx.flight.finish()
        return grad, None


class _StartSum(Function):
    """A function whose backward starts the sum of the gradient over the axis."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, axis: ModelAxis, token: str, flight: _Flight) -> Tensor:
        ctx.axis, ctx.token, ctx.flight = axis, token, flight
        return values.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            return functions.leave(grad, ctx.axis, ctx.token), None, None, None
        total = grad.clone(memory_format=torch.contiguous_format)  # other nodes may hold the same gradient
        ctx.flight.work = ctx.axis.start_all_reduce(total, ctx.token)
        return total, None, None, None


class _Gather(Function):
    """An all-gather whose backward starts the reduce-scatter of the gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, axis: ModelAxis, dim: int, token: str, flight: _Flight) -> Tensor:
        ctx.axis, ctx.dim, ctx.token, ctx.flight = axis, dim, token, flight
        return axis.all_gather(values, dim, token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            return functions.scatter(grad, ctx.axis, ctx.dim, ctx.token, sums=True), None, None, None, None
        total, ctx.flight.work = ctx.axis.start_reduce_scatter(grad, ctx.dim, ctx.token)
        return total, None, None, None, None


class _Kept:
    """The two tensors of which a weight's gradient is the product."""

    def __init__(self) -> None:
        self.values: tuple[Tensor, Tensor] | None = None  # the input, and the output's gradient


class _LateWeight(Function):
    """A function of the weight of a product, whose backward computes the gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, kept: _Kept, transposed: bool) -> Tensor:
        ctx.kept, ctx.transposed = kept, transposed
        return weight.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        kept, ctx.kept.values = ctx.kept.values, None
        is_empty = not any(grad.stride())  # as what `_Product` returns; a second backward brings a gradient, too
        if kept is None:
            return grad, None, None
        inputs, of_outputs = (one.reshape(-1, one.shape[-1]) for one in kept)
        found = inputs.t() @ of_outputs if ctx.transposed else of_outputs.t() @ inputs
        return found if is_empty else found + grad, None, None


class _Product(Function):
    """A linear layer's product; its backward leaves the gradient of the weight to `_LateWeight`."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, bias: Tensor | None, kept: _Kept, transposed: bool) -> Tensor:
        ctx.save_for_backward(values, weight)
        ctx.kept, ctx.transposed = kept, transposed
        return F.linear(values, weight.t() if transposed else weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        values, weight = ctx.saved_tensors
        ctx.kept.values = values, grad
        back = grad @ (weight.t() if ctx.transposed else weight) if ctx.needs_input_grad[0] else None
        sum_of_rows = grad.reshape(-1, grad.shape[-1]).sum(0) if ctx.needs_input_grad[2] else None
        return back, weight.new_zeros(()).expand(weight.shape), sum_of_rows, None, None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def enter(values: Tensor, axis: ModelAxis, token: str) -> Tensor:
    """Begin a region: the gradients of all ranks are summed beside the products of weights."""
    flight = _Flight()
    waiting, order = _waiting(values, flight)
    found: Tensor = _StartSum.apply(waiting, axis, token, flight)  # type: ignore[no-untyped-call]
    found.__dict__[_ORDER] = order
    return found


@torch.compiler.disable  # type: ignore[untyped-decorator]
def gather(values: Tensor, axis: ModelAxis, dim: int, token: str) -> Tensor:
    """All-gather along a dimension: gradients are summed and scattered beside the products of weights."""
    flight = _Flight()
    waiting, order = _waiting(values, flight)
    found: Tensor = _Gather.apply(waiting, axis, dim, token, flight)  # type: ignore[no-untyped-call]
    found.__dict__[_ORDER] = order
    return found


def _waiting(values: Tensor, flight: _Flight) -> tuple[Tensor, int]:
    """Return values whose gradient is waited for, and a sequence number between this node's and the next one's."""
    waiting: Tensor = _Wait.apply(values, flight)  # type: ignore[no-untyped-call]
    between: Any = waiting.view_as(waiting)
    return between, between.grad_fn._sequence_nr()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def product(values: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor | None:
    """Return what a linear layer computes of the input of a region; None if nothing is summed beside its gradient."""
    order = values.__dict__.get(_ORDER)
    if order is None or not (torch.is_grad_enabled() and weight.requires_grad):
        return None
    kind = values.device.type
    if values.is_meta or not torch.is_autocast_enabled(kind):  # the meta device has no autocast
        return _product(values, weight, bias, transposed, order)
    dtype = torch.get_autocast_dtype(kind)
    cast = None if bias is None else _cast(bias, dtype)
    with torch.autocast(kind, enabled=False):
        return _product(_cast(values, dtype), _cast(weight, dtype), cast, transposed, order)


def _cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values as autocast gives them to a product."""
    return values if values.dtype == torch.float64 else values.to(dtype)


def _product(values: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, order: int) -> Tensor:
    kept = _Kept()
    late: Any = _LateWeight.apply(weight, kept, transposed)  # type: ignore[no-untyped-call]
    late.grad_fn._set_sequence_nr(order)
    found: Tensor = _Product.apply(values, late, bias, kept, transposed)  # type: ignore[no-untyped-call]
    return found
