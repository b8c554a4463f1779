"""Optimizer state that is not of the parameter's shape keeps its types, shapes and dtypes, wherever it goes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwell
from shardwell.errors import CheckpointError
from shardwell.utils import safe_get_full_optimizer_state
from tests.support.models import zero
from tests.support.ranks import Ranks


class Odd(torch.optim.Optimizer):
    """Plain descent that keeps all kinds of things."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(first(p))
                state["n"] += 1
                state["t"] += 1
                state["step"] += 1
                state["moved"] = state["n"] > 1
                state["sum"] += p.grad
                state["signs"] = p.grad > 0
                p.sub_(p.grad, alpha=group["lr"] / state["n"])


def first(p: Tensor) -> dict[str, Any]:
    return {
        "n": 0,
        "t": torch.zeros(1),
        "step": torch.zeros(()),
        "whole": torch.tensor(7),
        "short": torch.tensor([[1.5], [float("nan")]], dtype=torch.bfloat16),
        "moved": False,
        "name": "odd",
        "nothing": None,
        "pair": (1, [2.5, "three"]),
        "rate": 0.25,
        "sum": torch.zeros_like(p),
        "signs": torch.zeros_like(p, dtype=torch.bool),
    }


EXPECTED = {**first(torch.zeros(1)), "n": 2, "t": torch.full((1,), 2.0), "step": torch.tensor(2.0), "moved": True}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        equal = isinstance(b, Tensor) and (a.shape, a.dtype) == (b.shape, b.dtype)
        return equal and torch.equal(a.nan_to_num(), b.nan_to_num())
    return type(a) is type(b) and a == b


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3), nn.Linear(3, 1))


def built(stage: int, model: nn.Module | None = None) -> shardwell.Engine:
    model = model if model is not None else net()
    config = zero(stage, shardwell={"shard_at_world_one": True})
    return shardwell.initialize(model=model, optimizer=Odd(model.parameters()), config=config, device="cpu").engine


def train(engine: shardwell.Engine, steps: int) -> None:
    for number in range(steps):
        generator = torch.Generator().manual_seed(number)
        engine.backward(engine(torch.randn(4, 3, generator=generator)).square().mean())
        engine.step()


def wrong(engine: shardwell.Engine) -> list[str]:
    """Which entries of which shards are not what they were."""
    found = []
    for shard in engine.optimizer.shards:
        state = engine.optimizer.state[shard.tensor]
        for key in EXPECTED:
            if key in ("sum", "signs"):
                if key not in state or state[key].shape != shard.tensor.shape:
                    found.append(f"{key}: not of the shape")
                elif state[key].dtype != EXPECTED[key].dtype:
                    found.append(f"{key}: {state[key].dtype}")
            elif key not in state or not same(state[key], EXPECTED[key]):
                found.append(f"{key}: {state.get(key, 'missing')!r}")
    return sorted(set(found))


def save_odd(stage: int, root: str) -> list[str]:
    engine = built(stage)
    train(engine, 2)
    engine.save_checkpoint(root)
    return wrong(engine)


def load_odd(stage: int, root: str) -> list[str]:
    engine = built(stage)
    engine.load_checkpoint(root, strict=True)
    found = wrong(engine)
    train(engine, 1)  # with state of its own
    engine.load_checkpoint(root, strict=True)
    return found + wrong(engine)


@pytest.mark.parametrize(("stage", "writers", "readers"), [(1, 2, 2), (3, 2, 3), (2, 3, 1)])
def test_odd_state_keeps_its_types_in_checkpoints(
    ranks: Ranks, tmp_path: Path, stage: int, writers: int, readers: int
) -> None:
    assert ranks.run(writers, save_odd, stage, str(tmp_path)) == [[]] * writers
    assert ranks.run(readers, load_odd, stage, str(tmp_path)) == [[]] * readers


def refit_odd(stage: int) -> list[str]:
    engine = built(stage)
    train(engine, 2)
    engine.module[1].weight = nn.Parameter(torch.ones(3, 5))  # its unit is built anew; the bias keeps its state
    engine.fit_to_model()
    state = [
        (key, safe_get_full_optimizer_state(engine.module[1].bias, key))
        for key in EXPECTED
        if key not in ("sum", "signs", "step")
    ]
    return [f"{key}: {value!r}" for key, value in state if not same(value, EXPECTED[key])]


@pytest.mark.parametrize("stage", [0, 3])
def test_odd_state_keeps_its_types_when_its_unit_is_built_anew(ranks: Ranks, stage: int) -> None:
    assert ranks.run(2, refit_odd, stage) == [[], []]


def test_an_older_number_becomes_what_the_optimizer_keeps(tmp_path: Path) -> None:
    engine = built(1)
    train(engine, 1)
    (shard, *_) = engine.optimizer.shards
    assert engine.optimizer.scalar(shard.tensor, 3, 5.0) == 5
    assert type(engine.optimizer.scalar(shard.tensor, 3, 5.0)) is int


def test_large_state_that_cannot_be_cut_is_refused_by_name(tmp_path: Path) -> None:
    engine = built(1)
    train(engine, 1)
    (shard, *_) = engine.optimizer.shards
    engine.optimizer.state[shard.tensor]["table"] = torch.zeros(20_000)
    with pytest.raises(CheckpointError, match=r"weight/table: a tensor of shape \(20000,\) is not of"):
        engine.save_checkpoint(tmp_path)


def test_odd_state_trains_on_as_without_the_checkpoint(tmp_path: Path) -> None:
    through = built(1)
    train(through, 2)
    through.save_checkpoint(tmp_path)
    after = built(1, copy.deepcopy(net()))
    after.load_checkpoint(tmp_path, strict=True)
    for engine in (through, after):
        train(engine, 2)
    for name, value in through.state_dict().items():
        assert torch.equal(value, after.state_dict()[name]), name
