"""What a program may do. An instruction is data; `perform` is what a user writes for it, on a world of either kind.

A world (`worlds.py`) is a plain model or an engine: it knows how to call, run backward, step, save and load, and keeps
what the program sees. Everything else here is one code for both.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parameters_to_vector, vector_to_parameters

import shardwell
from tests.programs.model import WAYS

if TYPE_CHECKING:
    from tests.programs.worlds import World


class Instruction:
    """Prints as its word and its fields, separated by commas."""

    word: ClassVar[str]

    def perform(self, world: World) -> None:
        raise NotImplementedError

    def __str__(self) -> str:
        values = [str(getattr(self, field.name)) for field in fields(self)]  # type: ignore[arg-type]
        return f"{self.word}({', '.join(values)})"

    @property
    def tag(self) -> str:
        """What it is switched on and off by, besides its word."""
        how = getattr(self, "how", None) or getattr(self, "way", None)
        return f"{self.word}:{how}" if how else self.word


@dataclass(frozen=True)
class Forward(Instruction):
    """Run a model and keep its losses. `gd` is the first model's output through the second."""

    word = "forward"
    slot: str
    who: str
    way: str
    data: int

    def perform(self, world: World) -> None:
        module = world.models[self.who[-1]]
        of_ranks = [WAYS[self.way](world.call(self.who), module, rows) for rows in world.rows(self.data)]
        world.slots[self.slot] = self.who, of_ranks
        world.see(f"loss {self.slot}", of_ranks[world.own][0])


@dataclass(frozen=True)
class Evaluate(Instruction):
    word = "evaluate"
    who: str
    how: str  # no_grad, inference, eval
    data: int

    def perform(self, world: World) -> None:
        model = world.models[self.who[-1]]
        context = torch.inference_mode() if self.how == "inference" else torch.no_grad()
        if self.how == "eval":
            model.eval()
        with context:
            of_ranks = [WAYS["tensor"](world.call(self.who), model, rows) for rows in world.rows(self.data)]
        model.train()
        world.see("evaluation", of_ranks[world.own][0])


@dataclass(frozen=True)
class Backward(Instruction):
    """Of a forward that is kept. Nothing happens if there is none, so that programs stay valid while they shrink."""

    word = "backward"
    slot: str
    how: str  # engine, loss
    loss: str  # first, second, both
    retain: bool

    def perform(self, world: World) -> None:
        if self.slot not in world.slots:
            return
        who, of_ranks = world.slots[self.slot]
        if not self.retain:
            del world.slots[self.slot]
        chosen = [{"first": first, "second": second, "both": first + second}[self.loss] for first, second in of_ranks]
        if chosen[0].requires_grad:
            world.backward(who[-1], chosen, self.how, retain=self.retain)


@dataclass(frozen=True)
class Step(Instruction):
    word = "step"
    who: str

    def perform(self, world: World) -> None:
        world.slots.clear()  # plain PyTorch refuses to run a backward through values that a step has changed
        world.step(self.who)


@dataclass(frozen=True)
class Edit(Instruction):
    """Change a parameter's values by hand, the same on all ranks."""

    word = "edit"
    who: str
    how: str
    name: str
    seed: int

    def perform(self, world: World) -> None:
        world.slots.clear()
        model = world.models[self.who]
        EDITS[self.how](model, model.get_parameter(self.name), self.seed)


@dataclass(frozen=True)
class Grad(Instruction):
    """Change or read one gradient."""

    word = "grad"
    who: str
    how: str
    name: str
    seed: int

    def perform(self, world: World) -> None:
        parameter = world.models[self.who].get_parameter(self.name)
        found = GRADS[self.how](parameter, self.seed)
        if self.how.startswith("read"):
            world.see(f"{self.how} {self.name}", found)


@dataclass(frozen=True)
class SafeGrad(Instruction):
    """Read or change one gradient through `shardwell.utils`."""

    word = "safe_grad"
    who: str
    how: str  # get, set
    name: str
    seed: int

    def perform(self, world: World) -> None:
        parameter = world.models[self.who].get_parameter(self.name)
        if self.how == "get":
            world.see(f"safe_get_full_grad {self.name}", world.full_grad(parameter))
        elif world.full_grad(parameter) is not None:
            world.set_full_grad(parameter, fresh(parameter, self.seed))


@dataclass(frozen=True)
class Clip(Instruction):
    word = "clip"
    who: str
    how: str  # norm, value
    limit: float

    def perform(self, world: World) -> None:
        parameters = world.models[self.who].parameters()
        if self.how == "norm":
            world.see("norm", clip_grad_norm_(parameters, self.limit))
        else:
            clip_grad_value_(parameters, self.limit)


