"""Collectives of the tensor axis with gradients.

    function            forward                         backward
    enter               nothing                         sum
    leave               sum                             nothing
    gather_sequence     all-gather along the sequence   reduce-scatter
    scatter_sequence    reduce-scatter along it         all-gather
    split_sequence      this rank's part of it          all-gather
    join_sequence       all-gather along it             this rank's part
    gather_last         all-gather of the last dim      this rank's part
    split_last          this rank's part of it          all-gather

The forward of each takes what the backward of the one below or above it gives, so that the backward of each is the
forward of that one, which has a backward, too. What is not summed is the same on all ranks of the axis, or is a part of
its own on each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import Function

from shardwell.errors import ShardwellError
from shardwell.parallel.model_axis import ModelAxis

_Function = TypeVar("_Function", bound=Callable[..., Tensor | None])


class _Enter(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, axis: ModelAxis, token: str) -> Tensor:
        ctx.axis, ctx.token = axis, token
        return values.detach()  # no view for autograd, which would keep `values` as long as it

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _Leave.apply(grad, ctx.axis, ctx.token), None, None  # type: ignore[no-untyped-call]


class _Leave(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, axis: ModelAxis, token: str) -> Tensor:
        ctx.axis, ctx.token = axis, token
        # A copy: other nodes may hold the same gradient.
        return axis.all_reduce(values.clone(memory_format=torch.contiguous_format), token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if not torch.is_grad_enabled():
            return grad, None, None
        return _Enter.apply(grad, ctx.axis, ctx.token), None, None  # type: ignore[no-untyped-call]


class _Gather(Function):
    """All-gather; backward is a reduce-scatter, or this rank's part if all ranks have the same gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, axis: ModelAxis, dim: int, token: str, sums: bool) -> Tensor:
        ctx.axis, ctx.dim, ctx.token, ctx.sums = axis, dim, token, sums
        return axis.all_gather(values, dim, token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        found = _Scatter.apply(grad, ctx.axis, ctx.dim, ctx.token, ctx.sums)  # type: ignore[no-untyped-call]
        return found, None, None, None, None


class _Scatter(Function):
    """Reduce-scatter, or this rank's part of values that all ranks have; backward is an all-gather."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, axis: ModelAxis, dim: int, token: str, sums: bool) -> Tensor:
        ctx.axis, ctx.dim, ctx.token, ctx.sums = axis, dim, token, sums
        if sums:
            return axis.reduce_scatter(values, dim, token)
        return values.chunk(axis.size, dim)[axis.rank].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        found = _Gather.apply(grad, ctx.axis, ctx.dim, ctx.token, ctx.sums)  # type: ignore[no-untyped-call]
        return found, None, None, None, None


def _uncompiled(function: _Function) -> _Function:
    """Let a compiled unit break its graph here: collectives that are announced cannot be in it."""
    return cast(_Function, torch.compiler.disable(function))


@_uncompiled
def enter(values: Tensor, axis: ModelAxis, token: str) -> Tensor:
    """Begin a region in which each rank computes with its own part: the gradients of all ranks are summed."""
    entered: Tensor = _Enter.apply(values, axis, token)  # type: ignore[no-untyped-call]
    return entered


@_uncompiled
def leave(values: Tensor, axis: ModelAxis, token: str) -> Tensor:
    """End such a region: the values of all ranks are summed."""
    left: Tensor = _Leave.apply(values, axis, token)  # type: ignore[no-untyped-call]
    return left


@_uncompiled
def gather(values: Tensor, axis: ModelAxis, dim: int, token: str, *, sums: bool) -> Tensor:
    """All-gather along a dimension. `sums`: the gradients of the ranks are summed; else they are the same."""
    found: Tensor = _Gather.apply(values, axis, dim, token, sums)  # type: ignore[no-untyped-call]
    return found


@_uncompiled
def scatter(values: Tensor, axis: ModelAxis, dim: int, token: str, *, sums: bool) -> Tensor:
    """Return this rank's part along a dimension. `sums`: of the sum over the ranks; else the ranks have the same."""
    if values.shape[dim] % axis.size:
        raise ShardwellError(
            f"{token}: a dimension of {values.shape[dim]} cannot be split over {axis.size} ranks; make it a multiple, "
            'by padding say, or leave "sequence_parallel" out of the block tensor_parallel'
        )
    found: Tensor = _Scatter.apply(values, axis, dim, token, sums)  # type: ignore[no-untyped-call]
    return found


@_uncompiled
def check_range(numbers: Tensor, size: int, what: str) -> None:
    """Raise if words are not in the vocabulary, as torch does: no rank would have them, and all would give zeros."""
    if numbers.is_meta or not numbers.numel():
        return
    least, most = torch.aminmax(numbers)
    is_inside = (least >= 0) & (most < size)
    if numbers.device.type != "cpu":  # the host does not wait
        torch._assert_async(is_inside, f"{what} out of range of the vocabulary of {size} words")
    elif not is_inside:
        found = int(least if least < 0 else most)
        raise IndexError(f"{what} {found} is out of range: the vocabulary has {size} words")
