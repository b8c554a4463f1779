"""Small neighbours form one unit and persistent parameters belong to the root: the same bits in fewer collectives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardwell
from shardwell.sharding import wrap_model
from shardwell.sharding.bundle import bundle_neighbours, gather_in_root
from shardwell.sharding.wrap import LeafRules
from tests.support.models import Gpt, batches, share, whole_parameters, zero
from tests.support.ranks import Ranks

BLOCKS = 6
BLOCK = 2785  # elements of a block of width 16


def names(specs: list[Any]) -> list[str]:
    return [one.name for one in specs]


def test_neighbours_in_a_container_are_joined_up_to_the_size() -> None:
    model = Gpt(blocks=BLOCKS)
    specs = wrap_model(model)
    assert specs[2].numel == BLOCK
    assert names(bundle_neighbours(model, specs, 2 * BLOCK)) == ["", "embed", "blocks.0-1", "blocks.2-3", "blocks.4-5"]
    assert names(bundle_neighbours(model, specs, 4 * BLOCK)) == ["", "embed", "blocks.0-3", "blocks.4-5"]
    assert names(bundle_neighbours(model, specs, 2 * BLOCK - 1)) == names(specs)
    bundle = bundle_neighbours(model, specs, 4 * BLOCK)[2]
    assert bundle.modules == tuple(model.blocks[:4])
    assert bundle.numel == 4 * BLOCK


def test_units_that_the_user_named_stay_alone() -> None:
    model = Gpt(blocks=BLOCKS)
    specs = wrap_model(model, LeafRules(names=("blocks.2",)))
    assert "blocks.2" in names(bundle_neighbours(model, specs, 10**9))


def test_persistent_parameters_of_all_units_belong_to_the_root() -> None:
    model = Gpt(blocks=2)
    specs = wrap_model(model)
    persistent = {id(p) for name, p in model.named_parameters() if "norm" in name}
    moved = gather_in_root(model, specs, persistent)
    assert {id(p) for _, p in moved[0].parameters} == {id(p) for _, p in specs[0].parameters} | persistent
    found = [name for one in moved for name, _ in one.parameters]
    assert sorted(found) == sorted(name for name, _ in model.named_parameters())


class Odd(nn.Module):
    """Uses the blocks of a bundle in another order, twice, or not at all."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.way = way
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)])
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        order = {"reversed": [5, 4, 3, 2, 1, 0], "skipped": [0, 3, 4], "twice": [0, 1, 2, 0, 1, 2, 3, 4, 5]}[self.way]
        for index in order:
            x = x + self.blocks[index](x)
        return F.mse_loss(self.head(x), torch.ones_like(x))


def trained(stage: int, bundle_size: int, recompute: str, more: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Gpt(blocks=BLOCKS, recompute=recompute)
    config = zero(stage, shardwell={"bundle_size": bundle_size}, **more)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = shardwell.initialize(model=model, optimizer=optimizer, config=config)
    losses = []
    for batch in batches(3, 4):
        loss = engine(share(batch, dist.get_rank(), dist.get_world_size()))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.eval()
    with torch.no_grad():
        engine(batch)
    return {
        "losses": losses,
        "values": {name: value.numpy() for name, value in whole_parameters(model).items()},
        "calls": {kind.name: num for kind, num in engine.traffic().calls.items()},
        "bytes": engine.traffic().total(),
        "units": [(unit.name, unit.residency) for unit in engine.units],
    }


RECOMPUTE = ("", "reentrant", "nonreentrant")


def in_several_ways(stage: int, ways: tuple[str, ...]) -> dict[str, Any]:
    return {f"{recompute} {size}": trained(stage, size, recompute, {}) for recompute in ways for size in (0, 3 * BLOCK)}


def same_values(first: dict[str, Any], second: dict[str, Any]) -> bool:
    values = first["values"], second["values"]
    return first["losses"] == second["losses"] and all((values[0][k] == values[1][k]).all() for k in values[0])


def check_ways(found: dict[str, Any], ways: tuple[str, ...], num_gathers: int, num_reductions: int) -> None:
    for recompute in ways:
        alone, bundled = found[f"{recompute} 0"], found[f"{recompute} {3 * BLOCK}"]
        assert same_values(alone, bundled), recompute
        assert bundled["calls"].get("REDUCE_SCATTER") == num_reductions, recompute
        assert bundled["calls"].get("ALL_GATHER", 0) == num_gathers, recompute
        assert bundled["bytes"] <= alone["bytes"] * 1.01, recompute  # the padding of fewer units is smaller


@pytest.mark.slow
def test_a_bundle_is_one_collective_and_gives_the_same_bits_at_stage_3(ranks: Ranks) -> None:
    for found in ranks.run(2, in_several_ways, 3, RECOMPUTE):
        check_ways(found, RECOMPUTE, 8, 4)  # root, embedding and two bundles, in forward and backward
        assert {state for way in found.values() for name, state in way["units"]} == {"sharded"}


@pytest.mark.slow
def test_a_bundle_is_one_collective_and_gives_the_same_bits_at_stages_1_and_2(ranks: Ranks) -> None:
    for stage, ways in ((1, RECOMPUTE[1:2]), (2, RECOMPUTE[::2])):
        for found in ranks.run(2, in_several_ways, stage, ways):
            check_ways(found, ways, 0, 4)
            assert all(way["calls"]["PUBLISH"] == (4 if " 0" not in name else 8) for name, way in found.items())


def persistent_run(threshold: int) -> dict[str, Any]:
    return trained(3, 0, "reentrant", {"zero_optimization": {"stage3_param_persistence_threshold": threshold}})


def test_persistent_parameters_travel_together(ranks: Ranks) -> None:
    for whole, sharded in zip(ranks.run(2, persistent_run, 65), ranks.run(2, persistent_run, 0), strict=True):
        assert same_values(whole, sharded)
        assert whole["calls"]["REDUCE_SCATTER"] == 8  # root with the persistent ones, embedding and six blocks
        assert whole["calls"]["PUBLISH"] == 1


def odd_use(way: str, size: int) -> dict[str, Any]:
    model = Odd(way)
    config = zero(3, shardwell={"bundle_size": size})
    engine, *_ = shardwell.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5), config=config
    )
    losses = []
    for step in range(3):
        torch.manual_seed(10 * step + dist.get_rank())
        loss = engine(torch.randn(4, 8))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    with torch.no_grad():
        engine(torch.ones(4, 8))
        states = {unit.residency for unit in engine.units}
        model.blocks[1](torch.ones(4, 8))  # a part, outside of the engine's forward
        engine(torch.ones(4, 8))
    values = {name: value.numpy() for name, value in whole_parameters(model).items()}
    return {"losses": losses, "values": values, "states": states, "left": {unit.residency for unit in engine.units}}


def odd_uses(way: str) -> list[dict[str, Any]]:
    return [odd_use(way, size) for size in (0, 10**6)]


def test_modules_of_a_bundle_may_run_in_any_order_or_not_at_all(ranks: Ranks) -> None:
    for way in ("reversed", "skipped", "twice"):
        for alone, bundled in ranks.run(2, odd_uses, way):
            assert same_values(alone, bundled), way
            assert bundled["states"] == bundled["left"] == {"sharded"}, way
