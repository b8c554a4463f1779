"""`split`: how a model is cut into pipeline stages, without a change of its code or of its names."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from shardwell.errors import ConfigError, ShardwellError
from shardwell.pipeline.partition import cost_of, divide
from shardwell.pipeline.stage_modules import Layers, Place

LossFunction = Callable[..., Any]


class SplitModel(nn.Module):
    """A model together with its layers, for `shardwell.initialize`, which leaves each rank its own stages only."""

    def __init__(self, layers: Layers, at: Sequence[str] | None, loss_fn: LossFunction | None) -> None:
        super().__init__()
        self.model = layers.model
        self.layers, self.at = layers, at
        self.__dict__["loss_fn"] = loss_fn  # a module with parameters would get a name among those of the model

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters under the names that the model itself has for them."""
        return self.model.named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the model itself."""
        return self.model.state_dict(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the whole model, without a pipeline."""
        return self.model(*args, **kwargs)

    def borders(self, num_stages: int, method: str) -> list[int]:
        """Return the index of each stage's first layer, and the number of layers."""
        places = self.layers.places
        if self.at is None:
            costs = [cost_of(self.layers.modules_of(index)) for index in range(len(places))]
            return divide(method, costs, [type(place.module).__name__ for place in places], num_stages)
        if len(self.at) != num_stages - 1:
            raise ConfigError(
                f"pipeline: split(at=...) names {len(self.at)} layer(s) that begin a stage, which makes "
                f"{len(self.at) + 1} stages, and the configuration has {num_stages} (stages x chunks)"
            )
        names = [place.name for place in places]
        borders = [0, *(names.index(name) for name in self.at), len(places)]
        if borders != sorted(set(borders)):
            raise ConfigError(f"pipeline: split(at={list(self.at)}) is not in the order of the layers")
        return borders


def split(model: nn.Module, at: str | Sequence[str] = "auto", loss_fn: LossFunction | None = None) -> SplitModel:
    """Prepare a model for a pipeline: an `nn.Sequential`, a decoder of Transformers, or a model with a list of blocks.

    Args:
        model: The whole model, on any device, `meta` included. Its code and its names stay as they are.
        at: "auto" divides by FLOPs and parameters (`pipeline.partition` in the configuration); otherwise the names of
            the layers that begin the second stage, the third and so on.
        loss_fn: A function of the model's output and the labels. By default the output itself, or its `loss`.
    """
    layers = layers_of(model)
    if isinstance(at, str):
        if at != "auto":
            raise ConfigError(f'pipeline: split(at=...) takes "auto" or a list of names, found "{at}"')
        return SplitModel(layers, None, loss_fn)
    names = [place.name for place in layers.places]
    if strange := [name for name in at if name not in names]:
        raise ConfigError(
            f"pipeline: split(at=...) names '{strange[0]}', which is no layer. The layers are {', '.join(names[:4])}"
            f"{' ...' if len(names) > 4 else ''}"
        )
    return SplitModel(layers, list(at), loss_fn)


def layers_of(model: nn.Module) -> Layers:
    """Return the layers of a model; raise if there is no list of them."""
    given = getattr(model, "pipeline_layers", None)
    if callable(given):
        found = given()
        assert isinstance(found, Layers)
        return found
    if isinstance(model, nn.Sequential):
        return Layers(model, [Place(model, name, name, child) for name, child in model._modules.items() if child])
    name = _block_list(model)
    container = model.get_submodule(name)
    places = [Place(container, key, f"{name}.{key}", child) for key, child in container._modules.items() if child]
    before, after = _around(model, name)
    return Layers(model, places, before, after, is_chain=False)


def _block_list(model: nn.Module) -> str:
    """Return the name of the list that holds most of the model's parameters."""
    lists: dict[str, int] = {
        name: sum(parameter.numel() for parameter in module.parameters())
        for name, module in model.named_modules()
        if name and isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1
    }
    outer = {name for name in lists if not any(name.startswith(f"{other}.") for other in lists)}
    if not outer:
        raise ShardwellError(
            f"pipeline: a {type(model).__name__} has no list of blocks (nn.ModuleList, nn.Sequential) that could be "
            "divided into stages. Write it as an nn.Sequential, or as a PipelineModule."
        )
    best = max(sorted(outer), key=lambda name: lists[name])
    rest = [name for name in outer if name != best and lists[name] * 10 > lists[best]]
    if rest:
        raise ShardwellError(
            f"pipeline: a {type(model).__name__} has several lists of blocks, '{best}' and '{rest[0]}', and a hidden "
            "state passes one list only (an encoder and a decoder are not supported). Write it as a PipelineModule."
        )
    return best


def _is_named_later(parent: nn.Module, key: str, blocks: str) -> bool:
    """Return whether a module's forward names a child for the first time after its blocks."""
    try:
        source = inspect.getsource(type(parent).forward)
    except (OSError, TypeError):
        return False
    places = [re.search(rf"\bself\.{name}\b", source) for name in (key, blocks)]
    return places[0] is not None and places[1] is not None and places[0].start() > places[1].start()


def _around(model: nn.Module, blocks: str) -> tuple[list[Place], list[Place]]:
    """Return the modules with parameters beside the list of blocks: those that run before it, and after it.

    The order is that of registration, but for modules that the forward names after the blocks; a module that runs on
    the other side is an error then (`stage_modules.py`).
    """
    before: list[Place] = []
    after: list[Place] = []
    parent, prefix, is_after = model, "", False
    path = blocks.split(".")
    for depth, step in enumerate(path):
        found_after: list[Place] = []
        is_after = False
        if next(parent.parameters(recurse=False), None) is not None:
            name = prefix.rstrip(".") or "the model itself"
            raise ShardwellError(
                f"pipeline: {name} ({type(parent).__name__}) holds a parameter beside its blocks, of which it is not "
                "known which stage uses it. Put it into a module of its own."
            )
        for key, child in parent._modules.items():
            if key == step:
                is_after = True
            elif child is not None and next(child.parameters(), None) is not None:
                runs_after = is_after or _is_named_later(parent, key, step)
                (found_after if runs_after else before).append(Place(parent, key, prefix + key, child))
        after = found_after + after
        parent, prefix = parent.get_submodule(step), f"{prefix}{step}."
        assert is_after or depth == len(path) - 1
    return before, after
