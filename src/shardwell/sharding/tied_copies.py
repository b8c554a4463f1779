"""Parameters that several pipeline stages hold, such as an embedding that is the output layer, too.

Each stage has a copy, in a group of its own with the same layout on all of them. After the reduce-scatter over the
data-parallel ranks, the shards of the gradients are summed over the copies, so that all of them take the same step. The
sum waits for the step: a stage that waited for it in its backward would wait for gradients that it has not sent yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from shardwell.parallel import Collectives, TrafficKind
from shardwell.sharding.group import ShardedGroup
from shardwell.sharding.unit import Unit


@dataclass(frozen=True)
class CopiesSum:
    """The sum of the gradients of tied parameters over the ranks that hold their copies."""

    comm: Collectives  # the ranks that hold copies of this rank's shards

    @torch.no_grad()
    def __call__(self, units: Sequence[Unit], scale: float) -> None:
        """Sum the gradients, which are averaged over the data-parallel ranks. All ranks with copies must call it."""
        for group in sorted(_tied(units), key=lambda group: group.layout.slots[0].name):
            gradients = group.gradients
            if not gradients.has_any:  # nothing on this stage has used it, but others may have
                gradients.reduce_scatter(scale, stays=False, accumulates=False)
            gradients.wait()
            gradients.reduced.ensure_readable()
            assert gradients.result is not None
            gradients.has_gradient = [True] * len(gradients.has_gradient)
            wide = torch.promote_types(gradients.result.dtype, torch.float32)
            part = gradients.result.to(self.comm.device.torch_device, wide, copy=True)
            self.comm.count_all_reduce(part, part.numel(), TrafficKind.REDUCE_SCATTER)
            self.comm.direct.all_reduce(part, gradients.result, 1.0, False).wait()


def _tied(units: Sequence[Unit]) -> Iterator[ShardedGroup]:
    return (group for unit in units for group in unit.trainable if group.tied is not None)
