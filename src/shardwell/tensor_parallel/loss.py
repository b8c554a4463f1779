"""The cross entropy over a vocabulary whose logits are cut over the tensor axis: they are never whole on a rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from shardwell.parallel.model_axis import ModelAxis
from shardwell.tensor_parallel.across_parts import plain
from shardwell.tensor_parallel.functions import check_range
from shardwell.tensor_parallel.layers import CutLayer

_TOKEN = "TENSOR loss"


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, axis: ModelAxis, sizes: list[int], smooth: float) -> Tensor:
        """Return the loss of each row. The softmax is kept for backward, in place of the logits.

        `sizes` are the words of each rank; `smooth` is the share of each target that all words get alike.
        """
        first, words = sum(sizes[: axis.rank]), sum(sizes)
        most = axis.all_reduce_max(
            logits.amax(-1) if logits.shape[-1] else logits.new_full(targets.shape, -1e30), _TOKEN
        )
        shifted = (logits - most.unsqueeze(-1)).exp_()
        own = targets - first
        is_away = (own < 0) | (own >= logits.shape[-1])
        own = own.masked_fill(is_away, 0)
        there = logits.gather(-1, own.unsqueeze(-1)).squeeze(-1) if logits.shape[-1] else torch.zeros_like(most)
        parts = [shifted.sum(-1), there.masked_fill(is_away, 0.0)]
        sums = torch.stack([*parts, logits.sum(-1)] if smooth else parts)
        axis.all_reduce(sums, _TOKEN)
        shifted.div_(sums[0].unsqueeze(-1))
        ctx.save_for_backward(shifted, own, is_away)
        ctx.smooth, ctx.words = smooth, words
        whole = sums[0].log() + most
        return whole - sums[1] if not smooth else whole - (1.0 - smooth) * sums[1] - smooth / words * sums[2]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        softmax, own, is_away = ctx.saved_tensors
        found = softmax.clone()
        if found.shape[-1]:
            one = (~is_away).to(found.dtype).unsqueeze(-1)
            found.scatter_add_(-1, own.unsqueeze(-1), (ctx.smooth - 1.0) * one)
            if ctx.smooth:
                found.sub_(ctx.smooth / ctx.words)
        return found.mul_(grad.unsqueeze(-1)), None, None, None, None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def vocab_parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    layer: Any,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the cross entropy of logits of which this rank has the part that `layer` computed.

    `layer` is the last linear layer, cut by "colwise"; logits have its outputs as last dimension. All ranks of the
    tensor axis get the same loss, in fp32 at least. `reduction` is "mean", "sum" or "none", and `label_smoothing` is
    between 0 and 1, as in torch.
    """
    if not isinstance(layer, CutLayer):
        raise TypeError(f"layer: expected one that a plan has cut, found a {type(layer).__name__}")
    if reduction not in ("mean", "sum", "none") or not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(
            f"vocab_parallel_cross_entropy: reduction={reduction!r}, label_smoothing={label_smoothing}: expected mean, "
            "sum or none, and a number from 0 to 1"
        )
    with torch._C.DisableTorchFunction():  # this is what looks at parts of logits right
        return _cross_entropy(plain(logits), targets, layer, ignore_index, reduction, label_smoothing)


def _cross_entropy(
    logits: Tensor, targets: Tensor, layer: Any, ignore_index: int, reduction: str, label_smoothing: float
) -> Tensor:
    rows = logits.reshape(-1, logits.shape[-1])
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    flat = targets.reshape(-1)
    is_counted = flat != ignore_index
    words = flat.masked_fill(~is_counted, 0)
    check_range(words, sum(layer.sizes), "vocab_parallel_cross_entropy: target")
    losses: Tensor = _CrossEntropy.apply(rows, words, layer.region.axis, layer.sizes, label_smoothing)  # type: ignore[no-untyped-call]
    losses = losses.masked_fill(~is_counted, 0.0)
    if reduction == "none":
        return losses.view(targets.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / is_counted.sum()
