"""The demo's report, measurements against formulas: a table, a comparison of losses, a picture and a JSON file.

Formulas are for Adam with fp32 state over Ψ parameters and N ranks. A parameter and its gradient take w bytes each
(4, or 2 in bfloat16, whose fp32 master keeps its other 2 bytes with the optimizer), so the optimizer takes 12 - w.
"""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from shardwell.version import __version__

# All stages average the same gradients; only the places where buffers are cut, and with them the order of a few
# additions, may differ. One fp32 rounding of a loss near 5 is 3e-7. Adam divides by the gradient's own size, so where
# a gradient is almost zero a rounding can grow into a visible part of an update: 1e-3 leaves room for that over
# hundreds of steps. A mistake is larger: ranks that do not average are off by 2e-2 after the first step. Adam does not
# feel a gradient that is wrong by a factor, but its norm does; so norms are compared too, relative to their size.
# bfloat16 rounds 2 ** 16 times more coarsely, but only the compute: masters and sums are fp32.
_TOLERANCE = {False: 1e-3, True: 2e-2}


@dataclass(frozen=True)
class StageResult:
    """The measurements of one stage: bytes on the rank where they are largest."""

    stage: int
    parameters: int
    losses: list[float]
    gradient_norms: list[float]
    seconds: float
    at_rest: dict[str, int]
    after_backward: dict[str, int]  # a reduce or two may still be in flight
    before_update: dict[str, int]  # all gradients are averaged
    received_per_step: dict[str, int]
    trace: str | None = None
    startup: str = ""  # the startup report of rank 0

    @property
    def rest(self) -> int:
        return sum(self.at_rest[state] for state in ("parameters", "gradients", "optimizer"))


@dataclass(frozen=True)
class StageFormula:
    """The bytes that one stage must hold and receive."""

    parameters: float
    gradients: float
    optimizer: float
    received: float

    @property
    def rest(self) -> float:
        return self.parameters + self.optimizer


def formula(stage: int, num_parameters: int, num_ranks: int, bf16: bool) -> StageFormula:
    width = 2 if bf16 else 4
    share = num_parameters / num_ranks
    moves = 3 if stage == 3 and num_ranks > 1 else 2
    return StageFormula(
        parameters=width * (share if stage == 3 else num_parameters),
        gradients=width * (share if stage >= 1 else num_parameters),
        optimizer=(12 - width) * (share if stage >= 1 else num_parameters),
        received=(num_ranks - 1) / num_ranks * width * moves * num_parameters,
    )


@dataclass(frozen=True)
class StageComparison:
    """The comparison of the stages' losses and gradient norms."""

    loss_difference: float  # the largest over all steps and stages
    norm_difference: float  # the same for the gradient's norm, relative
    tolerance: float
    agrees: bool


def compare(results: list[StageResult], bf16: bool) -> StageComparison:
    """Compare every stage's losses and gradient norms with the first stage's."""
    first, tolerance = results[0], _TOLERANCE[bf16]
    loss = norm = 0.0
    for other in results[1:]:
        loss = max(loss, *(abs(a - b) for a, b in zip(first.losses, other.losses, strict=True)))
        pairs = zip(first.gradient_norms, other.gradient_norms, strict=True)
        norm = max(norm, *(abs(a - b) / max(abs(a), 1e-12) for a, b in pairs))
    return StageComparison(loss, norm, tolerance, max(loss, norm) <= tolerance)


def results_table(results: list[StageResult], num_ranks: int, bf16: bool) -> Table:
    from shardwell.memory.statistics import human

    count = results[0].parameters
    kind = "bf16" if bf16 else "fp32"
    table = Table(
        title=f"bytes per rank: Ψ = {count:,} parameters, N = {num_ranks}, Adam, {kind}; formula and deviation"
    )
    table.add_column("stage", justify="right")
    for what in ("at rest", "averaged gradients", "received per step"):
        table.add_column(what, justify="right")
        table.add_column("formula", justify="right")
        table.add_column("off by", justify="right")
    for result in results:
        expected = formula(result.stage, count, num_ranks, bf16)
        cells: list[str | Text] = [str(result.stage)]
        for found, wanted in (
            (result.rest, expected.rest),
            (result.before_update["gradients"], expected.gradients),
            (result.received_per_step["payload"], expected.received),
        ):
            cells += [human(found), human(wanted), _deviation(found, wanted)]
        table.add_row(*cells)
    return table


def _deviation(found: float, wanted: float) -> Text:
    if not wanted:
        return Text("0.00 %" if not found else "∞", "green" if not found else "red")
    percent = 100 * (found - wanted) / wanted
    return Text(f"{percent:+.2f} %", "green" if abs(percent) < 0.5 else "yellow" if abs(percent) < 5 else "red")


def loss_line(results: list[StageResult], comparison: StageComparison) -> Text:
    first = results[0]
    word = ("pass", "bold green") if comparison.agrees else ("FAIL", "bold red")
    others = ", ".join(str(result.stage) for result in results[1:])
    fell = f"loss {first.losses[0]:.3f} → {first.losses[-1]:.3f} in {len(first.losses)} steps; "
    if not others:
        return Text(fell + "one stage, nothing to compare")
    compared = (
        f"from stage {first.stage} to stage {others} the loss differs by at most {comparison.loss_difference:.1e}, "
        f"the gradient norm by {comparison.norm_difference:.1e} of itself (tolerance {comparison.tolerance:.0e}): "
    )
    return Text.assemble(fell, compared, word)


def save_json(path: Path, results: list[StageResult], comparison: StageComparison, **settings: Any) -> None:
    import torch

    stages = []
    for result in results:
        expected = formula(result.stage, result.parameters, settings["ranks"], settings["bf16"])
        stages.append({**asdict(result), "formula": {**asdict(expected), "rest": expected.rest}})
    versions = {"shardwell": __version__, "torch": torch.__version__, "python": platform.python_version()}
    report = {
        "command": " ".join(["shardwell", *sys.argv[1:]]),
        "versions": versions,
        **settings,
        "verdict": asdict(comparison),
        "stages": stages,
    }
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def save_picture(path: Path, results: list[StageResult], num_ranks: int, bf16: bool) -> None:
    """Draw loss curves (left), and bytes per rank when all gradients are averaged with the formulas as lines."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for index, result in enumerate(results):
        # thinner and thinner, so that all of several equal curves are visible
        left.plot(result.losses, label=f"stage {result.stage}", linewidth=2 * (len(results) - index), alpha=0.8)
    left.set(xlabel="step", ylabel="loss (nats per byte)", title="the same training at every stage")
    left.legend()

    names = [f"stage {result.stage}" for result in results]
    bottom = [0.0] * len(results)
    for state in ("parameters", "gradients", "optimizer"):
        sizes = [result.before_update[state] / 2**20 for result in results]
        right.bar(names, sizes, bottom=bottom, label=state, width=0.6)
        bottom = [low + size for low, size in zip(bottom, sizes, strict=True)]
    for index, result in enumerate(results):
        expected = formula(result.stage, result.parameters, num_ranks, bf16)
        height = (expected.rest + expected.gradients) / 2**20
        right.hlines(height, index - 0.38, index + 0.38, "black", "dashed", label=None if index else "formula")
    right.set(
        ylabel=f"MiB on each of {num_ranks} ranks", title="memory before the update", ylim=(0, 1.25 * max(bottom))
    )
    right.legend(ncols=2, loc="upper right")
    figure.savefig(path, dpi=130)
    plt.close(figure)
