"""What lines of progress cost: two engines of one model in one process, one with a monitor, that take turns.

    python -m benchmarks.monitor [--rounds 30] [--steps 20] [--width 256] [--json PATH]

First one engine alone: the CPU time of its thread inside of the monitor's entry points, which nothing disturbs. Then
both, on the CPU with one thread. A round is some steps of each, in an order that alternates. CPU seconds of the
process are counted, not the time on the clock, so that other programs on the machine disturb little; the figure is the
median over rounds of the difference, as a share of a step without a monitor.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

import shardwell
from benchmarks.measure import circumstances, command_line, cpu_seconds, keep
from shardwell.monitor.monitor import Monitor


class Block(nn.Module):
    """A block of a decoder without attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Tokens(nn.Module):
    """Looks tokens up, and returns a loss."""

    def __init__(self, width: int, blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def engine_with(width: int, **more: Any) -> Any:
    """Return an engine at stage 2."""
    torch.manual_seed(0)
    config = {"optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2}, **more}
    return shardwell.initialize(model=Tokens(width), config=config, device="cpu").engine


@contextlib.contextmanager
def timed_monitor() -> Iterator[list[float]]:
    """Yield a list of one number: the CPU seconds of this thread inside of the monitor's entry points."""
    spent = [0.0]

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            before, begin = time.thread_time(), time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent[0] += time.thread_time() - begin - (begin - before)  # without reading the clock itself

        return called

    names = ("_forward_begins", "_forward_ends", "backward_begins", "backward_ends", "step_begins", "step_ends")
    before = {name: getattr(Monitor, name) for name in names}
    for name, function in before.items():
        setattr(Monitor, name, timed(function))
    try:
        yield spent
    finally:
        for name, function in before.items():
            setattr(Monitor, name, function)


def own_seconds(lines: int, width: int, every: int) -> dict[str, float]:
    """Return the CPU seconds inside of the monitor: medians of a step without and with a line, and of `every` steps."""
    torch.set_num_threads(1)
    with timed_monitor() as spent, contextlib.redirect_stdout(io.StringIO()):
        engine = engine_with(width, steps_per_print=every)
        tokens = torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(0))
        seconds_of(engine, tokens, 2 * every)
        found: dict[bool, list[float]] = {False: [], True: []}
        for step in range(1, lines * every + 1):
            spent[0] = 0.0
            seconds_of(engine, tokens, 1)
            found[step % every == 0].append(spent[0])
    quiet, line = statistics.median(found[False]), statistics.median(found[True])
    return {"quiet_step": quiet, "step_with_line": line, "mean_step": quiet + (line - quiet) / every}


def seconds_of(engine: Any, tokens: torch.Tensor, steps: int) -> float:
    """Return the CPU seconds of some steps, whose lines are written to memory."""
    begin = cpu_seconds()
    with contextlib.redirect_stdout(io.StringIO()):
        for _ in range(steps):
            engine.backward(engine(tokens))
            engine.step()
    return cpu_seconds() - begin


def measure(rounds: int, steps: int, width: int, every: int) -> dict[str, float]:
    """Return the seconds of a step without a monitor, and what one adds."""
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(io.StringIO()):
        engines = {"off": engine_with(width), "on": engine_with(width, steps_per_print=every)}
    tokens = torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(0))
    for engine in engines.values():
        seconds_of(engine, tokens, 2 * every)
    found: dict[str, list[float]] = {"off": [], "on": []}
    for number in range(rounds):
        for name in ("off", "on") if number % 2 else ("on", "off"):
            found[name].append(seconds_of(engines[name], tokens, steps) / steps)
    off = statistics.median(found["off"])
    added = statistics.median(on - without for on, without in zip(found["on"], found["off"], strict=True))
    return {"step_seconds": off, "added_seconds": added, "share": added / off}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--every", type=int, default=10, help="steps_per_print")
    parser.add_argument("--json", help="where the figures go")
    args = parser.parse_args(argv)
    own = own_seconds(args.rounds, args.width, args.every)
    found = measure(args.rounds, args.steps, args.width, args.every)
    words = f"{1e6 * own['quiet_step']:.1f} us of a step, {1e6 * own['step_with_line']:.0f} us of one with a line"
    print(f"{words}, {1e6 * own['mean_step']:.1f} us on average are inside of the monitor")
    words = f"{1e3 * found['step_seconds']:.2f} ms a step; lines add {1e6 * found['added_seconds']:.0f} us"
    print(f"{words} ({found['share']:.2%}; by the first figures {own['mean_step'] / found['step_seconds']:.2%})")
    kept = {**circumstances(command_line("monitor", argv), "cpu"), "own_seconds": own, **found}
    if path := keep(kept, "monitor", args.json):
        print(f"raw results: {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