@dataclass(frozen=True)
class ZeroGrad(Instruction):
    word = "zero_grad"
    who: str
    how: str  # engine, module, optimizer, each
    zeros: bool  # set_to_none=False

    @property
    def tag(self) -> str:
        return "zero_grad:zeros" if self.zeros else f"zero_grad:{self.how}"

    def perform(self, world: World) -> None:
        if self.how == "each":
            for parameter in world.models[self.who].parameters():
                parameter.grad = None
        elif self.how == "module":
            world.models[self.who].zero_grad(set_to_none=not self.zeros)
        elif self.how == "optimizer":
            world.optimizers[self.who].zero_grad(set_to_none=not self.zeros)
        else:
            world.zero_grad(self.who, set_to_none=not self.zeros)


@dataclass(frozen=True)
class Freeze(Instruction):
    word = "freeze"
    who: str
    name: str

    def perform(self, world: World) -> None:
        world.slots.clear()
        world.models[self.who].get_parameter(self.name).requires_grad_(False)


@dataclass(frozen=True)
class Thaw(Instruction):
    word = "thaw"
    who: str
    name: str

    def perform(self, world: World) -> None:
        world.slots.clear()
        world.models[self.who].get_parameter(self.name).requires_grad_(True)


@dataclass(frozen=True)
class Rate(Instruction):
    """Change the learning rate."""

    word = "rate"
    who: str
    how: str  # engine: of engine.optimizer; optimizer: of the user's own object
    factor: float

    def perform(self, world: World) -> None:
        optimizer = world.optimizers[self.who] if self.how == "optimizer" else world.optimizer(self.who)
        for group in optimizer.param_groups:
            group["lr"] *= self.factor


@dataclass(frozen=True)
class Save(Instruction):
    word = "save"
    who: str

    def perform(self, world: World) -> None:
        world.save(self.who)


@dataclass(frozen=True)
class Load(Instruction):
    """What was saved last; nothing if nothing was."""

    word = "load"
    who: str

    def perform(self, world: World) -> None:
        world.slots.clear()
        world.load(self.who)


@dataclass(frozen=True)
class Remember(Instruction):
    """Keep a state dictionary."""

    word = "remember"
    who: str
    how: str  # engine, module, engine.optimizer, optimizer

    def perform(self, world: World) -> None:
        source = world.with_states(self.who, self.how)
        world.remembered[self.who, self.how] = copy.deepcopy(source.state_dict())


@dataclass(frozen=True)
class Recall(Instruction):
    """Load the state dictionary that was kept last."""

    word = "recall"
    who: str
    how: str

    def perform(self, world: World) -> None:
        found = world.remembered.get((self.who, self.how))
        if found is not None:
            world.slots.clear()
            world.with_states(self.who, self.how).load_state_dict(copy.deepcopy(found))


@dataclass(frozen=True)
class Fail(Instruction):
    """The forward or the backward raises on all ranks, and the user goes on."""

    word = "fail"
    who: str
    how: str  # forward, backward
    data: int

    def perform(self, world: World) -> None:
        call = world.call(self.who)
        with contextlib.suppress(LookupError):
            if self.how == "forward":
                for rows in world.rows(self.data):
                    call(rows, "fails")
            else:
                of_ranks = []
                for rows in world.rows(self.data):
                    out = call(rows)
                    out.register_hook(_raise)
                    of_ranks.append(out.float().sum())
                if of_ranks[0].requires_grad:
                    world.backward(self.who, of_ranks, "loss", retain=False)


def _raise(grad: Tensor) -> None:
    raise LookupError("the backward failed on purpose")


@dataclass(frozen=True)
class Look(Instruction):
    """See all values."""

    word = "look"
    who: str
    how: str  # gathered, direct, engine (its state dictionary), module

    def perform(self, world: World) -> None:
        model = world.models[self.who]
        if self.how in ("engine", "module"):
            found = dict(world.with_states(self.who, self.how).state_dict())
        else:
            gathered = shardwell.zero.GatheredParameters(model.parameters())
            with gathered if self.how == "gathered" else torch.no_grad():
                found = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        for name, value in found.items():
            world.see(name, value)


@dataclass(frozen=True)
class Lie(Instruction):
    """Change values in the engine's world only. It is never drawn: tests of the comparison use it."""

    word = "lie"
    who: str

    def perform(self, world: World) -> None:
        if not world.is_reference:
            model: Any = world.models[self.who]
            _gathered_multiply(model, model.head.weight, 0)


# ------------------------------------------------------------------------------------------------ values by hand


