"""One error, caught: nothing is left open, half gathered or lost. On one of several ranks: all of them hear of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardwell
from shardwell.errors import ShardwellError
from shardwell.memory.device import FlatBuffer
from shardwell.offload.optimizer_swap import OptimizerSwapper
from shardwell.offload.param_swap import SwappedShard
from shardwell.offload.storage import swapped_masters, swapped_shard
from shardwell.offload.swapped_tensors import SwappedTensors
from shardwell.sharding import Unit
from shardwell.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state, safe_set_full_fp32_param
from tests.support.disk_engines import replace_file
from tests.support.execution_orders import Choosing
from tests.support.faults import fault_at
from tests.support.internals import disk_of, host_updates_of, units_of
from tests.support.models import batches, share, whole_parameters, zero
from tests.support.offload_cases import AIO, blocks, check_equal, engine_with, on_disk, quickly
from tests.support.ranks import Ranks


@contextlib.contextmanager
def failing(owner: type, name: str, *, only: object = None, times: int = 1) -> Iterator[None]:
    """A method raises, the first times it is called, or is called of one object."""
    method, left = getattr(owner, name), times

    def fails(itself: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal left
        if left and only in (None, itself):
            left -= 1
            raise ShardwellError("as it was told")
        return method(itself, *args, **kwargs)

    setattr(owner, name, fails)
    try:
        yield
    finally:
        setattr(owner, name, method)
    assert not left


def train(engine: shardwell.Engine, num_steps: int = 2) -> None:
    for batch in batches(num_steps, 4):
        engine.backward(engine(share(batch, dist.get_rank(), dist.get_world_size())))
        engine.step()


def wait(engine: shardwell.Engine) -> None:
    for unit in units_of(engine):
        unit.wait()


# ------------------------------------------------------------------------------------------------ what goes wrong


def reading_masters(engine: shardwell.Engine) -> None:
    group = units_of(engine)[2].groups[0]
    with failing(SwappedTensors, "open", only=swapped_masters(group)):  # the parameters' chest is open already
        safe_get_full_fp32_param(group.parameters[0])


def writing_masters(engine: shardwell.Engine) -> None:
    group = units_of(engine)[2].groups[0]
    value = safe_get_full_fp32_param(group.parameters[0])
    with failing(SwappedTensors, "_write", only=swapped_shard(group).swapped):
        safe_set_full_fp32_param(group.parameters[0], value)


def joining_masters(engine: shardwell.Engine) -> None:
    group = units_of(engine)[2].groups[0]
    with failing(FlatBuffer, "allocate", only=group._form.staging):
        safe_get_full_fp32_param(group.parameters[0])


def reading_ahead(engine: shardwell.Engine) -> None:
    with failing(SwappedShard, "read", only=swapped_shard(units_of(engine)[3].groups[0])):
        engine(batches(1, 4)[0])


def reading_to_look(engine: shardwell.Engine) -> None:
    page, last_first = swapped_shard(units_of(engine)[0].groups[0]), list(engine.module.parameters())[::-1]
    with failing(SwappedShard, "read", only=page), shardwell.zero.GatheredParameters(last_first):
        pytest.fail("it was opened")


def remembering_masters(engine: shardwell.Engine) -> None:
    group = units_of(engine)[0].groups[0]
    with (
        failing(SwappedTensors, "open", only=swapped_masters(group)),
        shardwell.zero.GatheredParameters(group.parameters),
    ):
        pytest.fail("it was opened")


def making_room(engine: shardwell.Engine) -> None:
    for _ in range(7):  # more than there are slots
        with failing(FlatBuffer, "allocate"), pytest.raises(ShardwellError):
            engine(batches(1, 4)[0])
    with failing(FlatBuffer, "allocate"):
        engine(batches(1, 4)[0])


def after(folder: str, go_wrong: Callable[[shardwell.Engine], None] | None) -> dict[str, Tensor]:
    quickly()
    engine = engine_with(blocks("nvme", "nvme", folder))
    train(engine)
    wait(engine)
    host_updates_of(engine).cancel_prefetches()
    if go_wrong is not None:
        with pytest.raises(ShardwellError, match="as it was told"):
            go_wrong(engine)
    train(engine)
    engine.save_checkpoint(f"{folder}/saved")
    assert not [unit.name for unit in units_of(engine) if unit.is_held]
    return whole_parameters(engine.module)


@pytest.fixture(scope="module")
def undisturbed(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    found: dict[str, Tensor] = ranks.run(1, after, str(tmp_path_factory.mktemp("undisturbed")), None)[0]
    return found


@pytest.mark.parametrize(
    "go_wrong",
    [
        reading_masters,
        writing_masters,
        joining_masters,
        reading_ahead,
        reading_to_look,
        remembering_masters,
        making_room,
    ],
    ids=lambda job: job.__name__,
)
def test_training_goes_on_after_an_error_as_if_there_was_none(
    ranks: Ranks, tmp_path: Path, undisturbed: dict[str, Tensor], go_wrong: Callable[[shardwell.Engine], None]
) -> None:
    check_equal(ranks.run(1, after, str(tmp_path), go_wrong)[0], undisturbed)


def stepping(folder: str) -> bool:
    """Parameters on disk are stepped on the device, and that fails."""
    quickly()
    engine = engine_with(blocks("nvme", "none", folder))
    train(engine)
    before = {name: safe_get_full_fp32_param(p) for name, p in engine.module.named_parameters()}
    with failing(torch.optim.AdamW, "step"), pytest.raises(ShardwellError, match="as it was told"):
        train(engine, 1)
    check_equal({name: safe_get_full_fp32_param(p) for name, p in engine.module.named_parameters()}, before)
    sizes = [len(group["params"]) for group in engine.optimizer.param_groups]
    train(engine)
    return sizes == [len(engine.units)]


def test_a_step_that_fails_leaves_parameters_on_disk_as_they_were(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(1, stepping, str(tmp_path)) == [True]


# ------------------------------------------------------------------------------------------ updates that nobody needs


def lost(folder: str, look: str) -> str:
    """The update of a block fails that the next batch does not use."""
    quickly()
    torch.manual_seed(0)
    model = Choosing()
    own = {"shard_at_world_one": True, "commit": "after_norm"}
    config = zero(3, zero_optimization=on_disk(Path(folder)), bf16={"enabled": True}, shardwell=own, aio=AIO)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=config, device="cpu").engine
    failed: list[str] = []

    def fail_once(acquire: Any, store: OptimizerSwapper, unit: Unit, *others: Any) -> Any:
        if unit.name == "blocks.4" and not failed:
            failed.append(unit.name)
            store.free_buffers.release()
            raise ShardwellError("as it was told")
        return acquire(store, unit, *others)

    def step(used: tuple[int, ...]) -> None:
        engine.backward(engine(torch.ones(2, 16).bfloat16(), used))
        engine.step()

    with fault_at("read of optimizer state", fail_once):
        step((0, 1, 2, 3, 4, 5))
        with pytest.raises(ShardwellError, match="as it was told"):
            step((0, 1, 2)) if look == "step" else engine.save_checkpoint(f"{folder}/saved")
    with pytest.raises(ShardwellError, match=r"the update of unit 'blocks\.4' failed.*as it was told") as caught:
        step((0, 1, 2, 3, 4, 5))  # its values may be updated in part
    return str(caught.value)


@pytest.mark.parametrize("look", ["step", "save"])
def test_an_update_that_fails_is_heard_of_although_nobody_needs_it(ranks: Ranks, tmp_path: Path, look: str) -> None:
    (words,) = ranks.run(1, lost, str(tmp_path), look)
    assert "start again, from the latest checkpoint" in words


# ------------------------------------------------------------------------------------------------ one of several ranks

Look = Callable[[shardwell.Engine], object]

LOOKS: dict[str, Look] = {
    "masters": lambda engine: [safe_get_full_fp32_param(p) for p in engine.module.parameters()],
    "moments": lambda engine: [safe_get_full_optimizer_state(p, "exp_avg") for p in engine.module.parameters()],
    "state_dict": lambda engine: engine.state_dict(),
    "gathered": lambda engine: whole_parameters(engine.module),
    "changed": lambda engine: (
        [safe_set_full_fp32_param(p, torch.zeros(p.shape)) for p in engine.module.parameters()],
        engine.state_dict(),
    ),
}


def one_drive_fails(folder: str, look: str) -> tuple[str, str]:
    quickly()
    engine = engine_with(blocks("nvme", "nvme", folder))
    train(engine)
    wait(engine)
    if dist.get_rank() == 1:
        replace_file(disk_of(engine), "/proc/self/mem")
    try:
        LOOKS[look](engine)
    except ShardwellError as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("look", list(LOOKS))
def test_a_drive_that_fails_on_one_rank_is_told_to_all(ranks: Ranks, tmp_path: Path, look: str) -> None:
    (peer, words), (culprit, own) = ranks.run(2, one_drive_fails, str(tmp_path), look)
    assert (peer, culprit) == ("PeerError", "ShardwellError")
    assert "Input/output error" in own
    assert "rank 1 failed first" in words
    assert "Input/output error" in words


def one_has_no_room() -> tuple[str, str]:
    """Not a drive, but memory."""
    engine = engine_with({})
    train(engine)
    try:
        with failing(FlatBuffer, "allocate") if dist.get_rank() == 1 else contextlib.nullcontext():
            whole_parameters(engine.module)
    except ShardwellError as error:
        return type(error).__name__, str(error)
    return "", ""


def test_a_rank_that_cannot_gather_tells_all(ranks: Ranks) -> None:
    (peer, words), (culprit, _) = ranks.run(2, one_has_no_room)
    assert (peer, culprit) == ("PeerError", "ShardwellError")
    assert "rank 1 failed first: ShardwellError in GatheredParameters of '(root)': as it was told" in words
