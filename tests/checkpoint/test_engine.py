"""What `save_checkpoint` and `load_checkpoint` carry, and how they behave."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwell
from shardwell.checkpoint import Folder
from shardwell.errors import CheckpointError
from shardwell.optim.lamb import Lamb
from shardwell.optim.lion import Lion
from shardwell.optim.muon import Muon
from tests.support.checkpoint_engines import CASE, alone, masters, step
from tests.support.checkpoint_legs import Leg
from tests.support.internals import locks_of
from tests.support.models import batches, share, whole_parameters, zero
from tests.support.ranks import Ranks
from tests.support.training import Case

# ------------------------------------------------------------------------------------------------------ surface


def test_tags_latest_and_client_state(tmp_path: Path) -> None:
    engine = alone()
    with pytest.warns(UserWarning, match="nothing was loaded"):
        assert engine.load_checkpoint(tmp_path / "none yet") == (None, None)
    step(engine)
    client = {
        "epoch": 3,
        "best": float("inf"),
        "shape": (2, 3),
        "by number": {1: "one", 2: [None, True]},
        "tensor": torch.arange(6, dtype=torch.bfloat16).view(2, 3).T,
        "array": np.arange(4, dtype=np.uint32),
        "rate": np.float64(0.5),
        "$sign": "a key like ours",
    }
    engine.save_checkpoint(tmp_path, client_state=client)
    step(engine)
    engine.save_checkpoint(tmp_path, tag="best", save_latest=False)
    assert (tmp_path / "latest").read_text().strip() == "global_step1"
    path, found = alone().load_checkpoint(tmp_path)
    assert path == str(tmp_path / "global_step1")
    assert torch.equal(found.pop("tensor"), client.pop("tensor"))
    assert (found.pop("array") == client.pop("array")).all()
    assert found == client
    other = alone()
    assert other.load_checkpoint(tmp_path, "best") == (str(tmp_path / "best"), {})
    assert (other.global_steps, other.global_samples) == (2, 2)
    with pytest.raises(CheckpointError, match="no such checkpoint; those here are: best, global_step1"):
        other.load_checkpoint(tmp_path, tag="global_step7")


def test_what_cannot_be_saved_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    engine = alone()
    with pytest.raises(
        CheckpointError, match=r"client_state\.model\[0\]: a Linear cannot be saved: nothing is pickled"
    ):
        engine.save_checkpoint(tmp_path, client_state={"model": [nn.Linear(1, 1)]})
    engine.save_checkpoint(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step0", "latest"]


def test_old_checkpoints_go_when_only_some_are_kept(tmp_path: Path) -> None:
    engine = alone(shardwell={"keep_last": 2})
    for number in range(4):
        step(engine, number)
        engine.save_checkpoint(tmp_path)
    assert Folder(tmp_path).tags() == ["global_step4", "global_step3"]


def test_leftovers_of_a_crash_go_and_a_save_of_another_job_stays(tmp_path: Path) -> None:
    crashed, living = Folder(tmp_path), Folder(tmp_path)
    left, written = crashed.begin("global_step9"), living.begin("global_step10")
    os.close(locks_of(crashed).pop(left.name))
    engine = alone()
    with pytest.warns(UserWarning, match="nothing was loaded"):
        engine.load_checkpoint(tmp_path)
    assert left.exists()  # who reads removes nothing
    engine.save_checkpoint(tmp_path)
    assert not left.exists()
    assert written.exists()
    living.discard(written)


def at_one_rank_only(stage: int, root: str) -> str:
    engine = Leg(stage, 0, 1, CASE, {"shardwell": {"divergence_timeout": 2.0}}, loads=False).engine()
    batch = share(batches(1, 4)[0], dist.get_rank(), dist.get_world_size())
    try:
        for _ in range(3):
            engine.backward(engine(batch))
            engine.step()
            if engine.global_steps == 2 and dist.get_rank() == 0:
                engine.save_checkpoint(root)
        time.sleep(6.0 if dist.get_rank() else 0.0)
    except shardwell.ShardwellError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_that_saves_alone_gets_an_error_and_no_hang(ranks: Ranks, tmp_path: Path, stage: int) -> None:
    alone, other = ranks.run(2, at_one_rank_only, stage, str(tmp_path))
    assert alone.startswith("DivergenceError"), alone
    assert "save_checkpoint('global_step2')" in alone
    assert "All ranks must call save_checkpoint" in alone
    assert "save_checkpoint" in other, other
    assert Folder(tmp_path).tags() == []


# -------------------------------------------------------------------------------------------- more than tensors


class Counting(nn.Module):
    """Buffers of all kinds, a state that is no tensor, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 7), nn.Linear(7, 3)
        self.norm = nn.BatchNorm1d(7)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("passing", torch.zeros(2), persistent=False)
        self.calls = 0

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls, "squares": (1, 4)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.two(self.drop(self.norm(self.one(x)).relu())).square().mean()


