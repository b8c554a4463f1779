"""Random programs: `draw(seed, ...)` gives the same one each time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tests.programs.instructions import (
    EDITS,
    GRADS,
    Backward,
    Clip,
    Edit,
    Evaluate,
    Fail,
    Forward,
    Freeze,
    Grad,
    Instruction,
    Load,
    Look,
    Rate,
    Recall,
    Remember,
    SafeGrad,
    Save,
    Step,
    Thaw,
    ZeroGrad,
)
from tests.programs.model import WAYS, Net
from tests.programs.program import Program, Setting

NAMES = [name for name, _ in Net().named_parameters()]
SLOTS = "abc"


@dataclass(frozen=True)
class Kinds:
    """Which instructions and settings may be drawn: by word (`edit`), by tag (`edit:data=`), or `offload=cpu`."""

    only: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()

    def allow(self, one: Instruction) -> bool:
        named = {one.word, one.tag}
        if named & self.without:
            return False
        return not self.only or bool(named & self.only) or one.word in _SKELETON

    def choose(self, rng: random.Random, key: str, values: dict[str, float]) -> str:
        """One of the values of a setting, by weight. `--only stage=3` counts against other stages only."""
        names = {f"{key}={value}" for value in values}
        left = {
            value: weight
            for value, weight in values.items()
            if f"{key}={value}" not in self.without
            and (not self.only & names or f"{key}={value}" in self.only)
        }  # fmt: skip
        return rng.choices(list(left), list(left.values()))[0]


_SKELETON = {"forward", "backward", "step", "look"}  # always there, in their simplest form, if others are chosen


def draw(seed: str, num_ranks: int, kinds: Kinds) -> Program:
    rng = random.Random(seed)
    setting = _setting(rng, num_ranks, kinds)
    drawing = _Drawing(rng, setting, kinds)
    return Program(setting, (*drawing.body(rng.randint(3, 14)), *_ending(setting)))


def _setting(rng: random.Random, num_ranks: int, kinds: Kinds) -> Setting:
    def choose(key: str, **values: float) -> str:
        return kinds.choose(rng, key, values)

    stage = int(kinds.choose(rng, "stage", {"0": 2, "1": 2, "2": 2, "3": 3}))
    offload = choose("offload", none=5, cpu=4, nvme=1, params=1)
    if offload == "params" and stage < 3:
        offload = "cpu"
    dtype = "float32" if offload == "nvme" else choose("dtype", float64=6, float32=3, bf16=1)
    loop = choose("loop", engine=7, given=2, before=1, after=1)
    by_engine = loop == "engine"
    return Setting(
        stage=stage,
        ranks=num_ranks,
        accumulation=int(kinds.choose(rng, "accumulation", {"1": 3, "2": 1})) if by_engine else 1,
        dtype=dtype,
        optimizer=choose("optimizer", SGD=1, AdamW=1),
        groups=rng.choice([1, 1, 2]),
        clip=rng.choice([0.0, 0.0, 0.2]) if by_engine else 0.0,
        offload=offload,
        loop=loop,
        engines=int(kinds.choose(rng, "engines", {"1": 6, "2": 1})),
    )


def _ending(setting: Setting) -> Iterator[Instruction]:
    """Gradients and states that are not what they should be show in a last step."""
    for number, who in enumerate(setting.models):
        for _ in range(setting.accumulation):
            yield Forward("z", who, "tensor", 90 + number)
            yield Backward("z", "loss", "first", False)
            yield Step(who)
    for who in setting.models:
        yield Look(who, "gathered")


@dataclass
class _Drawing:
    """Instructions that make sense after the ones before."""

    rng: random.Random
    setting: Setting
    kinds: Kinds
    _live: dict[str, bool] = field(default_factory=dict)  # forwards that wait for a backward; may be used
    _has_gradients: bool = False

    def body(self, num: int) -> Iterator[Instruction]:
        while num > 0:
            one = self._one()
            if self.kinds.allow(one):
                num -= 1
                self._follow(one)
                yield one
            else:
                num -= 0.1  # what is switched off leaves shorter programs, not endless ones

    def _one(self) -> Instruction:
        weights: dict[Callable[[], Instruction], float] = {
            self._forward: 3.0 if self._live or self._has_gradients else 8.0,
            self._backward: 8.0 if self._live else 0.0,
            self._step: 6.0 if self._has_gradients else 0.3,
            self._grad: 3.0 if self._has_gradients else 0.2,
            self._clip: 1.0 if self._has_gradients else 0.1,
            self._zero_grad: 1.0 if self._has_gradients else 0.3,
            self._edit: 1.5,
            self._freeze: 0.7,
            self._rate: 0.4,
            self._evaluate: 0.7,
            self._save_or_load: 0.6,
            self._remember_or_recall: 0.7,
            self._look: 0.6,
            self._fail: 0.2,
        }
        return self.rng.choices(list(weights), list(weights.values()))[0]()

    def _follow(self, one: Instruction) -> None:
        if isinstance(one, Forward):
            self._live[one.slot] = True
        elif isinstance(one, Backward):
            self._has_gradients = True
            if not one.retain:
                self._live.pop(one.slot, None)
        elif isinstance(one, (Step, Edit, Freeze, Thaw, Load, Recall)):
            self._live.clear()
            if isinstance(one, (Step, Load)):
                self._has_gradients = False
        elif isinstance(one, ZeroGrad):
            self._has_gradients = False

    def _who(self) -> str:
        return self.rng.choice(self.setting.models)

    def _name(self) -> str:
        return self.rng.choice(NAMES)

    def _seed(self) -> int:
        return self.rng.randint(10, 99)

    def _forward(self) -> Instruction:
        who = self.rng.choice([*self.setting.models, "gd"]) if self.setting.engines == 2 else "g"
        plain = len(who) == 2 or self.rng.random() < 0.5
        way = "tensor" if plain else self.rng.choice(list(WAYS))
        if not self.kinds.allow(Forward("a", who, way, 0)) or (
            self.kinds.only and not {"forward", f"forward:{way}"} & self.kinds.only
        ):
            way = "tensor"
        return Forward(self.rng.choice(SLOTS), who, way, self.rng.randint(0, 9))

    def _backward(self) -> Instruction:
        slot = self.rng.choice(list(self._live))
        loss = self.rng.choice(["first", "first", "first", "second", "both"])
        return Backward(slot, self.rng.choice(["engine", "loss"]), loss, self.rng.random() < 0.2)

    def _step(self) -> Instruction:
        return Step(self._who())

    def _edit(self) -> Instruction:
        return Edit(self._who(), self.rng.choice(list(EDITS)), self._name(), self._seed())

    def _grad(self) -> Instruction:
        if self.rng.random() < 0.2:
            return SafeGrad(self._who(), self.rng.choice(["get", "set"]), self._name(), self._seed())
        return Grad(self._who(), self.rng.choice(list(GRADS)), self._name(), self._seed())

    def _clip(self) -> Instruction:
        return Clip(self._who(), self.rng.choice(["norm", "norm", "value"]), self.rng.choice([0.05, 0.5]))

    def _zero_grad(self) -> Instruction:
        how = self.rng.choice(["engine", "module", "optimizer", "each"])
        return ZeroGrad(self._who(), how, how != "each" and self.rng.random() < 0.25)

    def _freeze(self) -> Instruction:
        return self.rng.choice([Freeze, Thaw])(self._who(), self._name())

    def _rate(self) -> Instruction:
        return Rate(self._who(), self.rng.choice(["engine", "optimizer"]), self.rng.choice([0.5, 2.0]))

    def _evaluate(self) -> Instruction:
        who = self.rng.choice([*self.setting.models, "gd"]) if self.setting.engines == 2 else "g"
        return Evaluate(who, self.rng.choice(["no_grad", "eval", "inference"]), self.rng.randint(0, 9))

    def _save_or_load(self) -> Instruction:
        return self.rng.choice([Save, Load])(self._who())

    def _remember_or_recall(self) -> Instruction:
        how = self.rng.choice(["engine", "engine", "module", "engine.optimizer", "optimizer"])
        return self.rng.choice([Remember, Recall])(self._who(), how)

    def _look(self) -> Instruction:
        return Look(self._who(), self.rng.choice(["gathered", "direct", "engine", "module"]))

    def _fail(self) -> Instruction:
        return Fail(self._who(), self.rng.choice(["forward", "backward"]), self.rng.randint(0, 9))
