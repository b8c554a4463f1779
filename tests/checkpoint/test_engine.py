"""What `save_checkpoint` and `load_checkpoint` carry, and how they behave."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwell
from shardwell.checkpoint import Folder
from shardwell.checkpoint import load as loading
from shardwell.checkpoint import save as saving
from shardwell.checkpoint.sources import OwnSource
from shardwell.errors import CheckpointError
from shardwell.optim.lamb import Lamb
from shardwell.optim.lion import Lion
from shardwell.optim.muon import Muon
from shardwell.utils import safe_get_full_fp32_param
from tests.checkpoint.legs import Leg, everything, run_leg
from tests.models import Gpt, batches, share, whole_parameters, zero
from tests.parity.loops import Case
from tests.ranks import Ranks

CASE = Case(dtype=torch.float32)


def alone(stage: int = 3, **config: Any) -> shardwell.Engine:
    torch.manual_seed(0)
    model = Gpt()
    config = zero(stage, **{"shardwell": {"shard_at_world_one": True}, **config})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return shardwell.initialize(model=model, optimizer=optimizer, config=config, device="cpu").engine


def step(engine: shardwell.Engine, number: int = 0) -> None:
    engine.backward(engine(batches(number + 1, 4)[number]))
    engine.step()


# ------------------------------------------------------------------------------------------------------ surface


def test_tags_latest_and_client_state(tmp_path: Path) -> None:
    engine = alone()
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
    del crashed._locks[left.name]
    (left / ".lock").unlink()
    alone().load_checkpoint(tmp_path)
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
    alone, other = ranks.run(2, at_one_rank_only, stage, str(tmp_path), limit=60)
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
        steps(whole, 0, 5)
        first = engine_at(3, name)
        steps(first, 0, 3)
        first.save_checkpoint(f"{root}/{name}")
        second = engine_at(1, name)
        second.load_checkpoint(f"{root}/{name}")
        steps(second, 3, 5)
        expected, found = whole_parameters(whole.module), whole_parameters(second.module)
        far[name] = max(float((expected[key] - found[key]).norm() / expected[key].norm()) for key in expected)
    return far


def test_the_state_of_any_optimizer_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    for name, distance in ranks.run(2, optimizers_go_on, str(tmp_path), list(OPTIMIZERS), limit=240)[0].items():
        assert distance < 1e-9, name


def test_another_optimizer_is_refused_unless_the_model_alone_is_wanted(tmp_path: Path) -> None:
    engine = alone()
    step(engine)
    engine.save_checkpoint(tmp_path)
    model = Gpt()
    config = zero(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = shardwell.initialize(model=model, optimizer=optimizer, config=config, device="cpu").engine
    before = whole_parameters(model)
    with pytest.raises(CheckpointError, match="holds the state of AdamW, and this engine's optimizer is SGD"):
        other.load_checkpoint(tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in whole_parameters(model).items())
    other.load_checkpoint(tmp_path, load_optimizer_states=False)
    for name, value in whole_parameters(engine.module).items():
        assert torch.equal(value, whole_parameters(model)[name])
    assert other.get_lr() == [0.1]
    assert other.global_steps == 1


def test_the_module_alone_leaves_counters_schedules_and_state(tmp_path: Path) -> None:
    engine = alone()
    step(engine)
    engine.save_checkpoint(tmp_path)
    other = alone()
    other.load_checkpoint(tmp_path, load_module_only=True)
    assert other.global_steps == 0
    assert not other.optimizer.state
    assert all(torch.equal(a, b) for a, b in zip(masters(engine), masters(other), strict=True))


def masters(engine: shardwell.Engine) -> list[Tensor]:
    return [safe_get_full_fp32_param(parameter) for parameter in engine.module.parameters()]


def load_while_whole(root: str) -> list[bool]:
    """A forward that fails leaves units whole; what is loaded must be in them too."""
    engine = Leg(3, 0, 1, CASE, loads=False).engine()
    engine.save_checkpoint(root)
    expected = whole_parameters(engine.module)
    other = Leg(3, 0, 1, CASE).engine()
    handle = other.module.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), torch.no_grad():
        other.module(batches(1, 4)[0])
    handle.remove()
    assert any(unit.residency.name != "RELEASED" for unit in other._flow.units)
    other.load_checkpoint(root)
    found = whole_parameters(other.module)
    return [bool(torch.equal(found[name], expected[name])) for name in expected]


def test_units_that_are_whole_take_what_is_loaded(ranks: Ranks, tmp_path: Path) -> None:
    assert all(equal for answer in ranks.run(2, load_while_whole, str(tmp_path)) for equal in answer)


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


# ------------------------------------------------------------------------------------------------------- frozen


def test_frozen_parameters_can_be_left_out(tmp_path: Path) -> None:
    def build(fill: float) -> shardwell.Engine:
        torch.manual_seed(0)
        model = Gpt()
        model.blocks[0].requires_grad_(False)
        with torch.no_grad():
            model.blocks[0].qkv.weight.fill_(fill)
        config = zero(3, bf16={"enabled": True}, shardwell={"shard_at_world_one": True})
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        return shardwell.initialize(model=model, optimizer=optimizer, config=config, device="cpu").engine

    engine = build(0.25)
    step(engine)
    engine.save_checkpoint(tmp_path, "whole")
    engine.save_checkpoint(tmp_path, "less", exclude_frozen_parameters=True)
    sizes = [sum(file.size for file in Folder(tmp_path).open(tag).files.values()) for tag in ("whole", "less")]
    frozen = sum(p.numel() for p in engine.module.blocks[0].parameters())
    assert sizes[0] - sizes[1] >= 2 * frozen  # bf16
    for tag, expected in (("whole", 0.25), ("less", 0.5)):
        other = build(0.5)
        other.load_checkpoint(tmp_path, tag)
        assert float(whole_parameters(other.module)["blocks.0.qkv.weight"][0, 0]) == expected
        assert torch.equal(masters(other)[0], masters(engine)[0])


def test_what_was_trained_and_is_frozen_now_and_the_other_way_round(tmp_path: Path) -> None:
    engine = alone(stage=2)
    step(engine)
    engine.save_checkpoint(tmp_path)
    model = Gpt()
    model.blocks[1].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = zero(3, shardwell={"shard_at_world_one": True})
    other = shardwell.initialize(model=model, optimizer=optimizer, config=config, device="cpu").engine
    other.load_checkpoint(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(masters(engine), masters(other), strict=True))
    step(other, 1)
    other.save_checkpoint(tmp_path, "frozen")
    third = alone(stage=1)
    third.load_checkpoint(tmp_path, "frozen")  # the state of blocks.1 is not there: it starts anew
    step(third, 2)
    assert int(third.optimizer.global_norm().isfinite())


def bytes_read(monkeypatch: pytest.MonkeyPatch, load: Callable[[], Any]) -> int:
    """Of tensors, while an engine loads."""
    counts: list[int] = []
    close = OwnSource.close
    monkeypatch.setattr(OwnSource, "close", lambda self: (counts.append(self.bytes_read), close(self))[1])
    load()
    monkeypatch.undo()
    return counts[0]


def check_same(one: shardwell.Engine, other: shardwell.Engine) -> None:
    expected, found = everything(one), everything(other)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(value)), name


@pytest.mark.parametrize("stage", [1, 3])
def test_with_too_little_memory_everything_is_read_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    engine = alone(stage)
    step(engine)
    engine.save_checkpoint(tmp_path)
    other, scarce = alone(stage), alone(stage)
    once = bytes_read(monkeypatch, lambda: other.load_checkpoint(tmp_path))
    monkeypatch.setattr(loading, "_SHARE", 0.0)
    twice = bytes_read(monkeypatch, lambda: scarce.load_checkpoint(tmp_path))
    check_same(engine, other)
    check_same(engine, scarce)
    assert 1.5 * once < twice <= 2 * once


def test_parameters_of_a_unit_that_differ_in_their_state_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Gpt()
    model.blocks[1].up.weight.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    config = zero(1)
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=config, device="cpu").engine
    step(engine)
    engine.save_checkpoint(tmp_path)
    other = alone(1)
    step(other)
    numel = sum(p.numel() for p in model.parameters()) + 2 * sum(p.numel() for p in trained)
    read = bytes_read(monkeypatch, lambda: other.load_checkpoint(tmp_path))
    assert 4 * numel <= read <= 4 * numel + 10_000  # random states
    found = everything(other)
    assert "blocks.1.up.weight exp_avg" not in found  # it was frozen, and starts anew
    for name, value in everything(engine).items():
        assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(value)), name


def test_tied_weights_load_into_untied_ones_and_back(tmp_path: Path) -> None:
    def engine_of(tied: bool, stage: int) -> shardwell.Engine:
        torch.manual_seed(3 + tied)
        model = Gpt(tied=tied)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        config = zero(stage, shardwell={"shard_at_world_one": True})
        return shardwell.initialize(model=model, optimizer=optimizer, config=config, device="cpu").engine

    tied = engine_of(True, 3)
    step(tied)
    tied.save_checkpoint(tmp_path)
    untied = engine_of(False, 1)
    untied.load_checkpoint(tmp_path)
    expected = whole_parameters(tied.module)["embed.weight"]
    found = whole_parameters(untied.module)
    assert torch.equal(found["embed.weight"], expected)
    assert torch.equal(found["head.weight"], expected)


class Picture(nn.Module):
    def __init__(self, order: torch.memory_format) -> None:
        super().__init__()
        self.one = nn.Conv2d(3, 8, 3).to(memory_format=order)
        self.two = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x).mean((2, 3))).square().mean()


def test_memory_orders_are_converted(tmp_path: Path) -> None:
    def engine_of(order: torch.memory_format, seed: int) -> shardwell.Engine:
        torch.manual_seed(seed)
        model = Picture(order)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        config = zero(3, shardwell={"shard_at_world_one": True})
        return shardwell.initialize(model=model, optimizer=optimizer, config=config, device="cpu").engine

    for save, load in [(torch.channels_last, torch.contiguous_format), (torch.contiguous_format, torch.channels_last)]:
        first, second = engine_of(save, 0), engine_of(load, 1)
        for engine in (first,):
            engine.backward(engine(torch.randn(2, 3, 6, 6)))
            engine.step()
        first.save_checkpoint(tmp_path, tag=str(save))
        second.load_checkpoint(tmp_path, tag=str(save))
        expected, found = everything(first), everything(second)
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(value)), name


# ------------------------------------------------------------------------------------------------ in the background


@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
def test_a_save_in_the_background_holds_the_state_of_its_moment(
    ranks: Ranks, tmp_path: Path, precision: dict[str, Any]
) -> None:
    first = Leg(2, 0, 2, CASE, precision, loads=False, options={"tag": "now"})
    ranks.run(2, run_leg, first, str(tmp_path))
    ranks.run(2, save_and_go_on, first, str(tmp_path))
    now = ranks.run(2, load_tag, first, str(tmp_path), "now")[0]
    later = ranks.run(2, load_tag, first, str(tmp_path), "later")[0]
    assert now.keys() == later.keys()
    for name, value in now.items():
        assert np.array_equal(value, later[name]), name


def save_and_go_on(leg: Leg, root: str) -> None:
    engine = leg.engine()
    hold, write = threading.Event(), saving.stream
    data = [share(batch, dist.get_rank(), dist.get_world_size()) for batch in batches(6, 48)]
    for number, batch in enumerate(data):
        engine.backward(engine(batch))
        engine.step()
        if number == 1:
            saving.stream = lambda *args: (hold.wait(), write(*args))[1]  # nothing is written before training goes on
            engine.save_checkpoint(root, "later", asynchronous=True)
    assert not Folder(root).is_committed("later")
    hold.set()
    engine.finish_saving()
    saving.stream = write
    assert Folder(root).is_committed("later")


def load_tag(leg: Leg, root: str, tag: str) -> dict[str, Any]:
    engine = leg.engine()
    engine.load_checkpoint(root, tag)
    return everything(engine)


def errors_in_the_background(root: str) -> list[str]:
    engine = Leg(1, 0, 1, CASE, loads=False).engine()
    rows = share(batches(1, 48)[0], dist.get_rank(), dist.get_world_size())
    write, found = saving.stream, []

    def failing(path: Path, *args: Any) -> Any:
        if dist.get_rank() == 1:
            raise CheckpointError(f"{path}: cannot be written (No space left on device)")
        return write(path, *args)

    saving.stream = failing  # type: ignore[assignment]
    engine.save_checkpoint(root, "bad", asynchronous=True)
    while engine._checkpoints._saver._thread.is_alive():
        time.sleep(0.01)
    saving.stream = write
    engine.backward(engine(rows))
    try:
        engine.step()
    except CheckpointError as error:
        found.append(str(error))
    engine.step()  # the gradients are still there
    engine.save_checkpoint(root, "good", asynchronous=True)
    engine.save_checkpoint(root, "better")  # waits for the one before
    assert Folder(root).tags() == ["better", "good"]
    found.append(f"{engine.global_steps} step, {sorted(p.name for p in Path(root).iterdir())}")
    return found


def test_errors_in_the_background_come_up_at_the_next_step_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    for error, rest in ranks.run(2, errors_in_the_background, str(tmp_path)):
        assert "rank 1: " in error
        assert "rank-00001.safetensors: cannot be written (No space left on device)" in error
        assert rest == "1 step, ['better', 'good', 'latest']"


def test_the_memory_of_a_snapshot_is_used_again_and_in_the_books(tmp_path: Path) -> None:
    engine = alone()
    step(engine)
    before = engine.memory().total()
    engine.save_checkpoint(tmp_path, "one", asynchronous=True)
    snapshot = engine._checkpoints._saver._snapshot
    engine.finish_saving()
    address, size = snapshot._memory.data_ptr(), snapshot._memory.numel()
    assert engine.memory().total() == before + size
    numel = sum(p.numel() for p in engine.module.parameters())
    assert 12 * numel <= size <= 12 * numel + 64 * 200 + 20_000  # fp32 master and moments; padding; random states
    step(engine)
    engine.save_checkpoint(tmp_path, "two", asynchronous=True)
    engine.finish_saving()
    assert snapshot._memory.data_ptr() == address


def test_engines_that_saved_are_collected(tmp_path: Path) -> None:
    engine = alone()
    engine.save_checkpoint(tmp_path, asynchronous=True)
    engine.finish_saving()
    reference = weakref.ref(engine)
    engine.destroy()
    del engine
    gc.collect()
    assert reference() is None
