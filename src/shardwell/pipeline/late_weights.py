"""Weight gradients that are computed later than the gradients of inputs, which fills the bubble (zero bubble).

The linear layers of a stage run through an autograd function. Its backward returns the gradient of the input and keeps
the input and the output's gradient, from which the weight's gradient is computed when the schedule says so. No graph is
kept for that, and no weight is needed: at stage 3 parameters are released in between. Layers that are cut over a tensor
axis find the function in their attribute `late_product`.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shardwell.pipeline.operations import Operation, Pass
from shardwell.pipeline.stage_modules import StageModules
from shardwell.runtime.scheduler import Scheduler
from shardwell.sharding.gradients import GradState

Kept = tuple[nn.Parameter, Tensor, Tensor, bool]  # the weight, its input, its output's gradient, whether transposed


class LateWeights:
    """The weight gradients of this rank's stages that are not computed yet."""

    def __init__(self, modules: StageModules) -> None:
        """Let the linear layers of these stages compute weight gradients late, while an operation collects them."""
        self._kept: defaultdict[tuple[int, int], list[Kept]] = defaultdict(list)
        self._collecting: list[Kept] | None = None
        self._stage_of: dict[int, int] = {}  # by parameter
        for stage in modules.stages:
            for layer in modules.layers_of(stage):
                for parameter in layer.parameters():
                    self._stage_of.setdefault(id(parameter), stage)
                for module in layer.modules():
                    if _is_linear(module) and "forward" not in vars(module):
                        module.late_product = partial(_late_product, self)  # type: ignore[assignment]
                        module.forward = partial(_late_forward, module)

    @contextlib.contextmanager
    def collecting(self, operation: Operation) -> Iterator[None]:
        """Keep the weight gradients of a backward that runs inside for a later operation."""
        self._collecting = self._kept[operation.stage, operation.micro_batch]
        try:
            yield
        finally:
            self._collecting = None

    def keep(self, weight: nn.Parameter, inputs: Tensor, grad: Tensor, *, transposed: bool) -> bool:
        """Keep what a weight gradient is computed from; false if it is to be computed now.

        That is so for weights with hooks of the user's, which see or change gradients that autograd computes.
        """
        if self._collecting is None or weight._backward_hooks:
            return False
        self._collecting.append((weight, inputs, grad, transposed))
        return True

    @torch.no_grad()
    def finish(self, operation: Operation, scheduler: Scheduler) -> None:
        """Compute the weight gradients of an operation, and reduce what is to be reduced of its stage."""
        reducer = scheduler.reducer
        places = {id(p): (u, g, i) for u in scheduler.units for g in u.trainable for i, p in enumerate(g.parameters)}
        assert operation.kind is Pass.BACKWARD_WEIGHT
        for weight, inputs, grad, transposed in self._kept.pop((operation.stage, operation.micro_batch), []):
            unit, group, index = places[id(weight)]
            reducer.accumulate(unit, group, index, _weight_gradient(inputs, grad, transposed).to(weight.dtype))
        for unit in reversed(scheduler.units):
            is_own = any(
                self._stage_of.get(id(p)) == operation.stage for group in unit.trainable for p in group.parameters
            )
            if is_own and any(group.gradients.state is GradState.PARTIAL for group in unit.trainable):
                unit.use.has_new_gradients = True
                scheduler.post_backward(unit)


def _is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer with a weight of its own: torch's, or the one of GPT-2."""
    name = type(module).__qualname__
    is_conv1d = name == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"
    return type(module) is nn.Linear or is_conv1d


def _late_forward(module: Any, inputs: Tensor) -> Tensor:
    """Run a linear layer whose weight gradient may be computed late."""
    found: Tensor | None = module.late_product(inputs, module.weight, module.bias, type(module) is not nn.Linear)
    return type(module).forward(module, inputs) if found is None else found


def _late_product(
    late: LateWeights, inputs: Tensor, weight: nn.Parameter, bias: Tensor | None, transposed: bool
) -> Tensor | None:
    """Return what a linear layer computes whose weight's gradient may be late; None if the weight gets no gradient."""
    found = _product(late, inputs, weight, transposed)
    return found if found is None or bias is None else found + bias.to(found.dtype)


def _product(late: LateWeights, inputs: Tensor, weight: nn.Parameter, transposed: bool) -> Tensor | None:
    if not (torch.is_grad_enabled() and weight.requires_grad and isinstance(weight, nn.Parameter)):
        return None
    compute: Tensor = weight
    if inputs.is_meta:  # has no autocast
        return _LateLinear.apply(inputs, compute, late, weight, transposed)  # type: ignore[no-untyped-call, no-any-return]
    if torch.is_autocast_enabled(inputs.device.type):
        dtype = torch.get_autocast_dtype(inputs.device.type)
        inputs, compute = inputs.to(dtype), weight.to(dtype)
    with torch.autocast(inputs.device.type, enabled=False):
        output: Tensor = _LateLinear.apply(inputs, compute, late, weight, transposed)  # type: ignore[no-untyped-call]
    return output


class _LateLinear(torch.autograd.Function):
    """A matrix product whose weight gradient may be left for later."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, late: LateWeights, owner: nn.Parameter, transposed: bool
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.late, ctx.owner, ctx.transposed = late, owner, transposed
        return inputs @ (weight if transposed else weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        back = grad @ (weight.t() if ctx.transposed else weight) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1] or ctx.late.keep(ctx.owner, inputs, grad, transposed=ctx.transposed):
            return back, None, None, None, None
        return back, _weight_gradient(inputs, grad, ctx.transposed), None, None, None


def _weight_gradient(inputs: Tensor, grad: Tensor, transposed: bool) -> Tensor:
    left, right = inputs.reshape(-1, inputs.shape[-1]), grad.reshape(-1, grad.shape[-1])
    return left.t() @ right if transposed else right.t() @ left
