"""What a search found: plans with their micro-batches, the fastest first, and what was dropped, with the reasons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardwell.errors import ShardwellError
from shardwell.plan.report import PlanReport
from shardwell.plan.speed import ALIKE, WORTH_IT, PlanSpeed, compared
from shardwell.plan.step_time import BUBBLE
from shardwell.plan.structure import PlanClass, as_text, minimal
from shardwell.plan.time_report import time_sentence


@dataclass(frozen=True)
class Candidate:
    """A class with a micro-batch, and its plan."""

    kind: PlanClass
    micro_batch: int
    report: PlanReport
    sequence: int

    @property
    def speed(self) -> PlanSpeed:
        """What orders it among others."""
        return PlanSpeed.of(self.report, self.sequence, recomputes=self.kind.way.recomputes)

    def __str__(self) -> str:
        return f"{self.kind}, micro-batch {self.micro_batch}"

    @property
    def bubble(self) -> float:
        """The share of a step in which a rank of a pipeline has nothing to do."""
        time = self.report.time
        found = None if time is None else time.by_resource.get(BUBBLE)
        return 0.0 if found is None or time is None else found.exposed / time.seconds


@dataclass(frozen=True)
class Dropped:
    """A class that is not among the plans, and the reason."""

    kind: PlanClass
    why: str


REFUSED = " refuses it: "  # between who does and why


@dataclass(frozen=True)
class AutoPlan:
    """The fastest plan that fits, if one does, those that come next, and what was dropped."""

    plans: list[Candidate]  # the fastest first
    dropped: list[Dropped]
    base: dict[str, Any]
    num_simulated: int = 0

    @property
    def best(self) -> Candidate | None:
        """The fastest plan; None if nothing fits."""
        return self.plans[0] if self.plans else None

    @property
    def refusal(self) -> str | None:
        """Return the one reason for which all plans were refused, whatever memory there is; None without one."""
        reasons = {one.why for one in self.dropped if one.kind.is_plain}
        refused = {why.partition(REFUSED)[2] for why in reasons if REFUSED in why}
        return refused.pop() if not self.plans and len(reasons) == len(refused) == 1 else None

    def config(self) -> dict[str, Any]:
        """Return the configuration of the fastest plan, without keys that have their defaults."""
        if self.best is None:
            raise ShardwellError("no plan fits, so there is no configuration of one")
        return minimal(self.best.report.config, self.best.report.num_ranks)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as values of JSON."""
        found: dict[str, Any] = {"fits": self.best is not None, "simulated": self.num_simulated}
        if self.best is not None:
            found["plan"] = {"words": str(self.best), **self.best.report.as_dict()}
            found["config"] = self.config()
            found["recompute"] = self.best.kind.way.recomputes
            found["runners_up"] = [
                {"words": str(one), "why": why, "config": minimal(one.report.config, one.report.num_ranks)}
                for one, why in self.reasons()
            ]
        found["dropped"] = [{"words": str(one.kind), "why": one.why} for one in self.dropped]
        return found

    def __str__(self) -> str:
        if self.best is None:
            return "\n".join(["Nothing that was tried fits.", *self._dropped_in_words()])
        found, num_ranks = self.best.report, self.best.report.num_ranks
        lines = [f"The fastest plan of {found.name} on {num_ranks:,} GPUs: {self.best}. {found.sentence()}"]
        lines += [] if found.time is None else [time_sentence(found.time)]
        if next_ones := self.reasons():
            lines.append("Next:")
            lines += [f"  {one}: {why}" for one, why in next_ones]
        lines += self._dropped_in_words()
        if self.best.kind.way.recomputes:
            lines.append(
                "Recompute blocks in the model: model.gradient_checkpointing_enable(), or shardwell.checkpointing."
            )
        return "\n".join([*lines, "Its configuration:", as_text(self.config())])

    def _dropped_in_words(self) -> list[str]:
        by_reason: dict[str, list[str]] = {}
        for one in self.dropped:
            by_reason.setdefault(one.why, []).append(str(one.kind))
        return [
            f"Dropped: {kinds[0]}{f' and {len(kinds) - 1} more' if len(kinds) > 1 else ''}: {why}."
            for why, kinds in by_reason.items()
        ]

    def reasons(self) -> list[tuple[Candidate, str]]:
        """Return the plans that come next, each with the reason why it is not the first."""
        assert self.best is not None
        return [
            (one, compared(one.speed, self.best.speed) + (f"; its bubble is {one.bubble:.0%}" if one.bubble else ""))
            for one in self.plans[1:]
        ]


def simplest_first(plans: list[Candidate]) -> list[Candidate]:
    """Return the plans with the simplest of the fastest first.

    Quantised collectives must save a tenth of the time to come before exact ones. Less than `ALIKE` of a difference is
    below what a simulation can tell, and so decides nothing.
    """
    if not plans:
        return plans
    exact = next((one for one in plans if not one.kind.quantised), None)
    first = plans[0]
    if exact is not None and first.kind.quantised and first.speed.cost >= WORTH_IT * exact.speed.cost:
        first = exact
    near = [one for one in plans if one.speed.cost <= ALIKE * first.speed.cost]
    alike = [one for one in near if first.kind.quantised or not one.kind.quantised]
    first = min(
        alike, key=lambda one: (one.kind.depth, one.kind.quantised, one.kind.rows_shared_by, one.kind.hpz, one.speed)
    )
    return [first, *(one for one in plans if one is not first)]
