"""Parameters on disk: every placement of parameters and optimizer state trains alike, and only what must move does."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwell
from shardwell.config import load
from shardwell.errors import ShardwellError
from shardwell.memory import StateKind, Tier
from shardwell.offload.disk import DiskTransfer
from shardwell.offload.param_swap import SwappedShard
from shardwell.sharding.tiled import TiledLinear
from tests.support.checkpoint_legs import Leg
from tests.support.disk_engines import replace_file
from tests.support.internals import disk_of, groups_of, prefetched_shards_of, units_of
from tests.support.models import batches, whole_parameters, zero
from tests.support.offload_cases import (
    AIO,
    HOST,
    PRECISIONS,
    blocks,
    check_equal,
    counted,
    engine_with,
    host_case,
    quickly,
    run_quickly,
    story,
    wait_for_the_reader,
)
from tests.support.ranks import Ranks
from tests.support.training import Case, all_sharded

PLACES = [(parameters, optimizer) for parameters in ("none", "cpu", "nvme") for optimizer in ("none", "cpu", "nvme")]


def everywhere(case: Case, places: list[tuple[str, str]], path: str) -> list[dict[str, Tensor]]:
    """Stage 3 in several placements, one after the other."""
    quickly()
    cases = [
        replace(case, config={**case.config, "zero_optimization": blocks(*place, path), "aio": AIO}) for place in places
    ]
    return all_sharded(cases, 3)


# --------------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize(("num_ranks", "precision"), [(2, "bf16"), (1, "fp32"), (1, "fp16")])
def test_every_placement_gives_the_same_bits(ranks: Ranks, tmp_path: Path, num_ranks: int, precision: str) -> None:
    """Of what steps below the device, and of what steps there: their optimizers round differently.

    On two ranks in bf16. On one rank, each placement is met in one of the other precisions.
    """
    case = host_case("auto", precision, steps=3, clip=0.5, accumulation=3 - num_ranks, groups=True)
    some = {"bf16": PLACES, "fp32": PLACES[::2], "fp16": PLACES[1::2]}[precision]
    places = list(dict.fromkeys([("none", "none"), ("none", "cpu"), *some]))
    found = dict(zip(places, ranks.run(num_ranks, everywhere, case, places, str(tmp_path))[0], strict=True))
    for place, values in found.items():
        expected = found["none", "none" if place[1] == "none" else "cpu"]
        for name, value in expected.items():
            assert (values[name] == value).all(), (place, name)


@pytest.mark.parametrize(
    ("commit", "moments"), [("at_once", "fp32"), ("after_norm", "8bit"), ("shadow", "fp32"), ("shadow", "8bit")]
)
def test_every_commit_policy_does(ranks: Ranks, tmp_path: Path, commit: str, moments: str) -> None:
    clip = 0.0 if commit == "at_once" else 0.8
    case = host_case(commit, clip=clip, moments=moments, groups=True, steps=3)
    places = [("none", "cpu"), ("nvme", "nvme"), *([("cpu", "cpu"), ("nvme", "cpu")] if moments == "fp32" else [])]
    first, *others = ranks.run(2 if moments == "fp32" else 1, everywhere, case, places, str(tmp_path))[0]
    for place, values in zip(places[1:], others, strict=True):
        for name, value in first.items():
            assert (values[name] == value).all(), (place, name)


@pytest.mark.parametrize("moments", ["fp32", "8bit"])
def test_whoever_looks_or_changes_does_so_there(ranks: Ranks, tmp_path: Path, moments: str) -> None:
    num_ranks, places = (2, [("cpu", "cpu"), ("nvme", "cpu"), ("nvme", "nvme")])
    if moments == "8bit":
        num_ranks, places = 1, [("nvme", "nvme")]
    above = ranks.run(num_ranks, story, HOST, 3, moments)
    for place in places:
        below = ranks.run(num_ranks, story, blocks(*place, tmp_path), 3, moments)
        for one, other in zip(above, below, strict=True):
            check_equal(other, one, str(place))


@pytest.mark.slow
@pytest.mark.parametrize("place", [("cpu", "cpu"), ("nvme", "nvme")], ids="-".join)
def test_checkpoints_go_in_and_out(ranks: Ranks, tmp_path: Path, place: tuple[str, str]) -> None:
    case, device = Case(dtype=torch.float32), PRECISIONS["bf16"]
    (tmp_path / "drive").mkdir()
    below = {**device, "zero_optimization": blocks(*place, tmp_path / "drive")}
    root = str(tmp_path / "saved")
    saved = ranks.run(2, run_quickly, Leg(1, 0, 2, case, device, loads=False), root)[0]["ended"]
    middle = ranks.run(3, run_quickly, Leg(3, 2, 4, case, below), root)[0]
    check_equal(middle["loaded"], saved)
    again = ranks.run(2, run_quickly, Leg(3, 4, 4, case, below, saves=False), root)[0]
    check_equal(again["loaded"], middle["ended"])
    last = ranks.run(2, run_quickly, Leg(2, 4, 4, case, device, saves=False), root)[0]
    check_equal(last["loaded"], middle["ended"])


class Adapted(nn.Module):
    """A frozen layer with a small one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.down, self.up = nn.Linear(24, 24), nn.Linear(24, 4), nn.Linear(4, 24)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.frozen(x) + self.up(self.down(x)))


