"""The GPUs of this machine: which one is this process's own, and where it is."""

from __future__ import annotations

import os
from typing import Any

import torch

from shardwell.errors import ShardwellError


def bus_of(index: int) -> str:
    """Return the PCI address of a GPU; an empty string where torch does not tell."""
    properties: Any = torch.cuda.get_device_properties(index)
    if not hasattr(properties, "pci_bus_id"):
        return ""
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def default_device() -> torch.device:
    """Return the device of this process: SHARDWELL_DEVICE if set, its own GPU if there is one, else the CPU."""
    if named := os.environ.get("SHARDWELL_DEVICE"):
        return device_named(named, "SHARDWELL_DEVICE")
    return _own_gpu() if torch.cuda.is_available() else torch.device("cpu")


def device_named(name: torch.device | str, where: str) -> torch.device:
    """Return a device that the user has named; `cuda` alone is this process's own GPU. `where` is for the error."""
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise ShardwellError(f"{where}: {str(name)!r} is no device; expected cpu, cuda or cuda:INDEX") from None
    if device.type in ("cpu", "meta"):
        return device
    if device.type != "cuda":
        raise ShardwellError(f"{where}: there are no streams for {str(name)!r} here; expected cpu, cuda or cuda:INDEX")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        found = f"{count} CUDA device{'' if count == 1 else 's'}" if count else "no CUDA device"
        raise ShardwellError(
            f"{where}: {str(name)!r}, but torch {torch.__version__} finds {found} here. Leave the device out to use "
            "what there is; `shardwell doctor` shows driver, torch and GPUs"
        )
    return device if ":" in str(device) else _own_gpu()


def _own_gpu() -> torch.device:
    """Return the GPU of this process, by the launcher's LOCAL_RANK, and make it the current one."""
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def num_gpus() -> int:
    return torch.cuda.device_count()


def generator_of(device: torch.device) -> torch.Generator | None:
    """Return the generator of a device's random numbers; None if it has none, as the meta device."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator if device.type == "cpu" else None
