"""`flops_profiler`: the floating-point operations of one forward by module, counted as torch dispatches them.

Operations are those that torch's FlopCounterMode knows: matrix products, convolutions and attention.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from shardwell.memory.statistics import render
from shardwell.monitor.numbers import counted, milliseconds

if TYPE_CHECKING:
    from rich.table import Table

_ROOT = "(model)"


class FlopCount:
    """The FLOPs of a model's modules between `begin` and `end`, on this rank."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._mode: FlopCounterMode | None = None
        self._began = 0.0
        self.by_module: dict[str, int] = {}  # the model itself is ""
        self.seconds = 0.0

    @property
    def is_open(self) -> bool:
        return self._mode is not None

    @property
    def total(self) -> int:
        """The FLOPs of the whole model."""
        return self.by_module.get("", 0)

    def begin(self) -> None:
        """Count from here."""
        self._mode = FlopCounterMode(display=False)
        self._mode.__enter__()
        self._began = time.perf_counter()

    def end(self) -> None:
        """Stop counting. The time is the host's, which may be ahead of the device."""
        assert self._mode is not None
        self.seconds = time.perf_counter() - self._began
        mode, self._mode = self._mode, None
        mode.__exit__(None, None, None)
        counts = {name: sum(found.values()) for name, found in mode.get_flop_counts().items()}
        root = type(self._model).__name__
        self.by_module = {"": counts.get("Global", 0)}
        for name, _ in self._model.named_modules():
            if name and (found := counts.get(f"{root}.{name}", 0)):
                self.by_module[name] = found

    def parameters_of(self, name: str) -> int:
        """Return the number of elements of a module's parameters."""
        return sum(parameter.numel() for parameter in self._model.get_submodule(name).parameters())

    def report(self, *, depth: int = -1, top: int = 1, detailed: bool = True, recomputed: float = 0.0) -> str:
        """Return a summary, the modules with the most FLOPs at each depth, and a table of modules."""
        step = self.total * (3 + recomputed)
        lines = [
            f"FLOPs of one forward on this rank: {counted(self.total, ' ')}FLOP in {milliseconds(self.seconds)} of the "
            f"host, {counted(self.parameters_of(''))} parameters; with backward {counted(step, ' ')}FLOP",
            *self._largest(depth, top),
        ]
        return "\n".join([*lines, render(self.table(depth))] if detailed else lines)

    def _largest(self, depth: int, top: int) -> list[str]:
        by_depth: dict[int, list[str]] = {}
        for name in self.by_module:
            by_depth.setdefault(_depth(name), []).append(name)
        lines = []
        for level in sorted(by_depth):
            if level == 0 or 0 <= depth < level:
                continue
            best = sorted(by_depth[level], key=lambda name: -self.by_module[name])[:top]
            named = ", ".join(f"{name} {counted(self.by_module[name], ' ')}FLOP" for name in best)
            lines.append(f"  at depth {level}: {named}")
        return lines

    def table(self, depth: int = -1) -> Table:
        """Return a table of modules, down to a depth."""
        from rich.table import Table

        table = Table(title="FLOPs of one forward by module")
        for column in ("module", "class", "parameters", "FLOPs", "share"):
            table.add_column(column, justify="left" if column in ("module", "class") else "right")
        for name, flops in self.by_module.items():
            if 0 <= depth < _depth(name):
                continue
            kind: Any = type(self._model.get_submodule(name)).__name__
            share = flops / self.total if self.total else 0.0
            table.add_row(name or _ROOT, kind, counted(self.parameters_of(name)), counted(flops), f"{share:.1%}")
        return table


def _depth(name: str) -> int:
    return name.count(".") + 1 if name else 0
