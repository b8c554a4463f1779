"""Ranks whose machines have different host memory plan alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

import shardwell
from shardwell.memory.machine import ThisMachine, simulated
from tests.support.placements import BELOW, SHARE, Stack, configured
from tests.support.ranks import Ranks


@dataclass(frozen=True)
class WithHost(ThisMachine):
    """This machine, with a CPU that is taken for a GPU, and so many free bytes on the host."""

    host: float

    def has_own_memory(self, device: torch.device) -> bool:
        return True

    def capacity_bytes(self, device: torch.device) -> float:
        return 1e9

    def available_bytes(self, device: torch.device) -> float:
        return 1e9

    def unreserved_bytes(self, device: torch.device) -> float:
        return 0.0

    def free_host_bytes(self, local_world_size: int = 1) -> float:
        return self.host


def commits(hosts: list[float]) -> list[str]:
    """The commit policies of the units, after steps of which one is given up."""
    config = configured(BELOW, {"commit": "auto"}, 2, train_micro_batch_size_per_gpu=4, gradient_clipping=1e3)
    with simulated(WithHost(hosts[dist.get_rank()])):
        torch.manual_seed(0)
        engine = shardwell.initialize(model=Stack(), config=config).engine
    for step in range(4):
        engine.backward(engine(torch.ones(4, 64)))
        if step == 1:
            engine.zero_grad()
        else:
            engine.step()
    return [commit.value for commit in engine.offload.commits.values()]


def test_as_many_units_speculate_as_the_rank_with_the_least_memory_has_room_for(ranks: Ranks) -> None:
    """Of one layer's share: 14 bytes on the host, 12 in the buffers, and 14 more where it speculates."""
    held, each = (8 * 14 + 12) * SHARE, 14 * SHARE
    some, all_of_them = (
        2 * (held + 2 * 3 * each),
        2 * (held + 2 * 8 * each),
    )  # half of what is free, for each of two ranks
    found = ranks.run(2, commits, [all_of_them, some])
    assert found[0] == found[1]
    assert len(set(found[0])) == 2
    assert len(set(ranks.run(2, commits, [all_of_them, all_of_them])[0])) == 1
