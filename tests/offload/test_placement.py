"""Training that is spread over device, host and disk, and how it is built."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped, unused-ignore]
import pytest
import torch
import torch.distributed as dist

import shardwell
from shardwell.config import load
from shardwell.errors import ConfigError, ShardwellError
from shardwell.memory import Tier
from shardwell.offload import budget
from shardwell.offload.placement import plan
from shardwell.sharding import ShardedGroup
from shardwell.sharding.model_states import TierPlacement
from tests.support.checkpoint_legs import everything
from tests.support.live_bytes import PeakWatch
from tests.support.models import zero
from tests.support.offload_cases import check_equal, on_disk
from tests.support.placements import (
    BELOW,
    BORN,
    CLIPPED,
    DEVICE,
    DISK,
    HOST,
    SHARE,
    Layer,
    Stack,
    auto,
    born,
    configured,
    trained,
)
from tests.support.ranks import Ranks

# -------------------------------------------------------------------------------------------------------- training


SEATS = {"buffer_count": 3}
ALL_BELOW = {**BELOW, "offload_param": {"device": "cpu"}}


UP, MIDDLE, DOWN = (DEVICE, DEVICE), (DEVICE, HOST), (DEVICE, DISK)


@pytest.mark.parametrize(
    ("parameters", "own", "others", "expected"),
    [
        # at once: 14 on the device with gradients, else 2; 12 on the host, and 3 seats of 12 for what is on disk
        ("none", auto(2 * 14 + 6 * 2, 36 + 2 * 12), {}, [UP] * 2 + [MIDDLE] * 2 + [DOWN] * 4),
        # after the norm, with sums in fp32: 16 on the device, else 2; 4 more on the host for all that is below
        ("none", auto(16 + 7 * 2, 36 + 7 * 4 + 2 * 12), CLIPPED, [UP] + [MIDDLE] * 2 + [DOWN] * 5),
        # parameters go down too: 2 on the host for what is on disk
        ("cpu", auto(2 * 14, 36 + 2 * 12 + 4 * 2), {}, [UP] * 2 + [(HOST, HOST)] * 2 + [(HOST, DISK)] * 4),
    ],
    ids=["at once", "after the norm", "parameters"],
)
def test_units_on_three_tiers_give_the_bits_of_units_on_the_host(
    ranks: Ranks, tmp_path: Path, parameters: str, own: dict[str, Any], others: dict[str, Any], expected: list[Any]
) -> None:
    block = {**on_disk(tmp_path, **SEATS), "offload_param": {"device": parameters}}
    placed = ranks.run(2, trained, block, own, **others)
    below = ranks.run(2, trained, BELOW, {}, **others)[0]
    assert below["rows"] == [MIDDLE] * 8
    for found in placed:
        assert found["rows"] == expected
        for name, value in below["values"].items():
            assert np.array_equal(found["values"][name], value), name


@pytest.mark.parametrize(("stage", "sums"), [(0, 0), (2, 0), (1, 2), (2, 2)])
def test_units_of_lower_stages_are_placed_with_the_bits_of_units_on_the_host(
    ranks: Ranks, stage: int, sums: int
) -> None:
    """In bytes of one layer's elements on a rank of two; at stage 0 a rank steps and averages all of them."""
    size = 1 if stage else 2
    others = {"gradient_accumulation_steps": sums} if sums else {}
    unreduced = 8 if sums and stage == 1 else 0  # sums over micro-steps, of all elements, in fp32
    low, averaged = 4 + unreduced, 0 if unreduced else 4 if sums else 2 * size
    up, host = low + size * 10 + averaged, size * (12 + (4 if sums else 0))
    block = {"offload_optimizer": {"device": "cpu", "ratio": "auto"}} if stage == 2 else BELOW
    own = auto(2 * up + 6 * low, 6 * host)
    if stage == 2:
        del own["placement"]  # `ratio` means it
    below = ranks.run(2, trained, BELOW, {}, stage, **others)[0]
    for found in ranks.run(2, trained, block, own, stage, **others):
        assert found["rows"] == [UP] * 2 + [MIDDLE] * 6
        assert found["planned"] == {DEVICE: (8 * 4 + 2 * size * 10) * SHARE, HOST: 6 * size * 12 * SHARE}
        assert found["held"] == pytest.approx(found["planned"], abs=100)
        for name, value in below["values"].items():
            assert np.array_equal(found["values"][name], value), name


