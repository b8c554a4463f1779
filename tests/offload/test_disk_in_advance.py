"""State on disk that is read before the step that needs it: the same bits, whoever else wants it meanwhile."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwell
from shardwell.offload.disk import DiskTier
from shardwell.offload.optimizer_swap import OptimizerSwapper
from shardwell.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state, safe_set_full_fp32_param
from tests.support.execution_orders import Choosing
from tests.support.faults import fault_at
from tests.support.internals import host_updates_of, units_of, updates_if_any
from tests.support.models import batches, whole_parameters, zero
from tests.support.offload_cases import AIO, HOST, check_equal, counted, engine_with, on_disk, quickly
from tests.support.patience import soon
from tests.support.ranks import Ranks


def read_ahead(engine: shardwell.Engine) -> int:
    """Bytes; the reader has nothing left to do."""
    offloaded = updates_if_any(engine)
    return 0 if offloaded is None else offloaded.bytes_in_advance()


def step(engine: shardwell.Engine, batch: Tensor) -> None:
    engine.backward(engine(batch))
    engine.step()


# ------------------------------------------------------------------------------------------------- when it is read


def reads(folder: str, commit: str) -> dict[str, Any]:
    """Which reads begin before the gradients of the third step are there, and after."""
    quickly()
    engine = engine_with(on_disk(Path(folder)), commit=commit)
    data = batches(3, 4)
    for batch in data[:2]:
        step(engine, batch)
    found: dict[str, Any] = {"ahead": read_ahead(engine), "seats": engine.optimizer.executor.queue.store.most_ready}
    sizes: list[int] = []
    before = DiskTier.read

    def read(tier: DiskTier, extent: Any, start: int, memory: Tensor, **others: Any) -> Any:
        sizes.append(memory.numel() * memory.element_size())
        return before(tier, extent, start, memory, **others)

    DiskTier.read = read  # type: ignore[method-assign]
    try:
        loss = engine(data[2])
        found["in forward"] = sum(sizes)
        engine.backward(loss)
        engine.step()
        for unit in units_of(engine):
            unit.wait()
    finally:
        DiskTier.read = before  # type: ignore[method-assign]
    found["in all"] = sum(sizes)
    found["state"] = 12 * sum(p.numel() for p in engine.module.parameters())
    return found


@pytest.mark.parametrize("commit", ["at_once", "after_norm"])
def test_what_was_read_in_advance_is_not_read_again(ranks: Ranks, tmp_path: Path, commit: str) -> None:
    found = ranks.run(1, reads, str(tmp_path), commit)[0]
    assert found["ahead"] > 0.3 * found["state"]  # three of the five units
    assert found["in forward"] == 0
    assert found["in all"] < found["state"] * 1.7  # for this step, and perhaps some of the next


# ------------------------------------------------------------------------------------------------------- who wants it


def looked_at(block: dict[str, Any], folder: str) -> dict[str, Any]:
    """Between steps, when seats are full: masters and moments are read, changed and saved."""
    quickly()
    engine = engine_with(block)
    found: dict[str, Any] = {}
    for number, batch in enumerate(batches(6, 4)):
        step(engine, batch)
        read_ahead(engine)
        weight = engine.module.blocks[2].up.weight
        if number == 1:
            found |= {name: safe_get_full_fp32_param(p) for name, p in engine.module.named_parameters()}
        if number == 2:
            found["moment"] = safe_get_full_optimizer_state(weight, "exp_avg")
            safe_set_full_fp32_param(weight, safe_get_full_fp32_param(weight) * 0.5)
        if number == 3:
            engine.save_checkpoint(folder, "three")
        if number == 4:
            engine.load_checkpoint(folder, "three")
    found |= {f"last {name}": value for name, value in whole_parameters(engine.module).items()}
    return found


def test_whoever_wants_what_was_read_in_advance_gets_it(ranks: Ranks, tmp_path: Path) -> None:
    above = ranks.run(1, looked_at, HOST, str(tmp_path / "above"))[0]
    below = ranks.run(1, looked_at, on_disk(tmp_path / "drive"), str(tmp_path / "below"))[0]
    check_equal(below, above)


USED = [(0, 1, 2, 3, 4, 5), (0, 1), (4, 5), (2, 3), (0, 5), (1, 2, 3), (5, 4, 3, 2, 1, 0), (0, 1, 2, 3, 4, 5)]


def chosen(block: dict[str, Any], commit: str) -> dict[str, Tensor]:
    """Seats are filled for units that the next step does not use, and it must find others."""
    quickly()
    torch.manual_seed(0)
    model = Choosing()
    own = {"shard_at_world_one": True, "commit": commit}
    config = zero(3, zero_optimization=block, bf16={"enabled": True}, shardwell=own, aio=AIO)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=config, device="cpu").engine
    for used in USED:
        engine.backward(engine(torch.ones(2, 16).bfloat16(), used))
        engine.step()
        read_ahead(engine)
    return whole_parameters(model)


@pytest.mark.parametrize("commit", ["at_once", "after_norm"])
def test_units_that_are_not_used_give_their_seats_up(ranks: Ranks, tmp_path: Path, commit: str) -> None:
    above = ranks.run(1, chosen, HOST, commit)[0]
    below = ranks.run(1, chosen, on_disk(tmp_path, buffer_count=3), commit)[0]
    check_equal(below, above)


def moved(commit: str, path: str) -> list[dict[str, int]]:
    """Bytes that a step moves which uses all blocks, and one that uses one of the six."""
    quickly()
    torch.manual_seed(0)
    model = Choosing()
    own = {"shard_at_world_one": True, "commit": commit}
    config = zero(3, zero_optimization=on_disk(Path(path)), bf16={"enabled": True}, shardwell=own, aio=AIO)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=config, device="cpu").engine
    found = []
    for used in (USED[0], USED[0], (0,)):
        bytes_moved = {"read": 0, "written": 0}
        with counted(bytes_moved):
            engine.backward(engine(torch.ones(2, 16).bfloat16(), used))
            engine.step()
            for unit in units_of(engine):
                unit.wait()
            read_ahead(engine)
        found.append(bytes_moved)
    return found[1:]


@pytest.mark.parametrize("commit", ["at_once", "after_norm"])
def test_units_without_a_gradient_stay_where_they_rest(ranks: Ranks, tmp_path: Path, commit: str) -> None:
    everything, little = ranks.run(1, moved, commit, str(tmp_path))[0]
    assert 0 < little["written"] < everything["written"] / 5
    assert little["read"] < everything["read"] / 2  # some of it for the next step, which may use other blocks


def thawed(block: dict[str, Any]) -> dict[str, Tensor]:
    """A unit changes while its state is in a seat."""
    quickly()
    engine = engine_with(block)
    for number, batch in enumerate(batches(5, 4)):
        step(engine, batch)
        read_ahead(engine)
        if number == 1:
            engine.module.head.weight.requires_grad_(False)
            engine.module.blocks[2].down.weight.requires_grad_(False)
        if number == 3:
            engine.module.blocks[2].down.weight.requires_grad_(True)
    return whole_parameters(engine.module)


def test_units_that_change_are_read_anew(ranks: Ranks, tmp_path: Path) -> None:
    check_equal(ranks.run(1, thawed, on_disk(tmp_path))[0], ranks.run(1, thawed, HOST)[0])


@contextlib.contextmanager
def guessing(may_go_on: threading.Event) -> Iterator[None]:
    """The reader knows what to prepare, and does not begin before it may."""
    before, taken, guesses = OptimizerSwapper.prefetch, OptimizerSwapper._taken, []

    def prepare(store: OptimizerSwapper, unit: Any) -> None:
        guesses.append(unit)
        before(store, unit)

    def take(store: OptimizerSwapper, num_bytes: int) -> Any:
        if guesses:
            may_go_on.wait()
        return taken(store, num_bytes)

    OptimizerSwapper.prefetch, OptimizerSwapper._taken = prepare, take  # type: ignore[method-assign]
    try:
        yield
    finally:
        OptimizerSwapper.prefetch, OptimizerSwapper._taken = before, taken  # type: ignore[method-assign]


def taken_unawares(folder: str) -> int:
    """Units change while the reader is about to prepare them. Returns how many seats it has filled then."""
    quickly()
    engine = engine_with(on_disk(Path(folder)))
    step(engine, batches(1, 4)[0])
    read_ahead(engine)
    optimizer, may_go_on = engine.optimizer, threading.Event()
    host_updates_of(engine).cancel_prefetches()
    with guessing(may_go_on):
        step(engine, batches(1, 4)[0])
        engine.zero_grad()
        for unit in units_of(engine):
            unit.wait()
        threading.Timer(0.1, may_go_on.set).start()
        engine.module.blocks[2].up.weight.requires_grad_(False)
        engine.refit()
        may_go_on.wait()
        time.sleep(0.2)
    return len(optimizer.executor.queue.store._ready)


def test_guesses_that_have_not_begun_are_waited_for(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(1, taken_unawares, str(tmp_path)) == [0]


def crossed(folder: str) -> bool:
    """Somebody has masters and wants state, while the reader has state and wants masters."""
    quickly()
    engine = engine_with(on_disk(Path(folder)))
    for batch in batches(2, 4):
        step(engine, batch)
    updates = host_updates_of(engine)
    updates.cancel_prefetches()
    unit = units_of(engine)[1]
    unit.wait()
    with unit.trainable[0].swapped_in():
        guess = updates._reader.submit(lambda: updates.store.prefetch(unit))
        time.sleep(soon(0.1))  # until it waits
        with updates.store.swapped_in(unit, changes=False):
            pass
    with pytest.raises(shardwell.ShardwellError, match="in use"):
        guess.wait()
    step(engine, batches(1, 4)[0])
    return read_ahead(engine) > 0


def test_a_guess_never_waits_with_something_in_its_hands(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(1, crossed, str(tmp_path)) == [True]


def test_a_drive_that_fails_in_advance_is_heard_in_the_step(ranks: Ranks, tmp_path: Path) -> None:
    assert "stopped answering" in ranks.run(1, failing, str(tmp_path))[0]


def failing(folder: str) -> str:
    quickly()
    engine = engine_with(on_disk(Path(folder)))
    data = batches(3, 4)

    def broken(_: Any, store: OptimizerSwapper, *__: Any) -> Any:
        store.free_buffers.release()
        raise shardwell.ShardwellError("the drive has stopped answering")

    try:
        with fault_at("read of optimizer state ahead of time", broken):
            step(engine, data[0])
            step(engine, data[1])  # a guess that came to nothing stops nobody
            with fault_at("read of optimizer state", broken):
                step(engine, data[2])
                for unit in units_of(engine):
                    unit.wait()
    except shardwell.ShardwellError as error:
        return str(error)
    return ""
