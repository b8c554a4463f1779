"""Whole tensors of parts that the ranks of the tensor axis hold."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from shardwell.parallel.tensor_axis import TensorAxis
from shardwell.sharding.tensor_part import TensorPart


def whole_of(values: Tensor, part: TensorPart, axis: TensorAxis, token: str) -> Tensor:
    """Return the whole tensor of which this rank has `values`. All ranks of the axis must call it."""
    most = part.shape_of(0)[part.dim]
    rows = values.movedim(part.dim, 0).contiguous()
    padded = F.pad(rows, (*(0, 0) * (rows.ndim - 1), 0, most - rows.shape[0]))  # the ranks send the same sizes
    parts = axis.all_gather(padded, 0, token).split(most)
    sizes = [part.shape_of(index)[part.dim] for index in range(part.num_parts)]
    return part.join([one[:size].movedim(0, part.dim) for one, size in zip(parts, sizes, strict=True)])
