"""How many floating-point operations a model takes for a token, and how many the hardware could do.

Model FLOPs as papers count them: a multiplication and an addition are two, backward is twice the forward, and what is
recomputed does not count.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

# Dense FLOP/s in bf16 and fp16, as the vendor states them; matched in this order.
_PEAKS = (
    ("B200", 2250e12),
    ("GB200", 2500e12),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("GH200", 989e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("L4", 121e12),
    ("A10G", 70e12),
    ("A10", 125e12),
    ("A6000", 155e12),
    ("V100", 125e12),
    ("T4", 65e12),
    ("4090", 165e12),
    ("3090", 71e12),
)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def peak_flops(name: str, dtype: torch.dtype | None) -> float | None:
    """Return the FLOP/s that a device could do in a 16-bit dtype; None if that is not known."""
    if dtype not in (torch.bfloat16, torch.float16):
        return None
    return next((peak for part, peak in _PEAKS if part in name), None)


def flops_per_token(model: nn.Module, length: int) -> float | None:
    """Return the FLOPs of forward and backward for one token of a sequence of `length`; None if they are not known.

    They are known of models that look tokens up and multiply them by every other weight once: not with convolutions,
    nor with experts of which only some are used. A frozen weight takes no gradient of its own: four instead of six.
    """
    looked_up: set[int] = set()
    multiplied: set[int] = set()
    config = getattr(model, "config", None)
    if any(getattr(config, name, None) for name in _EXPERTS):
        return None
    for module in model.modules():
        if isinstance(module, _CONVOLUTIONS):
            return None
        own = {id(parameter) for parameter in module._parameters.values() if parameter is not None}
        (looked_up if isinstance(module, nn.Embedding) else multiplied).update(own)
    if not looked_up:
        return None
    total = sum(
        parameter.numel() * (6 if parameter.requires_grad else 4)
        for parameter in model.parameters()
        if id(parameter) in multiplied
    )
    return total + _attention(config, length)


def _attention(config: Any, length: int) -> float:
    """Return the FLOPs of attention scores and of their product with the values, as if nothing were masked."""
    layers, width = getattr(config, "num_hidden_layers", None), getattr(config, "hidden_size", None)
    if isinstance(layers, int) and isinstance(width, int):
        return 12.0 * layers * width * length
    return 0.0
