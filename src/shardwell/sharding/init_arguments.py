"""The rarely used arguments of DeepSpeed's `zero.Init`: what they mean here, or why they are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardwell.errors import ConfigError
from shardwell.parallel.mesh import size_of_group, size_of_world

_WITHOUT_EFFECT = {
    "mem_efficient_linear": "a linear layer keeps no copy of its weight for backward here",
    "zero_param_parallel_group": "a secondary shard in each node is zero_optimization.zero_hpz_partition_size",
    "zero_quantized_weights": "it is zero_optimization.zero_quantized_weights of the configuration",
    "zero_quantized_nontrainable_weights": (
        "it is zero_optimization.zero_quantized_nontrainable_weights of the configuration"
    ),
}
_REFUSED = {
    "param_swapper": (
        "parameters go to drives by remote_device='nvme', or zero_optimization.offload_param of the configuration"
    ),
}
_GROUPS = ("data_parallel_group", "sequence_data_parallel_group")
_KNOWN = {"device", "pin_memory", "mpu", *_GROUPS, *_WITHOUT_EFFECT, *_REFUSED}


@dataclass(frozen=True)
class ExtraInitArguments:
    """The rarely used arguments of `zero.Init`, checked."""

    device: torch.device | None  # where parameters are constructed
    pin_memory: bool  # shards in host memory are pinned
    groups: dict[str, Any]  # process groups that DeepSpeed would shard over
    mpu: Any
    idle: list[str]  # given arguments that have no effect

    @staticmethod
    def of(given: Mapping[str, Any]) -> ExtraInitArguments:
        """Check and sort the given keyword arguments."""
        unknown = sorted(set(given) - _KNOWN)
        if unknown:
            raise TypeError(f"zero.Init got an unexpected keyword argument '{unknown[0]}'")
        for name, instead in _REFUSED.items():
            if given.get(name) is not None:
                raise ConfigError(f"zero.Init({name}=...) is not supported: {instead}")
        device = given.get("device")
        return ExtraInitArguments(
            torch.device(device) if device is not None else None,
            bool(given.get("pin_memory")),
            {name: given[name] for name in _GROUPS if given.get(name) is not None},
            given.get("mpu"),
            [name for name in _WITHOUT_EFFECT if given.get(name)],
        )

    def about_groups(self) -> str:
        """Refuse groups that are not all ranks, and return a message about arguments without effect.

        The process group must exist.
        """
        groups = dict(self.groups)
        if self.mpu is not None:
            groups["mpu"] = self.mpu.get_data_parallel_group()
        for name, group in groups.items():
            if (found := size_of_group(group)) != (expected := size_of_world()):
                raise ConfigError(
                    f"zero.Init({name}=...) names {found} of {expected} ranks, but parameters are split over all of "
                    "them: every rank must train on data of its own."
                )
        if not self.idle:
            return ""
        return "zero.Init: no effect: " + "; ".join(f"{name} ({_WITHOUT_EFFECT[name]})" for name in self.idle)
