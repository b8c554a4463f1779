"""Training between two hosts: step time against the rate of the link, and the bytes that cross it.

    python -m benchmarks.links [--rates 25,50,100,250,500,1000,none] [--steps 3] [--patience 20] [--only NAME,...]
        [--size small] [--seq 32] [--fp32] [--json PATH] [--plot PATH]

Four ranks of one thread, two on each of two hosts that are network namespaces of this machine (``benchmarks.hosts``).
All variants live in the same processes and take turns at each rate, so that a slow minute of the machine hits everyone.
A step's seconds are those of its slowest rank. Bytes are counted by the link's interface, and beside that by
shardwell's ledger. With so few tokens the link dominates. A variant that cannot be built is shown with the reason. One
that looks at the link when it is built ("auto") is built anew at each rate, and its points say what it has chosen.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.hosts import HostRanks, Hosts, HostsError
from benchmarks.launch import RunFailedError, without_folders
from benchmarks.links_report import (
    bytes_table,
    chosen_words,
    crossing_lines,
    crossings,
    draw,
    rate_name,
    seconds_table,
)
from benchmarks.links_worker import CHOOSING, VARIANTS
from benchmarks.measure import circumstances, command_line, keep, told
from benchmarks.model import PRESETS

WARM_UP_STEPS = 3
START_LIMIT = 180.0  # seconds: importing torch, building a model
START_BYTES = 16  # of each parameter that may cross the link when a model is built, with room


class Session:
    """The ranks, the link, and the figures so far."""

    def __init__(self, hosts: Hosts, ranks: HostRanks, args: argparse.Namespace, console: Console) -> None:
        self._hosts, self._ranks, self._args, self._console = hosts, ranks, args, console
        self.points: list[dict[str, Any]] = []
        self.warm: dict[str, dict[str, Any]] = {}  # the first steps of each variant, without a limit
        self.chosen: dict[str, dict[str, Any] | None] = {}
        self.errors: dict[str, str] = {}

    def build(self, variants: Sequence[str]) -> None:
        """Build and warm up each variant on a link without limit; what fails is left out of everything after."""
        self._hosts.limit(None)
        for variant in variants:
            self._build(variant, None)
            if variant not in self.errors and (last := self._point(variant, None, 1)) is not None:
                self.warm[variant] = last

    def _build(self, variant: str, mbit: float | None) -> None:
        """Build a variant on the link as it is, and run its first steps."""
        self._console.print(f"[dim]{rate_name(mbit)}: build {variant}[/dim]", highlight=False)
        workload = {"size": self._args.size, "seq": self._args.seq, "batch": 1, "bf16": not self._args.fp32}
        sending = START_BYTES * PRESETS[self._args.size].num_parameters * 8e-6 / mbit if mbit else 0.0
        answers = self._ranks.ask({"build": {"variant": variant, **workload}}, START_LIMIT + sending)
        if not self._failed(variant, answers):
            self.chosen[variant] = answers[0]["chosen"]
            self._point(variant, mbit, WARM_UP_STEPS - 1 if mbit is None else 1)

    def measure(self, rates: Sequence[float | None]) -> None:
        """Every variant at every rate, in the other order at every other rate."""
        for number, mbit in enumerate(rates):
            self._hosts.limit(mbit)
            alive = [variant for variant in self.warm if variant not in self.errors]
            for variant in alive if number % 2 == 0 else reversed(alive):
                if variant in CHOOSING:
                    self._build(variant, mbit)
                if variant in self.errors:
                    continue
                point = self._point(variant, mbit, self._num_steps(variant, mbit))
                if point is not None:
                    self.points.append(point)
                    said = f"{rate_name(mbit)}: {variant}: {point['seconds']:.2f} s{chosen_words(point['chosen'])}"
                    self._console.print(f"[dim]{said}[/dim]", highlight=False)

    def _num_steps(self, variant: str, mbit: float | None) -> int:
        """As many as were asked for, fewer where they would take more than the patience there is, at least one."""
        affordable = int(self._args.patience / self._expected(variant, mbit))
        return max(1, min(int(self._args.steps), affordable))

    def _expected(self, variant: str, mbit: float | None) -> float:
        """Seconds of a step, if nothing overlapped."""
        warm = self.warm.get(variant)
        if warm is None:
            return START_LIMIT
        return float(warm["seconds"] + (max(warm["there"], warm["back"]) * 8e-6 / mbit if mbit else 0.0))

    def _point(self, variant: str, mbit: float | None, steps: int) -> dict[str, Any] | None:
        before = self._hosts.quiet()
        limit = 60.0 + 3 * steps * self._expected(variant, mbit)
        answers = self._ranks.ask({"run": {"variant": variant, "steps": steps}}, limit)
        after = self._hosts.quiet()
        if self._failed(variant, answers):
            return None
        each = [max(times) for times in zip(*(answer["seconds"] for answer in answers), strict=True)]
        books = [sum(answer["ledger"]) for answer in answers if answer["ledger"] is not None]
        return {
            "variant": variant,
            "mbit": mbit,
            "seconds": statistics.median(each),
            "each": each,
            "there": (after[0] - before[0]) / steps,
            "back": (after[1] - before[1]) / steps,
            "ledger": sum(books) / steps if books else None,
            "loss": statistics.mean(answer["losses"][-1] for answer in answers),
            "chosen": self.chosen[variant] if variant in CHOOSING else None,
        }

    def _failed(self, variant: str, answers: list[dict[str, Any]]) -> bool:
        errors = [answer["error"] for answer in answers if "error" in answer]
        if errors:
            self.errors[variant] = without_folders(errors[0], most=1000)
        return bool(errors)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.links", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rates", default="25,50,100,250,500,1000,none", help="Mbit/s in each direction, or none")
    parser.add_argument("--steps", type=int, default=3, help="steps of a variant at a rate (default 3)")
    parser.add_argument("--patience", type=float, default=20.0, help="seconds for them; one is run always (default 20)")
    parser.add_argument("--only", default="", metavar="NAME,...", help=f"a subset of {', '.join(VARIANTS)}")
    parser.add_argument("--size", choices=sorted(PRESETS), default="small", help="the decoder (default small)")
    parser.add_argument("--seq", type=int, default=32, help="tokens of each rank and step (default 32)")
    parser.add_argument("--fp32", action="store_true", help="train in fp32 (default bf16, with fp32 masters)")
    parser.add_argument("--json", default=None, metavar="PATH", help="raw results; '-' for none (default results/)")
    parser.add_argument("--plot", default=None, metavar="PATH", help="picture; '-' for none (default beside the JSON)")
    args = parser.parse_args(argv)
    args.rates = [None if rate == "none" else float(rate) for rate in args.rates.split(",")]
    args.only = [name for name in args.only.split(",") if name] or list(VARIANTS)
    if unknown := [name for name in args.only if name not in VARIANTS]:
        parser.error(f"unknown variant {unknown[0]!r}; choose from: {', '.join(VARIANTS)}")
    return args


def run(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """What was measured, also when something failed on the way."""
    with tempfile.TemporaryDirectory(prefix="shardwell-bench-") as logs, Hosts() as hosts:
        with HostRanks(hosts, "benchmarks.links_worker", Path(logs)) as ranks:
            session, stopped = Session(hosts, ranks, args, console), None
            try:
                session.build(args.only)
                session.measure(args.rates)
            except RunFailedError as failure:
                stopped = without_folders(str(failure))
        return {
            "limiter": hosts.limiter,
            "warm": session.warm,
            "points": session.points,
            "crossings": crossings(session.points),
            "errors": session.errors,
            "stopped": stopped,
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, draw, keep the raw figures; the exit status is 1 when it was stopped or nothing was measured."""
    args = parse_arguments(argv)
    console = Console(width=max(Console().width, 120))
    command = command_line("links", argv)
    settings = {key: getattr(args, key) for key in ("rates", "steps", "patience", "size", "seq", "fp32")}
    parameters = PRESETS[args.size].num_parameters
    report: dict[str, Any] = {**circumstances(command, "cpu"), "parameters": parameters, "settings": settings}
    try:
        report |= run(args, console)
    except HostsError as refusal:
        console.print(f"no hosts here: {refusal}", highlight=False, markup=False)
        return 1
    dtype = "fp32" if args.fp32 else "bf16"
    title = f"{report['command']}  ({parameters / 1e6:.1f}M parameters, {dtype}, rates kept by {report['limiter']})"
    if report["points"]:
        console.print(seconds_table(report["points"], title), bytes_table(report["points"], report["warm"]))
    for line in crossing_lines(report["crossings"]):
        console.print(line, highlight=False)
    for variant, error in report["errors"].items():
        console.print(f"{variant}: not there yet: {error}", highlight=False, markup=False)
    if report["stopped"]:
        console.print(report["stopped"], highlight=False, markup=False)
    console.print(told(report), highlight=False)
    path = keep(report, "links", args.json)
    picture = Path(args.plot) if args.plot else path.with_suffix(".png") if path else None
    if path is not None:
        console.print(f"raw results: {path}", highlight=False)
    if picture is not None and args.plot != "-" and report["points"]:
        console.print(draw(report["points"], picture), highlight=False)
    return 1 if report["stopped"] or not report["points"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
