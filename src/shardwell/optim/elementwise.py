"""The check whether an optimizer is elementwise: only then may slices of parameters be stepped alone.

That is known of torch's and shardwell's optimizers. Any other optimizer is tried: it steps small full tensors, and the
same values as two ranks would hold them. A rule that depends on shapes, on norms, or on other parameters gives
different results, and is refused. An optimizer that cannot be tried is refused, too, unless it or its class has
`elementwise = True`.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwell.errors import ShardwellError
from shardwell.memory import Device
from shardwell.optim.full_tensors import needs_full_tensors
from shardwell.optim.given_parameters import check_capturable
from shardwell.optim.lion import Lion

Make = Callable[[list[list[Tensor]]], Optimizer]  # over the tensors of each parameter group

_KNOWN = {
    *(torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adadelta),
    *(torch.optim.Adamax, torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop),
    *(torch.optim.Rprop, Lion),
}
_KNOWN_ELSEWHERE = {  # some of them run on GPUs only, or need a process group
    "apex.optimizers.fused_adagrad.FusedAdagrad",
    "apex.optimizers.fused_adam.FusedAdam",
    "apex.optimizers.fused_sgd.FusedSGD",
    "deepspeed.ops.adagrad.cpu_adagrad.DeepSpeedCPUAdagrad",
    "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam",
    "deepspeed.ops.adam.fused_adam.FusedAdam",
    "deepspeed.ops.lion.cpu_lion.DeepSpeedCPULion",
    "deepspeed.ops.lion.fused_lion.FusedLion",
    "transformers.optimization.AdamW",
}
_HARMLESS = {"__annotations__", "__module__", "__static_attributes__", "add_param_group"}  # what a subclass may change
_REFUSED = {"LBFGS", "Adafactor", "SparseAdam"}
_SHAPES = {0: (), 1: (13,), 2: (6, 5), 3: (3, 4, 5), 4: (4, 3, 3, 2)}
_NUM_STEPS = 12  # rules may begin to differ after a few steps
_SCALES = (1.0, 1e-3, 30.0)  # of gradients: rules may clip them
_WAY_OUT = (
    "Use an elementwise optimizer (Adam, AdamW, Lion, SGD, Adagrad, RMSprop, ...), or Lamb or Muon, which know shards."
)


def check_kind(kind: Any) -> None:
    """Refuse a class that is known not to be elementwise."""
    names = {base.__name__ for base in getattr(kind, "__mro__", ())}
    if bad := sorted(names & _REFUSED):
        raise ShardwellError(
            f"{bad[0]} is not elementwise: it needs full tensors where shardwell has shards. {_WAY_OUT}"
        )


def kind_by_step(kind: type[Optimizer]) -> type[Optimizer]:
    """Return the known optimizer whose step a class inherits unchanged, or the class itself.

    A subclass with other arguments or defaults is as elementwise as its base, and the same kernels step it.
    """
    for place, base in enumerate(kind.__mro__):
        if base in _KNOWN:
            own = {name for between in kind.__mro__[:place] for name in vars(between)}
            changed = {
                name for name in own & set(dir(base)) - set(dir(object)) - _HARMLESS if not _is_same(kind, base, name)
            }
            return kind if changed else base
    return kind


def _is_same(kind: type, base: type, name: str) -> bool:
    """Return whether a class has its base's method; torch wraps `step` anew in each class."""
    return inspect.unwrap(getattr(kind, name)) is inspect.unwrap(getattr(base, name))


def check_object(optimizer: Optimizer, device: Device) -> None:
    """Refuse the user's optimizer if it is not elementwise, without changing it."""
    check_kind(type(optimizer))
    check_capturable(optimizer, device.has_device_memory or device.is_meta)
    if not _is_known(optimizer):
        dims = [sorted({parameter.ndim for parameter in group["params"]}) for group in optimizer.param_groups]
        _try(lambda tensors: _twin(optimizer, tensors), type(optimizer).__name__, dims, device)


def check_factory(make: Make, groups: Sequence[dict[str, Any]], device: Device) -> None:
    """Refuse a factory whose optimizer is not elementwise."""
    dims = [sorted({parameter.ndim for parameter in group["params"]}) for group in groups]
    made = make([[nn.Parameter(torch.zeros(4, device=device.torch_device))] for _ in groups])
    check_kind(type(made))
    check_capturable(made, device.has_device_memory or device.is_meta)
    if not _is_known(made):
        _try(make, type(made).__name__, dims, device)