def adapted(block: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, int], tuple[int, int]]:
    """Train adapters, with evaluations in between.

    Returns the parameters, the bytes that the third step moved, and how many elements are trained and frozen.
    """
    quickly()
    torch.manual_seed(0)
    model = nn.Sequential(*[Adapted() for _ in range(3)])
    own = {"shard_at_world_one": True, "keep_frozen": 0}
    config = zero(3, zero_optimization=block, aio=AIO, bf16={"enabled": True}, shardwell=own)
    engine, *_ = shardwell.initialize(
        model=model,
        optimizer=torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2),
        config=config,
    )
    moved = {"read": 0, "written": 0}
    for step in range(3):
        with counted(moved if step == 2 else {}):
            engine.eval()
            with torch.no_grad():
                engine(torch.ones(2, 24, dtype=torch.bfloat16))
            engine.train()
            x = torch.randn(2, 24, generator=torch.Generator().manual_seed(step)).bfloat16()
            engine.backward(engine(x).float().square().mean())
            engine.step()
            for unit in units_of(engine):
                unit.wait()
            wait_for_the_reader(engine)
    groups = groups_of(engine)
    sizes = [sum(g.layout.shard_numel for g in groups if g.trainable is kind) for kind in (True, False)]
    return whole_parameters(engine.module), moved, (sizes[0], sizes[1])


def test_frozen_parameters_on_disk_are_only_read(ranks: Ranks, tmp_path: Path) -> None:
    small = {"stage3_param_persistence_threshold": 0}
    above = ranks.run(1, adapted, {**HOST, **small})[0][0]
    below, moved, (trained, frozen) = ranks.run(1, adapted, {**blocks("nvme", "nvme", tmp_path), **small})[0]
    check_equal(below, above)
    assert frozen >= 3 * (24 * 24 + 24)
    # Three passes read all parameters: the evaluation, forward, backward. The update reads and writes two halves of
    # each master that is trained, padding included, and two moments.
    update = 4 * trained + 8 * 3 * (24 * 4 + 4 + 4 * 24 + 24)
    assert moved == {"read": 3 * 2 * (trained + frozen) + update, "written": update}


