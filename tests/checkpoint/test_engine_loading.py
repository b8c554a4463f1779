"""What `load_checkpoint` takes from a checkpoint, also of a model that is not quite the same, and how much it reads."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwell
from shardwell.checkpoint import Folder
from shardwell.checkpoint import load as loading
from shardwell.checkpoint.load import CheckpointLoader
from shardwell.checkpoint.sources import ShardwellSource
from shardwell.errors import CheckpointError
from shardwell.long_work import LongWork
from tests.support.checkpoint_engines import CASE, alone, masters, step
from tests.support.checkpoint_legs import Leg, everything
from tests.support.models import Gpt, batches, whole_parameters, zero
from tests.support.ranks import Ranks


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


@pytest.mark.parametrize("saved", [True, None])
def test_how_a_step_is_computed_is_not_taken_from_a_checkpoint(saved: bool | None, tmp_path: Path) -> None:
    def engine(fused: bool | None, lr: float) -> shardwell.Engine:
        model = Gpt()
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=fused)
        return shardwell.initialize(model=model, optimizer=optimizer, config=zero(1), device="cpu").engine

    one, other = engine(saved, 0.5), engine(None if saved else True, 0.1)
    step(one)
    one.save_checkpoint(tmp_path)
    other.load_checkpoint(tmp_path)
    assert other.optimizer.param_groups[0]["fused"] is (None if saved else True)
    assert other.get_lr() == [0.5]
    step(other, 1)


def test_the_module_alone_leaves_counters_schedules_and_state(tmp_path: Path) -> None:
    engine = alone()
    step(engine)
    engine.save_checkpoint(tmp_path)
    other = alone()
    other.load_checkpoint(tmp_path, load_module_only=True)
    assert other.global_steps == 0
    assert not other.optimizer.state
    assert all(torch.equal(a, b) for a, b in zip(masters(engine), masters(other), strict=True))


def load_while_whole(root: str) -> list[bool]:
    """A forward that fails leaves units whole; what is loaded must be in them too."""
    case = replace(CASE, model={"blocks": 3})
    engine = Leg(3, 0, 1, case, loads=False).engine()
    engine.save_checkpoint(root)
    expected = whole_parameters(engine.module)
    other = Leg(3, 0, 1, case).engine()
    handle = other.module.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), torch.no_grad():
        other.module(batches(1, 4)[0])
    handle.remove()
    assert any(unit.residency != "sharded" for unit in other.units)
    other.load_checkpoint(root)
    found = whole_parameters(other.module)
    return [bool(torch.equal(found[name], expected[name])) for name in expected]


def test_units_that_are_whole_take_what_is_loaded(ranks: Ranks, tmp_path: Path) -> None:
    assert all(equal for answer in ranks.run(2, load_while_whole, str(tmp_path)) for equal in answer)


def save_to_folders_of_their_own(root: str) -> list[str]:
    """Each rank names another folder, to save to and to load from; return what rank 1 is told, and what there is."""
    heard: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardwell").addHandler(handler)
    try:
        engine = alone()
        step(engine)
        engine.save_checkpoint(Path(root, str(torch.distributed.get_rank())), "one")
        path, _ = engine.load_checkpoint(Path(root, str(torch.distributed.get_rank())))
    finally:
        logging.getLogger("shardwell").removeHandler(handler)
    return [*heard, str(path), *sorted(one.name for one in Path(root).iterdir())]


def test_a_rank_that_names_another_folder_is_told_that_it_is_not_used(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(2, save_to_folders_of_their_own, str(tmp_path))
    assert first == [str(tmp_path / "0" / "one"), "0"]
    assert second[-2:] == first
    saved, loaded = second[:-2]
    assert saved == f"save_dir='{tmp_path}/1' of rank 1 is not used: all ranks use that of rank 0, '{tmp_path}/0'"
    assert loaded == saved.replace("save_dir", "load_dir")


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
    close = ShardwellSource.close
    monkeypatch.setattr(ShardwellSource, "close", lambda self: (counts.append(self.bytes_read), close(self))[1])
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


@pytest.mark.parametrize("kind", [IndexError, CheckpointError, MemoryError])
def test_an_error_of_any_kind_on_a_thread_that_reads_is_raised(kind: type[Exception]) -> None:
    def read(number: int, _: torch.Tensor) -> None:
        if number == 5:
            raise kind("the sixth")

    requests, progress = deque((number, torch.zeros(1)) for number in range(20)), LongWork("loading", speaks=False)
    with pytest.raises(kind, match="the sixth"):
        CheckpointLoader._read_all(SimpleNamespace(_read_into=read), requests, progress)  # type: ignore[arg-type]
    assert not requests
