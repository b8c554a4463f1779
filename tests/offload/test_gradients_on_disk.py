"""Gradients that wait on disk: the bits of those that wait on the host, and bytes where the formula says."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardwell
from shardwell.errors import ConfigError, ShardwellError
from shardwell.memory import Event, StateKind, Tier
from shardwell.offload.disk import DiskTier
from shardwell.offload.grad_swap import GradientSwapper
from shardwell.offload.swapped_tensors import SwappedTensors
from shardwell.sharding import ShardedGroup, Unit
from shardwell.utils import safe_get_full_grad, safe_get_local_grad, safe_set_full_grad
from tests.support.disk_engines import replace_file
from tests.support.faults import fault_at
from tests.support.internals import disk_of, end_passes, host_updates_of, trainable_groups_of, units_of
from tests.support.models import Gpt, batches, share, whole_parameters, zero
from tests.support.offload_cases import (
    AIO,
    blocks,
    check_equal,
    disk_case,
    host_case,
    on_disk,
    quickly,
    run_all,
    waiting_on,
)
from tests.support.patience import soon
from tests.support.ranks import Ranks


@pytest.mark.parametrize(  # every pair of values; at once, stage 0 is as stage 1
    ("stage", "accumulation", "commit"),
    [
        (0, 1, "after_norm"),
        (1, 3, "after_norm"),
        (1, 1, "at_once"),
        (2, 1, "after_norm"),
        (2, 3, "at_once"),
        (3, 3, "after_norm"),
        (3, 1, "at_once"),
    ],
)
def test_they_give_the_bits_of_gradients_on_the_host(
    ranks: Ranks, tmp_path: Path, stage: int, accumulation: int, commit: str
) -> None:
    clip = 0.8 if commit == "after_norm" else 0.0
    case = disk_case(host_case(commit, clip=clip, accumulation=accumulation, groups=True, steps=3), tmp_path)
    above, below = ranks.run(2, run_all, [waiting_on("host", case), waiting_on("disk", case)], stage)[0]
    check_equal(below, above)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_other_precisions_too(ranks: Ranks, tmp_path: Path, precision: str) -> None:
    case = disk_case(host_case("auto", precision, clip=0.8, moments="8bit", groups=True, steps=3), tmp_path)
    above, below = ranks.run(2, run_all, [waiting_on("host", case), waiting_on("disk", case)], 3)[0]
    check_equal(below, above)


# ------------------------------------------------------------------------------------------------------------ bytes


def clipped(block: dict[str, Any], tier: str, accumulation: int = 1, **own: Any) -> shardwell.Engine:
    quickly()
    torch.manual_seed(0)
    model = Gpt(blocks=2)
    config = zero(
        3,
        zero_optimization=block,
        bf16={"enabled": True},
        shardwell={"shard_at_world_one": True, "gradients": tier, **own},
        aio=AIO,
        gradient_clipping=0.5,
        gradient_accumulation_steps=accumulation,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return shardwell.initialize(model=model, optimizer=optimizer, config=config, device="cpu").engine


def trained(engine: shardwell.Engine, num_steps: int = 2, look: Callable[[int], None] = lambda _: None) -> None:
    for number in range(num_steps * engine.gradient_accumulation_steps()):
        rows = batches(number + 1, 4)[number]
        engine.backward(engine(share(rows, dist.get_rank(), dist.get_world_size())))
        look(number)
        engine.step()


def held(engine: shardwell.Engine) -> dict[Tier, int]:
    sizes = dict.fromkeys(Tier, 0)
    for (state, _, tier), size in engine.memory().now.items():
        if state is StateKind.GRADIENTS:
            sizes[tier] += size
    return sizes


def bytes_of_gradients(block: dict[str, Any], tier: str, accumulation: int) -> tuple[int, dict[Tier, int]]:
    engine = clipped(block, tier, accumulation)
    found: dict[Tier, int] = {}

    def look(number: int) -> None:
        end_passes(engine)
        found.update(held(engine))

    trained(engine, look=look)
    groups = [group for group in trainable_groups_of(engine) if group.is_stepped_on_host]
    return sum(group.local_numel for group in groups), found


@pytest.mark.parametrize(("accumulation", "each"), [(1, 2), (2, 4)], ids=["16 bits", "sums of micro-steps"])
def test_they_are_on_disk_and_nowhere_else(ranks: Ranks, tmp_path: Path, accumulation: int, each: int) -> None:
    block = blocks("nvme", "nvme", tmp_path)
    for numel, sizes in ranks.run(1, bytes_of_gradients, block, "disk", accumulation):
        assert sizes[Tier.DISK] == each * numel
        assert sizes[Tier.HOST] == 0
    for _, sizes in ranks.run(1, bytes_of_gradients, block, "host", accumulation):
        assert sizes[Tier.DISK] == 0


def bytes_moved(block: dict[str, Any], tier: str, accumulation: int) -> tuple[int, int, int]:
    """Elements; bytes read and written in the second step."""
    engine, moved = clipped(block, tier, accumulation), {"read": 0, "write": 0}
    originals = {name: getattr(DiskTier, name) for name in moved}

    def counting(name: str) -> Callable[..., Any]:
        def move(disk: DiskTier, extent: Any, start: int, memory: Tensor, **others: Any) -> Any:
            moved[name] += memory.numel() * memory.element_size()
            return originals[name](disk, extent, start, memory, **others)

        return move

    trained(engine, 2)
    settled(engine)
    for name in moved:
        setattr(DiskTier, name, counting(name))
    try:
        trained(engine, 1)
        settled(engine)
    finally:
        for name, original in originals.items():
            setattr(DiskTier, name, original)
    numel = sum(g.local_numel for g in trainable_groups_of(engine) if g.is_stepped_on_host)
    return numel, moved["read"], moved["write"]


def settled(engine: shardwell.Engine) -> None:
    for unit in units_of(engine):
        unit.wait()
    host_updates_of(engine).bytes_in_advance()


@pytest.mark.parametrize(
    ("accumulation", "read", "written"), [(1, 2, 2), (3, 12, 12)], ids=["16 bits", "sums of micro-steps"]
)
def test_they_are_written_once_and_read_once(
    ranks: Ranks, tmp_path: Path, accumulation: int, read: int, written: int
) -> None:
    """Sums: as often as there are micro-steps."""
    block = on_disk(tmp_path)
    above = ranks.run(2, bytes_moved, block, "host", accumulation)
    below = ranks.run(2, bytes_moved, block, "disk", accumulation)
    for (numel, *before), (_, *after) in zip(above, below, strict=True):
        assert [a - b for a, b in zip(after, before, strict=True)] == [read * numel, written * numel]


# ---------------------------------------------------------------------------------------------------------- readers


def with_readers(block: dict[str, Any], tier: str, accumulation: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    engine = clipped(block, tier, accumulation)
    weights, found = [engine.module.blocks[number].up.weight for number in (0, 1)], list[Tensor]()

    def look(number: int) -> None:
        for weight in weights:
            full, local = safe_get_full_grad(weight), safe_get_local_grad(weight)
            assert full is not None
            found.append(full.clone())
            found.extend([] if local is None else [local.clone()])
        if number % 2:
            safe_set_full_grad(weights[0], torch.full_like(found[0], 0.01))

    trained(engine, 3, look)
    return found, whole_parameters(engine.module)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_whoever_looks_at_them_or_changes_them_has_them_back(ranks: Ranks, tmp_path: Path, accumulation: int) -> None:
    above, below = (ranks.run(2, with_readers, on_disk(tmp_path), t, accumulation)[0] for t in ("host", "disk"))
    assert all((one == other).all() for one, other in zip(above[0], below[0], strict=True))
    check_equal(below[1], above[1])


def given_up(block: dict[str, Any], tier: str, accumulation: int) -> dict[str, Tensor]:
    """Gradients that nobody steps with, and a second backward that adds to those that wait."""
    engine = clipped(block, tier, accumulation)
    rows = [share(one, dist.get_rank(), dist.get_world_size()) for one in batches(2, 4)]
    engine.backward(engine(rows[0]))
    engine.optimizer.zero_grad()
    trained(engine, 1)
    engine.backward(engine(rows[0]))
    end_passes(engine)
    engine.backward(engine(rows[1]))
    engine.step()
    return whole_parameters(engine.module)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_those_that_are_given_up_or_added_to(ranks: Ranks, tmp_path: Path, accumulation: int) -> None:
    above, below = (ranks.run(2, given_up, on_disk(tmp_path), t, accumulation)[0] for t in ("host", "disk"))
    check_equal(below, above)


# ------------------------------------------------------------------------------------------------------------ errors


def trained_and_settled(engine: shardwell.Engine) -> None:
    trained(engine, 1)
    settled(engine)


def goes_on(engine: shardwell.Engine) -> bool:
    """Whether all parameters change in further steps, to something finite."""
    engine.optimizer.zero_grad()
    before = whole_parameters(engine.module)
    trained(engine, 2)
    settled(engine)
    after = whole_parameters(engine.module)
    return all(bool(torch.isfinite(after[name]).all()) and not after[name].equal(before[name]) for name in after)


def with_a_drive_that_fails(block: dict[str, Any], accumulation: int) -> tuple[str, bool | str]:
    """What is said of gradients that cannot be written; and whether training goes on behind it, or why it does not."""
    engine = clipped(block, "disk", accumulation)
    trained(engine, 1)
    settled(engine)
    failed: list[SwappedTensors] = []
    all_swapped = [away.swapped for away in host_updates_of(engine).offloader._swapper._units.values()]

    def failing(put_back: Any, swapped: SwappedTensors, *, changed: bool) -> Any:
        if changed and swapped is all_swapped[1] and not failed:
            failed.append(swapped)
            put_back(swapped, changed=False)
            raise ShardwellError("the drive is gone")
        return put_back(swapped, changed=changed)

    with fault_at("write of swapped tensors", failing), pytest.raises(ShardwellError) as caught:
        trained_and_settled(engine)
    with contextlib.suppress(ShardwellError):
        settled(engine)
    try:
        return str(caught.value), goes_on(engine)
    except ShardwellError as error:
        return str(caught.value), str(error)


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 2])
def test_gradients_that_cannot_be_written_are_an_error(ranks: Ranks, tmp_path: Path, accumulation: int) -> None:
    message, goes_on = ranks.run(1, with_a_drive_that_fails, on_disk(tmp_path), accumulation)[0]
    assert "the drive is gone" in message
    if accumulation == 1:  # other units were updated, and this one could not be
        assert "may be updated in part: the drive is gone" in str(goes_on)
    else:
        assert goes_on is True


class Lost(Event):
    """A read that has failed."""

    def wait(self) -> None:
        raise ShardwellError("the sums are lost")


def with_sums_that_cannot_be_read(block: dict[str, Any], micro: int) -> tuple[bool, bool]:
    """Of three micro-steps one cannot read the sums so far: whether parameters stay, and change in a step behind it."""
    engine, calls = clipped(block, "disk", 3), list[Unit]()
    trained_and_settled(engine)
    before = whole_parameters(engine.module)

    def failing(
        add: Any, waiting: GradientSwapper, unit: Unit, *args: Any, **kwargs: Any
    ) -> tuple[dict[ShardedGroup, Tensor], list[Any]]:
        sums, reads = add(waiting, unit, *args, **kwargs)
        calls.extend([unit] if unit is units_of(engine)[2] else [])
        if unit is not units_of(engine)[2] or len(calls) != micro + 1:
            return sums, reads
        for tensor in sums.values():
            tensor.fill_(float("nan") if micro == 2 else 1e3)
        return sums, [*reads, Lost()]

    with fault_at("read of gradient sums", failing), pytest.raises(ShardwellError, match="the sums are lost"):
        trained_and_settled(engine)
    after = whole_parameters(engine.module)
    return all(after[name].equal(before[name]) for name in after), goes_on(engine)


@pytest.mark.parametrize("micro", [1, 2])
def test_sums_that_cannot_be_read_are_an_error_and_not_learned_from(ranks: Ranks, tmp_path: Path, micro: int) -> None:
    assert ranks.run(1, with_sums_that_cannot_be_read, on_disk(tmp_path), micro)[0] == (True, True)


def with_a_drive_that_fails_on_rank_1(block: dict[str, Any], accumulation: int) -> tuple[str, str, float]:
    engine = clipped(block, "disk", accumulation)
    trained(engine, 1)
    settled(engine)
    if dist.get_rank() == 1:
        replace_file(disk_of(engine), os.devnull, os.O_RDONLY)
    begin = time.monotonic()
    try:
        for _ in range(2):
            trained_and_settled(engine)
    except ShardwellError as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "", "", 0.0


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_drive_that_fails_on_one_rank_is_an_error_on_all(ranks: Ranks, tmp_path: Path, accumulation: int) -> None:
    others, own = ranks.run(2, with_a_drive_that_fails_on_rank_1, on_disk(tmp_path), accumulation)
    assert own[0] == "ShardwellError"
    assert others[0] == "PeerError"
    assert others[1].startswith("rank 1 failed first: ")
    assert own[1] in others[1]
    assert others[2] < soon(8)


def tiers_of(block: dict[str, Any], **own: Any) -> set[Tier]:
    engine = clipped(block, own.pop("gradients", "auto"), **own)
    groups = [group for group in trainable_groups_of(engine) if group.is_stepped_on_host]
    return {group.spec.gradients.tier for group in groups}


def test_where_there_is_room_they_stay_on_the_host(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, tiers_of, on_disk(tmp_path)) == [{Tier.HOST}] * 2


def test_unknown_places_are_refused() -> None:
    with pytest.raises(ConfigError, match="gradients"):
        shardwell.config.load({"train_batch_size": 1, "shardwell": {"gradients": "device"}})
