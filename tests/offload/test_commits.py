"""When an update on the host becomes the truth: who may go ahead of the norm, and what others see of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwell
from shardwell.errors import CheckpointError, ConfigError
from shardwell.offload.cpu_kernels import HostKernel
from shardwell.optim.lamb import Lamb
from shardwell.optim.muon import Muon
from tests.support.models import Gpt, batches, whole_parameters, zero
from tests.support.offload_cases import HOST, check_equal, engine_with
from tests.support.ranks import Ranks
from tests.support.updates_in_flight import train

# ------------------------------------------------------------------------------ optimizers that are not elementwise


class Choice(nn.Module):
    """Rank 0 leaves a layer out, so that it cannot know whether the unit has all of its gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(9, 9, bias=False), nn.Linear(9, 9, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.one(x)) + (self.other(x) if dist.get_rank() else 0)


def choices() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Choice() for _ in range(2)])


Arguments = Callable[[nn.Module], dict[str, Any]]
WAYS: dict[str, Arguments] = {
    "Lamb": lambda model: {"optimizer": Lamb(model.parameters(), lr=1e-2)},
    "a factory of Lamb": lambda model: {"optimizer": partial(Lamb, lr=1e-2)},
    "Lamb by name": lambda model: {"config": {"optimizer": {"type": "Lamb", "params": {"lr": 1e-2}}}},
    "Muon": lambda model: {"optimizer": Muon(model.parameters(), lr=1e-2)},
    "torch's Muon": lambda model: {"optimizer": torch.optim.Muon(model.parameters(), lr=1e-2)},
}


def engine_of(model: nn.Module, arguments: dict[str, Any], block: dict[str, Any], commit: str) -> shardwell.Engine:
    own = {"commit": commit, "divergence_timeout": 5}
    block = {**block, "leaf_module": {"classes": ["Choice"]}}
    config = zero(2, zero_optimization=block, shardwell=own, **arguments.pop("config", {}))
    return shardwell.initialize(model=model, config=config, device="cpu", **arguments).engine


def chosen(way: str, block: dict[str, Any]) -> tuple[dict[str, Tensor], str]:
    model = choices()
    engine = engine_of(model, WAYS[way](model), block, "auto")
    for number in range(2):
        rows = torch.randn(4, 9, generator=torch.Generator().manual_seed(number))
        engine.backward(engine(rows).square().mean())
        engine.step()
    return whole_parameters(model), engine.config.shardwell.commit


@pytest.mark.parametrize("way", WAYS)
def test_optimizers_that_are_not_elementwise_commit_after_the_norm(ranks: Ranks, way: str) -> None:
    expected, _ = ranks.run(2, chosen, way, {})[0]
    for found, commit in ranks.run(2, chosen, way, HOST):
        assert commit == "after_norm"
        check_equal(found, expected)


@pytest.mark.parametrize("commit", ["at_once", "shadow"])
def test_they_cannot_be_told_to_go_ahead_of_it(commit: str) -> None:
    model = choices()
    with pytest.raises(ConfigError, match="ranks meet"):
        engine_of(model, WAYS["Lamb"](model), HOST, commit)
    engine_of(model, WAYS["Lamb"](model), {}, commit)  # nothing is on the host: nothing goes ahead


# -------------------------------------------------------------------------------------------------------------- saving