def counting_engine(stage: int) -> shardwell.Engine:
    torch.manual_seed(0)
    model = Counting()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 0.8**number)
    config = zero(stage, fp16={"enabled": False}, shardwell={"shard_at_world_one": True})
    return shardwell.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config).engine


def go_on_at_random(stage: int, root: str) -> dict[str, Any]:
    """Three steps, a checkpoint, three steps; and the last three again in a new engine with other random states."""

    def steps(engine: shardwell.Engine) -> list[float]:
        losses = []
        for _ in range(3):
            x = torch.randn(5, 6) + random.random() + float(np.random.rand())
            loss = engine(x)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        return losses

    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5 + dist.get_rank())
    engine = counting_engine(stage)
    steps(engine)
    engine.save_checkpoint(root)
    expected = steps(engine), engine.get_lr(), engine.module.calls, whole_parameters(engine.module)
    torch.manual_seed(99)
    random.seed(98)
    other = counting_engine(stage)
    other.load_checkpoint(root)
    found = steps(other), other.get_lr(), other.module.calls, whole_parameters(other.module)
    buffers = [bool(torch.equal(a, b)) for a, b in zip(engine.module.buffers(), other.module.buffers(), strict=True)]
    return {"expected": expected, "found": found, "buffers": buffers}


@pytest.mark.parametrize("stage", [1, 3])
def test_random_states_schedules_buffers_and_extra_state_come_back(ranks: Ranks, tmp_path: Path, stage: int) -> None:
    answers = ranks.run(2, go_on_at_random, stage, str(tmp_path))
    assert answers[0]["expected"][0] != answers[1]["expected"][0]  # ranks draw different numbers
    for answer in answers:
        losses, rates, calls, parameters = answer["found"]
        assert losses == answer["expected"][0]
        assert rates == answer["expected"][1] == pytest.approx([1e-2 * 0.8**6])
        assert calls == answer["expected"][2]
        for name, value in answer["expected"][3].items():
            assert (parameters[name] == value).all(), name
    assert all(answers[0]["buffers"])  # running statistics are each rank's own; rank 0's are saved


def test_the_loss_scale_goes_on(tmp_path: Path) -> None:
    block = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2}
    engine = alone(fp16=block)
    for number in range(3):
        step(engine, number)
    engine.save_checkpoint(tmp_path)
    other = alone(fp16=block)
    other.load_checkpoint(tmp_path)
    assert other.loss_scale == engine.loss_scale == 32.0
    step(engine, 3)
    step(other, 3)
    assert other.loss_scale == engine.loss_scale == 64.0
    plain = alone()
    plain.load_checkpoint(tmp_path)
    assert plain.loss_scale == 1.0


OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.2),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "Lion": lambda p: Lion(p, lr=0.01),
    "Lamb": lambda p: Lamb(p, lr=0.01),
    "Muon": lambda p: Muon(p, lr=0.01),
}


def optimizers_go_on(root: str, names: list[str]) -> dict[str, float]:
    """How far a run with a checkpoint in the middle, at another stage after it, is from one without."""

    def engine_at(stage: int, name: str) -> shardwell.Engine:
        model = Case(dtype=torch.float64, model={"blocks": 1}).build()
        parameters = [p for p in model.parameters() if p.ndim == 2] if name == "Muon" else list(model.parameters())
        return shardwell.initialize(model=model, optimizer=OPTIMIZERS[name](parameters), config=zero(stage)).engine

    def steps(engine: shardwell.Engine, first: int, last: int) -> None:
        for batch in batches(last, 8)[first:]:
            engine.backward(engine(share(batch, dist.get_rank(), dist.get_world_size())))
            engine.step()

    far = {}
    for name in names:
        whole = engine_at(3, name)
        steps(whole, 0, 4)
        first = engine_at(3, name)
        steps(first, 0, 2)
        first.save_checkpoint(f"{root}/{name}")
        second = engine_at(1, name)
        second.load_checkpoint(f"{root}/{name}")
        steps(second, 2, 4)
        expected, found = whole_parameters(whole.module), whole_parameters(second.module)
        far[name] = max(float((expected[key] - found[key]).norm() / expected[key].norm()) for key in expected)
    return far


@pytest.mark.slow
def test_the_state_of_any_optimizer_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    for name, distance in ranks.run(2, optimizers_go_on, str(tmp_path), list(OPTIMIZERS))[0].items():
        assert distance < 1e-9, name


def test_a_checkpoint_in_the_middle_of_a_boundary_disturbs_nothing(tmp_path: Path) -> None:
    results = []
    for saves in (False, True):
        engine = alone(stage=1, gradient_accumulation_steps=2, train_micro_batch_size_per_gpu=1)
        for number in range(4):
            loss = engine(batches(number + 1, 4)[number])
            if saves:
                engine.save_checkpoint(tmp_path, f"{number} before")
            engine.backward(loss)
            if saves:
                engine.save_checkpoint(tmp_path, f"{number} after", asynchronous=True)
            engine.step()
        engine.finish_saving()
        results.append(masters(engine))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
