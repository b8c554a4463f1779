"""Whoever reads changes nothing; what was set or loaded is what the next forward uses, with copies and codes too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

import shardwell
from shardwell.utils import safe_get_local_fp32_param, safe_set_local_fp32_param
from shardwell.zero import GatheredParameters
from tests.support.models import Gpt, batches, share, zero
from tests.support.ranks import Ranks

COPIES: dict[str, Any] = {"zero_hpz_partition_size": 2}
CODES: dict[str, Any] = {"zero_quantized_weights": True}
FROZEN: dict[str, Any] = {"zero_quantized_nontrainable_weights": True}


class EarlyExit(nn.Module):
    """As many blocks as the caller wants: the next one may have been gathered already."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4)])

    def forward(self, x: Tensor, depth: int = 4) -> Tensor:
        for block in self.blocks[:depth]:
            x = x + block(x)
        return x.square().mean()


def losses(block: dict[str, Any], looks: bool) -> list[float]:
    torch.manual_seed(0)
    model = Gpt()
    config = zero(3, zero_optimization=block, bf16={"enabled": True})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=config).engine
    found = []
    for batch in batches(3, 12):
        if looks:
            with GatheredParameters(list(model.parameters())):
                pass
            engine.state_dict()
        loss = engine(share(batch, dist.get_rank(), dist.get_world_size()))
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("block", [COPIES, CODES], ids=["copies", "codes"])
def test_looking_changes_nothing(ranks: Ranks, block: dict[str, Any]) -> None:
    assert ranks.run(4, losses, block, True) == ranks.run(4, losses, block, False)


def evaluator(block: dict[str, Any], *, trains: bool) -> Any:
    torch.manual_seed(0)
    model = EarlyExit().requires_grad_(trains)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if trains else None
    config = zero(3, zero_optimization=block, shardwell={"keep_frozen": 0})
    return shardwell.initialize(model=model, optimizer=optimizer, config=config).engine


@torch.no_grad()
def score(engine: Any, depth: int = 4) -> float:
    return float(engine(torch.ones(2, 32), depth))


def after_an_early_exit(engine: Any) -> list[str]:
    """What is on its way when a forward has ended before all that was expected of it."""
    score(engine)
    score(engine, 2)
    return [unit.residency for unit in engine.units if unit.residency != "sharded"]


def set_locally(block: dict[str, Any]) -> dict[str, Any]:
    engine = evaluator(block, trains=True)
    left = after_an_early_exit(engine)
    weight = engine.module.blocks[2][0].weight
    part = safe_get_local_fp32_param(weight)
    refused = False
    if part is not None:
        try:
            safe_set_local_fp32_param(weight, torch.full_like(part, 0.3))
        except shardwell.ShardwellError:
            refused = True
    return {"left": left, "refused": refused, "scores": [score(engine), score(engine)]}


@pytest.mark.parametrize("block", [{}, CODES], ids=["numbers", "codes"])
def test_a_part_that_was_set_after_an_early_exit_is_used(ranks: Ranks, block: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain = EarlyExit()
    plain.blocks[2][0].weight.data.fill_(0.3)
    expected = plain(torch.ones(2, 32)).item()
    for found in ranks.run(4, set_locally, block):
        assert found["left"] == []
        assert not found["refused"]
        assert found["scores"] == pytest.approx([expected] * 2, rel=1e-2 if block else 1e-5)


def test_a_part_of_what_has_a_copy_is_not_set(ranks: Ranks) -> None:
    for found in ranks.run(4, set_locally, COPIES):
        assert found["left"] == []
        assert found["refused"] or found["scores"][0] == found["scores"][1]


def loaded(block: dict[str, Any], path: str) -> list[float]:
    engine = evaluator(block, trains=False)
    after_an_early_exit(engine)
    engine.load_model(path)
    return [score(engine) for _ in range(3)]


@pytest.mark.parametrize("codes", [{}, CODES, FROZEN], ids=["numbers", "codes", "at-rest"])
@pytest.mark.parametrize("copies", [{}, COPIES], ids=["one", "two"])
def test_a_model_that_was_loaded_after_an_early_exit_is_used(
    ranks: Ranks, tmp_path: Path, copies: dict[str, Any], codes: dict[str, Any]
) -> None:
    torch.manual_seed(5)
    other = EarlyExit()
    save_file(other.state_dict(), tmp_path / "model.safetensors")
    expected = other(torch.ones(2, 32)).item()
    for scores in ranks.run(4, loaded, {**copies, **codes}, str(tmp_path / "model.safetensors")):
        assert len(set(scores)) == 1
        assert scores[0] == pytest.approx(expected, rel=1e-2 if codes else 1e-5)
