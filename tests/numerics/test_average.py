"""Averages over shards equal those of a plain model; snapshots are whole and exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shardwell
from shardwell.errors import ShardwellError
from shardwell.utils import ExponentialMovingAverage, safe_get_full_fp32_param
from tests.support.models import Gpt, batches, share, zero
from tests.support.ranks import Ranks

DECAY, STEPS, ROWS = 0.7, 4, 4
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
WAYS = {
    "stage 0": (0, {}),
    "stage 1": (1, {}),
    "stage 2": (2, {}),
    "stage 3": (3, {}),
    "stage 1 on the host": (1, OFFLOAD),
    "stage 3 on the host": (3, {**OFFLOAD, "offload_param": {"device": "cpu"}}),
}


def gpt() -> nn.Module:
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        model = Gpt(blocks=2)
    finally:
        torch.set_default_dtype(before)
    model.blocks[0].norm1.requires_grad_(False)
    return model


def plainly() -> tuple[dict[str, Any], float, dict[str, Any]]:
    model = gpt()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for batch in batches(STEPS, ROWS):
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()
        average.update_parameters(model)
    averages = {name: p.detach().numpy() for name, p in average.module.named_parameters() if p.requires_grad}
    final = {name: p.detach().numpy() for name, p in model.named_parameters()}
    return averages, float(average(batches(1, ROWS, seed=5)[0]).detach()), final


def built(stage: int, more: dict[str, Any], dtype: str = "") -> shardwell.Engine:
    model = gpt() if not dtype else Gpt(blocks=2)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)
    config = zero(stage, zero_optimization=more, **({dtype: {"enabled": True}} if dtype else {}))
    return shardwell.initialize(model=model, optimizer=optimizer, config=config, device="cpu").engine


def mean_loss(engine: shardwell.Engine, batch: torch.Tensor) -> float:
    with torch.no_grad():
        loss = engine(share(batch, dist.get_rank(), dist.get_world_size())).double()
    dist.all_reduce(loss)
    return float(loss) / dist.get_world_size()


def train(engine: shardwell.Engine, average: ExponentialMovingAverage, first: int, last: int) -> None:
    for number, batch in enumerate(batches(STEPS, ROWS)):
        if first <= number < last:
            engine.backward(engine(share(batch, dist.get_rank(), dist.get_world_size())))
            engine.step()
            average.update()
            if number == 1:  # a look in between changes nothing
                with average.swapped():
                    mean_loss(engine, batch)


def averaged(way: str, root: str) -> tuple[dict[str, Any], float, dict[str, Any], bool]:
    stage, more = WAYS[way]
    engine = built(stage, more)
    average = ExponentialMovingAverage(engine, DECAY, device="cpu" if stage == 2 else None)
    train(engine, average, 0, 3)
    engine.save_checkpoint(root, client_state={"ema": average.state_dict(rank0_only=True)})
    other = built(stage, more)
    _, client = other.load_checkpoint(root, strict=True)
    again = ExponentialMovingAverage(other, 0.1)
    again.load_state_dict(client["ema"])
    train(other, again, 3, STEPS)
    before = other.parameters_snapshot()
    with again.swapped():
        loss = mean_loss(other, batches(1, ROWS, seed=5)[0])
        inside = other.parameters_snapshot()
    final = other.parameters_snapshot()
    same = all(torch.equal(before[name], final[name]) for name in before)
    trained = again.state_dict()["parameters"]
    same = same and all(torch.equal(inside[name], trained[name]) for name in trained)
    return trained, loss, final, same


@pytest.mark.parametrize("way", WAYS)
def test_averages_are_those_of_a_plain_model(ranks: Ranks, tmp_path: Path, way: str) -> None:
    averages, loss, final = plainly()
    for found, its_loss, its_final, same in ranks.run(2, averaged, way, str(tmp_path)):
        assert found.keys() == averages.keys()
        assert max(abs(found[name] - averages[name]).max() for name in averages) < 1e-10
        assert max(abs(its_final[name] - final[name]).max() for name in final) < 1e-10
        assert abs(its_loss - loss) < 1e-10
        assert same


def halves(stage: int) -> tuple[list[str], list[str]]:
    """Averages that are not those of the masters, and values of a snapshot that are not the masters."""
    torch.manual_seed(0)
    engine = built(stage, {}, "bf16")
    average = ExponentialMovingAverage(engine, DECAY)
    names = dict(engine.module.named_parameters())
    masters: dict[str, Any] = {}
    expected: dict[str, Any] = {}
    for batch in batches(3, ROWS):
        engine.backward(engine(share(batch, dist.get_rank(), dist.get_world_size())))
        engine.step()
        average.update()
        masters = {name: safe_get_full_fp32_param(parameter) for name, parameter in names.items()}
        expected = {n: expected[n].lerp(m, 1 - DECAY) if n in expected else m for n, m in masters.items()}
    with average.swapped():
        pass
    found, snapshot = average.state_dict()["parameters"], engine.parameters_snapshot()
    return (
        [name for name in names if not torch.equal(found[name], expected[name])],
        [n for n in names if snapshot[n].dtype != torch.float32 or not torch.equal(snapshot[n], masters[n])],
    )


@pytest.mark.parametrize("stage", [1, 3])
def test_averages_and_snapshots_are_of_the_fp32_masters(ranks: Ranks, stage: int) -> None:
    assert ranks.run(2, halves, stage) == [([], [])] * 2


def alone() -> shardwell.Engine:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = zero(3, shardwell={"shard_at_world_one": True})
    return shardwell.initialize(model=model, optimizer=optimizer, config=config, device="cpu").engine


def test_training_on_averages_is_told() -> None:
    engine = alone()
    average = ExponentialMovingAverage(engine)

    def step() -> None:
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()

    def inside() -> None:
        with average.swapped():
            step()

    with pytest.raises(ShardwellError, match=r"engine.step\(\) was called inside"):
        inside()
    with average.swapped(), pytest.raises(ShardwellError, match="leave swapped"):
        average.update()
    step()
    average.update()


def test_averages_of_another_model_are_refused() -> None:
    average = ExponentialMovingAverage(alone())
    state = average.state_dict()
    state["parameters"].pop("0.weight")
    with pytest.raises(ShardwellError, match=r"those of another model: '0.weight'"):
        average.load_state_dict(state)
    with pytest.raises(ShardwellError, match="decay=2"):
        ExponentialMovingAverage(alone(), decay=2)
    engine = alone()
    average = ExponentialMovingAverage(engine)
    engine.module[0].weight = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(ShardwellError, match="were added, removed"):
        average.update()
