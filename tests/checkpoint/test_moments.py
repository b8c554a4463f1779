"""Moments in 8 bits, through checkpoints and where they cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardwell
from shardwell.errors import ShardwellError
from shardwell.kernels import Moment8bit, moments8
from tests.support.checkpoint_legs import Leg, run_leg
from tests.support.models import Gpt, zero
from tests.support.ranks import Ranks
from tests.support.training import Case

HOST = {"offload_optimizer": {"device": "cpu"}}
EIGHT_BITS = {"shardwell": {"moments": "8bit", "shard_at_world_one": True}, "zero_optimization": HOST}


@pytest.mark.parametrize("is_second", [False, True])
def test_values_of_codes_become_the_same_codes(is_second: bool) -> None:
    encode = moments8.encode_second if is_second else moments8.encode_first
    for seed in range(20):
        torch.manual_seed(seed)
        values = torch.randn(3000) * torch.rand(3000) ** 8
        values = values.square() if is_second else values
        before = Moment8bit.zeros(3000, is_second=is_second)
        encode(before.codes, before.exponents, slice(0, 3000), values, seed)
        again = Moment8bit.of(before[:], is_second=is_second)
        assert torch.equal(again[:], before[:])


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_8_bit_moments_are_the_same_bits_after_a_load_at_the_same_ranks(
    ranks: Ranks, tmp_path: Path, stage: int
) -> None:
    case = Case(dtype=torch.float32)
    whole = ranks.run(2, run_leg, Leg(stage, 0, 4, case, EIGHT_BITS, loads=False, saves=False), str(tmp_path))
    saved = ranks.run(2, run_leg, Leg(stage, 0, 2, case, EIGHT_BITS, loads=False), str(tmp_path))
    gone_on = ranks.run(2, run_leg, Leg(stage, 2, 4, case, EIGHT_BITS, saves=False), str(tmp_path))
    for one, other in ((saved[0]["ended"], gone_on[0]["loaded"]), (whole[0]["ended"], gone_on[0]["ended"])):
        assert one.keys() == other.keys()
        for name in one:
            assert torch.equal(torch.as_tensor(one[name]), torch.as_tensor(other[name])), name


class Own(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:  # another step, for all that the engine knows
        return super().step(closure)


@pytest.mark.parametrize(
    ("kind", "options", "dtype"),
    [
        (torch.optim.AdamW, {"amsgrad": True}, torch.float32),
        (torch.optim.Adam, {"maximize": True}, torch.float32),
        (Own, {}, torch.float32),
        (torch.optim.AdamW, {}, torch.float64),
    ],
)
def test_8_bit_moments_that_cannot_be_are_refused(kind: Any, options: dict[str, Any], dtype: torch.dtype) -> None:
    model = Gpt().to(dtype)
    with pytest.raises(ShardwellError, match='moments "8bit" needs a kernel, and there is none for'):
        shardwell.initialize(
            model=model, optimizer=kind(model.parameters(), **options), config=zero(2, **EIGHT_BITS), device="cpu"
        )


def test_8_bit_moments_without_effect_are_told_of() -> None:
    model = Gpt()
    config = {**EIGHT_BITS, "zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.0}}}
    with pytest.warns(UserWarning, match='moments "8bit" has no effect'):
        shardwell.initialize(
            model=model, optimizer=torch.optim.AdamW(model.parameters()), config=zero(2, **config), device="cpu"
        )
