"""The modules of a stage: what stands in the places of layers that other stages have.

A stage runs the model's own forward. Layers of other stages are replaced: those before the stage by modules that hand
on the hidden state that was received, those after it by modules that hand on their input. So every layer keeps its name
and its index, and checkpoints know nothing of stages.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwell.errors import ShardwellError

Hidden = Any  # a tensor, or a tuple of tensors


class Passage:
    """The hidden states at the borders of the stage that runs."""

    received: Hidden = None
    sent: Hidden = None
    is_running = False  # a stage runs
    is_inside = False  # a layer of it, or the exit from it, has been called
    wraps = False  # layers take a tensor and return a tuple, of which the model takes the first element

    def handed_on(self, hidden: Hidden) -> Any:
        """Return what a layer of this model returns."""
        return (hidden,) if self.wraps else hidden


class PassThrough(nn.Module):
    """Returns its first argument."""

    is_elsewhere = True  # the module of this name is on another stage

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else next(iter(kwargs.values()))


class LayerElsewhere(PassThrough):
    """Returns its first argument as layers return what they compute."""

    def __init__(self, passage: Passage) -> None:
        super().__init__()
        self.__dict__["passage"] = passage

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["passage"].handed_on(super().forward(*args, **kwargs))


class LayerEntry(nn.Module):
    """Returns the hidden state that this stage received, as layers return what they compute."""

    def __init__(self, passage: Passage) -> None:
        super().__init__()
        self.__dict__["passage"] = passage

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        passage = self.__dict__["passage"]
        return passage.handed_on(passage.received)


class StageEntry(nn.Module):
    """Returns the hidden state that this stage received."""

    def __init__(self, passage: Passage) -> None:
        super().__init__()
        self.__dict__["passage"] = passage

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["passage"].received


class StageExit(PassThrough):
    """Notes its first argument as the hidden state that this stage sends, and returns it."""

    def __init__(self, passage: Passage) -> None:
        super().__init__()
        self.__dict__["passage"] = passage

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        passage = self.__dict__["passage"]
        passage.sent = super().forward(*args, **kwargs)
        passage.is_inside = True
        return passage.handed_on(passage.sent)


def _checked(module: nn.Module, place: Place, passage: Passage, *, runs_after: bool) -> nn.Module:
    """Let a module beside the layers, or what stands for it, raise if it runs on the other side of the layers."""

    def check(*_: Any) -> None:
        if passage.is_running and passage.is_inside is not runs_after:
            now, then = ("before", "after") if runs_after else ("after", "before")
            raise ShardwellError(
                f"pipeline: '{place.name}' runs {now} the blocks and is registered {then} them, by which it got its "
                f"stage. Register it {now} them: take all modules of '{place.name.rpartition('.')[0] or 'the model'}' "
                "out and put them back in the order in which they run (module._modules)"
            )

    module.register_forward_pre_hook(check)
    return module


def _note_layer(passage: Passage, layer: nn.Module) -> None:
    """Note that a stage's layer is called, and what it returns."""

    def begin(*_: Any) -> None:
        passage.is_inside = True

    def look(_: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        given = args[0] if args else next(iter(kwargs.values()), None)
        if isinstance(output, tuple) and isinstance(given, Tensor):
            passage.wraps = True

    layer.register_forward_pre_hook(begin)
    layer.register_forward_hook(look, with_kwargs=True)


@dataclass(frozen=True)
class Place:
    """A child of a module, which a stage may replace."""

    parent: nn.Module
    child: str
    name: str  # of the child, in the model
    module: nn.Module

    def put(self, module: nn.Module) -> None:
        """Let the parent have this child."""
        self.parent._modules[self.child] = module


@dataclass
class Layers:
    """The layers of a model in the order in which a hidden state passes them, and the modules around them."""

    model: nn.Module
    places: list[Place]
    before: list[Place] = field(default_factory=list)  # modules with parameters that run before the first layer
    after: list[Place] = field(default_factory=list)  # and after the last one
    is_chain: bool = True  # the model is nothing but its layers: it is called with the hidden state

    def modules_of(self, index: int) -> list[nn.Module]:
        """Return a layer, with the modules before the first and after the last one."""
        around = [*(self.before if index == 0 else []), *(self.after if index == len(self.places) - 1 else [])]
        return [self.places[index].module, *(place.module for place in around)]


class StageModules:
    """The stages of a model that one rank has: its other layers are dropped, and each stage can be made the model."""

    def __init__(self, layers: Layers, borders: Sequence[int], rank: int, num_ranks: int) -> None:
        """Keep the stages of a rank of the pipeline: stage `s` has the layers from borders[s] to borders[s + 1].

        Stage `s` is on rank `s % num_ranks`.
        """
        self.layers, self.num_stages = layers, len(borders) - 1
        self.stages = tuple(range(rank, self.num_stages, num_ranks))
        self.passage = Passage()
        self._borders = list(borders)
        self.tied = self._find_tied(num_ranks)  # parameters that several ranks have, by name, each with its ranks
        self._roles = {stage: self._replacements(stage) for stage in self.stages}
        self._drop_others()
        if self.num_stages > 1:
            self._watch_order()
        layers.model.register_forward_hook(self._give_hidden)
        self._running = -1

    def _replacements(self, stage: int) -> list[tuple[Place, nn.Module]]:
        """Return the places of other stages, and what stands there while this stage runs."""
        layers, start, end = self.layers, self._borders[stage], self._borders[stage + 1]
        entry, leave, through = (kind(self.passage) for kind in (LayerEntry, StageExit, LayerElsewhere))
        found: list[tuple[Place, nn.Module]] = []
        for index, place in enumerate(layers.places):
            if index < start:
                found.append((place, entry if index == start - 1 else through))
            elif index >= end:
                found.append((place, leave if index == end else through))
        checked = partial(_checked, passage=self.passage)
        if stage > 0:
            found += [(one, checked(StageEntry(self.passage), one, runs_after=False)) for one in layers.before]
        if stage < self.num_stages - 1:
            found += [(one, checked(PassThrough(), one, runs_after=True)) for one in layers.after]
        return found

    def _watch_order(self) -> None:
        """Raise where a model calls a module beside its layers on their other side."""
        layers, borders = self.layers, self._borders
        for stage in self.stages:
            for place in layers.places[borders[stage] : borders[stage + 1]] if not layers.is_chain else ():
                _note_layer(self.passage, place.module)
        for place in layers.before if 0 in self.stages else ():
            _checked(place.module, place, self.passage, runs_after=False)
        for place in layers.after if self.num_stages - 1 in self.stages else ():
            _checked(place.module, place, self.passage, runs_after=True)

    def _find_tied(self, num_ranks: int) -> dict[str, tuple[int, ...]]:
        """Return the parameters that several ranks of the pipeline have, by name, each with its ranks."""
        users: defaultdict[int, set[int]] = defaultdict(set)
        for index in range(len(self.layers.places)):
            for parameter in (p for module in self.layers.modules_of(index) for p in module.parameters()):
                users[id(parameter)].add(self._stage_of(index) % num_ranks)
        names = self.layers.model.named_parameters()
        return {name: tuple(sorted(users[id(p)])) for name, p in names if len(users[id(p)]) > 1}

    def _stage_of(self, layer: int) -> int:
        return bisect_right(self._borders, layer) - 1

    def _drop_others(self) -> None:
        """Replace the layers that no stage of this rank has; the parameters that only they have are free then.

        A tied parameter keeps the name that it has in the whole model, although the layer of that name is not here.
        """
        model = self.layers.model
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        others = [{id(place.module) for place, _ in self._roles[stage]} for stage in self.stages]
        gone = [place for place, _ in self._roles[self.stages[0]] if id(place.module) in set.intersection(*others)]
        for place in gone:
            place.put(PassThrough())  # outside of `running`, it only keeps the place
        for name, parameter in list(model.named_parameters()):
            if (first := names[id(parameter)]) != name:
                _hold(model, first, parameter)

    @contextlib.contextmanager
    def running(self, stage: int, received: Hidden) -> Iterator[None]:
        """Let the model be this stage: inside, its forward takes `received` and returns what the stage sends."""
        before = [(place, place.parent._modules[place.child]) for place, _ in self._roles[stage]]
        for place, hole in self._roles[stage]:
            place.put(hole)
        self.passage.received, self.passage.sent, self._running = received, None, stage
        self.passage.is_running, self.passage.is_inside = True, False
        try:
            yield
        finally:
            self.passage.received = self.passage.sent = None
            self.passage.is_running = False
            self._running = -1
            for place, module in before:
                if module is None:
                    del place.parent._modules[place.child]
                else:
                    place.parent._modules[place.child] = module

    def _give_hidden(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the hidden state instead of the model's output, unless the last stage runs."""
        return output if self._running in (-1, self.num_stages - 1) else self.passage.sent

    def layers_of(self, stage: int) -> list[nn.Module]:
        """Return the modules of a stage, with those before the first layer and after the last one."""
        indices = range(self._borders[stage], self._borders[stage + 1])
        return [module for index in indices for module in self.layers.modules_of(index)]

    def recompute(self, checkpoint: Callable[..., Any]) -> None:
        """Let each layer of this rank keep its input only, and compute the rest again in backward."""
        for stage in self.stages:
            for place in self.layers.places[self._borders[stage] : self._borders[stage + 1]]:
                layer = place.module
                layer.forward = partial(_recomputed, checkpoint, layer, layer.forward)

    def layer_names(self, stage: int) -> list[str]:
        """Return the names of a stage's layers, for reports."""
        return [place.name for place in self.layers.places[self._borders[stage] : self._borders[stage + 1]]]


def _recomputed(
    checkpoint: Callable[..., Any], layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Run a layer's own forward, under a checkpoint while it is trained."""
    if layer.training and torch.is_grad_enabled():
        return checkpoint(forward, *args, **kwargs)
    return forward(*args, **kwargs)


def _hold(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Give a model a parameter under a name, for which modules are made where there are none."""
    *path, last = name.split(".")
    for step in path:
        if step not in model._modules:
            model.add_module(step, PassThrough())
        model = model.get_submodule(step)
    model.register_parameter(last, parameter)
