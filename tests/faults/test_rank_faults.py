"""A rank that raises, leaves, diverges or sleeps in its own code: the others get the cause, or its name in the log."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.patience import HANG, soon
from tests.support.rank_faults import complaints, environments, outcomes

WITHIN = 45.0  # seconds on an idle machine, of which three are the limit of divergences


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["raising", "leaving", "diverging", "sleeping"])
def test_the_other_ranks_get_the_first_cause(tmp_path: Path, fault: str) -> None:
    found = outcomes(fault, tmp_path, environments(2, on_gpu=False), HANG)
    assert not (wrong := complaints(fault, found, soon(WITHIN))), "\n".join(wrong)
