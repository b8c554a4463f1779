"""`offload_states` and `reload_states`: states leave the device for a while and come back."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING, Any

import torch

from shardwell.compat.deepspeed_api.enums import OffloadDeviceEnum, OffloadStateTypeEnum
from shardwell.errors import ShardwellError

if TYPE_CHECKING:
    from shardwell.engine import Engine

    _Base = Engine
else:
    _Base = object


class StateMoves(_Base):
    """Moving the states of an engine to host memory and back, for `DeepSpeedEngine`."""

    _moved: bool = False

    def offload_states(
        self,
        include: Container[OffloadStateTypeEnum] | None = None,
        device: OffloadDeviceEnum = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move states to host memory until `reload_states`; refused where there is an accelerator."""
        if device == OffloadDeviceEnum.none:
            return
        if device == OffloadDeviceEnum.nvme:
            raise ValueError("offload_states(device='nvme'): states can be moved to host memory only")
        if self.optimizer is None:
            raise ShardwellError("offload_states needs an engine with an optimizer")
        if self.device.type != "cpu":
            raise ShardwellError(
                "offload_states is not supported on an accelerator yet: configure offload_optimizer (and offload_param "
                "at stage 3) with device 'cpu', which keeps these states in host memory during training, too"
            )
        self._moved = True  # on the CPU all states are in host memory already

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move states back that `offload_states` has moved."""
        self._moved = False


def get_state_devices(model: Any, state: Any) -> set[torch.device]:
    """Return the devices on which a state of the engine is stored now."""
    kinds = {"optim_states": "optimizer", "hp_params": "optimizer", "lp_params": "parameters"}
    name = str(getattr(state, "value", state))
    memory = model.memory()
    found = {
        tier.value
        for (kind, _, tier), size in memory.now.items()
        if size and kind.value == kinds.get(name, "gradients")
    }
    return {model.device if tier == "device" else torch.device("cpu") for tier in found}
