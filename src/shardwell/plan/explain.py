"""`--explain`: answers to what people ask of a plan, each from simulations, with their figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from shardwell.errors import ConfigError
from shardwell.memory import Tier
from shardwell.memory.statistics import human
from shardwell.plan.changes import FittingChange, PlanChoice
from shardwell.plan.largest import largest_that_fits
from shardwell.plan.models import PlanModel
from shardwell.plan.recording import ACTIVATIONS
from shardwell.plan.report import PlanReport
from shardwell.plan.speed import PlanSpeed, report_seconds
from shardwell.plan.structure import ACCUMULATION, MICRO, TRAIN

_MOST_BATCH = 4096  # sequences of a rank at a time
_MOST_SEQUENCE = 1 << 24  # tokens
_STEP = 128  # tokens: lengths of sequences are multiples of it


_HPZ = "Are secondary shards in each node (hpZ) worth it?"
_ON_HOST = "Is optimizer state on the host worth it?"
_NODE = "What would one more node bring?"


@dataclass(frozen=True)
class Answer:
    """A question, its answer in words, and the figures in it."""

    question: str
    words: str
    figures: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.question}\n  {self.words}"


@dataclass(frozen=True)
class Explanation:
    """A plan that is asked about, and the model of which other ones are simulated."""

    first: PlanChoice
    report: PlanReport
    sequence: int
    model: PlanModel

    def plan(self, choice: PlanChoice, tokens: int) -> PlanReport:
        """Return the plan of a choice with sequences of so many tokens."""
        return self.model.report(choice.config, choice.machine, tokens, choice.recomputes)

    def answers(self) -> Iterator[Answer]:
        """Yield the answers; each may take several simulations."""
        yield self._fits()
        if self.model.has_batches:
            yield self._largest_batch()
            yield self._longest_sequence()
        if self.model.has_choices:
            yield self._checkpointing()
        for question, answer in (
            (_HPZ, self._secondary_shards),
            (_ON_HOST, self._offload),
            (_NODE, self._one_more_node),
        ):
            try:
                yield answer()
            except ConfigError as error:  # of a change that this configuration does not admit
                yield Answer(question, f"No, it is refused: {error}", {"worth_it": False, "refused": str(error)})

    # ----------------------------------------------------------------------------------------------------- answers

    def _fits(self) -> Answer:
        if self.report.fits:
            return Answer("Does it fit?", self.report.sentence(), {"fits": True})
        most = max(self.report.costs.at_peak.items(), key=lambda pair: pair[1])
        change = FittingChange(self.model, self.sequence).smallest(self.first, self.report)
        way = "Nothing that was tried makes it fit." if change is None else (
            f"The smallest change that was found to fit: {change[0].words}. {change[1].sentence()}"
        )  # fmt: skip
        lacks_device = any(one.tier is Tier.DEVICE and not one.fits for one in self.report.verdicts())
        what = f"Most of the device's peak are {most[0]}, {human(most[1])}. " if lacks_device else ""
        words = f"{self.report.sentence()} {what}{way}"
        return Answer(
            "Why does it not fit, and what is the smallest change that would?",
            words,
            {"fits": False, "change": None if change is None else change[0].words, "config": _config(change)},
        )

    def _largest_batch(self) -> Answer:
        question = f"What is the largest micro-batch of sequences of {self.sequence:,} tokens?"
        found = largest_that_fits(lambda size: self.plan(self._with_batch(size), self.sequence), 1, 2, _MOST_BATCH)
        if found is None:
            return Answer(question, "None: one sequence at a time does not fit.", {"micro_batch": 0})
        number, report = found
        limit = ", the most that is looked at" if number == _MOST_BATCH else ""
        return Answer(
            question,
            f"{number:,}{limit}, with {human(report.peak(Tier.DEVICE))} of {human(report.device_room)} on the device.",
            {"micro_batch": number, "peak": report.peak(Tier.DEVICE)},
        )

    def _longest_sequence(self) -> Answer:
        question = "What is the longest sequence, one at a time?"
        alone, most = self._with_batch(1), _MOST_SEQUENCE // _STEP
        found = largest_that_fits(lambda size: self.plan(alone, size * _STEP), 1, 1 + self.sequence // _STEP, most)
        if found is None:
            return Answer(question, f"None: {_STEP} tokens do not fit.", {"sequence": 0})
        number, report = found
        limit = ", the most that is looked at" if number == most else ""
        return Answer(
            question,
            f"{number * _STEP:,} tokens{limit}, in steps of {_STEP}, with {human(report.peak(Tier.DEVICE))} of "
            f"{human(report.device_room)} on the device; attention is a fused kernel.",
            {"sequence": number * _STEP, "peak": report.peak(Tier.DEVICE)},
        )

    def _checkpointing(self) -> Answer:
        other = replace(self.first, recomputes=not self.first.recomputes)
        reports = {self.first.recomputes: self.report, other.recomputes: self.plan(other, self.sequence)}
        kept, again = reports[False], reports[True]
        held = [human(one.costs.at_peak[ACTIVATIONS]) for one in (kept, again)]
        words = (
            f"Kept activations are {held[0]} at the peak of {human(kept.peak(Tier.DEVICE))}, recomputed blocks leave "
            f"{held[1]} at the peak of {human(again.peak(Tier.DEVICE))}. "
        )
        if kept.fits:
            words += "Keep them: they fit, and nothing is computed twice."
        elif again.fits:
            words += "Recompute blocks: kept activations do not fit."
        else:
            words += "Neither fits."
        if seconds := _speeds(kept, again, self.sequence):
            words += f" A step takes {seconds[0]} kept and {seconds[1]} recomputed."
        return Answer(
            "Which activation checkpointing?",
            words,
            {"kept": kept.peak(Tier.DEVICE), "recomputed": again.peak(Tier.DEVICE)},
        )

    def _secondary_shards(self) -> Answer:
        question, size = _HPZ, self.first.machine.ranks.size
        per_node = self.first.machine.local_world_size(size)
        if not 1 < per_node < size:
            return Answer(question, "No: they are for several nodes of several GPUs.", {"worth_it": False})
        zero = self.first.config.get("zero_optimization", {})
        if zero.get("stage", 0) != 3:
            return Answer(
                question, f"No: they are for stage 3, and this is {zero.get('stage', 0)}.", {"worth_it": False}
            )
        now, other = self.report, self.plan(self._with_zero(zero_hpz_partition_size=per_node), self.sequence)
        before, after = (_between(one) for one in (now, other))
        more = other.peak(Tier.DEVICE) - now.peak(Tier.DEVICE)
        words = (
            f"Between nodes a rank then receives {human(after)} in a step, and {human(before)} without them, for "
            f"{human(more)} more on the device. "
        )
        words += f"They do not fit: {other.lack()}." if not other.fits else self._worth(now, other)
        return Answer(question, words, {"between": before, "between_with": after, "bytes": more, "fits": other.fits})

    def _offload(self) -> Answer:
        question = _ON_HOST
        zero = self.first.config.get("zero_optimization", {})
        if (zero.get("offload_optimizer") or {}).get("device", "none") != "none":
            above = self.plan(self._with_zero(offload_optimizer={}), self.sequence)
            words = f"Without it {above.lack()}: it is needed." if not above.fits else (
                f"It is not needed: without it the peak is {human(above.peak(Tier.DEVICE))}, which fits. "
                + self._worth(above, self.report)
            )  # fmt: skip
            return Answer(question, words, {"needed": not above.fits})
        stage = max(1, zero.get("stage", 0)) if self.first.machine.ranks.size > 1 else zero.get("stage", 0)
        other = self.plan(self._with_zero(stage=stage, offload_optimizer={"device": "cpu"}), self.sequence)
        saved = self.report.peak(Tier.DEVICE) - other.peak(Tier.DEVICE)
        copied = sum(other.costs.copies.values())
        words = (
            f"It frees {human(saved)} of each device and takes {human(other.peak(Tier.HOST))} of the host for each "
            f"rank, with {human(copied)} copied in a step. "
        )
        seconds = _speeds(self.report, other, self.sequence)
        if not other.fits:
            words += f"It does not fit: {other.lack()}."
        elif self.report.fits:
            words += f"It is not needed: the plan fits without it. {self._worth(self.report, other)}"
        else:
            words += "It is needed, or another change: the plan fits with it, and not without it. "
            words += f"A step takes {seconds[1]} with it." if seconds else ""
        return Answer(question, words.rstrip(), {"freed": saved, "copied": copied, "fits": other.fits})

    def _one_more_node(self) -> Answer:
        ranks = self.first.machine.ranks
        per_node = self.first.machine.local_world_size(ranks.size)
        larger = replace(ranks, size=ranks.size + per_node, per_node=per_node)
        choice = replace(self.first, machine=replace(self.first.machine, ranks=larger), config=_free_batch(self.first))
        other = self.plan(choice, self.sequence)
        states = self.report.at_rest(Tier.DEVICE) - other.at_rest(Tier.DEVICE)
        words = (
            f"States on each device are {human(states)} smaller, the peak is {human(other.peak(Tier.DEVICE))} where it "
            f"was {human(self.report.peak(Tier.DEVICE))}; {per_node} more GPUs are {larger.size / ranks.size:.2f} "
            "times the tokens of a step. "
        )
        if other.fits != self.report.fits:
            words += "It then fits. " if other.fits else "It does not fit then. "
        if seconds := _speeds(self.report, other, self.sequence):
            words += f"A step takes {seconds[1]} and took {seconds[0]}."
        return Answer(
            _NODE,
            words.rstrip(),
            {"gpus": larger.size, "peak": other.peak(Tier.DEVICE), "states": states, "fits": other.fits},
        )

    # ------------------------------------------------------------------------------------------------------ choices

    def _with_batch(self, size: int) -> PlanChoice:
        return replace(self.first.without_time(), config={**_free_batch(self.first), MICRO: size})

    def _with_zero(self, **keys: Any) -> PlanChoice:
        zero = {**self.first.config.get("zero_optimization", {}), **keys}
        return replace(self.first, config={**self.first.config, "zero_optimization": zero})

    def _worth(self, without: PlanReport, with_it: PlanReport) -> str:
        found = _speeds(without, with_it, self.sequence)
        if not found:
            return "Without figures of time, bytes are all that is known of it."
        faster = _seconds(with_it, self.sequence) < _seconds(without, self.sequence)
        return f"A step takes {found[1]} with it and {found[0]} without: {'worth it' if faster else 'not worth it'}."


def _free_batch(choice: PlanChoice) -> dict[str, Any]:
    """Return the configuration without the batch of all ranks: it follows from the micro-batch."""
    steps = choice.config.get(ACCUMULATION)
    kept = {key: value for key, value in choice.config.items() if key not in (TRAIN, ACCUMULATION)}
    return kept | ({ACCUMULATION: steps} if isinstance(steps, int) else {})


def _config(change: tuple[PlanChoice, PlanReport] | None) -> dict[str, Any] | None:
    return None if change is None else change[0].config


def _between(report: PlanReport) -> int:
    return sum(size for key, size in report.costs.traffic.items() if key.endswith(" between"))


def _seconds(report: PlanReport, sequence: int) -> float:
    return PlanSpeed.of(report, sequence, recomputes=False).seconds


def _speeds(one: PlanReport, other: PlanReport, sequence: int) -> tuple[str, str] | None:
    """Return the seconds of a step of two plans in words; None where time is not known."""
    found = [report_seconds(report) for report in (one, other)]
    return (f"{found[0]:.3g} s", f"{found[1]:.3g} s") if all(found) else None