@pytest.mark.parametrize("stage", [2, 3])
def test_where_everything_fits_updates_are_those_without_offloading(ranks: Ranks, stage: int) -> None:
    own = {**auto(1000, 1000), "commit": "auto"}
    plain = ranks.run(2, trained, {}, {"commit": "auto"}, stage)[0]
    for found in ranks.run(2, trained, BELOW, own, stage):
        assert found["rows"] == [UP] * 8
        assert found["executor"] == plain["executor"] == "InlineExecutor"
        for name, value in plain["values"].items():
            assert np.array_equal(found["values"][name], value), name


def test_ratio_auto_is_placement_auto() -> None:
    block = {"offload_optimizer": {"device": "cpu", "ratio": "auto"}}
    config = load({"zero_optimization": {"stage": 1, **block}})
    assert config.shardwell.placement == "auto"
    assert config.zero_optimization.offload_optimizer.ratio == 1.0
    assert load(config.to_dict()).to_dict() == config.to_dict()
    assert load({"zero_optimization": {"offload_optimizer": {"ratio": "auto"}}}).shardwell.placement == "asked"
    with pytest.raises(ConfigError, match=r'"auto" contradicts shardwell\.placement "asked"'):
        load({"zero_optimization": {"stage": 1, **block}, "shardwell": {"placement": "asked"}})


@pytest.mark.slow
def test_gradients_wait_on_disk_as_the_last_resort(ranks: Ranks, tmp_path: Path) -> None:
    """16 on the device; on disk, 3 seats of 12, and either 4 for each gradient, or for those of 3 seats and 3 slots."""
    block, others = {**on_disk(tmp_path, **SEATS), "offload_param": {"device": "none"}}, CLIPPED
    above = ranks.run(2, trained, block, auto(16 + 7 * 2, 36 + 7 * 4), **others)
    below = ranks.run(2, trained, block, auto(16 + 7 * 2, 36 + 6 * 4), **others)
    for found, tier in ((above, HOST), (below, DISK)):
        assert [one["rows"] for one in found] == [[UP] + [DOWN] * 7] * 2
        assert [one["gradients"] for one in found] == [[DEVICE] + [tier] * 7] * 2
        assert ("gradients that wait on disk: of 7 units" in found[0]["text"]) is (tier is DISK)
    for name, value in above[0]["values"].items():
        assert np.array_equal(below[0]["values"][name], value), name
    with pytest.raises(Exception, match=r"does not fit .* host"):
        ranks.run(2, trained, block, auto(16 + 7 * 2, 36 + 6 * 4, gradients="host"), **others)


@pytest.mark.slow
def test_what_needs_no_disk_is_not_on_disk_and_what_rests_is_told(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(2, trained, on_disk(tmp_path, **SEATS), auto(3 * 14 + 5 * 2, 5 * 12))[0]
    assert found["rows"] == [UP] * 3 + [MIDDLE] * 5
    assert found["planned"] == {DEVICE: (3 * 12 + 5 * 2) * SHARE, HOST: 5 * 12 * SHARE}
    assert found["held"] == pytest.approx(found["planned"], abs=100)  # steps are counted, too
    assert found["text"] == (
        "updates on the host, by unit: 5 at once; units by optimizer state: 3 on the device, 5 on the host; "
        "stored on each rank: 92.0 KiB on the device, 120.0 KiB on the host"
    )


def test_on_cpu_ranks_nothing_is_on_the_device_that_need_not_be(ranks: Ranks) -> None:
    found = ranks.run(2, trained, ALL_BELOW, {"placement": "auto"})[0]
    assert found["rows"] == [(HOST, HOST)] * 8
    assert found["text"].startswith("updates on the host, by unit: 8 at once; units by optimizer state: 8 on the host")


def test_what_does_not_fit_is_refused_with_numbers_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ShardedGroup, "__init__", lambda *_: pytest.fail("a group was made"))
    layer = 64 * 64  # all of it on one rank
    block = {**on_disk(tmp_path, **SEATS), "offload_param": {"device": "cpu"}}
    own = {"placement": "auto", "memory": {"device": 14 * layer, "host": 60 * layer, "disk": 12 * layer}}
    expected = (
        r"Needed on each of 1 rank\(s\): device 48.0 KiB \(free 56.0 KiB\), host 240.0 KiB \(free 240.0 KiB\), "
        r'disk 288.0 KiB \(free 48.0 KiB\). Free space .* set shardwell.moments to "8bit", or use more ranks'
    )
    with pytest.raises(ShardwellError, match=expected):
        shardwell.initialize(model=Stack(), config=configured(block, own), device="cpu")
    own = {"placement": "auto", "memory": {"device": 14 * layer, "host": 10**9}}
    expected = (
        r'device 64.0 KiB \(free 56.0 KiB\), .*memory.device, set offload_param.device to "cpu", or use more ranks'
    )
    with pytest.raises(ShardwellError, match=expected):
        shardwell.initialize(model=Stack(), config=configured(BELOW, own), device="cpu")


