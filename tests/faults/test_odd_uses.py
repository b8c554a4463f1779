"""What people do to an engine that it is not made for works, or is told in one sentence."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import shardwell
from shardwell.errors import ShardwellError
from tests.support.models import zero


def engine(stage: int = 2, accumulation: int = 1) -> shardwell.Engine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    config = {**zero(stage, shardwell={"shard_at_world_one": True}), "gradient_accumulation_steps": accumulation}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return shardwell.initialize(model=model, optimizer=optimizer, config=config, device="cpu").engine


def train(it: shardwell.Engine, times: int, after: Any = None) -> None:
    for _ in range(times):
        it.backward(it(torch.ones(2, 4)).sum())
        if after is not None:
            after()


@pytest.mark.parametrize("plain", [False, True], ids=["engine.backward", "loss.backward"])
@pytest.mark.parametrize(("stage", "accumulation"), [(0, 1), (1, 2), (2, 1), (3, 1), (3, 2)])
def test_a_loop_that_never_steps_is_told_once(stage: int, accumulation: int, plain: bool) -> None:
    it = engine(stage, accumulation)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(12):
            loss = it(torch.ones(2, 4)).sum()
            loss.backward() if plain else it.backward(loss)
    assert len(caught) == 1
    assert "engine.step() was never called: nothing is trained" in str(caught[0].message)
    assert caught[0].filename == __file__


def test_loops_that_step_are_not_told_anything() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        it = engine(2, 3)
        train(it, 20, it.step)
        it = engine(3)
        train(it, 9, it.zero_grad)  # trials
        it = engine(2)
        with it.no_sync():
            train(it, 8)
        train(it, 1, it.step)
        it = engine(2)
        train(it, 8, lambda: (it.optimizer.step(), it.optimizer.zero_grad()))
        it = engine(2)
        train(it, 1)
        with torch.no_grad():
            for _ in range(9):
                it(torch.ones(2, 4))


@pytest.mark.parametrize("way", ["torch.save", "pickle", "deepcopy"])
def test_an_engine_is_not_pickled_but_says_what_to_do(way: str) -> None:
    it = engine()
    ways: dict[str, Any] = {
        "torch.save": lambda: torch.save(it, io.BytesIO()),
        "pickle": lambda: pickle.dumps(it),
        "deepcopy": lambda: copy.deepcopy(it),
    }
    with pytest.raises(ShardwellError, match=r"cannot be pickled or copied .* Use engine.save_checkpoint"):
        ways[way]()


def test_reports_are_readable_in_notebooks(monkeypatch: pytest.MonkeyPatch) -> None:
    it = engine()
    train(it, 1, it.step)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    for report, words in ((it.memory(), "memory on this rank"), (it.traffic(), "received by this rank")):
        assert words in str(report)
        assert report._repr_html_().startswith("<table>")
        assert words in report._repr_html_()
        told: list[str] = []
        printer = type("Printer", (), {"text": staticmethod(told.append)})
        report._repr_pretty_(printer, False)
        assert told == [str(report)]
