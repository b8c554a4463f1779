"""Fabric on a shardwell strategy follows the same loop on DDP, with its own names for backward, clipping and files."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from torch import nn

import shardwell.integrations.lightning as own
from shardwell import ShardwellError
from tests.support import lightning_runs as runs
from tests.support.ranks import Ranks


def fabric_on(strategy: Any, **options: Any) -> L.Fabric:
    fabric = L.Fabric(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy,
        plugins=[LightningEnvironment()],
        **options,
    )
    fabric.launch()
    return fabric


def strategy_of(stage: int | None) -> Any:
    return "ddp" if stage is None else own.ShardwellFabricStrategy(stage=stage, config=runs.SHARDED)


def loop(
    stage: int | None, way: str, precision: str = "32-true", files: tuple[str | None, str | None] = (None, None)
) -> dict[str, Any]:
    """Accumulate two micro-batches for each step, and clip; save at the end, or load at the start."""
    warnings.simplefilter("ignore")
    L.seed_everything(3, verbose=False)
    fabric = fabric_on(strategy_of(stage), precision=precision)
    with fabric.init_module():
        module = runs.network()
    if way == "apart":
        model = fabric.setup_module(module)
        optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    else:
        model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    data = fabric.setup_dataloaders(runs.loader(48))
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "epoch": 0}
    save, load = files
    if load is not None:
        fabric.load(load, state)
    losses, norms = [], []
    fabric.backward(model(torch.ones(2, 8)).sum())
    optimizer.zero_grad()  # gradients that nobody wants
    for index, (x, y) in enumerate(data):
        accumulates = index % 2 == 0
        with fabric.no_backward_sync(model, enabled=accumulates):
            loss = nn.functional.mse_loss(model(x), y)
            fabric.backward(loss / 2)
        losses.append(loss.item())
        if not accumulates:
            if way == "value":
                fabric.clip_gradients(model, optimizer, clip_val=0.01)
            else:
                norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=0.3)))
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    state["epoch"] += 1
    if save is not None:
        fabric.save(save, state)
    weights = fabric.strategy.get_module_state_dict(model._forward_module)
    found = {"losses": losses, "norms": norms, "weights": {k: v.float() for k, v in weights.items()}}
    own.release(module)
    return {**found, "epoch": state["epoch"], "rate": optimizer.param_groups[0]["lr"]}


def loops(way: str, precision: str) -> dict[str, Any]:
    stages = (None, 0, 3) if way == "together" else (None, 2, 3)
    return {str(stage): loop(stage, way, precision) for stage in stages}


def assert_same(mine: dict[str, Any], theirs: dict[str, Any], tolerance: float = 5e-6) -> None:
    for key in ("losses", "norms", "rate", "epoch"):
        np.testing.assert_allclose(mine[key], theirs[key], rtol=tolerance, atol=tolerance, err_msg=key)
    for name, value in theirs["weights"].items():
        np.testing.assert_allclose(mine["weights"][name], value, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("way", ["together", "apart", "value"])
def test_fabric_follows_ddp(ranks: Ranks, way: str) -> None:
    found = ranks.run(2, loops, way, "32-true")[0]
    for one in found.values():
        assert_same(one, found["None"])


def test_fabric_in_bf16_is_close_to_ddp(ranks: Ranks) -> None:
    found = ranks.run(2, loops, "together", "bf16-mixed")[0]
    for one in found.values():
        assert_same(one, found["None"], 0.03)


def saved_and_loaded(folder: str, leg: int) -> dict[str, Any]:
    found = {}
    for stage in (None, 3):
        first, second = f"{folder}/{stage}-1", None if leg == 1 else f"{folder}/{stage}-1"
        found[str(stage)] = loop(stage, "together", files=(first if leg == 1 else None, second))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_fabric_goes_on_at_another_number_of_ranks(ranks: Ranks, tmp_path: Path, num_ranks: int) -> None:
    ranks.run(2, saved_and_loaded, str(tmp_path), 1)
    found = ranks.run(num_ranks, saved_and_loaded, str(tmp_path), 2)[0]
    assert found["3"]["epoch"] == 2
    assert_same(found["3"], found["None"])


def refusals() -> list[str]:
    fabric = fabric_on(strategy_of(2))
    module = runs.network()
    two = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (module[0], module[1])]
    said = []
    model = fabric.setup_module(runs.network())
    for attempt in (
        lambda: fabric.setup(module, *two),
        lambda: fabric.setup_optimizers(two[0]),
        lambda: fabric.save("nowhere", {"model": module}),
        lambda: fabric.save("nowhere", {"model": model}, filter={"model": lambda name, value: True}),
        lambda: fabric.load("nowhere"),
    ):
        try:
            attempt()
            said.append("")
        except (ShardwellError, TypeError) as error:
            said.append(str(error))
    return said


def test_fabric_refuses_what_cannot_work(ranks: Ranks) -> None:
    two, foreign, no_model, filtered, nothing = ranks.run(1, refusals)[0]
    assert "one optimizer" in two
    assert "setup_module" in foreign
    assert "found 0" in no_model
    assert "filter" in filtered
    assert "needs the model" in nothing
