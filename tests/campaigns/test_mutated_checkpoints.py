"""A short campaign of each kind in the suite; long ones are run by hand (`python -m tests.campaigns.checkpoints`)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.campaigns.checkpoints import Campaign
from tests.campaigns.mutations import OWN
from tests.support.checkpoint_samples import save_own
from tests.support.patience import HANG
from tests.support.ranks import Ranks

pytestmark = pytest.mark.slow


def test_changed_checkpoints_are_refused_or_loaded_as_they_were(ranks: Ranks, tmp_path: Path) -> None:
    result = Campaign(tmp_path, 1, ranks).run(32, HANG)
    assert result.bad == []
    assert result.outcomes["refused"] > result.tried / 2
    assert result.figures["at another layout"] > 0


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
