"""Seeds of regions in which ranks draw numbers of their own."""

from __future__ import annotations

import pytest
import torch

from shardwell.runtime import randomness
from shardwell.runtime.randomness import RegionRandomness


@pytest.mark.slow
def test_regions_in_each_other_have_a_seed_for_each_pair_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator()  # as a device's: the numbers that seeds are made of come from another one
    monkeypatch.setattr(randomness, "generator_of", lambda device: generator)
    found = set()
    for outer in range(2):
        for inner in range(2):
            torch.manual_seed(0)
            generator.manual_seed(0)
            first, second = RegionRandomness(outer), RegionRandomness(inner)
            first.begin(torch.device("cpu"))
            second.begin(torch.device("cpu"))
            found.add(generator.initial_seed())
            second.end()
            first.end()
            assert generator.initial_seed() == 0
    assert len(found) == 4
