"""The upper half of an fp32 number and its remainder are the number."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwell.kernels.rounding import join, split, to_bf16

BITS = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=64)
EDGES = [0x7FFFFFFF, -1, 0x7F800000, 0x7F7FFFFF, 0x7F7F8000, 0x8000, 0, -(2**31), 0x7F800001, 0x7FC00000]


def halves(bits: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    number = torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)
    high, low = torch.empty(len(bits), dtype=torch.bfloat16), torch.empty(len(bits), dtype=torch.int16)
    split(number, high, low)
    return number, high, low


@given(BITS)
def test_join_undoes_split_bit_for_bit_and_keeps_nan(bits: list[int]) -> None:
    number, high, low = halves([*bits, *EDGES])
    back = join(high, low, torch.empty_like(number))
    nan = number.isnan()
    assert torch.equal(back[~nan].view(torch.int32), number[~nan].view(torch.int32))
    assert back[nan].isnan().all()


@given(BITS)
def test_rounding_is_to_nearest_and_ties_go_away_from_zero(bits: list[int]) -> None:
    number, high, _ = halves(bits)
    finite = number.isfinite() & high.isfinite()
    error = (high[finite].double() - number[finite].double()).abs()
    even = (number[finite].bfloat16().double() - number[finite].double()).abs()
    assert torch.equal(error, even)
    ties = (number.view(torch.int32) & 0xFFFF) == 0x8000
    assert (high[ties & finite].double().abs() >= number[ties & finite].double().abs()).all()


@given(BITS)
def test_split_and_to_bf16_round_alike(bits: list[int]) -> None:
    number, high, _ = halves(bits)
    alone = to_bf16(number, torch.empty_like(high))
    assert torch.equal(alone.view(torch.int16), high.view(torch.int16))
