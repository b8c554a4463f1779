"""Values that are changed by hand on a GPU, with masters there or on the host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwell
from shardwell.kernels.rounding import join, narrow, split
from shardwell.sharding.edits import adopt, digest
from tests.support.edits import check, every_edit
from tests.support.models import zero

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("offload", ["", "cpu", "nvme"])
def test_values_changed_by_hand_are_trained_on(precision: str, offload: str, tmp_path: Path) -> None:
    check(every_edit(1, precision, offload, str(tmp_path)), 1, 1e-4 if precision == "fp32" else 0.03)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_masters_adopt_what_is_not_their_rounding_and_nothing_else(dtype: torch.dtype) -> None:
    masters = torch.randn(100_003, device="cuda")
    values = narrow(masters, torch.empty_like(masters, dtype=dtype)).clone()
    before = masters.clone()
    adopt(masters, values)
    assert torch.equal(masters, before)
    values[::7] = 0.5
    adopt(masters, values)
    changed = torch.zeros_like(masters, dtype=torch.bool)
    changed[::7] = True
    changed &= narrow(before, torch.empty_like(values)) != values
    assert torch.equal(masters, torch.where(changed, values.float(), before))


CHANGES: dict[str, Callable[[torch.Tensor], None]] = {
    "a bit": lambda t: t.view(torch.int16)[77_777].bitwise_xor_(1),  # type: ignore[dict-item, return-value]
    "the last": lambda t: t[-1].fill_(3.0),  # type: ignore[dict-item, return-value]
    "two places": lambda t: t[:2].copy_(t[:2].flip(0).clone()),  # type: ignore[dict-item, return-value]
    "rows": lambda t: t[:100_000].view(100, 1000)[:2].copy_(t[:100_000].view(100, 1000)[:2].flip(0).clone()),  # type: ignore[dict-item, return-value]
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_digest_changes_with_any_bit_and_with_the_order(dtype: torch.dtype, change: str) -> None:
    values = torch.randn(100_003, device="cuda").to(dtype)
    before = digest(values)
    assert torch.equal(digest(values), before)
    CHANGES[change](values)
    assert not torch.equal(digest(values), before)


def test_zeros_and_infinities_that_were_set_by_hand_join_with_any_remainder() -> None:
    masters = torch.randn(10_000, device="cuda")
    high, low = torch.empty_like(masters, dtype=torch.bfloat16), torch.empty_like(masters, dtype=torch.int16)
    split(masters, high, low)
    for value in (0.0, -0.0, float("inf"), float("-inf"), 1.0):
        high.fill_(value)
        joined = join(high, low, torch.empty_like(masters))
        assert torch.equal(narrow(joined, torch.empty_like(high)), high), value


def test_a_look_costs_little(capsys: pytest.CaptureFixture[str]) -> None:
    """What the device does for a comparison of masters below it: less than a hundredth of a step of any size."""
    values = torch.randn(1 << 28, device="cuda", dtype=torch.bfloat16)
    before = digest(values)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(10):
        digest(values)
    end.record()
    torch.cuda.synchronize()
    milliseconds = start.elapsed_time(end) / 10
    with capsys.disabled():
        print(f"a digest of {values.numel() / 1e6:.0f}M numbers: {milliseconds:.2f} ms")
    assert before is not None
    assert milliseconds < 10.0  # at 50 GB/s; an H200 takes less than 1


def test_an_ordinary_model_comes_back_to_the_device() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    config = zero(3, shardwell={"shard_at_world_one": True}, bf16={"enabled": True})
    engine = shardwell.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config).engine
    engine.destroy()
    assert all(p.is_cuda and p.dtype is torch.float32 for p in model.parameters())
    model(torch.ones(1, 8, device="cuda")).sum().backward()
