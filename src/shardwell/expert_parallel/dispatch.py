"""Tokens travel to the ranks of their experts, and come back: two all-to-alls in forward, two in backward.

Rows are pairs of a token and one of its experts, sorted by expert. The ranks tell each other first how many rows each
expert gets, which the host has to know: sizes differ from step to step. On the meta device there are no values: there
every expert gets as many rows as any other, or one fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from shardwell.parallel.model_axis import ModelAxis
from shardwell.parallel.traffic import TrafficKind


@dataclass(frozen=True)
class TokenRoute:
    """The numbers of rows that this rank sends to each rank, and gets from it, and the experts that they are for."""

    sent: list[int]  # by rank
    received: list[int]  # by rank
    experts: Tensor  # of the received rows, counted among those of this rank


class _Exchange(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, axis: ModelAxis, to: Sequence[int], of: Sequence[int], token: str) -> Tensor:
        ctx.axis, ctx.to, ctx.of, ctx.token = axis, to, of, token
        return axis.exchange(rows, to, of, token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        found = _Exchange.apply(grad, ctx.axis, ctx.of, ctx.to, ctx.token)  # type: ignore[no-untyped-call]
        return found, None, None, None, None


def route(axis: ModelAxis, experts: Tensor, num_experts: int, name: str) -> TokenRoute:
    """Tell the ranks how many rows each of their experts gets; `experts` (1D) are those of this rank's rows."""
    if experts.is_meta:
        return _balanced(axis, experts, num_experts, name)
    counts = torch.bincount(experts, minlength=num_experts).view(axis.size, -1)  # rank, expert of that rank
    told = axis.all_to_all(counts, f"EXPERT {name} counts", TrafficKind.CONTROL)
    sent, received = torch.stack([counts.sum(1), told.sum(1)]).tolist()
    numbers = torch.arange(told.shape[1], device=told.device).repeat(axis.size)
    return TokenRoute(sent, received, torch.repeat_interleave(numbers, told.flatten(), output_size=sum(received)))


def balanced_rows(num_rows: int, num_experts: int) -> list[int]:
    """Return how many rows each expert gets if none gets two more than another; the first ones get those left over."""
    each, left = divmod(num_rows, num_experts)
    return [each + (number < left) for number in range(num_experts)]


def _balanced(axis: ModelAxis, experts: Tensor, num_experts: int, name: str) -> TokenRoute:
    """Return the route of rows without values; the ranks tell each other numbers of the same size."""
    counts = torch.empty(axis.size, num_experts // axis.size, dtype=torch.long, device="meta")
    axis.all_to_all(counts, f"EXPERT {name} counts", TrafficKind.CONTROL)
    rows, per_rank = balanced_rows(experts.shape[0], num_experts), num_experts // axis.size
    sent = [sum(rows[rank * per_rank : (rank + 1) * per_rank]) for rank in range(axis.size)]
    received = [sent[axis.rank]] * axis.size
    return TokenRoute(sent, received, experts.new_empty(sum(received)))


def dispatch(
    axis: ModelAxis,
    tokens: Tensor,
    experts: Tensor,
    weights: Tensor,
    num_experts: int,
    compute: Callable[[Tensor, Tensor], Tensor],
    name: str,
) -> Tensor:
    """Return the weighted sums of what the experts of all ranks compute of this rank's tokens.

    `tokens` is (tokens, width); `experts` and `weights` are (tokens, experts of a token). `compute` gets rows of all
    ranks, which may be none, and which of this rank's experts each is for.
    """
    each = experts.shape[1]
    order = experts.flatten().argsort(stable=True)
    way = route(axis, experts.flatten(), num_experts, name)
    rows: Tensor = _Exchange.apply(tokens[order // each], axis, way.sent, way.received, f"EXPERT {name} tokens")  # type: ignore[no-untyped-call]
    found = compute(rows, way.experts)
    back: Tensor = _Exchange.apply(found, axis, way.received, way.sent, f"EXPERT {name} results")  # type: ignore[no-untyped-call]
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    weighed = back[place].unflatten(0, (-1, each)) * weights.unsqueeze(-1)
    total: Tensor = weighed.sum(1)
    return total.to(tokens.dtype)
