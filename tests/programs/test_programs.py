"""Random programs over a small model follow plain PyTorch, or say that they do not; `python -m tests.programs`: more.

A failure prints its seed and its program, made small, in the form of `regressions.py`.
"""

from __future__ import annotations

import pytest

from tests.programs.campaign import Campaign, outcomes
from tests.programs.draw import Kinds, draw
from tests.programs.instructions import Backward, Forward, Grad, Lie, Look, Step
from tests.programs.program import Program, Setting
from tests.programs.regressions import REGRESSIONS
from tests.programs.shrink import shrunk
from tests.programs.trial import Outcome
from tests.support.ranks import Ranks

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("num_ranks", "count"), [(1, 30), (2, 30)])
def test_random_programs_follow_plain_pytorch_or_say_so(ranks: Ranks, num_ranks: int, count: int) -> None:
    failures = []

    def report(seed: str, program: Program, outcome: Outcome) -> None:
        failures.append(f"seed {seed}: {outcome.what} {outcome.at}\n{program}\n{outcome.detail}")

    seeds = [f"test:{number}" for number in range(count)]
    campaign = Campaign(ranks, report)
    campaign.run((seed, draw(seed, num_ranks, Kinds())) for seed in seeds)
    assert not failures, "\n\n".join(failures)
    assert campaign.verdicts["agreed"] > count / 2, campaign


@pytest.mark.skipif(not REGRESSIONS, reason="no program has failed yet")
def test_programs_that_failed_once_do_not_fail_again(ranks: Ranks) -> None:
    programs = sorted(map(Program.read, REGRESSIONS), key=lambda program: program.setting.ranks)
    for num_ranks in (1, 2):
        some = [program for program in programs if program.setting.ranks == num_ranks]
        failed = [f"{program}\n{outcome}" for program, outcome in outcomes(ranks, some) if outcome.verdict == "failed"]
        assert not failed, "\n\n".join(failed)


def test_a_program_is_read_back_from_its_text() -> None:
    for number in range(300):
        program = draw(f"text:{number}", 2, Kinds())
        assert Program.read(str(program)) == program


def test_a_seed_gives_the_same_program_each_time() -> None:
    assert draw("1:7", 2, Kinds()) == draw("1:7", 2, Kinds())
    assert draw("1:7", 2, Kinds()) != draw("1:8", 2, Kinds())


def test_kinds_are_switched_on_and_off() -> None:
    without, only = Kinds(without=frozenset({"edit", "grad:mul_"})), Kinds(only=frozenset({"clip", "stage=3"}))
    for number in range(300):
        assert not {"edit", "grad:mul_"} & draw(f"{number}", 2, without).tags
        program = draw(f"{number}", 2, only)
        assert program.setting.stage == 3
        assert {one.word for one in program.instructions} <= {"forward", "backward", "step", "look", "clip"}


def test_a_failure_is_made_small() -> None:
    """Of a program that fails whenever a gradient is set before a step, these two are left."""
    program = draw("any", 2, Kinds())
    guilty = [Grad("g", "set", "head.bias", 11), Forward("a", "g", "tensor", 0), Step("g")]
    program = Program(program.setting, (*guilty[:1], *program.instructions, *guilty[1:]))

    def attempt(one: Program) -> Outcome:
        words = [instruction.word for instruction in one.instructions]
        bad = "grad" in words and "step" in words[words.index("grad") :]
        return Outcome("failed", "silent") if bad else Outcome("agreed")

    small, outcome = shrunk(program, attempt(program), attempt)
    assert [one.word for one in small.instructions] == ["grad", "step"]
    assert small.setting == Setting(stage=program.setting.stage, ranks=2)
    assert outcome == Outcome("failed", "silent")


def test_a_silent_difference_is_found(ranks: Ranks) -> None:
    """The check can fail: `lie` changes values in the engine's world only."""
    honest = (Forward("a", "g", "tensor", 0), Backward("a", "loss", "first", False), Step("g"), Look("g", "gathered"))
    for num_ranks, stage in ((1, 2), (2, 3)):
        programs = [Program(Setting(stage, num_ranks), (*one, *honest)) for one in ((), (Lie("g"),), ())]
        found = [outcome for _, outcome in outcomes(ranks, programs)]
        assert [outcome.verdict for outcome in found] == ["agreed", "failed", "agreed"]
        assert found[1].what == "silent"
