from __future__ import annotations

import copy
import itertools

import pytest

from tests.support import recorder
from tests.support import recorder_cases as cases
from tests.support.ranks import Ranks

TWO = {
    "plain": ({**cases.USUAL, "stage": "3", "ranks": "2", "clipping": "0.5"},),
    "saved": (
        {**cases.USUAL, "stage": "2", "tier": "host"},
        {**cases.USUAL, "stage": "3", "tier": "nvme", "ranks": "2"},
    ),
}


def test_every_pair_of_values_that_may_go_together_is_in_a_case() -> None:
    chosen = cases.choose_cases()
    assert chosen == cases.choose_cases()
    assert all(map(cases.allowed, chosen))
    pairs = {pair for case in chosen for pair in itertools.combinations(case.items(), 2)}
    assert (("stage", "3"), ("optimizer", "muon")) in pairs
    assert (("tier", "nvme+params"), ("zeropp", "all")) in pairs
    assert (("stage", "2"), ("tier", "host+params")) not in pairs


@pytest.mark.slow
def test_what_is_recorded_twice_is_the_same_and_a_change_is_named(ranks: Ranks) -> None:
    before, after = (
        {"circumstances": {}, "cases": {name: recorder.record_case(ranks, parts) for name, parts in TWO.items()}}
        for _ in range(2)
    )
    assert not [field for case in before["cases"].values() for field in case if "error" in field]
    assert recorder.compare(before, after, TWO) == []
    changed = copy.deepcopy(after)
    changed["cases"]["saved"]["resumed norm"]["all"][1] = (1.5).hex()
    del changed["cases"]["plain"]
    assert [line.split(":")[0] for line in recorder.compare(before, changed, TWO)] == [
        "plain",
        "saved > resumed norm > all[1]",
    ]


def test_a_case_that_is_refused_is_recorded_as_its_error(ranks: Ranks) -> None:
    refused = {**cases.USUAL, "tier": "host+params"}
    (said,) = recorder.record_case(ranks, (refused,))["error"].values()
    assert said.startswith("ConfigError: ")


def test_names_choose_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert recorder.main(["--list", "--only", "-> stage=0"]) == 0
    assert capsys.readouterr().out.count("\n") == 1
