"""Optimizer state on disk: the bits of state on the host, with nothing but seats in host memory."""

from __future__ import annotations

import gc
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwell.errors import ShardwellError
from shardwell.memory import MemoryReport, StateKind, Tier
from shardwell.offload import host_updates
from shardwell.offload.disk import DiskTier
from shardwell.offload.disk_file import rounded
from shardwell.offload.optimizer_swap import OptimizerSwapper
from shardwell.offload.swapped_tensors import SwappedTensors
from shardwell.optim.lion import Lion
from shardwell.sharding import Unit
from shardwell.sharding.spec import CommitPolicy
from shardwell.utils import (
    safe_get_full_optimizer_state,
)
from tests.support.checkpoint_legs import Leg, everything
from tests.support.disk_engines import replace_file
from tests.support.internals import disk_of, files_of, units_of
from tests.support.models import Gpt, batches, share, whole_parameters
from tests.support.offload_cases import (
    HOST,
    PRECISIONS,
    check_equal,
    disk_case,
    engine_with,
    host_case,
    on_disk,
    quickly,
    run_all,
    run_quickly,
    story,
)
from tests.support.patience import soon
from tests.support.ranks import Ranks
from tests.support.training import Case


def check_same_bits(ranks: Ranks, case: Case, stage: int, *paths: Path) -> None:
    above = replace(case, config={**case.config, "zero_optimization": {}})
    cases = [case, disk_case(case, *paths), *([above] if stage == 0 else [])]
    first, second, *others = ranks.run(2, run_all, cases, stage)[0]
    for name, value in first.items():
        assert (second[name] == value).all(), name
        for (
            other
        ) in others:  # torch's steps: on some CPUs its square roots are off by a bit, and bf16 shows some of that
            np.testing.assert_allclose(np.float32(other[name]), np.float32(value), rtol=0.01, atol=1e-5, err_msg=name)
    assert [os.listdir(path) for path in paths] == [[] for _ in paths]


# --------------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    ("stage", "commit"),
    [
        (0, "after_norm"),
        (1, "at_once"),
        (1, "shadow"),
        (2, "after_norm"),
        (3, "at_once"),
        (3, "after_norm"),
        (3, "shadow"),
    ],
)
def test_state_on_disk_gives_the_bits_of_state_on_the_host(
    ranks: Ranks, tmp_path: Path, stage: int, commit: str
) -> None:
    clip = 0.0 if commit == "at_once" else 0.8
    case = host_case(commit, clip=clip, accumulation=1 + stage % 2, groups=True, steps=3)
    check_same_bits(ranks, case, stage, tmp_path / "one", tmp_path / "two")


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_other_precisions_and_8_bit_moments_too(ranks: Ranks, tmp_path: Path, precision: str) -> None:
    case = host_case("auto", precision, moments="8bit", groups=True, steps=3)
    check_same_bits(ranks, case, 3, tmp_path)


@pytest.mark.parametrize("power", [24, 10], ids=["all steps", "some steps"])
def test_steps_that_overflow_are_left_out_with_what_was_read_ahead(ranks: Ranks, tmp_path: Path, power: int) -> None:
    case = host_case("auto", "fp16", groups=True, steps=6)
    fp16 = {"enabled": True, "initial_scale_power": power, "loss_scale_window": 1, "hysteresis": 1}
    check_same_bits(ranks, replace(case, config={**case.config, "fp16": fp16}), 3, tmp_path)


def test_small_parameters_of_a_unit_may_stay_on_the_device(ranks: Ranks, tmp_path: Path) -> None:
    case = host_case("at_once", groups=True, steps=3)
    small = {"stage3_param_persistence_threshold": 300}
    cases = [replace(case, config={**case.config, "zero_optimization": {**HOST, **small}}), disk_case(case, tmp_path)]
    cases[1].config["zero_optimization"].update(small)
    below, deeper = ranks.run(2, run_all, cases, 3)[0]
    check_equal(deeper, below)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1),
    "Lion": lambda p: Lion(p, lr=1e-3),
}


def stepped(name: str, block: dict[str, Any]) -> dict[str, Tensor | float]:
    quickly()
    engine = engine_with(block, OPTIMIZERS[name])
    for batch in batches(3, 4):
        engine.backward(engine(share(batch, dist.get_rank(), dist.get_world_size())))
        engine.step()
    found: dict[str, Any] = dict(whole_parameters(engine.module))
    for key in ("momentum_buffer", "sum", "exp_avg"):
        value = safe_get_full_optimizer_state(engine.module.blocks[1].up.weight, key)
        found |= {} if value is None else {key: value}
    return found


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_optimizers_with_kernels_step_it(ranks: Ranks, tmp_path: Path, name: str) -> None:
    below = ranks.run(1, stepped, name, HOST)[0]
    deeper = ranks.run(1, stepped, name, on_disk(tmp_path))[0]
    assert len(below) == len(list(Gpt().named_parameters())) + (name != "SGD")
    check_equal(deeper, below)


