"""`module.cpu()`, `.to(device)` and the like at stage 3: DeepSpeed moves what the modules hold, which are no shards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import MethodType

import torch
from torch import Tensor, nn

from shardwell.zero import is_released


def leave_shards_in_place(module: nn.Module) -> None:
    """Let conversions of this module leave out its released parameters, whose shards belong to the engine.

    Clients move a model to the CPU when they are done with it, such as Lightning after `fit`.
    """
    module.__dict__["_apply"] = MethodType(_apply_to_held, module)


def _apply_to_held(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Apply a conversion to buffers, and to parameters that have values."""
    for part in module.modules() if recurse else (module,):
        parameters = part._parameters
        released = {name: parameter for name, parameter in parameters.items() if is_released(parameter)}
        parameters.update(dict.fromkeys(released))
        try:
            type(part)._apply(part, fn, recurse=False)
        finally:
            parameters.update(released)
    return module


@contextlib.contextmanager
def returned_to(device: torch.device, module: nn.Module) -> Iterator[None]:
    """Return a module that a client has moved to the engine's device inside: DeepSpeed saves models that were moved."""
    away = {p.device for p in module.parameters() if p.device.type != device.type and not is_released(p)}
    if not away:
        yield
        return
    module.to(device)
    try:
        yield
    finally:
        module.to(away.pop())
