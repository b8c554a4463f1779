"""Bytes that are free on the tiers for an engine, and on the disks of its paths. All ranks get the same answer."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import nn

from shardwell.config import Config
from shardwell.memory import Device, Tier
from shardwell.memory.machine import Machine
from shardwell.sharding import EngineContext, released
from shardwell.sharding.init_parameters import InitParameter


def tier_budgets(
    config: Config,
    context: EngineContext,
    parameters: Iterable[nn.Parameter],
    paths: Sequence[Path],
    floor: int,
    unsharded: int,
) -> dict[Tier, float]:
    """Return the bytes that a rank may fill on each tier: the user's limits, or a share of what is free.

    What is free is that of the rank with the least. Memory of the model's own parameters counts as free, because it is
    freed as soon as the units are built. Where the device is the CPU, the device tier has the `floor`, the bytes that
    must be there, unless the user says otherwise. These bytes, and the `unsharded` ones of the unit that computes, are
    not free on the host then. The latter count twice: malloc keeps what they were freed from between blocks that stay.
    """
    budget, device = config.shardwell.memory, context.device
    local_world_size = context.roles.all.rank_group.local_world_size
    held = held_bytes(parameters, device)
    above = (device.available_bytes() + held[Tier.DEVICE]) * budget.device if device.has_device_memory else float(floor)
    available = device.machine.free_host_bytes(local_world_size) * budget.host
    if not device.has_device_memory:  # what must be on the device is in the same memory
        available = max(0.0, available - local_world_size * (floor + 2 * unsharded))
    found = {
        Tier.DEVICE: _or(budget.device, above),
        Tier.HOST: _or(budget.host, available + local_world_size * held[Tier.HOST]) / local_world_size,
        Tier.DISK: _or(budget.disk, budget.disk * free_on(paths, device.machine)) / local_world_size,
    }
    if device.is_meta:
        return found
    return {tier: context.roles.all.all_reduce_min(size, "ROOM") for tier, size in found.items()}


def _or(budget: float, measured: float) -> float:
    """Return a budget in bytes: that is `measured` for one that is a share of the free bytes, a number up to 1."""
    return measured if 0 < budget <= 1 else float(budget)


def held_bytes(parameters: Iterable[nn.Parameter], device: Device) -> Counter[Tier]:
    """Return the bytes per tier of parameters that are in no unit yet."""
    found: Counter[Tier] = Counter()
    for parameter in parameters:
        owner = released.owner_of(parameter) if released.is_owned(parameter) else None
        if isinstance(owner, InitParameter):
            tier, size = owner.tier_and_bytes
            found[tier if device.has_device_memory or tier is Tier.DISK else Tier.HOST] += size
        elif owner is None and not parameter.is_meta:
            found[Tier.DEVICE if device.is_on_device(parameter) else Tier.HOST] += parameter.nbytes
    return found


def bytes_by_path(num_bytes: int, paths: Sequence[Path], machine: Machine) -> list[tuple[Path, int]]:
    """Return the bytes that go to the file system of each path; in a simulation all paths are on one.

    A path that does not exist is left out, for the code that opens it to report.
    """
    if machine.ranks is not None:
        return [(path, num_bytes) for path in paths]
    drives = Counter(os.stat(path).st_dev for path in paths if path.exists())
    return [(p, num_bytes * drives[os.stat(p).st_dev] // len(paths)) for p in paths if p.exists()]


def free_on(paths: Sequence[Path], machine: Machine) -> float:
    """Return the bytes that fit when they are striped over the paths; infinite if the free space of none is known."""
    unit = 1 << 40
    available_bytes = [(machine.free_disk_bytes(path), part) for path, part in bytes_by_path(unit, paths, machine)]
    return min((unit * free / part for free, part in available_bytes if free is not None), default=float("inf"))