def _is_known(optimizer: Optimizer) -> bool:
    kind = type(optimizer)
    return (
        kind_by_step(kind) in _KNOWN
        or f"{kind.__module__}.{kind.__qualname__}" in _KNOWN_ELSEWHERE
        or needs_full_tensors(optimizer)
        or bool(getattr(optimizer, "elementwise", False))
    )


def _twin(optimizer: Optimizer, tensors: list[list[Tensor]]) -> Optimizer:
    """Return an optimizer with the same settings over other tensors, without its hooks."""
    memo: dict[int, Any] = {}
    for group, others in zip(optimizer.param_groups, tensors, strict=True):
        memo.update({id(parameter): others[0] for parameter in group["params"]})
    twin = object.__new__(type(optimizer))
    left_out = {"state", "param_groups", "step"}
    for key, value in optimizer.__dict__.items():
        if key.startswith("_optimizer_"):
            twin.__dict__[key] = OrderedDict()
        elif key not in left_out:
            twin.__dict__[key] = copy.deepcopy(value, memo)
    twin.state = defaultdict(dict)
    twin.param_groups = [
        {**{key: copy.deepcopy(value, memo) for key, value in group.items() if key != "params"}, "params": list(others)}
        for group, others in zip(optimizer.param_groups, tensors, strict=True)
    ]
    return twin


def _try(make: Make, name: str, dims: list[list[int]], device: Device) -> None:
    if device.is_meta:
        return
    remedy = (
        f"{_WAY_OUT} If you know that {name} may be stepped in pieces of parameters, set `elementwise = True` on it or "
        "on its class."
    )
    try:
        with torch.random.fork_rng(), torch.enable_grad():
            is_elementwise = _gives_the_same(make, dims, device)
    except Exception as error:
        raise ShardwellError(
            f"it is not known whether {name} is elementwise, and small steps to find out failed with "
            f"{type(error).__name__}: {error}. {remedy}"
        ) from error
    if not is_elementwise:
        raise ShardwellError(
            f"{name} is not elementwise: over pieces of parameters, which is what a rank holds, its steps give other "
            f"numbers than over full ones. {remedy}"
        )
    logging.getLogger("shardwell").info(
        "%s was tried on small tensors: it is elementwise, and steps pieces of parameters as it steps full ones.", name
    )


def _gives_the_same(make: Make, dims: list[list[int]], device: Device) -> bool:
    """Return whether steps over full tensors and over the slices of two ranks give the same values."""
    generator = torch.Generator().manual_seed(0)
    shapes = [[_SHAPES[min(dim, 4)] for dim in (own or [1]) for _ in range(2)] for own in dims]
    whole = [[torch.randn(shape, generator=generator) for shape in own] for own in shapes]
    flat = [torch.cat([tensor.reshape(-1) for tensor in own]) for own in whole]
    halves = [[own[: own.numel() // 2 + 1] for own in flat], [own[own.numel() // 2 + 1 :] for own in flat]]
    runs = [
        _Run(make, whole, device),
        *(_Run(make, [[own] for own in half], device) for half in halves),
    ]
    for step in range(_NUM_STEPS):
        scale = _SCALES[step % len(_SCALES)]
        gradients = [[torch.randn(shape, generator=generator) * scale for shape in own] for own in shapes]
        joined = [torch.cat([tensor.reshape(-1) for tensor in own]) for own in gradients]
        runs[0].step(gradients)
        runs[1].step([[own[: own.numel() // 2 + 1]] for own in joined])
        runs[2].step([[own[own.numel() // 2 + 1 :]] for own in joined])
    first, second = (run.values() for run in runs[1:])
    return all(
        torch.allclose(expected, torch.cat([one, other]), rtol=1e-4, atol=1e-5, equal_nan=True)
        for expected, one, other in zip(runs[0].values(), first, second, strict=True)
    )


class _Run:
    """An optimizer over copies of some tensors."""

    def __init__(self, make: Make, tensors: list[list[Tensor]], device: Device) -> None:
        where = device.torch_device
        self._parameters = [[nn.Parameter(t.detach().clone().to(where)) for t in own] for own in tensors]
        self._optimizer = make([list(own) for own in self._parameters])

    def step(self, gradients: list[list[Tensor]]) -> None:
        for own, theirs in zip(self._parameters, gradients, strict=True):
            for parameter, gradient in zip(own, theirs, strict=True):
                parameter.grad = gradient.clone().to(parameter.device)
        self._optimizer.step()

    def values(self) -> list[Tensor]:
        """Return the values of each parameter group (1D)."""
        return [torch.cat([parameter.detach().reshape(-1) for parameter in own]) for own in self._parameters]