def saved(commit: str, folder: str) -> tuple[str, dict[str, Tensor], dict[str, Tensor]]:
    """What a save between the first backward and its step says; what one after it holds, and what it should."""
    model = choices()
    engine = engine_of(model, {"optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2)}, HOST, commit)
    engine.backward(engine(torch.ones(4, 9)).square().mean())
    said = "saved"
    try:
        engine.save_checkpoint(folder, "between")
    except CheckpointError as error:
        said = str(error)
    engine.step()
    engine.save_checkpoint(folder, "after")
    expected = whole_parameters(model)
    engine.backward(engine(torch.ones(4, 9)).square().mean())
    engine.step()
    engine.load_checkpoint(folder, "after")
    return said, whole_parameters(model), expected


@pytest.mark.parametrize("commit", ["after_norm", "at_once", "shadow"])
def test_a_checkpoint_holds_whole_steps_only(ranks: Ranks, tmp_path: Path, commit: str) -> None:
    for said, found, expected in ranks.run(2, saved, commit, str(tmp_path)):
        check_equal(found, expected)
        assert "save after the step" in said if commit == "at_once" else said == "saved"
    assert (tmp_path / "between").exists() == (commit != "at_once")


# ------------------------------------------------------------------------------------- what changes while updates wait


@contextlib.contextmanager
def slow_kernels() -> Iterator[None]:
    real = HostKernel.step

    def step(*args: Any) -> None:
        time.sleep(0.01)
        real(*args)

    HostKernel.step = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        HostKernel.step = real  # type: ignore[method-assign]


def scheduled(block: dict[str, Any], commit: str) -> dict[str, Tensor]:
    """Torch's schedules change a rate that is a tensor in place, while updates of the step before may wait."""
    torch.manual_seed(0)
    model = Gpt(width=8, blocks=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 10.0**-step)
    config = zero(2, zero_optimization=block, shardwell={"commit": commit})
    initialized = shardwell.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)
    with slow_kernels():
        train(initialized.engine)
        return whole_parameters(model)


@pytest.mark.parametrize("commit", ["after_norm", "at_once", "shadow"])
def test_an_update_has_the_learning_rate_of_its_step(ranks: Ranks, commit: str) -> None:
    (expected,), (found,) = (ranks.run(1, scheduled, block, commit) for block in ({}, HOST))
    for name, value in expected.items():
        torch.testing.assert_close(torch.as_tensor(found[name]), torch.as_tensor(value), rtol=0.0, atol=1e-7)


def counted_while_changing() -> bool:
    """A state whose entries change when the first of them is looked at, as a worker may do between any two."""
    engine = engine_with(HOST)
    train(engine, 1)
    engine.optimizer.settle()
    before, state = engine.memory().now, next(iter(engine.optimizer.state.values()))

    class Changing(Tensor):
        @property
        def nbytes(self) -> int:  # type: ignore[override]
            state.pop("first", None)
            return 0

    entries = dict(state)
    state.clear()
    state.update({"changing": torch.zeros(0).as_subclass(Changing), **entries, "first": True})
    engine.optimizer._num_states = -1
    engine.optimizer.count_states()
    return engine.memory().now == before and "first" not in state


def test_states_are_counted_while_they_change(ranks: Ranks) -> None:
    assert ranks.run(1, counted_while_changing) == [True]


# -------------------------------------------------------------------------------------------------------- in line, too


def in_line(commit: str, clip: float) -> tuple[dict[str, Tensor], list[float | None]]:
    """fp16, with small parameters that rest whole and are stepped in line, ahead of the norm as the others are."""
    torch.manual_seed(0)
    model = Gpt(width=8, blocks=2)
    config = zero(
        3,
        zero_optimization={**HOST, "stage3_param_persistence_threshold": 100},
        fp16={"enabled": True, "initial_scale_power": 8},
        gradient_accumulation_steps=2,
        gradient_clipping=clip,
        shardwell={"commit": commit, "shard_at_world_one": True},
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=config).engine
    norms = []
    for batch in batches(3, 12):
        for rows in batch.chunk(2):
            engine.backward(engine(rows))
            engine.step()
        norms.append(engine.get_global_grad_norm())
    return whole_parameters(model), norms


@pytest.mark.parametrize("clip", [0.0, 0.1])
def test_gradients_are_unscaled_once_in_line_too(ranks: Ranks, clip: float) -> None:
    ((expected, norms),) = ranks.run(1, in_line, "after_norm", clip)
    ((found, its_norms),) = ranks.run(1, in_line, "shadow", clip)
    assert its_norms == norms
    check_equal(found, expected)
