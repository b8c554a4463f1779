"""Gradients that are not finite: an error while a run begins, a step left out, counted and told, later on."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwell
from shardwell.optim.grad_norm import FIRST_STEPS, MOST_IN_A_ROW
from tests.support.models import Gpt, batches, whole_parameters, zero
from tests.support.ranks import Ranks

NAN = float("nan")


def engine_for(stage: int = 1, **config: Any) -> shardwell.Engine:
    torch.manual_seed(0)
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return shardwell.initialize(model=model, optimizer=optimizer, config=zero(stage, **config)).engine


def step(engine: shardwell.Engine, factor: float = 1.0) -> None:
    engine.backward(engine(batches(1, 4)[0]) * factor)
    engine.step()


def a_bad_batch_later(stage: int, dtype: str, bad_rank: int) -> tuple[bool, int, bool]:
    """Whether the step changed nothing; what was counted; whether the next step is taken."""
    engine = engine_for(stage, **({} if dtype == "fp32" else {dtype: {"enabled": True}}))
    for _ in range(FIRST_STEPS):
        step(engine)
    before = whole_parameters(engine.module)
    step(engine, NAN if dist.get_rank() == bad_rank else 1.0)
    after = whole_parameters(engine.module)
    step(engine)
    then = whole_parameters(engine.module)
    is_same = all(torch.equal(before[name], after[name]) for name in before)
    return is_same, engine.skipped_steps, all(not torch.equal(before[name], then[name]) for name in before)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_bad_batch_after_the_first_steps_is_left_out_on_all_ranks(ranks: Ranks, stage: int, dtype: str) -> None:
    assert ranks.run(2, a_bad_batch_later, stage, dtype, 1) == [(True, 1, True)] * 2


def test_a_bad_batch_in_the_first_steps_is_an_error_that_says_so() -> None:
    engine = engine_for()
    for _ in range(FIRST_STEPS - 1):
        step(engine)
    with pytest.raises(shardwell.NonFiniteError, match=f"one of the first {FIRST_STEPS} steps"):
        step(engine, NAN)
    step(engine)
    step(engine, NAN)
    assert engine.skipped_steps == 2


def test_a_run_that_is_resumed_has_its_first_steps_behind_it(tmp_path: Path) -> None:
    engine = engine_for()
    for _ in range(FIRST_STEPS):
        step(engine)
    engine.save_checkpoint(tmp_path)
    again = engine_for()
    again.load_checkpoint(tmp_path)
    step(again, NAN)
    assert again.skipped_steps == 1


def test_many_bad_batches_in_a_row_are_an_error_and_a_good_one_between_them_is_enough() -> None:
    engine = engine_for()
    for _ in range(FIRST_STEPS):
        step(engine)
    for _ in range(2):
        for _ in range(MOST_IN_A_ROW - 1):
            step(engine, NAN)
        step(engine)
    for _ in range(MOST_IN_A_ROW - 1):
        step(engine, NAN)
    with pytest.raises(shardwell.NonFiniteError, match=f"{MOST_IN_A_ROW} steps were left out one after another"):
        step(engine, NAN)
    assert engine.skipped_steps == 3 * MOST_IN_A_ROW - 2


def test_the_log_tells_of_steps_left_out_with_their_number_and_seldom(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_for(shardwell={"nonfinite": "skip"})
    with caplog.at_level(logging.WARNING, logger="shardwell"):
        for _ in range(120):
            step(engine, NAN)
    said = [record.getMessage() for record in caplog.records if "was left out" in record.getMessage()]
    assert len(said) == 99 + 3  # each of the first 99, then every tenth
    assert said[0].startswith("step 1 was left out: the gradients are not finite (their global norm is nan, first in")
    assert "120 of 120 steps were left out so far, 120 of them in a row" in said[-1]


def test_asked_for_an_error_it_is_one_at_any_step() -> None:
    engine = engine_for(shardwell={"nonfinite": "error"})
    for _ in range(FIRST_STEPS + 1):
        step(engine)
    with pytest.raises(shardwell.NonFiniteError):
        step(engine, NAN)


def updated_at_once(commit: str) -> str:
    engine = engine_for(2, zero_optimization={"offload_optimizer": {"device": "cpu"}}, shardwell={"commit": commit})
    for _ in range(FIRST_STEPS):
        step(engine)
    for parameter in engine.module.blocks[0].parameters():
        parameter.register_hook(lambda gradient: gradient * NAN)
    try:
        step(engine)
    except shardwell.NonFiniteError as error:
        return str(error)
    return f"skipped {engine.skipped_steps}"


def test_what_was_updated_at_once_cannot_be_left_out(ranks: Ranks) -> None:
    for said in ranks.run(2, updated_at_once, "at_once"):
        assert "updates at once are not taken back" in said
        assert "A step that was applied in part cannot be left out" in said
    assert ranks.run(2, updated_at_once, "after_norm") == ["skipped 1"] * 2


def test_a_fixed_loss_scale_that_never_fits_is_told(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_for(fp16={"enabled": True, "loss_scale": 2.0**60})
    with caplog.at_level(logging.WARNING, logger="shardwell"):
        for _ in range(MOST_IN_A_ROW):
            step(engine)
    assert [r.getMessage() for r in caplog.records if "50 of them in a row" in r.getMessage()]


def test_a_step_that_the_kernels_left_out_is_counted_when_the_host_hears_of_it() -> None:
    torch.manual_seed(0)
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=zero(1)).engine
    engine.optimizer.executor.vetoes_on_device = True  # as on CUDA: torch's fused kernels are told
    for _ in range(FIRST_STEPS):
        step(engine)
    before = {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}
    step(engine, NAN)
    assert engine.skipped_steps == 0
    assert all(torch.equal(before[name], parameter) for name, parameter in engine.module.named_parameters())
    step(engine)
    assert engine.skipped_steps == 1
    assert not torch.equal(before["head.weight"], engine.module.head.weight)
