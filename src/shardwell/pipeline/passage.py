"""What stands in the places of modules that other stages have, and the hidden states at the borders of a stage.

A stage begins with what was sent to it and ends with what it sends. That is what the whole model computes only if
nothing else passes from the layers of one stage to those of the next: no sum beside the layers, no skip connection over
them, no embedding that later layers read. Where a model does that, it is an error here and not another result.
"""

from __future__ import annotations

import weakref
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from shardwell.errors import ShardwellError
from shardwell.pipeline.stand_ins import StandIns
from shardwell.runtime.pytree import map_tensors, tensors_in

Hidden = Any  # a tensor, or a tuple of tensors


class Passage:
    """The hidden states at the borders of the stage that runs."""

    received: Hidden = None
    sent: Hidden = None
    returned: Any = None  # by the last layer of the stage that runs
    versions: tuple[int, ...] = ()  # of what was received or returned: they count changes in place
    is_running = False  # a stage runs
    is_entered = False  # the layer before it has been called
    is_inside = False  # a layer of it, or the exit from it, has been called
    stand_ins: StandIns | None = None  # where the stage's forward is followed
    wraps = 0  # the length of the tuples of layers that take a tensor, of which the model takes the first element

    def handed_on(self, hidden: Hidden) -> Any:
        """Return what a layer of this model returns."""
        return (hidden, *[None] * (self.wraps - 1)) if self.wraps else hidden

    def begin(self, received: Hidden, stand_ins: StandIns | None = None) -> None:
        """Begin a stage that has received this."""
        self.stand_ins = stand_ins
        self.received, self.sent, self.returned = received, None, None
        self.versions = _versions(received)
        self.is_running, self.is_entered, self.is_inside = True, False, False

    def end(self) -> None:
        """End the stage."""
        self.received = self.sent = self.returned = self.stand_ins = None
        self.is_running = False

    def stand_in(self, hidden: Hidden) -> Hidden:
        """Return values of this shape that stand for what another stage computes."""
        found = _without_gradient(hidden)
        if self.stand_ins is not None:
            self.stand_ins.mark(found)
        return found

    def begin_layer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note that a layer of the stage is called with these arguments."""
        self.is_inside = True
        if self.sent is not None:
            raise ShardwellError(_CALLED_AGAIN)
        if self.stand_ins is not None:
            if self.stand_ins.are_in((args, kwargs)):
                raise ShardwellError(BESIDE)
            self.stand_ins.note_arguments(args, kwargs)
            self.stand_ins.pause()

    def end_layer(self, name: str, output: Any) -> None:
        """Note what the layer of this name has returned."""
        if self.stand_ins is not None:
            self.stand_ins.returned = output
            if self.stand_ins.are_arguments_changed():
                raise ShardwellError(
                    f"pipeline: layer '{name}' changes a tensor among its arguments beside the hidden state, or puts "
                    f"another in its place, which other stages would not see. {_CHAIN}"
                )
            self.stand_ins.resume()

    def enter(self) -> Hidden:
        """Return what the stage received, where the model calls the layer before it."""
        if self.is_running and self.is_entered:
            raise ShardwellError(_CALLED_AGAIN)
        self.is_entered = True
        return self.received

    def note(self, returned: Any) -> None:
        """Note what the last layer of the stage returns."""
        self.returned, self.versions = returned, _versions(returned)

    def leave(self, hidden: Hidden, others: Any, name: str) -> None:
        """Take what the model hands to the layer behind the stage, whose name is `name`, for what the stage sends."""
        if self.is_running:
            if self.sent is not None:
                raise ShardwellError(_CALLED_AGAIN)
            self.check(hidden, self.returned, name)
            handed = set(map(id, tensors_in(others))) & set(map(id, tensors_in(self.returned)))
            if handed - set(map(id, tensors_in(hidden))):
                raise ShardwellError(
                    f"pipeline: the model calls layer '{name}' with several tensors that the layer before it returned, "
                    f"of which stages send the first. {_CHAIN}"
                )
        self.sent, self.is_inside = hidden, True
        if self.stand_ins is not None:  # what the model goes on with is not what it will be
            self.stand_ins.mark(hidden)

    def check(self, given: Any, before: Any, name: str) -> None:
        """Raise if a layer is called with something else than what the layer before it returned, or what was sent."""
        found = list(tensors_in(before))
        is_changed = self.versions != _versions(before)
        if is_changed or not all(any(_is_same(one, other) for other in found) for one in tensors_in(given)):
            raise ShardwellError(
                f"pipeline: the model does not call layer '{name}' with what the layer before it returned (it adds, "
                f"scales or normalises in between, or calls layers in another order). {_CHAIN}"
            )


_CHAIN = (
    "Stages hand on one hidden state, from each layer to the next one: move what is computed beside the layers into "
    "them, or write the model as a PipelineModule, whose layers may return tuples"
)
BESIDE = (
    "pipeline: layers, or modules behind them, use what modules before the layers or layers of earlier stages "
    f"compute (embeddings, values for skip connections), not only through the layer before. {_CHAIN}"
)
ASIDE = (
    "pipeline: the loss depends on layers not only through what the last one returned (values that layers keep or "
    "append to a list, norms of their parameters), and the last stage has its own layers only: a loss of all layers "
    "cannot be computed there"
)
_CALLED_AGAIN = f"pipeline: the model calls its layers more than once in a forward. {_CHAIN}"


def _versions(values: Any) -> tuple[int, ...]:
    return tuple(0 if one.is_inference() else one._version for one in tensors_in(values))


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same values; those of one memory are not looked at."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    is_alias = one is other or one.untyped_storage()._cdata == other.untyped_storage()._cdata
    return is_alias or (not one.is_meta and torch.equal(one, other))


def _without_gradient(hidden: Hidden) -> Hidden:
    """Return values that stand for what another stage computes: no loss may depend on them, and they may be changed."""
    return map_tensors(hidden, _watched)


def _watched(tensor: Tensor) -> Tensor:
    if not (torch.is_grad_enabled() and tensor.is_floating_point()):
        return tensor.clone()
    watched = tensor.detach().requires_grad_()
    watched.register_hook(_refuse_gradient)
    return watched.clone()


def _refuse_gradient(grad: Tensor) -> None:
    raise ShardwellError(BESIDE)


class ElsewhereError(ShardwellError, AttributeError):
    """A model reads an attribute of a module that another stage has."""


class WeightElsewhere:
    """A parameter of a module that another stage has: its shape is known, and where this stage's own ones are."""

    def __init__(self, name: str, weight: nn.Parameter, model: nn.Module) -> None:
        self.name, self.shape, self.ndim = name, weight.shape, weight.ndim
        self._model = weakref.ref(model)
        self._kind = weight.device, weight.dtype

    @property
    def device(self) -> torch.device:
        """Return the device of this stage's parameters."""
        return self._own()[0]

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of this stage's parameters."""
        return self._own()[1]

    def _own(self) -> tuple[torch.device, torch.dtype]:
        model = self._model()
        first = None if model is None else next(model.parameters(), None)
        return self._kind if first is None else (first.device, first.dtype)

    def __getattr__(self, name: str) -> Any:
        """Refuse what needs values."""
        raise ElsewhereError(_elsewhere(self.__dict__.get("name", "")))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse operations of torch."""
        weight = next((one for one in args if isinstance(one, cls)), None)
        raise ElsewhereError(_elsewhere("a weight" if weight is None else weight.name))


def _elsewhere(name: str) -> str:
    return (
        f"pipeline: the model uses '{name}' of a module that another stage has: modules may only be called. Where a "
        "weight is used twice, let two modules have it and call both, or write the model as a PipelineModule with "
        "TiedLayerSpec(forward_fn=...)"
    )


class Elsewhere(nn.Module):
    """A module that stands for one that another stage has; it has that module's plain attributes."""

    def stand_for(self, module: nn.Module, name: str, model: nn.Module) -> Self:
        """Take the numbers and texts of a module whose name in `model` is `name`; nothing keeps the module itself."""
        plain: dict[str, Any] = {
            key: value for key, value in vars(module).items() if isinstance(value, int | float | str | None)
        }
        weights = {key: one for key, one in module._parameters.items() if one is not None}
        plain |= {key: WeightElsewhere(f"{name}.{key}", one, model) for key, one in weights.items()}
        self.__dict__.update(stands_for=name, plain=plain)
        return self

    def __getattr__(self, name: str) -> Any:
        """Look an attribute up in the module that this one stands for."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            here = self.__dict__
            if name in here.get("plain", ()):
                return here["plain"][name]
            if "stands_for" not in here or name.startswith("__"):
                raise
            raise ElsewhereError(_elsewhere(f"{here['stands_for']}.{name}")) from None

    def __getitem__(self, key: Any) -> NoReturn:
        """Refuse to look into a container, such as a ModuleDict, that another stage has."""
        raise ElsewhereError(_elsewhere(self.__dict__.get("stands_for", "")))

    def __iter__(self) -> NoReturn:
        """Refuse to go through a container that another stage has."""
        self.__getitem__(0)

    def __len__(self) -> NoReturn:
        """Refuse to count what is in a container that another stage has."""
        self.__getitem__(0)

    def __bool__(self) -> bool:
        """Return True, as a module does that is no container."""
        return True


class PassThrough(Elsewhere):
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
        passage, given = self.__dict__["passage"], super().forward(*args, **kwargs)
        is_before = passage.is_running and not passage.is_entered and passage.received is not None
        return passage.handed_on(passage.stand_in(given) if is_before else given)


class LayerEntry(Elsewhere):
    """Returns the hidden state that this stage received, as layers return what they compute."""

    def __init__(self, passage: Passage) -> None:
        super().__init__()
        self.__dict__["passage"] = passage

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        passage = self.__dict__["passage"]
        return passage.handed_on(passage.enter())


class StageEntry(Elsewhere):
    """Returns values of the shape of the hidden state that this stage received, for modules before the layers."""

    def __init__(self, passage: Passage) -> None:
        super().__init__()
        self.__dict__["passage"] = passage

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        passage = self.__dict__["passage"]
        return passage.stand_in(passage.received)


class StageExit(PassThrough):
    """Notes its first argument as the hidden state that this stage sends, and returns it."""

    def __init__(self, passage: Passage, name: str) -> None:
        super().__init__()
        self.__dict__.update(passage=passage, layer=name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        passage = self.__dict__["passage"]
        passage.leave(super().forward(*args, **kwargs), (args, kwargs), self.__dict__["layer"])
        return passage.handed_on(passage.sent)
