"""A job of NCCL ranks of which one is killed: all start again, resume, and end with the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.restarts import complaints, ends_of_jobs


@pytest.mark.gpu
@pytest.mark.ranks
def test_nccl_ranks_start_again_and_resume(tmp_path: Path) -> None:
    wrong = complaints(ends_of_jobs(tmp_path, "cuda"))
    assert not wrong, "\n".join(wrong)
