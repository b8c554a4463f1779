"""Losses over parts of sequences, right to the token: what counts is the number of labels on all ranks together."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwell.errors import ShardwellError
from shardwell.sequence_parallel.batches import IGNORED
from shardwell.sequence_parallel.binding import binding_of


def cross_entropy(logits: Tensor, shift_labels: Tensor, num_items_in_batch: Tensor | float) -> Tensor:
    """Return this rank's share of the mean cross entropy over the tokens of all ranks.

    `shift_labels` and `num_items_in_batch` are those of `shard_batch`. The average of the shares over the ranks is the
    mean. Labels of -100 do not count. A rank without labels has a loss of 0.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    flat = logits.flatten(0, -2).to(wide)
    labels = shift_labels.flatten().to(flat.device)
    return F.cross_entropy(flat, labels, ignore_index=IGNORED, reduction="sum") / num_items_in_batch


@torch.no_grad()
def average_loss(loss: Tensor, engine: Any) -> Tensor:
    """Return the average of a loss over all ranks, to show it: each rank has a share. All ranks must call it."""
    binding = binding_of(engine)
    if binding is None:
        raise ShardwellError("average_loss: the model has no sequence axis; its loss is whole on each rank")
    total = loss.detach().to(torch.float64, copy=True)
    binding.data.all_reduce_sum(total, "SEQUENCE loss")
    return (total / binding.data.rank_group.size).to(loss.dtype)
