"""The GPUs of this machine: which one is this process's own, and where it is."""

from __future__ import annotations

import os
from typing import Any

import torch


def bus_of(index: int) -> str:
    """Return the PCI address of a GPU; an empty string where torch does not tell."""
    properties: Any = torch.cuda.get_device_properties(index)
    if not hasattr(properties, "pci_bus_id"):
        return ""
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def default_device() -> torch.device:
    """Return the device of this process: SHARDWELL_DEVICE if set, its own GPU if there is one, else the CPU."""
    if named := os.environ.get("SHARDWELL_DEVICE"):
        return torch.device(named)
    if torch.cuda.is_available():
        index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    return torch.device("cpu")


def num_gpus() -> int:
    return torch.cuda.device_count()


def generator_of(device: torch.device) -> torch.Generator | None:
    """Return the generator of a device's random numbers; None if it has none, as the meta device."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator if device.type == "cpu" else None