def test_an_optimizer_without_a_kernel_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWELL_IO", "threads")
    with pytest.raises(ShardwellError, match=r"none for NAdam .* use AdamW, Adam, SGD, Adagrad or Lion"):
        engine_with(on_disk(tmp_path), lambda p: torch.optim.NAdam(p))


# ------------------------------------------------------------------------------------------------------ everyone else


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "moments"), [(1, "8bit"), (3, "fp32")])
def test_whoever_looks_or_changes_does_so_on_disk(ranks: Ranks, tmp_path: Path, stage: int, moments: str) -> None:
    below = ranks.run(2, story, HOST, stage, moments)
    deeper = ranks.run(2, story, on_disk(tmp_path), stage, moments)
    for one, other in zip(below, deeper, strict=True):
        assert len(one) > 100
        check_equal(other, one)


@pytest.mark.slow
def test_checkpoints_go_from_the_device_to_disk_to_the_host(ranks: Ranks, tmp_path: Path) -> None:
    """Saved in the background; tests/offload/test_disk_parameters.py has such runs that wait for it."""
    case, device = Case(dtype=torch.float32), PRECISIONS["bf16"]
    disk = {**device, "zero_optimization": on_disk(tmp_path / "drive")}
    root = str(tmp_path / "saved")
    saved = ranks.run(2, run_quickly, Leg(1, 0, 2, case, device, loads=False), root)[0]["ended"]
    middle = ranks.run(3, run_quickly, Leg(3, 2, 4, case, disk, options={"asynchronous": True}), root)[0]
    check_equal(middle["loaded"], saved)
    again = ranks.run(2, run_quickly, Leg(2, 4, 4, case, disk, saves=False), root)[0]
    check_equal(again["loaded"], middle["ended"])
    last = ranks.run(2, run_quickly, Leg(2, 4, 4, case, {**device, "zero_optimization": HOST}, saves=False), root)[0]
    check_equal(last["loaded"], middle["ended"])


# ---------------------------------------------------------------------------------------------------------- memory


def books(path: str, moments: str, directory: str) -> tuple[MemoryReport, int, int, list[int]]:
    """The books after some steps, a checkpoint and a look; elements on this rank, and in its largest unit.

    And what was staged while the checkpoint was saved and loaded, whenever something came from the disk.
    """
    quickly()
    engine = engine_with(on_disk(Path(path), buffer_count=1), moments=moments)
    for batch in batches(2, 4):
        engine.backward(engine(share(batch, dist.get_rank(), dist.get_world_size())))
        engine.step()
    staged: list[int] = []
    open_chest = SwappedTensors.open
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            SwappedTensors,
            "open",
            lambda swapped: open_chest(swapped) or staged.append(in_host_memory(engine.memory())),
        )
        engine.save_checkpoint(directory)
        engine.load_checkpoint(directory)
    whole_parameters(engine.module)
    sizes = [sum(group.local_numel for group in unit.groups) for unit in units_of(engine)]
    held = engine.memory()
    for unit in units_of(engine):
        for shard in engine.optimizer.shards.of(unit):
            state = engine.optimizer.state[shard.tensor]
            assert shard.tensor.untyped_storage().nbytes() == 4
            assert shard.tensor.isnan().all()
            assert "exp_avg" in state
            for value in state.values():
                parts = (value.codes, value.exponents) if hasattr(value, "codes") else (value,)
                assert all(part.untyped_storage().nbytes() <= 8 for part in parts)
    return held, sum(sizes), max(sizes), staged


def in_host_memory(report: MemoryReport) -> int:
    return sum(size for (_, _, tier), size in report.now.items() if tier is Tier.HOST)


@pytest.mark.parametrize(("moments", "parts"), [("fp32", [4, 4, 4]), ("8bit", [4, 1, 1, 1 / 256, 1 / 256])])
def test_nothing_but_seats_is_in_host_memory(ranks: Ranks, tmp_path: Path, moments: str, parts: list[float]) -> None:
    for held, numel, largest, staged in ranks.run(2, books, str(tmp_path / "drive"), moments, str(tmp_path / "saved")):
        tiers = {Tier.HOST: 0, Tier.DISK: 0, Tier.DEVICE: 0}
        for (state, _, tier), size in held.now.items():
            tiers[tier] += size if state is not StateKind.PARAMETERS else 0
        assert tiers[Tier.DEVICE] == 0
        assert tiers[Tier.DISK] == pytest.approx(sum(parts) * numel, rel=0.02)
        seat = sum(rounded(math.ceil(part * largest)) for part in parts)
        assert tiers[Tier.HOST] in (seat, 2 * seat, 3 * seat)  # they are made when they are needed
        assert len(staged) >= 4 * 5  # masters and state of each unit, out and in
        assert max(staged) <= tiers[Tier.HOST] + seat


