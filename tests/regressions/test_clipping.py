"""Pain: gradients are clipped at 1.0 although nobody asked, and nobody knows which norm is logged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwell
from tests.support.models import Gpt, batches, share, whole_parameters, zero
from tests.support.ranks import Ranks
from tests.support.training import distance

STEPS, ROWS = 3, 12
LOUD = 40.0  # makes gradients far larger than one


def make() -> Gpt:
    torch.manual_seed(0)
    return Gpt(blocks=1).double()


def plain(clip: float) -> tuple[dict[str, Tensor], list[float]]:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    norms = []
    for batch in batches(STEPS, ROWS):
        optimizer.zero_grad()
        (LOUD * model(batch)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, norms


def train(stage: int, clipping: dict[str, float], accumulation: int) -> dict[str, Any]:
    model = make()
    engine, *_ = shardwell.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        config=zero(stage, gradient_accumulation_steps=accumulation, **clipping),
    )
    norms = []
    for batch in batches(STEPS, ROWS):
        for micro in range(accumulation):
            rows = share(batch, dist.get_rank(), dist.get_world_size(), micro, accumulation)
            engine.backward(LOUD * engine(rows))
            engine.step()
        norms.append(engine.get_global_grad_norm())
    return {"norms": norms, "clip": engine.gradient_clipping(), "parameters": whole_parameters(model)}


def train_all(clipping: dict[str, float], accumulation: int) -> list[dict[str, Any]]:
    return [train(stage, clipping, accumulation) for stage in range(4)]


@pytest.mark.parametrize(("clipping", "accumulation"), [({}, 1), ({}, 3), ({"gradient_clipping": 0.0}, 1)], ids=str)
def test_nothing_is_clipped_unless_asked_for(ranks: Ranks, clipping: dict[str, float], accumulation: int) -> None:
    """An absent key means 1.0 and slows training down silently; here it means no clipping."""
    expected, norms = plain(float("inf"))
    assert min(norms) > 10
    for answer in ranks.run(2, train_all, clipping, accumulation)[0]:
        assert answer["clip"] == 0.0
        difference, name = distance(answer["parameters"], expected)
        assert difference < 1e-12, f"{name} differs by {difference}"
        assert answer["norms"] == pytest.approx(norms, rel=1e-12)


def test_the_norm_is_that_of_the_averaged_gradient_before_clipping(ranks: Ranks) -> None:
    """A logged norm may be a rank's own, scaled or clipped; here it is what torch's clip_grad_norm_ returns."""
    expected, norms = plain(0.5)
    assert min(norms) > 10
    for answers in ranks.run(2, train_all, {"gradient_clipping": 0.5}, 1):
        for answer in answers:
            assert answer["norms"] == pytest.approx(norms, rel=1e-12)
            difference, name = distance(answer["parameters"], expected)
            assert difference < 1e-12, f"{name} differs by {difference}"
