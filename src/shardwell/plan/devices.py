"""The GPUs, links and drives that plans know by name: figures of `devices.json`, each with its source.

`speeds_of` makes the speeds of a machine from them. Datasheets state what hardware can do at most; which share of it
training reaches is assumed here, in `SHARES`, and said in every report.
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from shardwell.errors import ConfigError
from shardwell.virtual_time.speeds import MatmulRates, Speeds

_ALSO = {"h100": "h100-80gb", "a100": "a100-80gb", "v100": "v100-32gb", "h200-141gb": "h200", "4090": "rtx-4090"}
_ALSO |= {"5090": "rtx-5090", "rtx4090": "rtx-4090", "rtx5090": "rtx-5090", "b200-180gb": "b200"}
SHARES = {"matrix products": 0.72, "device memory": 0.8, "links": 0.8, "buses": 0.87, "drives": 0.9}


@dataclass(frozen=True)
class Figure:
    """One figure of a device, and where it is from."""

    value: float
    source: str
    year: int
    kind: str  # "measured" or "stated"

    def __str__(self) -> str:
        return f"{self.value:g}, {self.kind}: {self.source} ({self.year})"


@dataclass(frozen=True)
class Gpu:
    """A GPU as it is sold, and the bus and the link between nodes that each one usually has."""

    key: str
    name: str
    memory_mib: Figure  # the total that the driver lists
    matmul_tflops: Figure  # of dense 16-bit matrices
    gpu_link_gbs: Figure  # to other GPUs of the node, one way
    fp32_tflops: Figure  # of fp32 matrices, without TF32
    memory_gbs: Figure
    bus: str
    node_link: str
    has_bf16: bool = True  # matrix products of bf16 in hardware

    @property
    def memory_bytes(self) -> float:
        """The bytes that the driver lists."""
        return self.memory_mib.value * (1 << 20)


_FIGURES = ("memory_mib", "matmul_tflops", "gpu_link_gbs", "fp32_tflops", "memory_gbs")


@functools.cache
def _data() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads((resources.files("shardwell.plan") / "devices.json").read_text())
    return found


@functools.cache
def gpus() -> dict[str, Gpu]:
    """Return all GPUs that are known, by name."""
    found = {}
    for key, one in _data()["gpus"].items():
        memory, matmul, link, fp32, rate = (Figure(**one[name]) for name in _FIGURES)
        found[key] = Gpu(key, one["name"], memory, matmul, link, fp32, rate, one["bus"], one["node_link"])
        found[key] = replace(found[key], has_bf16=one.get("has_bf16", True))
    return found


@functools.cache
def links() -> dict[str, Figure]:
    """Return the rates of links and buses in GB/s, one way, by name."""
    return {key: Figure(**one["gbs"]) for key, one in _data()["links"].items()}


@functools.cache
def drives() -> dict[str, tuple[Figure, Figure]]:
    """Return the rates of drives in GB/s by name: of reads, and of writes."""
    return {key: (Figure(**one["read_gbs"]), Figure(**one["write_gbs"])) for key, one in _data()["drives"].items()}


def gpu(name: str) -> Gpu:
    """Return the GPU of a name."""
    key = name.lower().replace(" ", "-").replace("_", "-")
    key = _ALSO.get(key, key)
    return gpus()[_known("GPU", name, key, gpus())]


def speeds_of(gpu: Gpu, node_link: str | None = None, drive: str = "nvme-gen4", num_drives: int = 1) -> Speeds:
    """Return the speeds of a machine of such GPUs, by the figures of datasheets and the shares that are assumed."""
    network = links()[_known("link", node_link or gpu.node_link, (node_link or gpu.node_link).lower(), links())]
    bus, (reads, writes) = links()[gpu.bus], drives()[_known("drive", drive, drive.lower(), drives())]
    update = Figure(**_data()["hosts"]["default"]["update_gbs"])
    half_words = "16-bit matrix products" + ("" if gpu.has_bf16 else " (fp16: it computes none in bf16)") + ", TFLOP/s"
    figures = (
        ("matmul bf16", half_words, gpu.matmul_tflops, "matrix products"),
        ("matmul fp32", "fp32 matrix products, TFLOP/s", gpu.fp32_tflops, "matrix products"),
        ("device_memory", "device memory, GB/s", gpu.memory_gbs, "device memory"),
        ("inside", "link inside the node, GB/s", gpu.gpu_link_gbs, "links"),
        ("between", "link between nodes, GB/s for each GPU", network, "links"),
        ("copy_up", "PCIe to the device, GB/s", bus, "buses"),
        ("copy_down", "PCIe from the device, GB/s", bus, "buses"),
        ("disk_read", f"reads of each of {num_drives} drive(s) of a node, GB/s", reads, "drives"),
        ("disk_write", f"writes of each of {num_drives} drive(s) of a node, GB/s", writes, "drives"),
    )
    origins = {
        key: f"{words}: {figure}; {SHARES[share]:.0%} of it are reached" for key, words, figure, share in figures
    }
    matmul, memory, link = SHARES["matrix products"], SHARES["device memory"], SHARES["links"]
    half, full = gpu.matmul_tflops.value * 1e12, gpu.fp32_tflops.value * 1e12
    return Speeds(
        {name: MatmulRates(((1.0, peak * matmul),), peak) for name, peak in (("bf16", half), ("fp32", full))},
        device_memory=gpu.memory_gbs.value * 1e9 * memory,
        copy_up=bus.value * 1e9 * SHARES["buses"],
        copy_down=bus.value * 1e9 * SHARES["buses"],
        inside=gpu.gpu_link_gbs.value * 1e9 * link,
        between=network.value * 1e9 * link,
        host_update=update.value * 1e9,
        disk_read=num_drives * reads.value * 1e9 * SHARES["drives"],
        disk_write=num_drives * writes.value * 1e9 * SHARES["drives"],
        origins={**origins, "host_update": f"optimizer steps of a host, GB/s: {update}"},
    )


def _known(what: str, name: str, key: str, known: Iterable[str]) -> str:
    """Return a name that is known, or raise with those that are."""
    if key not in known:
        near = difflib.get_close_matches(key, known, 1, 0.5)
        meant = f"Did you mean {near[0]}? " if near else ""
        raise ConfigError(f"no {what} is known as {name!r}. {meant}Known are {', '.join(known)}.")
    return key