def test_what_comes_from_disk_is_read_while_the_unit_before_is_updated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDWELL_IO", "threads")
    engine = engine_with(on_disk(tmp_path), commit="after_norm")
    seated: dict[int, threading.Event] = {unit.index: threading.Event() for unit in units_of(engine)}
    overlaps = []
    seat, step = OptimizerSwapper.acquire, host_updates.HostUpdateQueue._step

    def seat_and_tell(store: OptimizerSwapper, unit: Unit, *others: Any) -> Any:
        found = seat(store, unit, *others)
        seated[unit.index].set()
        return found

    def step_late(updates: host_updates.HostUpdateQueue, job: Any, factor: float) -> None:
        following = seated.get(job.unit.index + 1)
        if following is not None:
            overlaps.append(following.wait(soon(5)))
        step(updates, job, factor)

    monkeypatch.setattr(OptimizerSwapper, "acquire", seat_and_tell)
    monkeypatch.setattr(host_updates.HostUpdateQueue, "_step", step_late)
    engine.backward(engine(batches(1, 4)[0]))
    engine.step()
    whole_parameters(engine.module)
    assert overlaps == [True] * (len(seated) - 1)


def test_a_step_that_is_left_out_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWELL_IO", "threads")
    engine = engine_with(on_disk(tmp_path), nonfinite="skip", commit="at_once")
    rows = batches(1, 4)[0]
    engine.backward(engine(rows) * float("nan"))
    engine.step()
    whole_parameters(engine.module)
    writes: list[Any] = []
    write = DiskTier.write
    monkeypatch.setattr(DiskTier, "write", lambda *args: writes.append(args) or write(*args))
    before = everything(engine)
    engine.backward(engine(rows) * float("nan"))
    engine.step()
    check_equal(everything(engine), before)
    assert not writes
    assert float(before["blocks.1.up.weight exp_avg"].abs().max()) == 0.0
    engine.backward(engine(rows))
    engine.step()
    assert float(everything(engine)["blocks.1.up.weight exp_avg"].abs().max()) > 0.0
    assert writes


# ---------------------------------------------------------------------------------------------------------- trouble


def test_a_path_that_is_not_there_is_named(tmp_path: Path) -> None:
    block = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path / "gone")}}
    with pytest.raises(ShardwellError, match=r"gone: opening a file failed \(No such file .*mount the drive"):
        engine_with(block)


def test_too_little_space_is_refused_with_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwell.memory.limits.free_disk_bytes", lambda path: 70_000)
    numel = sum(p.numel() for p in Gpt().parameters())
    expected = (
        rf"needs .* on this node: 12 bytes for each of {numel:,} parameters.* go to {tmp_path}/one, where 68.4 KiB"
    )
    with pytest.raises(ShardwellError, match=expected):
        engine_with(on_disk(tmp_path / "one", tmp_path / "two"))


def test_too_little_host_memory_for_the_seats_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = type("Memory", (), {"available": 50_000})
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    with pytest.raises(
        ShardwellError, match=r"needs more host memory .* 0 bytes for each .* of staging buffers .* may be used"
    ):
        engine_with(on_disk(tmp_path))


@pytest.mark.parametrize(
    ("target", "message"),
    [("/dev/full", r"writing .* \(No space left .*free space there"), ("/proc/self/mem", r"\(Input/output error\)")],
)
def test_a_drive_that_fails_is_an_error_where_the_unit_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, message: str
) -> None:
    monkeypatch.setenv("SHARDWELL_IO", "threads")
    engine = engine_with(on_disk(tmp_path))
    rows = batches(1, 4)[0]
    engine.backward(engine(rows))
    engine.step()
    whole_parameters(engine.module)
    replace_file(disk_of(engine), target)

    def train() -> None:
        for _ in range(3):  # what could not be written is missed at the next read
            engine.backward(engine(rows))
            engine.step()

    with pytest.raises(ShardwellError, match=message):
        train()


def test_a_shadow_on_disk_commits_after_the_norm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWELL_IO", "threads")
    engine = engine_with(on_disk(tmp_path), commit="shadow")
    assert set(engine.offload.commits.values()) == {CommitPolicy.AFTER_NORM}
    assert len(engine.offload.commits) == len(engine.units)


def test_the_tier_goes_with_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWELL_IO", "threads")
    for destroys in (False, True):
        engine = engine_with(on_disk(tmp_path))
        engine.backward(engine(batches(1, 4)[0]))
        engine.step()
        file = files_of(disk_of(engine))[0]
        assert file.size > 0
        if destroys:
            engine.destroy()
        del engine
        deadline = time.monotonic() + soon(10)
        while file.descriptor != -1 and time.monotonic() < deadline:
            gc.collect()  # threads may still hold what they do
        assert file.descriptor == -1
        assert not os.listdir(tmp_path)
