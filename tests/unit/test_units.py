"""`engine.units` says what is all-gathered together, where it is stored, and how large it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardwell
from tests.support.models import Gpt, batches
from tests.support.ranks import Ranks


def config(stage: int, **zero: Any) -> dict[str, Any]:
    block = {"stage": stage, "stage3_param_persistence_threshold": 0, **zero}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    return {"train_micro_batch_size_per_gpu": 2, "zero_optimization": block, "optimizer": optimizer}


def seen(stage: int, zero: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Gpt()
    engine, *_ = shardwell.initialize(model=model, config=config(stage, **zero))
    before = [unit.residency for unit in engine.units]
    inside: list[str] = []
    block = engine.units[1]
    block.module.register_forward_pre_hook(lambda *_: inside.append(engine.units[1].residency))
    engine.backward(engine(batches(1, 2)[0]))
    engine.step()
    units = engine.units
    every = [parameter for unit in units for parameter in unit.parameters.values()]
    memory = engine.memory()
    return {
        "names": [unit.name for unit in units],
        "before": before,
        "inside": inside,
        "tiers": [unit.tiers for unit in units],
        "is_whole": {id(p) for p in every} == {id(p) for p in model.parameters()},
        "names_fit": all(dict(model.named_parameters())[n] is p for u in units for n, p in u.parameters.items()),
        "modules_fit": all(model.get_submodule(unit.name) is unit.module for unit in units),
        "numel": sum(unit.numel for unit in units) == sum(p.numel() for p in model.parameters()),
        "bytes": {unit.name: sum(unit.bytes.values()) for unit in units if unit.bytes},
        "memory": {name: size for name, size in memory.by_unit().items() if name in {unit.name for unit in units}},
    }


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_units_name_every_parameter_once_with_its_residency_and_bytes(ranks: Ranks, stage: int) -> None:
    for found in ranks.run(2, seen, stage, {}):
        assert found["names"][0] == ""
        assert len(set(found["names"])) == len(found["names"]) > 2
        assert found["is_whole"]
        assert found["names_fit"]
        assert found["modules_fit"]
        assert found["numel"]
        assert set(found["before"]) == ({"sharded"} if stage == 3 else {"unsharded"})
        assert found["inside"] == ["unsharded"]
        assert all(tiers == {"parameters": "device", "optimizer": "device"} for tiers in found["tiers"])
        assert found["bytes"] == found["memory"]


def test_units_say_which_tier_their_states_are_on(ranks: Ranks, tmp_path: Path) -> None:
    zero = {
        "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)},
        "offload_param": {"device": "cpu"},
    }
    for found in ranks.run(2, seen, 3, zero):
        assert all(tiers == {"parameters": "host", "optimizer": "disk"} for tiers in found["tiers"])
