"""`torch.autocast` for the meta device, which torch does not have: the lists of CUDA, applied to torch's functions.

A simulation has the activations of a GPU with it. What a function of Python's calls inside itself is not seen, as
`F.multi_head_attention_forward`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

_LOWER = ("linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "prelu")
_LOWER_TOO = ("matmul", "mm", "bmm", "mv", "addmm", "addmv", "addr", "addbmm", "baddbmm", "chain_matmul", "einsum")
_WIDER = (
    *("layer_norm", "rms_norm", "group_norm", "softmax", "log_softmax", "softmin", "softplus", "cross_entropy"),
    *("nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "kl_div", "binary_cross_entropy_with_logits"),
    *("cosine_similarity", "normalize"),
)
_WIDER_TOO = (
    *("exp", "expm1", "log", "log10", "log1p", "log2", "pow", "rsqrt", "reciprocal", "sum", "prod", "cumsum"),
    *("cumprod", "norm", "softmax", "log_softmax", "acos", "asin", "cosh", "sinh", "tan", "erfinv", "cdist", "renorm"),
)


def _named(places: tuple[Any, ...], names: tuple[str, ...]) -> set[Any]:
    return {getattr(place, name) for place in places for name in names if hasattr(place, name)}


_IN_16_BITS = _named((F,), _LOWER) | _named((torch, Tensor), _LOWER_TOO)
_IN_16_BITS |= {Tensor.__matmul__, Tensor.__rmatmul__, F.scaled_dot_product_attention}
_IN_32_BITS = _named((F,), _WIDER) | _named((torch, Tensor), _WIDER_TOO) | {Tensor.__pow__, Tensor.__rpow__}


class MetaAutocast(TorchFunctionMode):
    """Casts what functions on meta tensors get, as autocast on a GPU does without its cache of casts."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        dtype = self._dtype if func in _IN_16_BITS else torch.float32 if func in _IN_32_BITS else None
        if dtype is not None:
            args, kwargs = tree_map(lambda one: _cast(one, dtype), (args, kwargs))
        return func(*args, **kwargs)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    is_cast = isinstance(value, Tensor) and value.is_meta and value.is_floating_point()
    return value.to(dtype) if is_cast and value.dtype is not torch.float64 else value
