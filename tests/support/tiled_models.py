"""Decoders whose layers are larger than a device: in tiles, with the inputs of checkpoints in host memory.

A block of 32 trillion parameters has 316 GB of weights. Its linears and its embedding are tiles, each of which is
recomputed on its own inside the block's recomputation: what a block's recomputation keeps of a tile would hold the
tile's whole memory until the block's backward ends.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwell import checkpointing
from shardwell.memory import Tier
from shardwell.plan import SimulatedMachine, SimulatedRanks, estimate, tokens
from shardwell.plan.decoder import Decoder, DecoderSizes
from shardwell.plan.devices import gpu
from shardwell.zero import TiledLinear, tile_linears

PER_NODE, SEQUENCE = 16, 1024
ON_NVME: dict[str, dict[str, Any]] = {
    "zero_optimization": {
        "stage3_max_live_parameters": 0,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"},
        "offload_param": {"device": "nvme", "nvme_path": "/nvme", "max_in_cpu": 0},
    },
    "others": {"shardwell": {"gradients": "disk"}, "activation_checkpointing": {"cpu_checkpointing": True}},
}


@dataclass(frozen=True)
class TiledSizes:
    """A decoder, and the elements of its largest tile."""

    sizes: DecoderSizes
    tile: int


HUGE = {
    "1T": TiledSizes(DecoderSizes(128, 25600, 200, 50257, positions=SEQUENCE), 25600 * 25600),
    "32T": TiledSizes(DecoderSizes(203, 114688, 896, 50257, positions=SEQUENCE), 114688 * 19115),
}


class _TiledEmbedding(nn.Module):
    """An embedding as several of a part of its width."""

    def __init__(self, vocabulary: int, hidden: int, parts: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Embedding(vocabulary, hidden // parts) for _ in range(parts))

    def forward(self, ids: Tensor) -> Tensor:
        return torch.cat([part(ids) for part in self.parts], -1)


class _Tiled(Decoder):
    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__(sizes)
        self.embed = _TiledEmbedding(sizes.vocabulary, sizes.hidden, 8)  # type: ignore[assignment]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpointing.checkpoint(block, x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), ids.flatten())


def tiled(sizes: DecoderSizes, tile: int) -> nn.Module:
    """Return a decoder on the meta device whose linears have tiles of so many elements at most."""
    with torch.device("meta"):
        model = tile_linears(_Tiled(replace(sizes, positions=0)), tile)
    for layer in model.modules():
        if isinstance(layer, TiledLinear):
            for linear in layer.linears.modules():
                if isinstance(linear, nn.Linear):
                    linear.forward = partial(checkpoint, linear.forward, use_reentrant=False)  # type: ignore[method-assign]
    return model


@dataclass(frozen=True)
class TiledPlan:
    """What a model takes: the device of a rank, and host and drives of a node."""

    parameters: int
    device: int
    host_of_node: int
    disk_of_node: int


def planned_tiled(model: TiledSizes, nodes: int, config: dict[str, Any]) -> TiledPlan:
    """Return a plan for nodes of 16 V100. Two and three blocks are simulated; every other one adds what the third adds.

    Two blocks have more tiles than there are staging buffers.
    """
    machine = SimulatedMachine(gpu("v100-32gb").memory_bytes, ranks=SimulatedRanks(0, nodes * PER_NODE, PER_NODE))
    ids = (tokens(1, SEQUENCE),)
    two, three = (
        estimate(tiled(replace(model.sizes, layers=layers), model.tile), config, machine, ids) for layers in (2, 3)
    )

    def whole(first: int, second: int) -> int:
        return first + (second - first) * (model.sizes.layers - 2)

    device, host, disk = (whole(two.peak(tier), three.peak(tier)) for tier in Tier)
    parameters = whole(two.costs.num_parameters, three.costs.num_parameters)
    return TiledPlan(parameters, device, PER_NODE * host, PER_NODE * disk)
