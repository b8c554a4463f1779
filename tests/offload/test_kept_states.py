"""Host offload keeps the optimizer state of the first units on a device that has memory of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardwell
from shardwell.config import load
from shardwell.memory import Tier
from shardwell.memory.machine import SimulatedMachine, ThisMachine, simulated
from shardwell.offload.kept_states import MOST, ROOM, keeps_states
from shardwell.plan import estimate
from shardwell.plan.changes import FittingChange, PlanChoice
from shardwell.plan.decoder import DecoderSizes
from shardwell.plan.devices import gpu, speeds_of
from shardwell.plan.estimate import _run
from shardwell.plan.models import PlanModel, decoder
from shardwell.plan.report import RESERVE
from shardwell.plan.search import Search
from tests.support.checkpoint_legs import everything
from tests.support.internals import units_of
from tests.support.placements import BELOW, Stack, configured, trained
from tests.support.ranks import Ranks

DEVICE, HOST = Tier.DEVICE, Tier.HOST
OPEN = {"offload_optimizer": {"device": "cpu"}}
LAYER = 64 * 64  # parameters; the stack has eight, and no others
KEPT, SENT = (DEVICE, DEVICE), (DEVICE, HOST)
CLIPPED = {"gradient_clipping": 0.05}


@dataclass(frozen=True)
class OwnMemory(ThisMachine):
    """This machine, with a CPU that is taken for a GPU with so many free bytes."""

    free: float

    def has_own_memory(self, device: torch.device) -> bool:
        return True

    def capacity_bytes(self, device: torch.device) -> float:
        return self.free

    def available_bytes(self, device: torch.device) -> float:
        return self.free

    def unreserved_bytes(self, device: torch.device) -> float:
        return 0.0

    def workspace_bytes(self, device: torch.device) -> int:
        return 0


def beside(free: float, block: dict[str, Any], own: dict[str, Any], stage: int, **others: Any) -> dict[str, Any]:
    with simulated(OwnMemory(free)):
        return trained(block, own, stage, **others)


@pytest.mark.parametrize(
    ("stage", "others"),
    [(1, {}), (2, CLIPPED), (3, {}), (3, CLIPPED)],
    ids=["1-at once", "2-after the norm", "3-at once", "3-after the norm"],
)
def test_seven_of_eight_units_stay_where_there_is_room_with_the_same_bits(
    ranks: Ranks, stage: int, others: dict[str, Any]
) -> None:
    sent = ranks.run(2, beside, 1e9, BELOW, {}, stage, **others)
    assert sent[0]["rows"] == [SENT] * 8
    for found, other in zip(ranks.run(2, beside, 1e9, OPEN, {}, stage, **others), sent, strict=True):
        assert found["rows"] == [KEPT] * 7 + [SENT]
        assert found["held"] == pytest.approx(found["planned"], abs=100)
        for name, value in other["values"].items():
            assert np.array_equal(found["values"][name], value), name


@pytest.mark.parametrize("num_kept", [0, 3])
def test_no_more_is_kept_than_a_share_of_what_the_states_leave_free(ranks: Ranks, num_kept: int) -> None:
    """At stage 2 a layer has 2 bytes a parameter on each rank; kept, 10 more of its half, and 2 of its gradients."""
    each, rest = 12 * LAYER // 2, 8 * 2 * LAYER + 4 * LAYER  # and the parameters and gradients of the largest unit
    for free, expected in (
        (rest + (num_kept + 1) * each / ROOM - 1, num_kept),
        (rest + num_kept * each / ROOM, num_kept),
    ):
        for found in ranks.run(2, beside, free, OPEN, {}, 2):
            assert found["rows"] == [KEPT] * expected + [SENT] * (8 - expected)


def with_less(free: list[float]) -> Any:
    return beside(free[torch.distributed.get_rank()], OPEN, {}, 2)["rows"]


def test_the_rank_with_the_least_memory_decides(ranks: Ranks) -> None:
    assert ranks.run(2, with_less, [1e9, 0.0]) == [[SENT] * 8] * 2


def told() -> tuple[str, list[str], tuple[str, ...]]:
    """What an engine says of kept state, and an error for want of memory."""
    config = configured(OPEN, {}, 2, train_micro_batch_size_per_gpu=4)
    with simulated(OwnMemory(1e9)):
        engine = shardwell.initialize(model=Stack(), config=config).engine

    def fails(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    engine.module.layers[2].register_forward_pre_hook(fails)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        engine(torch.randn(4, 64))
    return engine.startup_report, raised.value.__notes__, engine.offload.kept


def test_what_is_kept_is_told_with_its_bytes_and_the_way_out(ranks: Ranks) -> None:
    report, notes, kept = ranks.run(1, told)[0]
    assert kept == tuple(f"layers.{number}" for number in range(7))
    size = "336.0 KiB"  # 12 bytes of 7 x 4096 parameters
    assert "88% of the trained parameters) stays on the device" in report
    assert f"where it takes {size} with the gradients" in report
    assert '"ratio": 1.0 sends all of it to the host' in report
    assert len(notes) == 1
    assert f"({size}) on the device although it is offloaded" in notes[0]
    assert '"ratio": 1.0' in notes[0]


def unfrozen() -> dict[str, Any]:
    """What is kept while five of eight layers are frozen, and where states are once these train."""
    config = configured(OPEN, {}, 2, train_micro_batch_size_per_gpu=4)
    model = Stack()
    model.layers[:5].requires_grad_(False)
    with simulated(OwnMemory(1e9)):
        engine = shardwell.initialize(model=model, config=config).engine
        model.layers[:5].requires_grad_(True)
        engine.optimizer.add_param_group({"params": list(model.layers[:5].parameters())})
        for _ in range(2):
            engine.backward(engine(torch.randn(4, 64)))
            engine.step()
    tiers = [unit.groups[0].spec.optimizer.tier for unit in units_of(engine)]
    return {"kept": engine.offload.kept, "tiers": tiers}


def test_units_that_were_frozen_when_others_were_kept_go_to_the_host_when_they_train(ranks: Ranks) -> None:
    """Frozen, they took nothing, so that there need not be room for what they take now."""
    found = ranks.run(1, unfrozen)[0]
    assert found["kept"] == tuple(f"layers.{number}" for number in range(7))
    assert found["tiers"] == [HOST] * 5 + [DEVICE] * 2 + [HOST]


def leg(path: str, block: dict[str, Any], *, saves: bool) -> dict[str, Any]:
    config = configured(block, {}, 2, train_micro_batch_size_per_gpu=4, **CLIPPED)
    with simulated(OwnMemory(1e9)):
        torch.manual_seed(0 if saves else 1)
        engine = shardwell.initialize(model=Stack(), config=config).engine
    if saves:
        for step in range(2):
            torch.manual_seed(step)
            engine.backward(engine(torch.randn(4, 64)))
            engine.step()
        engine.save_checkpoint(path)
    else:
        engine.load_checkpoint(path)
    return everything(engine)


@pytest.mark.parametrize("saved_kept", [False, True])
def test_checkpoints_load_whether_state_is_kept_or_not(ranks: Ranks, tmp_path: Path, saved_kept: bool) -> None:
    blocks = [BELOW, OPEN]
    saved = ranks.run(2, leg, str(tmp_path), blocks[saved_kept], saves=True)[0]
    loaded = ranks.run(1, leg, str(tmp_path), blocks[not saved_kept], saves=False)[0]
    assert loaded.keys() == saved.keys()
    for name, value in saved.items():
        assert np.array_equal(loaded[name], value), name


@pytest.mark.parametrize(
    ("zero", "own", "expected"),
    [
        ({"offload_optimizer": {"device": "cpu"}}, {}, True),
        ({"offload_optimizer": {"device": "cpu", "ratio": 1.0}}, {}, False),
        ({"offload_optimizer": {"device": "cpu", "ratio": "auto"}}, {}, False),
        ({"offload_optimizer": {"device": "cpu"}}, {"placement": "asked"}, False),
        ({"offload_optimizer": {"device": "cpu"}}, {"moments": "8bit"}, False),
        ({"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}, {}, False),
        ({"offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}}, {}, False),
        ({}, {}, False),
    ],
)
def test_a_configuration_that_says_more_decides_itself(
    zero: dict[str, Any], own: dict[str, Any], expected: bool
) -> None:
    assert keeps_states(load({"zero_optimization": {"stage": 3, **zero}, "shardwell": own})) is expected


# ------------------------------------------------------------------------------------------------------------- plans


def host_config(**block: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", **block}},
        "shardwell": {"bundle_size": 0},
    }


@pytest.mark.slow
def test_few_blocks_of_a_plan_keep_what_all_of_them_keep() -> None:
    sizes = DecoderSizes(72, 64, 2, 256, mlp=128, gated=True)
    machine = SimulatedMachine(24 << 20, 1 << 40)
    model = decoder("few", sizes, 1, 16, recomputes=True)
    few = estimate(model, host_config(), machine)
    assert any("identical blocks were simulated" in note for note in few.notes)
    whole, _ = _run(model.build(sizes.layers), host_config(), machine, model.inputs, None)
    assert 3 < len(few.costs.kept) < MOST * sizes.layers  # the limit is memory
    for name in ("kept", "rest", "traffic", "calls", "copies"):
        assert getattr(few.costs, name) == getattr(whole, name), name
    assert few.costs.peaks["forward device"] == pytest.approx(whole.peaks["forward device"], abs=4096)


def test_a_device_without_memory_of_its_own_keeps_nothing(ranks: Ranks) -> None:
    assert ranks.run(1, trained, OPEN, {}, 2)[0]["rows"] == [SENT] * 8


@pytest.mark.slow
def test_where_what_is_kept_takes_too_much_plans_send_all_of_it_to_the_host() -> None:
    sizes = DecoderSizes(12, 64, 2, 64, mlp=128, gated=True)
    model = PlanModel("small", lambda batch, length, again: decoder("small", sizes, batch, length, recomputes=again))
    enough = model.report(host_config(ratio=1.0), SimulatedMachine(1e9), 512, True)
    tight = SimulatedMachine(1.005 * enough.peak(Tier.DEVICE) / (1 - RESERVE), speeds=speeds_of(gpu("h100")))
    given = model.report(host_config(), replace(tight, speeds=None), 512, True)
    assert given.costs.kept
    assert not given.fits
    change = FittingChange(model, 512).smallest(PlanChoice("", host_config(), tight, True), given)
    assert change is not None
    assert change[0].words == "all of it (ratio 1.0)"
    assert change[1].peak(Tier.DEVICE) == enough.peak(Tier.DEVICE)
    base = {key: value for key, value in host_config().items() if key != "zero_optimization"}
    found = Search(model, base, tight, 512, recomputes=True).run()
    assert found.config()["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "ratio": 1.0}
