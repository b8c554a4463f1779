"""A plain step enters few functions of few files: a feature that is off is not on its path."""

from __future__ import annotations

import sys

import pytest

from tests.support.footprint import footprint
from tests.support.ranks import Ranks

MOST = {3: (140, 18), 0: (110, 14)}  # functions and files, by stage
DEEPEST = 10  # frames of the package


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="comprehensions are frames of their own up to Python 3.11")
@pytest.mark.parametrize("stage", list(MOST))
def test_a_plain_step_enters_few_functions(ranks: Ranks, stage: int) -> None:
    found = ranks.run(2, footprint, stage)[0]
    functions, files = MOST[stage]
    assert len(found["functions"]) <= functions, found["functions"]
    assert len(found["files"]) <= files, found["files"]
    assert len(found["deepest"]) <= DEEPEST, found["deepest"]
    assert not any(file.startswith(("offload", "tensor_parallel", "pipeline")) for file in found["files"])
