"""Is this still the model that was handed over? Checked before every forward, in about 0.1 µs a parameter."""

from __future__ import annotations

import torch
from torch import nn

from shardwell.errors import ModelChangedError


class Fingerprint:
    """Which parameters and submodules every module had, and whether each parameter was trainable."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [
            (
                name,
                module,
                len(module._modules),
                {
                    key: (parameter, parameter is not None and parameter.requires_grad)
                    for key, parameter in module._parameters.items()
                },
            )
            for name, module in model.named_modules()
        ]

    def check(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # parameters that are away answer through a slow path
            self._check()

    def _check(self) -> None:
        for name, module, num_children, known in self._modules:
            now = module._parameters
            if len(module._modules) != num_children or len(now) != len(known):
                raise ModelChangedError(self._message(name, "modules or parameters were added or removed"))
            for key, (parameter, trainable) in known.items():
                found = now.get(key)
                if found is not parameter:
                    raise ModelChangedError(self._message(name, f"parameter '{key}' is another object"))
                if found is not None and found.requires_grad is not trainable:
                    raise ModelChangedError(
                        self._message(name, f"requires_grad of '{key}' was changed to {not trainable}")
                    )

    @staticmethod
    def _message(name: str, what: str) -> str:
        return (
            f"the model was changed after initialize: in '{name or '(root)'}' {what}. Shards and optimizer state "
            "belong to the model as it was: make the change before initialize, or change values inside "
            "shardwell.zero.GatheredParameters."
        )
