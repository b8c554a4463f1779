"""A program: a setting and a list of instructions. It prints as short text, and is read back from it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from tests.programs.instructions import ALL, Instruction

_KINDS: dict[str, Any] = {"int": int, "float": float, "str": str}


@dataclass(frozen=True)
class Setting:
    """Where a program runs. The plain world knows the numbers only: ranks, accumulation, clip, optimizer, groups."""

    stage: int = 0
    ranks: int = 1
    accumulation: int = 1
    dtype: str = "float64"  # float64, float32, bf16: fp32 masters, the plain world in fp64
    optimizer: str = "SGD"
    groups: int = 1  # of parameters
    clip: float = 0.0  # gradient_clipping
    offload: str = "none"  # none, cpu, nvme: optimizer state; params: parameters as well, in host memory
    loop: str = "engine"  # who steps: the engine; the user's optimizer, given to initialize, or made before or after it
    engines: int = 1

    def __str__(self) -> str:
        default = Setting()
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        always = ("stage", "ranks")
        return " ".join(f"{k}={v}" for k, v in values.items() if k in always or v != getattr(default, k))

    @staticmethod
    def read(text: str) -> Setting:
        kinds = {field.name: _KINDS[str(field.type)] for field in fields(Setting)}
        pairs = (word.split("=") for word in text.split())
        return Setting(**{key: kinds[key](value) for key, value in pairs})

    @property
    def tolerance(self) -> float:
        """Ranks add in another order. bf16 has three digits, and weights that are rounded to it once a step."""
        return {"float64": 1e-8, "float32": 2e-4, "bf16": 0.06}[self.dtype]

    @property
    def models(self) -> str:
        return "gd"[: self.engines]


@dataclass(frozen=True)
class Program:
    setting: Setting
    instructions: tuple[Instruction, ...]

    def __str__(self) -> str:
        return "\n".join([str(self.setting), *map(str, self.instructions)])

    @property
    def tags(self) -> set[str]:
        return {tag for one in self.instructions for tag in (one.word, one.tag)}

    @staticmethod
    def read(text: str) -> Program:
        first, *rest = (line.strip() for line in text.strip().splitlines())
        return Program(Setting.read(first), tuple(_instruction(line) for line in rest if line))


def _instruction(line: str) -> Instruction:
    word, inside = line.removesuffix(")").split("(", 1)
    kind = ALL[word]
    values = inside.split(", ") if inside else []
    types = [str(field.type) for field in fields(kind)]
    made: Instruction = kind(
        *(value == "True" if name == "bool" else _KINDS[name](value) for name, value in zip(types, values, strict=True))
    )
    return made
