"""Values of parameters that are changed by hand are those that training goes on with."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.edits import check, every_edit
from tests.support.ranks import Ranks


# The bounds in 16 bits are those of roundings that add up over the steps; a lost edit is off by 0.1 and more.
@pytest.mark.parametrize(
    ("stage", "precision", "most"),
    [(0, "fp64", 1e-9), (0, "bf16", 0.03), (1, "fp64", 1e-9), (1, "fp16", 0.03), (2, "bf16", 0.03)],
)
def test_values_changed_by_hand_are_trained_on(ranks: Ranks, stage: int, precision: str, most: float) -> None:
    check(ranks.run(2, every_edit, stage, precision, "")[0], 2, most)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("offload", "precision", "most"), [("cpu", "fp32", 1e-5), ("cpu", "fp16", 0.03), ("nvme", "bf16", 0.03)]
)
def test_they_are_where_masters_rest_on_the_host_or_on_disk(
    ranks: Ranks, offload: str, precision: str, most: float, tmp_path: Any
) -> None:
    check(ranks.run(2, every_edit, 1, precision, offload, str(tmp_path))[0], 2, most)
