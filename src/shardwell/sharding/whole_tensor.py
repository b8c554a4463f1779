"""Whole tensors of the parts that ranks of the tensor or expert axis hold, and parts of whole ones."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from shardwell.parallel import Collectives
from shardwell.parallel.model_axis import ModelAxis
from shardwell.sharding import released
from shardwell.sharding.tensor_part import TensorPart


def whole_of(values: Tensor, part: TensorPart, axis: ModelAxis, token: str) -> Tensor:
    """Return the whole tensor of which this rank has `values`. All ranks of the axis must call it."""
    most = max(part.shape_of(index)[part.dim] for index in range(part.num_parts))
    rows = values.movedim(part.dim, 0).contiguous()
    padded = F.pad(rows, (*(0, 0) * (rows.ndim - 1), 0, most - rows.shape[0]))  # the ranks send the same sizes
    parts = axis.all_gather(padded, 0, token).split(most)
    sizes = [part.shape_of(index)[part.dim] for index in range(part.num_parts)]
    return part.join([one[:size].movedim(0, part.dim) for one, size in zip(parts, sizes, strict=True)])


def first_values(name: str, parameter: nn.Parameter, ranks: Collectives) -> Tensor:
    """Return the first rank's values of a whole parameter, which may come from `zero.Init`. All ranks must call it."""
    if released.is_owned(parameter):
        return released.owner_of(parameter).hand_over(parameter)
    if parameter.is_meta:
        return parameter.data
    whole = parameter.data.to(ranks.device.torch_device).contiguous()
    ranks.broadcast(whole, token=f"SETUP {name}")
    return whole
