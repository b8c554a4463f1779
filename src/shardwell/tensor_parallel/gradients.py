"""The check that the ranks of the tensor axis compute the same gradients for parameters that are not cut.

A layer that is whole, and whose output meets those of cut layers, gets only a part of its gradient on each rank: a key
projection of one head, say, that all ranks' heads of queries share. Nothing else would tell, and the ranks would drift
apart.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardwell.errors import ShardwellError
from shardwell.parallel.model_axis import ModelAxis
from shardwell.parallel.traffic import TrafficKind
from shardwell.sharding.tensor_part import is_partial, part_of

_FURTHEST = 0.05  # of a norm; kernels that add in any order differ by less, and parts of a gradient by more


class GradientCheck:
    """A forward pre-hook of the model, which compares the gradients of the backward before."""

    def __init__(self, model: nn.Module, axis: ModelAxis) -> None:
        self._axis = axis
        self._names: list[str] = []
        self._found: dict[str, Tensor] = {}  # norm and sum
        self._handles: list[Any] = []
        for name, parameter in model.named_parameters():
            is_whole = part_of(parameter) is None and not is_partial(parameter)
            if is_whole and parameter.requires_grad and not parameter.is_meta:
                self._names.append(name)
                self._handles.append(parameter.register_hook(self._noting(name)))

    def _noting(self, name: str) -> Any:
        def note(grad: Tensor | None) -> None:
            if grad is not None and name not in self._found:  # weight gradients may be computed late
                grad, wide = grad.detach(), torch.promote_types(grad.dtype, torch.float32)  # without a wide copy
                both = torch.linalg.vector_norm(grad, dtype=wide), grad.sum(dtype=wide)
                self._found[name] = torch.stack(both).double()

        return note

    def remove(self) -> None:
        """Look at no more gradients."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Raise if gradients of the first backward differ between the ranks of the axis."""
        if not self._found or not self._handles:
            return
        self.remove()
        nothing = next(iter(self._found.values())).new_zeros(2)
        mine = torch.stack([self._found.pop(name, nothing) for name in self._names])
        every = self._axis.all_gather(mine.unsqueeze(0), 0, "GRADIENTS", TrafficKind.CONTROL)
        far = (every - every[:1]).abs().amax((0, 2)) > _FURTHEST * every[..., 0].amax(0)
        if bool(far.any()):
            names = [name for name, is_far in zip(self._names, far.tolist(), strict=True) if is_far]
            raise ShardwellError(
                f"tensor_parallel: the ranks of the tensor axis computed different gradients for {_listed(names)}, "
                "which no plan cuts. What is between a layer that is cut by columns and one that is cut by rows must "
                "be cut, too, or have the style replicated_with_grad_allreduce"
            )


def _listed(names: list[str]) -> str:
    return ", ".join(f"'{name}'" for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
