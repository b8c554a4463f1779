"""Ranks that diverge get an error with names, before a mismatched collective, and never a hang."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwell
from tests.support.models import Gpt, batches, share, zero
from tests.support.patience import soon
from tests.support.ranks import Ranks

LIMIT = 5.0  # seconds; where ranks are to diverge, less is enough
SHORT = 1.5


class Fork(nn.Module):
    """Runs blocks in an order that the test chooses; all blocks have the same size."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(4)])

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for index in order:
            x = self.blocks[index](x)
        return x.square().mean()


def run_orders(stage: int, orders: list[list[list[int]]], time_limit: float = LIMIT) -> dict[str, Any]:
    """orders[step][rank]; the last step is where they may differ."""
    torch.manual_seed(0)
    model = Fork()
    config = zero(stage, shardwell={"divergence_timeout": time_limit})
    engine, *_ = shardwell.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)
    losses, start = [], time.monotonic()
    try:
        for order in orders:
            start = time.monotonic()
            loss = engine(torch.ones(2, 8), order[dist.get_rank()])
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
    except shardwell.ShardwellError as error:
        return {
            "error": type(error).__name__,
            "text": str(error),
            "seconds": time.monotonic() - start,
            "losses": losses,
        }
    return {"error": "", "losses": losses}


SAME = [[0, 1, 2, 3], [0, 1, 2, 3]]


@pytest.mark.parametrize("warm_up", [0, 2], ids=["in the first step", "in a later step"])
def test_ranks_that_run_different_units_of_equal_size_get_an_error_that_names_them(ranks: Ranks, warm_up: int) -> None:
    orders = [SAME] * warm_up + [[[0, 1, 2, 3], [0, 2, 1, 3]]]
    answers = ranks.run(2, run_orders, 3, orders, SHORT)
    assert [answer["error"] for answer in answers] == ["DivergenceError", "DivergenceError"]
    for answer in answers:
        assert answer["seconds"] < soon(SHORT + 4)
        assert "blocks.1" in answer["text"] or "blocks.2" in answer["text"]
        assert "rank 0" in answer["text"] or "rank 1" in answer["text"]
        assert len(answer["losses"]) == warm_up


@pytest.mark.parametrize("stage", [1, 2])
def test_ranks_that_reduce_different_units_get_an_error_at_stages_1_and_2(ranks: Ranks, stage: int) -> None:
    answers = ranks.run(2, run_orders, stage, [SAME, [[0, 1, 2], [0, 1, 3]]], SHORT)
    assert {answer["error"] for answer in answers} <= {"DivergenceError", "PeerError"}
    assert "DivergenceError" in {answer["error"] for answer in answers}


def test_an_order_that_changes_alike_on_all_ranks_is_no_divergence(ranks: Ranks) -> None:
    orders = [SAME, [[3, 2, 1, 0]] * 2, SAME, [[0, 0, 1, 1]] * 2, [[3, 2, 1, 0]] * 2]
    first, second = ranks.run(2, run_orders, 3, orders)
    assert first["error"] == second["error"] == ""
    assert first["losses"] == second["losses"]


def raise_in_forward(stage: int, where: str) -> dict[str, Any]:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Gpt()
    config = zero(stage, shardwell={"divergence_timeout": LIMIT})
    engine, *_ = shardwell.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)
    batch = batches(1, 4)[0]
    engine.backward(engine(share(batch, rank, num_ranks)))
    engine.step()
    start = time.monotonic()
    if rank == 1:

        def explode(*_: Any) -> None:
            raise ValueError("a bad batch on this rank")

        model.blocks[1].register_forward_pre_hook(explode)
    try:
        loss = engine(share(batch, rank, num_ranks))
        engine.backward(loss)
        engine.step()
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - start}
    return {"error": ""}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_rank_that_raises_in_forward_takes_the_others_with_it(ranks: Ranks, stage: int) -> None:
    other, culprit = ranks.run(2, raise_in_forward, stage, "forward")
    assert culprit["error"] == "ValueError"
    assert other["error"] == "PeerError"
    assert "rank 1" in other["text"]
    assert "a bad batch on this rank" in other["text"]
    assert other["seconds"] < soon(LIMIT + 4)


def catch_and_go_on(stage: int) -> list[str]:
    """Rank 1 skips a batch that its forward cannot take; what each rank hears from then on."""
    model = Gpt()
    config = zero(stage, shardwell={"divergence_timeout": LIMIT})
    engine, *_ = shardwell.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)
    good, bad, heard = batches(1, 2)[0], torch.full((2, 9), 1000), []
    for batch in (good, bad if dist.get_rank() else good, good):
        try:
            engine.backward(engine(batch))
            engine.step()
        except Exception as error:
            heard.append(f"{type(error).__name__}: {error}")
    return heard


@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_that_catches_its_error_and_goes_on_hears_what_to_do_as_all_do(ranks: Ranks, stage: int) -> None:
    other, culprit = ranks.run(2, catch_and_go_on, stage)
    assert culprit[0].startswith("IndexError")
    assert "IndexError in forward" in culprit[1]
    assert "on this rank, 1" in culprit[1]
    assert "rank 1 failed first: IndexError in forward" in other[0]
    for words in (culprit[1], other[0]):
        assert "Start again from the last checkpoint, and leave out what may fail" in words


def use_after_failure() -> str:
    first = raise_in_forward(3, "forward")
    assert first["error"]
    return first["error"]


def test_the_pool_of_ranks_survives_a_failed_engine(ranks: Ranks) -> None:
    assert ranks.run(2, use_after_failure) == ["PeerError", "ValueError"]
    assert ranks.run(2, run_orders, 3, [SAME])[0]["error"] == ""
