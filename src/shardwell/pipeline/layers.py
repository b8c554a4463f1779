"""Layers that are described and not built yet, under DeepSpeed's names: each rank builds those of its own stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardwell.pipeline.partition import LayerCost, cost_of


class LayerSpec:
    """A class with the arguments of its constructor: `build` makes the layer."""

    def __init__(self, typename: type[nn.Module] | Callable[..., Any], *module_args: Any, **module_kwargs: Any) -> None:
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def build(self, log: bool = False) -> Any:
        """Make the layer."""
        return self.typename(*self.module_args, **self.module_kwargs)

    def cost(self) -> LayerCost:
        """Return what the layer costs, from one without values."""
        with torch.device("meta"):
            built = self.build()
        return cost_of([built] if isinstance(built, nn.Module) else [])

    @property
    def class_name(self) -> str:
        return getattr(self.typename, "__name__", str(self.typename))

    def __repr__(self) -> str:
        arguments = [*map(repr, self.module_args), *(f"{key}={value!r}" for key, value in self.module_kwargs.items())]
        return f"{self.class_name}({', '.join(arguments)})"


class TiedLayerSpec(LayerSpec):
    """A layer that shares its module with all layers of the same key, also with those of other stages.

    `forward_fn(module, inputs)` replaces the module's own forward, as an output layer does with an embedding.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module] | Callable[..., Any],
        *module_args: Any,
        forward_fn: Callable[[Any, Any], Any] | None = None,
        tied_weight_attr: str | list[str] = "weight",
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn, self.tied_weight_attr = key, forward_fn, tied_weight_attr


class FunctionLayer(nn.Module):
    """A layer that is a function of its input, or of a tied module and its input. It owns nothing."""

    def __init__(self, function: Callable[..., Any], tied: nn.Module | None = None) -> None:
        super().__init__()
        self.__dict__.update(function=function, tied=tied)  # the module has its name elsewhere

    def forward(self, inputs: Any) -> Any:
        function, tied = self.__dict__["function"], self.__dict__["tied"]
        return function(inputs) if tied is None else function(tied, inputs)