class Wide(nn.Module):
    """A layer in tiles, recomputed in backward from an input that rests on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.tiles, self.norm = TiledLinear(24, 24, in_splits=2, out_splits=3), nn.LayerNorm(24)

    def forward(self, x: Tensor) -> Tensor:
        return shardwell.checkpointing.checkpoint(lambda y: torch.tanh(self.norm(self.tiles(y))), x)


def tiled(block: dict[str, Any]) -> dict[str, Tensor]:
    quickly()
    torch.manual_seed(0)
    model = nn.Sequential(*[Wide() for _ in range(3)])
    config = zero(
        3,
        zero_optimization={**block, "stage3_param_persistence_threshold": 0},
        activation_checkpointing={"cpu_checkpointing": True},
        bf16={"enabled": True},
        aio=AIO,
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    engine, *_ = shardwell.initialize(model=model, optimizer=optimizer, config=config)
    for step in range(3):
        x = torch.randn(4, 24, generator=torch.Generator().manual_seed(step)).bfloat16().requires_grad_()
        engine.backward(engine(x).float().square().mean())
        engine.step()
    shardwell.checkpointing.reset()
    return whole_parameters(engine.module)


@pytest.mark.slow
def test_tiles_and_recomputed_layers_rest_on_disk_too(ranks: Ranks, tmp_path: Path) -> None:
    above = ranks.run(2, tiled, HOST)[0]
    check_equal(ranks.run(2, tiled, blocks("nvme", "nvme", tmp_path))[0], above)


# -------------------------------------------------------------------------------------------------------- movement


def books(parameters: str, optimizer: str, path: str) -> dict[str, float]:
    """Bytes a parameter of this rank, by state and tier, after two steps."""
    quickly()
    engine = engine_with(blocks(parameters, optimizer, path))
    train(engine, 2)
    numel = sum(group.local_numel for group in groups_of(engine))
    found: defaultdict[str, float] = defaultdict(float)
    for (state, _, tier), size in engine.memory().now.items():
        found[f"{state.value} {tier.value}"] += size / numel
    return {key: value for key, value in found.items() if value and not key.startswith(StateKind.STAGING.value)}


def train(engine: Any, num_steps: int) -> None:
    for batch in batches(num_steps, 4):
        engine.backward(engine(batch))
        engine.step()
        for unit in units_of(engine):
            unit.wait()


def where_parameters_rest(path: str, max_in_cpu: int) -> list[Tier]:
    quickly()
    engine = engine_with(blocks("nvme", "nvme", path, max_in_cpu=max_in_cpu))
    train(engine, 1)
    return [group.spec.parameters.tier for group in groups_of(engine)]


def test_parameters_that_may_be_on_the_host_are(ranks: Ranks, tmp_path: Path) -> None:
    assert set(ranks.run(1, where_parameters_rest, str(tmp_path), 0)[0]) == {Tier.DISK}
    some = ranks.run(1, where_parameters_rest, str(tmp_path), 4000)[0]
    assert set(some) == {Tier.HOST, Tier.DISK}
    assert some == sorted(some, key=[Tier.HOST, Tier.DISK].index)  # the first units are on the host
    assert set(ranks.run(1, where_parameters_rest, str(tmp_path), 10**9)[0]) == {Tier.HOST}


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_all_below_the_device_takes_12_bytes(ranks: Ranks, tmp_path: Path, tier: str) -> None:
    """The 16-bit parameter is the upper half of its master."""
    found = ranks.run(1, books, tier, tier, str(tmp_path))[0]
    where = {"cpu": Tier.HOST, "nvme": Tier.DISK}[tier].value
    assert found == pytest.approx(
        {f"{StateKind.PARAMETERS.value} {where}": 2, f"{StateKind.OPTIMIZER.value} {where}": 10}, rel=0.02
    )


def expected_reads(path: str, buffer_count: int) -> list[bool]:
    """Of the reads of a steady step: whether each had been expected."""
    quickly()
    engine = engine_with(blocks("nvme", "nvme", path, buffer_count=buffer_count))
    train(engine, 3)
    found: list[bool] = []
    read = SwappedShard.read
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SwappedShard, "read", lambda page: found.append(page._coming is not None) or read(page))
        train(engine, 1)
    assert prefetched_shards_of(engine).num_ahead == 0
    return found


@pytest.mark.parametrize("buffer_count", [1, 2, 5])
def test_units_are_read_before_they_are_needed(ranks: Ranks, tmp_path: Path, buffer_count: int) -> None:
    found = ranks.run(1, expected_reads, str(tmp_path), buffer_count)[0]
    assert len(found) >= 8
    assert sum(found) >= 0.6 * len(found)


def depths(path: str, buffer_count: int, seconds: list[float]) -> list[int]:
    """How far ahead units are read after steps with a drive whose reads take so long."""
    quickly()
    engine = engine_with(blocks("nvme", "nvme", path, buffer_count=buffer_count))
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for each in seconds:
            patch.setattr(DiskTransfer, "seconds", each)
            train(engine, 2)
            found.append(prefetched_shards_of(engine).pace.depth)
    return found


@pytest.mark.parametrize("buffer_count", [1, 2, 5])
def test_a_slow_drive_is_asked_earlier_within_the_buffers(ranks: Ranks, tmp_path: Path, buffer_count: int) -> None:
    most = max(1, buffer_count - 1)
    assert ranks.run(1, depths, str(tmp_path), buffer_count, [0.0, 1e3, 0.0])[0][:2] == [1, most]


@pytest.mark.parametrize("optimizer", ["none", "cpu", "nvme"])
def test_a_drive_that_fails_is_an_error_where_the_unit_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    monkeypatch.setenv("SHARDWELL_IO", "threads")
    engine = engine_with(blocks("nvme", optimizer, tmp_path))
    train(engine, 1)
    replace_file(disk_of(engine), "/proc/self/mem")
    for _ in range(2):  # and again: nobody was left waiting
        with pytest.raises(ShardwellError, match=r"\(Input/output error\)"):
            train(engine, 2)


def test_a_path_is_asked_for() -> None:
    with pytest.raises(ShardwellError, match=r"offload_param\.nvme_path"):
        load({"train_batch_size": 1, "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}})