def test_budgets_are_shares_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = type("Memory", (), {"available": 100_000})
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    budgets = {}
    monkeypatch.setattr("shardwell.offload.plan.plan", lambda needs, buffers, free: budgets.update(free) or PASS)
    PASS = plan([[Counter()]] * 8, [Counter()], {})
    for limits in ({"memory": {"host": 0.8, "disk": 5}}, {"host_room": 0.2, "disk_memory": 5}):
        own = {"placement": "auto", **limits}
        shardwell.initialize(model=Stack(), config=configured(ALL_BELOW, own), device="cpu")
        # a layer that computes and its gradients, on the CPU in the same memory, and what malloc keeps of them
        unsharded = 2 * (2 * 64 * 64 * 2)
        model = 8 * 64 * 64 * 4  # what the model has now is free soon
        assert budgets == {DEVICE: 0, HOST: 80_000 - unsharded + model, DISK: 5}


def uneven(path: str) -> list[Any]:
    """Training on ranks that find different amounts of free memory."""
    # bytes of all layers, and twice of one and its gradients on both ranks: in host memory, too
    parameters = 8 * 2 + 2 * (2 * 2 * 2)
    available = 10**9 if dist.get_rank() else 2 * (parameters + 36 + 3 * 12) * SHARE
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": available}))
        patch.setattr(budget, "held_bytes", lambda *_: Counter())
        own = {"placement": "auto", "memory": {"host": 1.0}}
        return trained(on_disk(Path(path), **SEATS), own)["rows"]


def test_all_ranks_place_by_the_least_room(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, uneven, str(tmp_path)) == [[MIDDLE] * 3 + [DOWN] * 5] * 2


