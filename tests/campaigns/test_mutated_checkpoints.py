"""A short campaign of each kind in the suite; long ones are run by hand (`python -m tests.campaigns.checkpoints`)."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from tests.campaigns import checkpoints
from tests.campaigns.checkpoints import Campaign, Tally, Trial, main
from tests.campaigns.mutations import OWN
from tests.checkpoint.samples import save_own
from tests.ranks import Ranks


def test_changed_checkpoints_are_refused_or_loaded_as_they_were(ranks: Ranks, tmp_path: Path) -> None:
    tally = Campaign(tmp_path, 1, ranks).run(48, 60.0)
    assert tally.is_well, tally
    assert tally.refused > tally.tried / 2
    assert tally.elsewhere > 0
    assert sum(tally.by_mutation.values()) == tally.tried == tally.refused + tally.equal


def test_a_campaign_says_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def one(count: int, seed: int, seconds: float) -> Tally:
        tally = Tally(seed)
        trial = Trial("a bit of the data", "bit 3", "ranks-2", (1, 0, 0), True, "copy")
        for outcome in ("refused", "equal", "silent", "errors: KeyError: 7", "crashes: exit code -11", "hangs: 30 s"):
            tally.count(trial, outcome)
        return tally

    monkeypatch.setattr(checkpoints, "run", one)
    assert main(["--count", "6", "--json", str(tmp_path / "found.json")]) == 1
    found = json.loads((tmp_path / "found.json").read_text())["tally"]
    assert (found["tried"], found["elsewhere"], found["refused"], found["equal"]) == (6, 6, 1, 1)
    assert [len(found[key]) for key in ("silent", "errors", "crashes", "hangs")] == [1, 1, 1, 1]


@pytest.mark.parametrize("name", [name for name in OWN if name != "latest"])
def test_each_mutation_changes_something(tmp_path: Path, name: str) -> None:
    save_own(tmp_path, "a", {"model/w": torch.arange(2000.0)}, {"counters": {"global_steps": 3}})
    before = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    changed = 0
    for seed in range(4):
        OWN[name][0](tmp_path / "a", random.Random(seed))
        after = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir() if path.is_file()}
        changed += after != before
        if changed:
            break
    assert changed
