"""Attention and norms on the meta device as a GPU computes them, by fused kernels.

On meta tensors torch takes the path that makes all scores. On a GPU, `scaled_dot_product_attention` calls a fused
kernel that saves queries, keys, values, the result and one number for each query; these have meta forms of their own.
`rms_norm` on meta tensors makes several tensors in fp32, which a GPU's fused kernel does not. Which kernel attention
calls, models of Transformers ask the values of their masks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode

_MASKS = "transformers.masking_utils"


class FusedKernels(TorchFunctionMode):
    """Replaces operations on meta tensors by the fused kernels that a device would run."""

    def __init__(
        self, autocast: Callable[[], AbstractContextManager[Any]] = nullcontext, *, has_gpus: bool = True
    ) -> None:
        """Run forwards that a backward recomputes in `autocast`, if given. Without GPUs only attention is fused."""
        super().__init__()
        self._autocast, self._has_gpus = autocast, has_gpus

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _REPLACED:
            return func(*args, **kwargs) if kwargs else func(*args)
        if func is Tensor.__bool__:
            return _answer(sys._getframe(1)) if args[0].is_meta else func(*args)
        if func is F.scaled_dot_product_attention and args and args[0].is_meta:
            return _attention(*args, **(kwargs or {}))
        if func in (F.rms_norm, torch.rms_norm) and self._has_gpus and args[0].is_meta:
            return _rms_norm(*args, **(kwargs or {}))
        if func is Tensor.backward:
            return self._backward(args[:1], (kwargs or {}).get("gradient"), kwargs or {})
        if func is torch.autograd.backward and not (kwargs or {}).get("inputs"):
            tensors, *given = args
            gradients = given[0] if given else (kwargs or {}).get("grad_tensors")
            return self._backward(tensors, gradients, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _backward(self, tensors: Any, gradients: Any, options: dict[str, Any]) -> None:
        """Run a backward in this mode, which torch leaves for what a function calls: forwards are recomputed in it."""
        roots = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
        given = (gradients,) if gradients is None or isinstance(gradients, Tensor) else tuple(gradients)
        given = given if len(given) == len(roots) else given * len(roots)
        begin = tuple(torch.ones_like(root) if one is None else one for root, one in zip(roots, given, strict=True))
        keeps, creates = bool(options.get("retain_graph") or options.get("create_graph")), options.get("create_graph")
        with self, self._autocast():
            _engine_run_backward(roots, begin, keeps, bool(creates), (), allow_unreachable=True, accumulate_grad=True)


_REPLACED = frozenset(
    {
        *(F.scaled_dot_product_attention, F.rms_norm, torch.rms_norm),
        *(Tensor.backward, torch.autograd.backward, Tensor.__bool__),
    }
)


def _answer(asks: FrameType | None) -> bool:
    """Answer the code of Transformers that makes masks: rows are whole sequences without padding.

    All that it asks of values is whether this is so. Nothing else has an answer. Other modes for functions may be
    between it and this one.
    """
    name = ""
    while asks is not None and (name := asks.f_globals.get("__name__", "")).partition(".")[0] in ("torch", "shardwell"):
        asks = asks.f_back
    if name == _MASKS:
        return True
    raise NotImplementedError("Tensor.__bool__() cannot be called on meta tensors")


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if attn_mask is None and query.dtype in (torch.bfloat16, torch.float16):
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return cast(Tensor, flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0])
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.empty_like(attn_mask, dtype=query.dtype)  # the bias that the kernel adds
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    saves = torch.is_grad_enabled() and any(one.requires_grad for one in (query, key, value))
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return cast(Tensor, efficient(query, key, value, attn_mask, saves, dropout_p, is_causal, scale=scale)[0])


def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    if weight is not None and weight.dtype is not input.dtype:  # torch fuses one dtype
        return torch.rms_norm(input, list(normalized_shape), weight, eps)
    return cast(Tensor, _FusedRMSNorm.apply(input, len(normalized_shape), weight))  # type: ignore[no-untyped-call]


class _FusedRMSNorm(torch.autograd.Function):
    """The memory and the bytes moved of the fused kernel, which saves its input and one number for each row.

    Each operation stands for a kernel that reads and writes the same tensors.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, num_dims: int, weight: Tensor | None) -> Tensor:
        rows = (*input.shape[: input.dim() - num_dims], *[1] * num_dims)
        ctx.save_for_backward(input, weight, torch.empty(rows, dtype=torch.float32, device=input.device))
        return input.neg()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor | None]:
        input, weight, _ = ctx.saved_tensors
        return grad * input, None, None if weight is None else torch.empty_like(weight)
