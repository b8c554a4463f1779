"""Random numbers of ranks that compute parts of the same thing.

Outside of cut regions all ranks of the tensor axis must draw the same numbers, because they compute the same thing:
`align_randomness` gives them the same generators once, and they then draw the same. Inside, each rank has heads and
columns of its own, and must draw others: there the generator is seeded from a number that all ranks draw and from the
rank. So a recomputation that restores the generator (`torch.utils.checkpoint` does) draws the same numbers again.

For the ranks of a sequence axis, which have other tokens and in attention other heads, such a region is a whole
forward. Between forwards they draw alike, if the user seeds them alike: a data loader that shuffles gives them the same
rows.
"""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from shardwell.memory.local_gpus import generator_of
from shardwell.parallel.collectives import Collectives


class RegionRandomness:
    """The generator of this rank inside of regions in which it computes a part of its own.

    A recomputation that has all it needs stops inside of a region (`torch.utils.checkpoint` raises there), and sets the
    generator back by itself. The generator's seed tells: it is the region's own as long as the region lasts.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._outside: tuple[torch.Generator, torch.Tensor] | None = None  # the state to return to
        self._seed = 0  # of the region

    @property
    def _has_begun(self) -> bool:
        return self._outside is not None and self._outside[0].initial_seed() == self._seed

    def begin(self, device: torch.device) -> None:
        """Seed the generator of the device for this rank, unless the region has begun."""
        if self._has_begun:
            return
        generator = generator_of(device)
        if generator is None:
            return
        drawn = int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=None))
        self._outside = generator, generator.get_state()
        # Regions lie in each other (a tensor region in a sequence axis's forward). The number that is drawn is of the
        # host's generator, which an outer region does not seed on CUDA: the outer seed keeps ranks apart there.
        words = f"{drawn} {generator.initial_seed()} {self._rank}"
        self._seed = int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest()) >> 1
        generator.manual_seed(self._seed)

    def end(self) -> None:
        """Return to the numbers that all ranks draw alike."""
        if self._outside is not None and self._has_begun:
            generator, state = self._outside
            generator.set_state(state)
        self._outside = None


def draws_in(model: nn.Module) -> bool:
    """Return whether modules say that they drop values in training: by a probability in an attribute."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return True
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float) and value > 0:
                return True
    return False


def align_randomness(comm: Collectives) -> None:
    """Give all ranks of the axis the generators of its first rank."""
    device = comm.device.torch_device
    if comm.device.is_meta:  # nothing is drawn there
        return
    for where in {torch.device("cpu"), device}:
        generator = generator_of(where)
        if generator is not None:
            state = generator.get_state().to(device)
            comm.broadcast(state, token=f"RANDOM {where.type}")
            generator.set_state(state.cpu())