def fresh(parameter: nn.Parameter, seed: int) -> Tensor:
    """Values of the parameter's shape and type, the same on all ranks and in both worlds."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(parameter.shape, generator=generator, dtype=torch.float64).mul_(0.4).to(parameter.dtype)


def _assign(model: nn.Module, parameter: nn.Parameter, seed: int) -> None:
    parameter.data = fresh(parameter, seed)


def _copy(model: nn.Module, parameter: nn.Parameter, seed: int) -> None:
    parameter.data.copy_(fresh(parameter, seed))


def _index(model: nn.Module, parameter: nn.Parameter, seed: int) -> None:
    parameter.data[0] = 0.25


def _multiply(model: nn.Module, parameter: nn.Parameter, seed: int) -> None:
    with torch.no_grad():
        parameter.mul_(0.5)


def _clamp(model: nn.Module, parameter: nn.Parameter, seed: int) -> None:
    with torch.no_grad():
        parameter.clamp_(-0.1, 0.1)


def _initialise(model: nn.Module, parameter: nn.Parameter, seed: int) -> None:
    nn.init.constant_(parameter, 0.01 * seed)


def _vector(model: nn.Module, parameter: nn.Parameter, seed: int) -> None:
    with torch.no_grad():
        vector_to_parameters(parameters_to_vector(model.parameters()) * 0.75, model.parameters())


def _there_and_back(model: nn.Module, parameter: nn.Parameter, seed: int) -> None:
    before = parameter.dtype
    model.to(torch.float64 if before == torch.float32 else torch.float32)
    model.to(before)


def _swap(model: Any, parameter: nn.Parameter, seed: int) -> None:
    first, second = model.blocks[0].up.weight, model.blocks[1].up.weight
    first.data, second.data = second.data, first.data


@contextlib.contextmanager
def _gathered(parameter: nn.Parameter) -> Iterator[None]:
    with shardwell.zero.GatheredParameters([parameter], modifier_rank=0):
        yield


def _gathered_multiply(model: nn.Module, parameter: nn.Parameter, seed: int) -> None:
    with _gathered(parameter):
        _multiply(model, parameter, seed)


def _gathered_assign(model: nn.Module, parameter: nn.Parameter, seed: int) -> None:
    with _gathered(parameter):
        _assign(model, parameter, seed)


def _gathered_initialise(model: nn.Module, parameter: nn.Parameter, seed: int) -> None:
    with _gathered(parameter):
        _initialise(model, parameter, seed)


def _replace(model: nn.Module, parameter: nn.Parameter, seed: int) -> None:
    """The optimizer of a plain loop would not know a new parameter: it keeps the old one's place by `data`."""
    with _gathered(parameter):
        parameter.data = parameter.data.clone()


EDITS: dict[str, Callable[[nn.Module, nn.Parameter, int], None]] = {
    "data=": _assign,
    "data.copy_": _copy,
    "data[0]=": _index,
    "mul_": _multiply,
    "clamp_": _clamp,
    "init.constant_": _initialise,
    "vector_to_parameters": _vector,
    "to and back": _there_and_back,
    "swap": _swap,
    "gathered mul_": _gathered_multiply,
    "gathered data=": _gathered_assign,
    "gathered init.constant_": _gathered_initialise,
    "gathered clone": _replace,
}


# --------------------------------------------------------------------------------------------- gradients by hand


def _with_grad(change: Callable[[Tensor, nn.Parameter, int], Any]) -> Callable[[nn.Parameter, int], Any]:
    def changed(parameter: nn.Parameter, seed: int) -> Any:
        return None if parameter.grad is None else change(parameter.grad, parameter, seed)

    return changed


def _set(parameter: nn.Parameter, seed: int) -> None:
    parameter.grad = fresh(parameter, seed)


def _none(parameter: nn.Parameter, seed: int) -> None:
    parameter.grad = None


GRADS: dict[str, Callable[[nn.Parameter, int], Any]] = {
    "mul_": _with_grad(lambda grad, parameter, seed: grad.mul_(0.5)),
    "*=": _with_grad(lambda grad, parameter, seed: grad.__imul__(2.0)),
    "clamp_": _with_grad(lambda grad, parameter, seed: grad.clamp_(-0.01, 0.01)),
    "zero_": _with_grad(lambda grad, parameter, seed: grad.zero_()),
    "add_": _with_grad(lambda grad, parameter, seed: grad.add_(fresh(parameter, seed))),
    "data.mul_": _with_grad(lambda grad, parameter, seed: grad.data.mul_(0.5)),
    "none": _none,
    "set": _set,
    "read": _with_grad(lambda grad, parameter, seed: grad.detach().clone()),
    "read norm": _with_grad(lambda grad, parameter, seed: grad.norm()),
    "read sum": _with_grad(lambda grad, parameter, seed: grad.sum().item()),
    "read is None": lambda parameter, seed: float(parameter.grad is None),
}

ALL: dict[str, type[Any]] = {
    kind.word: kind
    for kind in (
        Forward, Evaluate, Backward, Step, Edit, Grad, SafeGrad, Clip, ZeroGrad, Freeze, Thaw, Rate, Save, Load,
        Remember, Recall, Fail, Look, Lie,
    )
}  # fmt: skip