def saved_and_loaded(block: dict[str, Any], own: dict[str, Any], folder: str, saves: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    engine = shardwell.initialize(model=Stack(), config=configured(block, own)).engine
    if saves:
        for step in range(2):
            torch.manual_seed(step)
            engine.backward(engine(torch.randn(4, 64)))
            engine.step()
        engine.save_checkpoint(folder)
    else:
        engine.load_checkpoint(folder)
    return everything(engine)


def test_checkpoints_go_from_three_tiers_to_the_host_and_back(ranks: Ranks, tmp_path: Path) -> None:
    spread = {**on_disk(tmp_path / "drive", **SEATS), "offload_param": {"device": "cpu"}}, auto(28, 68)
    folder = str(tmp_path / "saved")
    saved = ranks.run(2, saved_and_loaded, *spread, folder, True)[0]
    for block, own in ((BELOW, {}), spread):
        check_equal(ranks.run(2, saved_and_loaded, block, own, folder, False)[0], saved)
    assert float(np.abs(saved["layers.7.inner.weight exp_avg"]).max()) > 0


def test_a_plan_can_be_seen_without_any_memory(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Stack()
    own = auto(2 * (2 * 14 + 6 * 2), 36 + 2 * 12, shard_at_world_one=True)  # one rank holds what two would
    engine = shardwell.initialize(model=model, config=configured(on_disk(tmp_path, **SEATS), own)).engine
    assert [place.optimizer for place in engine.offload.places.values()] == [DEVICE] * 2 + [HOST] * 2 + [DISK] * 4


def grown(own: dict[str, Any]) -> list[Any]:
    """The tiers of units before and after a layer is made anew, and another one comes."""
    torch.manual_seed(0)
    model = Stack(layers=4)
    engine = shardwell.initialize(model=model, config=configured(ALL_BELOW, own)).engine
    before = [unit.tiers["parameters"] for unit in engine.units]
    model.layers[0] = Layer()
    model.layers.append(Layer())
    for _ in range(2):
        engine.backward(engine(torch.ones(4, 64)))
        engine.step()
    return [before, [unit.tiers["parameters"] for unit in engine.units]]


def test_a_unit_that_is_built_anew_keeps_its_place_and_a_new_one_rests_deep(ranks: Ranks) -> None:
    for before, after in ranks.run(2, grown, auto(2 * 14, 100)):
        assert before == [DEVICE.value] * 2 + [HOST.value] * 2
        assert after == [DEVICE.value] * 2 + [HOST.value] * 3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
            'offload_optimizer.ratio: 0.5 contradicts shardwell.placement "auto"',
        ),
    ],
)
def test_placement_contradicts_what_else_places(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load({**config, "shardwell": {"placement": "auto"}})


# ---------------------------------------------------------------------------------------------------- construction


SCALARS = 64  # bytes: what ranks have just told each other


def built(path: str, upside_down: bool) -> dict[str, Any]:
    """The order of building, and how much more memory it took than there was before."""
    below = {"device": "nvme", "nvme_path": path, "buffer_count": 1}
    config = configured({**on_disk(Path(path), **SEATS), "offload_param": below}, auto(28, 62))
    torch.set_default_dtype(torch.bfloat16)
    try:
        with shardwell.zero.Init(config=config, remote_device="none"):
            torch.manual_seed(0)
            model = Stack()
    finally:
        torch.set_default_dtype(torch.float32)
    order: list[str] = []
    make = ShardedGroup.__init__
    with pytest.MonkeyPatch.context() as patch, PeakWatch() as watch:
        patch.setattr(
            ShardedGroup, "__init__", lambda group, name, *rest: order.append(name) or make(group, name, *rest)
        )
        if upside_down:
            patch.setattr(TierPlacement, "depth", 0)
        engine = shardwell.initialize(model=model, config=config).engine
    return {"order": order, "more": watch.peak - watch.start, "names": [u.name for u in engine.units]}


def test_units_that_rest_deepest_are_built_first(ranks: Ranks, tmp_path: Path) -> None:
    """So that building takes no more than a unit beside what there is before or after."""
    names = [f"layers.{number}" for number in range(8)]
    whole, part = 2 + 4 + 2, 4 + 4 + 2  # as it was born, in fp32 and in bf16; masters, their way to disk, parameters
    right, wrong = (ranks.run(2, built, str(tmp_path), upside_down) for upside_down in (False, True))
    for found, other in zip(right, wrong, strict=True):
        assert found["names"] == other["names"] == names
        assert found["order"] == names[4:] + names[2:4] + names[:2]
        assert other["order"] == names
        assert found["more"] <= (2 * whole + part) * SHARE + SCALARS
        assert other["more"] >= found["more"] + 2 * 2 * SHARE  # lower halves, while the upper ones wait for the disk


@pytest.mark.parametrize("remote", list(BORN))
def test_shards_are_born_in_host_memory_or_on_disk(ranks: Ranks, tmp_path: Path, remote: str) -> None:
    plain = ranks.run(2, born, str(tmp_path), "none")
    for found, usual in zip(ranks.run(2, born, str(tmp_path), remote), plain, strict=True):
        assert found["at rest"] == [(BORN[remote], 0)] + [(BORN[remote], 2 * SHARE)] * 8  # in bf16
        assert usual["at rest"] == [(DEVICE, 0)] + [(DEVICE, 2 * SHARE)] * 8
        assert found["by books"] == {**dict.fromkeys(Tier, 0), BORN[remote]: 8 * 2 * SHARE}
        assert usual["by books"] == {**dict.fromkeys(Tier, 0), DEVICE: 8 * 2 * SHARE}
        for part in ("values", "stepped"):
            for name, value in usual[part].items():
                assert np.array_equal(found[part][name], value), name
        if remote == "nvme":
            assert found["reserved"] == 8 * 2 * SHARE
            assert found["left"] == 0  # when they have become units
            assert found["peak"] < usual["peak"] - 4 * 2 * SHARE
    assert not list(tmp_path.iterdir())


def test_init_on_disk_needs_a_folder() -> None:
    with pytest.raises(ConfigError, match=r"needs a folder: .* zero_optimization.offload_param.nvme_path"):
        shardwell.zero.Init(config=zero(3), remote_device="nvme")
    with pytest.raises(ConfigError, match="expected one of 'none', 'cuda', 'cpu', 'nvme', or none of them"):
        shardwell.zero.Init(config=zero(3), remote_device="tape")
