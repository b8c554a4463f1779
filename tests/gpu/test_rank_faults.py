"""A rank on NCCL that is killed, raises, leaves, diverges or sleeps: the others get the first cause; none aborts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.rank_faults import FAULTS, TIMEOUT, complaints, environments, outcomes

LIMIT, WITHIN = 90.0, TIMEOUT + 15.0  # seconds for a run, and after the fault; a heartbeat has a second, a check two


def of_nccl_ranks(fault: str, folder: Path) -> list[str]:
    """Return what is wrong with how NCCL ranks end after a fault of rank 1."""
    folder.mkdir()
    found = outcomes(fault, folder, environments(4 if fault == "raising" else 2, on_gpu=True), LIMIT)
    return [f"{fault}: {words}" for words in complaints(fault, found, WITHIN)]


@pytest.mark.gpu
@pytest.mark.ranks
def test_the_other_nccl_ranks_get_the_first_cause(tmp_path: Path) -> None:
    with ThreadPoolExecutor(len(FAULTS)) as pool:  # all at a time, because most of it is the start of processes
        found = list(pool.map(of_nccl_ranks, FAULTS, [tmp_path / one for one in FAULTS]))
    wrong = [words for of_one in found for words in of_one]
    assert not wrong, "\n".join(wrong)
