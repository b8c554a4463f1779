"""DeepSpeed's loss scalers as objects of their own, for loops that scale by themselves."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shardwell.optim.loss_scale import DynamicScale, LossScale, ScaleRules

SETTLING = 1  # DeepSpeed's window begins with the second step after an overflow


class LossScalerBase:
    """A loss scale with DeepSpeed's methods."""

    dynamic = False

    def __init__(self, scale: LossScale) -> None:
        self._scale = scale

    @property
    def cur_scale(self) -> float:
        return self._scale.value

    @property
    def loss_scale(self) -> float:
        return self._scale.value

    def update_scale(self, overflow: bool) -> None:
        """Adapt the scale after a step."""
        self._scale.update(overflow)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale."""
        return loss * self._scale.value

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Run backward from the scaled loss."""
        self.scale_loss(loss).backward(retain_graph=retain_graph)


class LossScaler(LossScalerBase):
    """A scale that stays."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__(LossScale(float(scale)))


class DynamicLossScaler(LossScalerBase):
    """A scale that halves on overflow and doubles after a window without one."""

    dynamic = True

    def __init__(
        self,
        init_scale: float = 2.0**32,
        scale_factor: float = 2.0,
        scale_window: int = 1000,
        min_scale: float = 1,
        delayed_shift: int = 1,
        consecutive_hysteresis: bool = False,
        raise_error_at_min_scale: bool = True,
        **_: Any,
    ) -> None:
        if scale_factor != 2.0:
            raise ValueError(f"DynamicLossScaler(scale_factor={scale_factor}): expected 2")
        rules = ScaleRules(scale_window, delayed_shift, consecutive_hysteresis, float(min_scale), SETTLING)
        super().__init__(DynamicScale(float(init_scale), rules))


def CreateLossScaler(  # noqa: N802 - DeepSpeed's name
    dtype: Any, static_loss_scale: float, dynamic_scaling: bool, dynamic_loss_args: dict[str, Any] | None
) -> LossScalerBase:
    """Return a scaler for a dtype: a fixed one of 1 unless it is fp16."""
    import torch

    if dtype is torch.float16 and dynamic_scaling:
        return DynamicLossScaler(**(dynamic_loss_args or {}))
    return LossScaler(static_loss_scale if dtype is torch.float16 else 1.0)
