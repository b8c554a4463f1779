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
from shardwell.pipeline.passage import (
    ASIDE,
    Elsewhere,
    Hidden,
    LayerElsewhere,
    LayerEntry,
    Passage,
    PassThrough,
    StageEntry,
    StageExit,
)
from shardwell.pipeline.stand_ins import StandIns, leads_beside


def _checked(module: nn.Module, place: Place, passage: Passage, *, runs_after: bool) -> None:
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


def _note_layer(passage: Passage, place: Place) -> None:
    """Note that a stage's layer is called, and what it returns."""

    def begin(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if passage.is_running:
            passage.begin_layer(args, kwargs)

    def look(_: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if passage.is_running:
            passage.end_layer(place.name, output)
        given = args[0] if args else next(iter(kwargs.values()), None)
        if isinstance(output, tuple | list) and isinstance(given, Tensor):
            passage.wraps = len(output)

    place.module.register_forward_pre_hook(begin, with_kwargs=True)
    place.module.register_forward_hook(look, with_kwargs=True)


def _watch_ends(passage: Passage, first: Place | None, last: Place | None) -> None:
    """Check what the model calls the first layer of a stage with, and note what the last one returns to the model.

    Other hooks of these layers, such as those that split sequences, are inside of these two.
    """

    def check(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if passage.is_running and first is not None:
            passage.check(args[0] if args else next(iter(kwargs.values()), None), passage.received, first.name)

    def note(_: nn.Module, args: Any, output: Any) -> None:
        if passage.is_running:
            passage.note(output)

    if first is not None:
        first.module.register_forward_pre_hook(check, with_kwargs=True, prepend=True)
    if last is not None:
        last.module.register_forward_hook(note)


@dataclass(eq=False)
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
    are_divided: bool = False  # the layers of other ranks are gone

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
            layers.model.register_forward_pre_hook(self._check_running)
        layers.model.register_forward_hook(self._give_hidden)
        self._running, self._watched, self._followed = -1, set[int](), set[tuple[int, bool]]()

    def _replacements(self, stage: int) -> list[tuple[Place, Elsewhere]]:
        """Return the places of other stages, and what stands there while this stage runs."""
        layers, start, end = self.layers, self._borders[stage], self._borders[stage + 1]
        found: list[tuple[Place, Elsewhere]] = []
        for index, place in enumerate(layers.places):
            if index == start - 1:
                found.append((place, LayerEntry(self.passage)))
            elif index == end:
                found.append((place, StageExit(self.passage, place.name)))
            elif not start <= index < end:
                found.append((place, LayerElsewhere(self.passage)))
        before = layers.before if stage > 0 else ()
        after = layers.after if stage < self.num_stages - 1 else ()
        found += [(one, StageEntry(self.passage)) for one in before]
        found += [(one, PassThrough()) for one in after]
        for place, hole in found:
            hole.stand_for(place.module, place.name, layers.model)
        for place, hole in found[len(found) - len(before) - len(after) :]:
            _checked(hole, place, self.passage, runs_after=isinstance(hole, PassThrough))
        return found

    def _watch_order(self) -> None:
        """Raise where a model calls a module beside its layers on their other side."""
        layers, borders = self.layers, self._borders
        for stage in self.stages:
            for place in layers.places[borders[stage] : borders[stage + 1]] if not layers.is_chain else ():
                _note_layer(self.passage, place)
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
        for place in gone:  # outside of `running`, what stands there only keeps the place
            place.module = PassThrough().stand_for(place.module, place.name, model)
            place.put(place.module)
            self.layers.are_divided = True
        for name, parameter in list(model.named_parameters()):
            if (first := names[id(parameter)]) != name:
                _hold(model, first, parameter)

    @contextlib.contextmanager
    def running(self, stage: int, received: Hidden) -> Iterator[StandIns | None]:
        """Let the model be this stage: inside, its forward takes `received` and returns what the stage sends.

        The first forwards of a stage are followed: what is yielded knows what stands for values of other stages.
        """
        if stage not in self._watched:  # not before all other hooks are there
            self._watched.add(stage)
            places, borders, is_last = self.layers.places, self._borders, stage == self.num_stages - 1
            first, last = places[borders[stage]], places[borders[stage + 1] - 1]
            _watch_ends(self.passage, first if stage > 0 else None, None if is_last else last)
        before = [(place, place.parent._modules[place.child]) for place, _ in self._roles[stage]]
        for place, hole in self._roles[stage]:
            place.put(hole)
        stand_ins = self._stand_ins(stage, received)
        self.passage.begin(received, stand_ins)
        self._running = stage
        try:
            with contextlib.nullcontext() if stand_ins is None else stand_ins.following():
                yield stand_ins
            self._check_buffers(stand_ins)
        finally:
            self.passage.end()
            self._running = -1
            for place, module in before:
                if module is None:
                    del place.parent._modules[place.child]
                else:
                    place.parent._modules[place.child] = module

    def _stand_ins(self, stage: int, received: Hidden) -> StandIns | None:
        """Return what follows a forward: the first of a stage, in training and in evaluation."""
        key = stage, torch.is_grad_enabled()
        if self.num_stages == 1 or self.layers.is_chain or key in self._followed:
            return None
        self._followed.add(key)
        return StandIns()

    def check_loss(self, loss: Tensor, stand_ins: StandIns) -> None:
        """Raise if a loss depends on layers of the last stage in another way than through the hidden state."""
        layers = self.layers
        around = {id(p) for place in (*layers.before, *layers.after) for p in place.module.parameters()}
        own = {id(p) for place in layers.places[self._borders[-2] :] for p in place.module.parameters()}
        if leads_beside(loss, stand_ins.returned, own - around):
            raise ShardwellError(ASIDE)

    def _check_buffers(self, stand_ins: StandIns | None) -> None:
        """Raise if a buffer beside the layers was updated with what stands for values of another stage."""
        for name, buffer in self.layers.model.named_buffers() if stand_ins is not None else ():
            if stand_ins is not None and stand_ins.are_in(buffer):
                raise ShardwellError(
                    f"pipeline: buffer '{name}' beside the layers is updated with hidden states (running statistics), "
                    "which each stage would do with its own. Move the module that has it into a layer"
                )

    def _check_running(self, module: nn.Module, args: Any) -> None:
        """Raise if the model is called by hand: it would return what this rank's layers make of the inputs."""
        if self._running == -1:
            raise ShardwellError(
                f"pipeline: {type(module).__name__} was called, and this rank has one stage of it: call "
                "engine.train_batch(iterator) or engine.eval_batch(iterator). What calls the whole model (generate, "
                "say) needs it without a pipeline: engine.save_checkpoint(folder), and load that there"
            )

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
    model.__dict__.get("plain", {}).pop(last, None)
    model.register_parameter(last, parameter)
