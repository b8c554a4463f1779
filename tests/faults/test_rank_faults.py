"""A rank that raises, leaves, diverges or sleeps in its own code: the others get the cause, or its name in the log."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.rank_faults import complaints, environments, outcomes

LIMIT, WITHIN = 200.0, 90.0  # seconds, on a machine that others use, too


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["raising", "leaving", "diverging", "sleeping"])
def test_the_other_ranks_get_the_first_cause(tmp_path: Path, fault: str) -> None:
    found = outcomes(fault, tmp_path, environments(2, on_gpu=False), LIMIT)
    assert not (wrong := complaints(fault, found, WITHIN)), "\n".join(wrong)
