"""All-gathers in turns on two communicators: what a step takes over a link that two fill and one does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shardwell.memory.machine import SimulatedMachine, SimulatedRanks
from shardwell.plan import estimate
from shardwell.plan.devices import gpu, speeds_of
from tests.support.models import Gpt, zero

RANKS, RATE = 4, 1e9
MODEL = {"width": 256, "blocks": 24}


def seconds(stage: int, together: float) -> tuple[float, float]:
    """Return the seconds of a step, and of its parameters over the link once, on one communicator."""
    speeds = replace(speeds_of(gpu("h200")), inside=RATE, between=RATE, inside_seconds=0.0, two_communicators=together)
    machine = SimulatedMachine(80e9, ranks=SimulatedRanks(0, RANKS, RANKS), speeds=speeds)
    with torch.device("meta"):
        model = Gpt(**MODEL)
        tokens = torch.empty(1, 9, dtype=torch.long)
    config = zero(
        stage,
        optimizer={"type": "AdamW", "params": {"lr": 1e-3}},
        train_micro_batch_size_per_gpu=1,
        shardwell={"gathers_take_turns": True},
    )
    plan = estimate(model, config, machine, inputs=(tokens,))
    assert plan.time is not None
    numel = sum(one.numel() for one in model.parameters())
    return plan.time.seconds, 4 * numel * (RANKS - 1) / RANKS / RATE


# all-gathers of the forward, and those of the backward beside reductions; reductions, and updated parameters
@pytest.mark.parametrize(("stage", "passes"), [(3, 3 / 2), (1, 1 + 1 / 2)])
def test_two_communicators_share_the_all_gathers_where_nothing_is_reduced(stage: int, passes: float) -> None:
    step, once = seconds(stage, 2.0)
    assert step == pytest.approx(passes * once, rel=0.15)


@pytest.mark.parametrize(("stage", "passes"), [(3, 3), (1, 2)])
def test_turns_cost_nothing_on_a_link_that_one_communicator_fills(stage: int, passes: int) -> None:
    step, once = seconds(stage, 1.0)
    assert step == pytest.approx(passes * once, rel=0.1)
