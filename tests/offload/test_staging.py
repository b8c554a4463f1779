"""Staging buffers: how many there are, and how large, in a run and in a simulation."""

from __future__ import annotations

from shardwell.memory import Device, MemoryStats, Tier
from shardwell.memory.machine import SimulatedMachine, simulated
from shardwell.memory.streams import Event
from shardwell.offload.staging import PinnedAllocator, StagingPool


def test_small_buffers_are_replaced_when_they_are_taken_next() -> None:
    stats = MemoryStats()
    pool = StagingPool(PinnedAllocator(Device("cpu"), stats), 2, 0)
    for buffer in [pool.take(10), pool.take(10)]:
        pool.give(buffer, Event())
    sizes = []
    for wanted in (100, 10, 10):  # otherwise a pool would grow by one buffer in each step
        pool.give(pool.take(wanted), Event())
        sizes.append(stats.total(Tier.HOST))
    assert sizes == [110, 200, 200]


def test_a_simulated_pool_has_no_more_buffers_than_a_step_can_use() -> None:
    stats = MemoryStats()
    with simulated(SimulatedMachine()):
        device = Device("meta")
        pool = StagingPool(PinnedAllocator(device, stats), 4, 8)
        found = []
        for taken in (1, 1, 2, 2, 9):
            for _ in range(taken):
                pool.give(pool.take(8), Event())
            device.num_steps += 1
            found.append(stats.total(Tier.HOST) // 8)
    assert found == [1, 1, 2, 2, 4]


def test_a_simulated_pool_counts_buffers_that_are_held_over_a_step() -> None:
    stats = MemoryStats()
    with simulated(SimulatedMachine()):
        device = Device("meta")
        pool = StagingPool(PinnedAllocator(device, stats), 4, 8)
        ahead = pool.take(8)  # read ahead of the next step
        device.num_steps += 1
        pool.give(pool.take(8), Event())
        pool.give(ahead, Event())
        pool.give(pool.take(8), Event())
    assert stats.total(Tier.HOST) == 3 * 8
