"""Collectives over the tensor axis: sums, all-gathers and reduce-scatters of activations and of their gradients.

They are on the path of forward and backward, so they run on the current stream, and nothing overlaps them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from shardwell.parallel.collectives import Collectives
from shardwell.parallel.traffic import TrafficKind


class TensorAxis:
    """This rank's line of the tensor axis."""

    def __init__(self, comm: Collectives) -> None:
        self.comm = comm
        self.rank, self.size = comm.rank_group.rank, comm.rank_group.size

    def all_reduce(self, values: Tensor, token: str) -> Tensor:
        """Sum `values`, which are contiguous, over the axis, in place; all ranks get the same bits."""
        num_bytes = 2 * -(-values.numel() // self.size) * values.element_size()
        self.comm.begin(token, TrafficKind.TENSOR, num_bytes)
        self.comm.complete(dist.all_reduce, values)
        return values

    def all_reduce_max(self, values: Tensor, token: str) -> Tensor:
        """Replace `values`, which are contiguous, by the largest of the axis, in place."""
        num_bytes = 2 * -(-values.numel() // self.size) * values.element_size()
        self.comm.begin(token, TrafficKind.TENSOR, num_bytes)
        self.comm.complete(dist.all_reduce, values, dist.ReduceOp.MAX)
        return values

    def all_gather(self, values: Tensor, dim: int, token: str) -> Tensor:
        """Return the values of all ranks, which have the same shape, one after the other along a dimension."""
        self.comm.begin(token, TrafficKind.TENSOR, values.nbytes)
        rows = torch.empty(self.size * values.numel(), dtype=values.dtype, device=values.device)
        if self.comm.host_drives_progress:
            rows.chunk(self.size)[self.rank].copy_(values.reshape(-1))
            self.comm.direct.all_gather(rows).wait()
        else:
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            self.comm.complete(gather, rows, values.contiguous().view(-1))
        return torch.cat(rows.view(self.size, *values.shape).unbind(), dim)

    def reduce_scatter(self, values: Tensor, dim: int, token: str) -> Tensor:
        """Return this rank's part, along a dimension that the ranks divide, of the sum of `values` over the axis."""
        parts = torch.stack(values.chunk(self.size, dim))
        into = torch.empty_like(parts[0])
        self.comm.begin(token, TrafficKind.TENSOR, into.nbytes)
        if self.comm.host_drives_progress:
            self.comm.direct.reduce_scatter(parts.view(-1), into.view(-1), 1.0, False).wait()
        else:
            scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            self.comm.complete(scatter, into.view(-1), parts.view(-1))
        return into
