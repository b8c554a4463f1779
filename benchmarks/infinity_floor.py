"""What no step can be faster than when its states rest on the GPU, on the host and on disk.

    at once          max(compute, update, bus, disk)
    after the norm   backward + max(forward, update, bus, disk)

Each alone: compute is that of the bare model, from decoders of one block and of three; update is the kernel's over what
is stepped on the host; the bus brings gradients down and parameters up; disk is what a step must read and write there,
over what the drive keeps up when it does both at once. Drives slow down under load and recover, and are slower if much
of them is in use: so that is measured in the process of the steps, right before them, and right behind them over the
same bytes in the same places, by the disk tier and by threads that share no code with it: the faster counts. Of both
moments it is the mean, and only the latter where the former finds no room on the drive.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.disk import drive_rates
from benchmarks.infinity_variants import disk_bytes
from benchmarks.offload_floor import bus_rates, compute_seconds, update_rates
from benchmarks.offload_variants import Size, Variant, workload_of
from shardwell import kernels
from shardwell.offload.disk_queue import AioSettings

FORMULAS = {
    "at once": "max(compute, update, bus, disk)",
    "after the norm": "backward + max(forward, update, bus, disk)",
}
FEW, SOME_MORE = 1, 3  # blocks
DRIVE_BYTES = {"cuda": 1 << 30, "cpu": 1 << 22}
UPDATED = {"cuda": 2**25, "cpu": 2**12}  # elements
PLAIN = Variant("shardwell", offload=None)


def block_by_block(size: Size, device: str) -> dict[str, float]:
    """Seconds of forward, backward and both, of a model that need not fit on the device."""
    workload = workload_of(size, PLAIN, device)
    few, more = (
        compute_seconds(replace(workload, model=replace(size.model, blocks=blocks))) for blocks in (FEW, SOME_MORE)
    )
    rest = (size.model.blocks - FEW) / (SOME_MORE - FEW)
    found = {name: few[name] + rest * max(0.0, more[name] - few[name]) for name in few}
    return {**found, "backward": found["compute"] - found["forward"]}


def measure_floors(sizes: dict[str, Size], device: str, folder: str) -> dict[str, Any]:
    """The speed of everything, and the compute of each size."""
    return {
        "drive": drive_rates(Path(folder), AioSettings(), DRIVE_BYTES[device]),
        "bus": bus_rates(device),
        "update": update_rates(device, UPDATED[device]),
        "kernel": str(kernels.describe()),
        "compute": {name: block_by_block(size, device) for name, size in sizes.items()},
    }


@dataclass(frozen=True)
class Place:
    """Elements whose parameters and optimizer state rest on these tiers."""

    parameters: str
    optimizer: str
    numel: int


def demands(places: Iterable[Place], on_disk: dict[str, int]) -> dict[str, float]:
    """What a step asks of the host, the bus and the drives; ``on_disk`` are bytes by state.

    Gradients come down in 16 bits; those that wait on disk are written and read. Parameters go up twice if they rest
    below, and once if only their update does.
    """
    places = list(places)
    below = sum(place.numel for place in places if place.optimizer != "device")
    gathered = sum(place.numel for place in places if place.parameters != "device")
    sent = sum(place.numel for place in places if place.parameters == "device" and place.optimizer != "device")
    moved = disk_bytes(on_disk.get("optimizer", 0), on_disk.get("parameters", 0))
    disk = sum(moved.values()) + 2.0 * on_disk.get("gradients", 0)
    return {"updated": below, "down": 2.0 * below, "up": 4.0 * gathered + 2.0 * sent, "disk": disk}


def drive_speed(figures: dict[str, Any], rates: dict[str, Any]) -> float:
    """Bytes a second that the drive kept up before the steps and behind them, or else in a short while of the floor."""
    return statistics.mean(figures.get("kept_up") or [rates["drive"]["mixed"]])


def floor_of(figures: dict[str, Any], rates: dict[str, Any], size: str) -> dict[str, float]:
    """Seconds of each part, and of a step at least."""
    compute, asked = rates["compute"][size], figures["demands"]
    parts = {
        "update": asked["updated"] / rates["update"][figures["moments"]],
        "bus": max(asked["up"], asked["down"]) / rates["bus"]["each_of_both"] if rates["bus"] else 0.0,
        "disk": asked["disk"] / drive_speed(figures, rates),
    }
    beside = max(parts.values())
    waits = figures["commit"] == "after the norm"
    floor = compute["backward"] + max(compute["forward"], beside) if waits else max(compute["compute"], beside)
    return {**compute, **parts, "floor": floor}


def steady_seconds(figures: dict[str, Any]) -> float:
    """Seconds a step when no more and no less is on its way at the end than at the begin, at the pace of the drive.

    The first steps of a large model leave more to do behind them than was left to them.
    """
    used, steps = figures["usage"], len(figures["returned_seconds"])
    moved = used["disk_read"] + used["disk_written"]
    return float(figures["seconds"] * max(1.0, steps * figures["demands"]["disk"] / moved if moved else 1.0))
