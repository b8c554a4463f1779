"""Collectives over an axis inside of the model: sums, all-gathers and exchanges of activations and their gradients.

They are on the path of forward and backward, so they run on the current stream, and nothing overlaps them but what the
caller does between the start of a sum and the wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardwell.parallel.collectives import Collectives
from shardwell.parallel.traffic import TrafficKind
from shardwell.parallel.transport import Work


class ModelAxis:
    """This rank's line of the tensor, sequence or expert axis."""

    def __init__(self, comm: Collectives, kind: TrafficKind) -> None:
        """`kind`: as what the bytes of activations are counted."""
        self.comm, self.kind = comm, kind
        self.rank, self.size = comm.rank_group.rank, comm.rank_group.size

    def all_reduce(self, values: Tensor, token: str) -> Tensor:
        """Sum `values`, which are contiguous, over the axis, in place; all ranks get the same bits."""
        num_bytes = 2 * -(-values.numel() // self.size) * values.element_size()
        self.comm.begin(token, self.kind, num_bytes)
        self.comm.complete(dist.all_reduce, values)
        return values

    def start_all_reduce(self, values: Tensor, token: str) -> Work:
        """Start to sum `values`, which are contiguous, over the axis, in place; the bits are those of `all_reduce`."""
        num_bytes = 2 * -(-values.numel() // self.size) * values.element_size()
        self.comm.begin(token, self.kind, num_bytes)
        return self.comm.start(dist.all_reduce, values)

    def all_reduce_max(self, values: Tensor, token: str) -> Tensor:
        """Replace `values`, which are contiguous, by the largest of the axis, in place."""
        num_bytes = 2 * -(-values.numel() // self.size) * values.element_size()
        self.comm.begin(token, self.kind, num_bytes)
        self.comm.complete(dist.all_reduce, values, dist.ReduceOp.MAX)
        return values

    def all_gather(self, values: Tensor, dim: int, token: str, kind: TrafficKind | None = None) -> Tensor:
        """Return the values of all ranks, which have the same shape, one after the other along a dimension."""
        self.comm.begin(token, kind or self.kind, values.nbytes)
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
        into, work = self.start_reduce_scatter(values, dim, token)
        work.wait()
        return into

    def start_reduce_scatter(self, values: Tensor, dim: int, token: str) -> tuple[Tensor, Work]:
        """Start it; return what this rank's part will be in, and the work to wait for."""
        parts = torch.stack(values.chunk(self.size, dim))
        into = torch.empty_like(parts[0])
        self.comm.begin(token, self.kind, into.nbytes)
        if self.comm.host_drives_progress:
            return into, self.comm.direct.reduce_scatter(parts.view(-1), into.view(-1), 1.0, False)
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return into, self.comm.start(scatter, into.view(-1), parts.view(-1))

    def all_to_all(self, sent: Tensor, token: str, kind: TrafficKind | None = None) -> Tensor:
        """Send the r-th of equal parts of `sent` along dimension 0 to rank r; return what the ranks sent, in order."""
        self.comm.begin(token, kind or self.kind, sent.nbytes // self.size)
        sent, received = sent.contiguous(), torch.empty_like(sent, memory_format=torch.contiguous_format)
        if self.comm.host_drives_progress and sent.device.type == "cpu":
            self.comm.direct.all_to_all(sent.view(-1), received.view(-1)).wait()
        else:
            self.comm.complete(dist.all_to_all_single, received, sent)
        return received

    def exchange(self, rows: Tensor, to: Sequence[int], of: Sequence[int], token: str) -> Tensor:
        """Send the next to[r] rows to each rank r; return the rows of all ranks in order, of[r] of rank r."""
        width = rows.shape[1:].numel()
        received = rows.new_empty((sum(of), *rows.shape[1:]))
        outgoing = rows.contiguous().view(-1).split([number * width for number in to])
        incoming = received.view(-1).split([number * width for number in of])
        self.comm.all_to_all(outgoing, incoming, token, self.kind)
        return received
