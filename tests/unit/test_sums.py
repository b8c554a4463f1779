"""Sums of what ranks send: the same bits whether the library or the transport adds them up."""

from __future__ import annotations

import pytest
import torch

from shardwell.parallel.transport import sum_in_rank_order


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sum_is_added_with_the_bits_of_a_library_that_has_summed_already(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(1000, dtype=dtype, generator=generator) for _ in range(2)]
    before = torch.randn(1000, dtype=dtype, generator=generator)
    for accumulate in (False, True):
        here, library = before.clone(), before.clone()
        sum_in_rank_order([parts[0] + parts[1]], library, 1 / 3, accumulate)
        sum_in_rank_order([part.clone() for part in parts], here, 1 / 3, accumulate)
        assert here.equal(library)
