from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaigns.kills import Report, Settings, misplaced_samples, run_job

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """The short version: `python -m tests.campaigns.kills` kills more often."""
    return run_job(Path(tmp_path_factory.mktemp("campaign")), Settings(kills=4, seed=10))


def test_nothing_is_lost_when_ranks_are_killed(report: Report) -> None:
    assert {claim: problem for claim, problem in report.checks.items() if problem} == {}
    assert len(report.checks) == 8


def test_the_kills_were_felt(report: Report) -> None:
    assert [kill.moment for kill in report.kills] == ["save", "training", "save", "start"]
    assert report.repeated > 0
    assert sum(kill.verified for kill in report.kills) > 0


def test_a_sample_that_was_seen_twice_is_found() -> None:
    epoch = [[step * 6 + index for index in range(6)] for step in range(16)]
    assert misplaced_samples([*epoch, *epoch]) == ""
    assert (
        misplaced_samples([*epoch, epoch[1], *epoch[1:]])
        == "micro-steps 16 on: samples [6, 7, 8, 9, 10, 11] more than once"
    )
