"""The exchange around attention: from parts of a sequence with all heads to whole sequences with some heads, and back.

    function       from                             to                               backward
    to_heads       batch, H heads, s tokens, d      batch, H / N heads, N s tokens   to_tokens
    to_tokens      batch, h heads, S tokens, d      batch, N h heads, S / N tokens   to_heads

Several tensors travel in one all-to-all, so that a layer has two in forward (query, key and value; output) and two in
backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import Function

from shardwell.parallel.model_axis import ModelAxis

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _ToHeads(Function):
    @staticmethod
    def forward(ctx: Any, axis: ModelAxis, token: str, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.axis, ctx.token = axis, token
        return _moved_to_heads(axis, values, token)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, *_ToTokens.apply(ctx.axis, ctx.token, *grads)  # type: ignore[no-untyped-call]


class _ToTokens(Function):
    @staticmethod
    def forward(ctx: Any, axis: ModelAxis, token: str, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.axis, ctx.token = axis, token
        return _moved_to_tokens(axis, values, token)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, *_ToHeads.apply(ctx.axis, ctx.token, *grads)  # type: ignore[no-untyped-call]


def _moved_to_heads(axis: ModelAxis, values: Sequence[Tensor], token: str) -> tuple[Tensor, ...]:
    parts = [one.unflatten(1, (axis.size, -1)).movedim(1, 0) for one in values]  # N, batch, h, s, d
    # of each rank its tokens of these heads -> batch, h, N s, d
    return tuple(part.movedim(0, 2).flatten(2, 3) for part in _exchanged(axis, parts, token))


def _moved_to_tokens(axis: ModelAxis, values: Sequence[Tensor], token: str) -> tuple[Tensor, ...]:
    parts = [one.unflatten(2, (axis.size, -1)).movedim(2, 0) for one in values]  # N, batch, h, s, d
    # of each rank its heads of these tokens -> batch, N h, s, d
    return tuple(part.movedim(0, 1).flatten(1, 2) for part in _exchanged(axis, parts, token))


def _exchanged(axis: ModelAxis, parts: Sequence[Tensor], token: str) -> list[Tensor]:
    """Send part[r] of each tensor to rank r, in one all-to-all; return what the ranks sent, in the same shapes."""
    flat = [part.reshape(axis.size, -1) for part in parts]
    received = axis.all_to_all(flat[0] if len(flat) == 1 else torch.cat(flat, 1), token)
    found = received.split([one.shape[1] for one in flat], 1)
    return [
        one.view(part.shape) if len(flat) == 1 else one.reshape(part.shape)
        for one, part in zip(found, parts, strict=True)
    ]


def _uncompiled(function: _Function) -> _Function:
    """Let a compiled unit break its graph here: collectives that are announced cannot be in it."""
    return cast(_Function, torch.compiler.disable(function))


@_uncompiled
def to_heads(axis: ModelAxis, values: Sequence[Tensor], token: str) -> tuple[Tensor, ...]:
    """Return whole sequences of this rank's heads; the ranks divide the heads of each tensor."""
    if len({one.dtype for one in values}) > 1:
        return tuple(_ToHeads.apply(axis, token, one)[0] for one in values)  # type: ignore[no-untyped-call]
    found: tuple[Tensor, ...] = _ToHeads.apply(axis, token, *values)  # type: ignore[no-untyped-call]
    return found


@_uncompiled
def to_tokens(axis: ModelAxis, values: Tensor, token: str) -> Tensor:
    """Return this rank's part of the sequence with all heads; the ranks divide the sequence."""
    found: tuple[Tensor, ...] = _ToTokens.apply(axis, token, values)  # type: ignore[no-untyped-call]
    return found[0]
