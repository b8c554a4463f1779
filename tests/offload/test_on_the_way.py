"""Updates that are still on their way: whoever looks, loads or gives up in between sees all of them, or none."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwell
from shardwell.errors import NonFiniteError, ReleasedParameterError
from shardwell.memory import StateKind, Tier
from shardwell.optim.grad_norm import OverflowCheck
from shardwell.utils import (
    safe_get_full_fp32_param,
    safe_get_local_fp32_param,
    safe_get_local_optimizer_state,
    safe_set_full_grad,
)
from tests.support.checkpoint_legs import everything
from tests.support.internals import units_of
from tests.support.models import Gpt, batches, whole_parameters, zero
from tests.support.offload_cases import HOST, blocks, check_equal, engine_with, on_disk, quickly
from tests.support.ranks import Ranks
from tests.support.updates_in_flight import Forks, backward, copied, slowly, train


def seen(engine: shardwell.Engine) -> dict[str, Any]:
    """Masters, state, and parameters as they are gathered."""
    whole = {f"whole {name}": value for name, value in engine.state_dict().items()}
    return copied(everything(engine) | whole)


# --------------------------------------------------------------------------------------------------------- loading


def loaded(block: dict[str, Any], commit: str, folder: str, steps: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """What was saved, and what the engine holds after it was loaded while updates were on their way."""
    quickly()
    engine = engine_with(block, commit=commit)
    train(engine)
    engine.save_checkpoint(folder)
    saved = copied(everything(engine))
    with slowly():
        backward(engine, 2)
        if steps:
            engine.step()
        engine.load_checkpoint(folder)
        for unit in units_of(engine):
            unit.wait()
        found = copied(everything(engine))
    train(engine, 1)
    return saved, found


@pytest.mark.parametrize(  # every pair of values; `steps` is whether it comes after a step, or after a backward
    ("tier", "commit", "steps"),
    [
        ("host", "after_norm", True),
        ("host", "at_once", False),
        ("disk", "after_norm", False),
        ("disk", "at_once", True),
        ("all on disk", "after_norm", True),
        ("all on disk", "at_once", False),
    ],
)
def test_what_is_loaded_is_what_was_saved(ranks: Ranks, tmp_path: Path, tier: str, commit: str, steps: bool) -> None:
    (tmp_path / "drive").mkdir()
    drive = tmp_path / "drive"
    block = {"host": HOST, "disk": on_disk(drive), "all on disk": blocks("nvme", "nvme", drive)}[tier]
    saved, found = ranks.run(1, loaded, block, commit, str(tmp_path / "saved"), steps)[0]
    check_equal(found, saved)


# --------------------------------------------------------------------------------------------------------- looking


def between(stage: int, commit: str, small: int) -> list[dict[str, Any]]:
    """All values before a backward, after it, later, and after the step."""
    block = {**HOST, "stage3_param_persistence_threshold": small}
    engine = engine_with(block, stage=stage, commit=commit)
    train(engine)
    found = [copied(engine.state_dict())]
    with slowly():
        backward(engine, 2)
        found.append(copied(engine.state_dict()))
        time.sleep(0.5)
        found.append(copied(engine.state_dict()))
        engine.step()
        found.append(copied(engine.state_dict()))
    return found


@pytest.mark.parametrize(("stage", "small"), [(1, 0), (3, 0), (3, 100)])
def test_who_looks_between_backward_and_step_sees_updates_at_once_on_all_ranks(
    ranks: Ranks, stage: int, small: int
) -> None:
    one, other = ranks.run(2, between, stage, "at_once", small)
    before, first, later, after = one
    check_equal(later, first)
    changed = {name for name in first if (before[name] != first[name]).any()}
    own = {name for name in first if name.startswith("blocks.2") and name.endswith("weight")}
    assert changed >= {name for name in own if not small or "norm" not in name}  # small ones are the root's
    for name in changed:
        assert (first[name] == after[name]).all(), name
    for mine, theirs in zip(one, other, strict=True):
        check_equal(theirs, mine)


def test_a_forward_before_the_step_does(ranks: Ranks) -> None:
    for losses in ranks.run(2, forwards, 1):
        assert losses[0] != losses[1]
        assert losses[1] == losses[2]


def forwards(stage: int) -> list[float]:
    """The loss of the same rows before a backward, after it, and once more."""
    engine = engine_with(HOST, stage=stage, commit="at_once")
    train(engine)
    rows, losses = batches(1, 4)[0], []
    with torch.no_grad(), slowly():
        losses.append(float(engine(rows)))
        with torch.enable_grad():
            backward(engine, 2)
        losses.append(float(engine(rows)))
        time.sleep(0.5)
        losses.append(float(engine(rows)))
    engine.step()
    return losses


class Choice(nn.Module):
    """Rank 0 uses both layers, others one: those cannot update the unit before they know the gradients of all."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.one(x) + (self.other(x) if dist.get_rank() == 0 or not self.training else 0)


def apart(stage: int) -> list[float]:
    """Losses between backward and step, after the step, and after gradients were given up."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Choice() for _ in range(3)])
    block = {**HOST, "leaf_module": {"classes": ["Choice"]}}
    config = zero(stage, zero_optimization=block, bf16={"enabled": True}, shardwell={"commit": "at_once"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = shardwell.initialize(model=model, optimizer=optimizer, config=config)
    rows, losses = torch.ones(2, 8).bfloat16(), []

    def look() -> None:
        with torch.no_grad():
            losses.append(float(engine.eval()(rows).float().square().mean()))
        engine.train()

    for end in (engine.step, engine.zero_grad, engine.step):
        engine.backward(engine(rows).float().square().mean())
        look()
        end()
        look()
    return losses


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_of_which_some_update_at_once_see_the_same(ranks: Ranks, stage: int) -> None:
    one, other = ranks.run(2, apart, stage)
    assert one == other
    assert len(set(one)) > 3


# -------------------------------------------------------------------------------------------------------- giving up


def given_up(stage: int, commit: str) -> list[dict[str, Any]]:
    """All values before a backward whose gradients nobody wants, and after; and what comes of further steps."""
    engine = engine_with(HOST, stage=stage, commit=commit)
    train(engine)
    found = [seen(engine)]
    with slowly():
        backward(engine, 2)
        engine.zero_grad()
        found.append(seen(engine))
        time.sleep(0.5)
        found.append(seen(engine))
    backward(engine, 2)
    engine.step()
    found.append(copied(whole_parameters(engine.module)))
    return found


@pytest.mark.parametrize(("stage", "commit"), [(1, "at_once"), (3, "at_once"), (1, "after_norm"), (3, "shadow")])
def test_gradients_can_be_given_up(ranks: Ranks, stage: int, commit: str) -> None:
    one, other = ranks.run(2, given_up, stage, commit)
    before, after, later, _ = one
    check_equal(later, after)
    if commit != "at_once":  # what was updated at once is not taken back
        check_equal(after, before)
    for mine, theirs in zip(one, other, strict=True):
        check_equal(theirs, mine)


class Trap(torch.autograd.Function):
    """Backward fails here, if the trap is set."""

    is_set = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        if Trap.is_set:
            raise ValueError("in the trap")
        return grad


def failed(block: dict[str, Any], how: str) -> bool:
    """A backward that fails between two blocks, or a step that hears too late that the one before was not finite."""
    quickly()
    engine = engine_with(block, commit="at_once")
    engine.module.blocks[0].register_forward_hook(lambda _, __, output: Trap.apply(output))
    train(engine)
    Trap.is_set = how == "backward"
    before = OverflowCheck.resolve

    def hear(verdict: OverflowCheck, **options: Any) -> bool:
        OverflowCheck.resolve = before  # type: ignore[method-assign]
        raise NonFiniteError("the gradients were not finite")

    if how == "step":
        OverflowCheck.resolve = hear  # type: ignore[method-assign]
    with pytest.raises(ValueError if how == "backward" else NonFiniteError):
        train(engine, 1)
    Trap.is_set = False
    if how == "backward":
        engine.zero_grad()
    train(engine)
    return all(bool(torch.isfinite(value).all()) for value in whole_parameters(engine.module).values())


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("how", ["backward", "step"])
def test_training_goes_on_after_a_failure(ranks: Ranks, tmp_path: Path, tier: str, how: str) -> None:
    assert ranks.run(1, failed, HOST if tier == "host" else on_disk(tmp_path), how) == [True]


# --------------------------------------------------------------------------------------------------------- refitting


def refitted(commit: str) -> list[dict[tuple[StateKind, str, Tier], int]]:
    """Host memory for gradients and for what travels, as a unit is built anew again and again."""
    torch.manual_seed(0)
    model = Gpt()
    own = {"shard_at_world_one": True, "commit": commit}
    config = zero(3, zero_optimization=HOST, bf16={"enabled": True}, shardwell=own, gradient_accumulation_steps=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=config, device="cpu").engine
    found = []
    for _ in range(3):
        for trains in (False, True):
            model.blocks[1].up.weight.requires_grad_(trains)
            engine.refit()
            train(engine)
        for unit in units_of(engine):
            unit.wait()
        now = engine.memory().now.items()
        found.append({key: size for key, size in now if key[0] in (StateKind.GRADIENTS, StateKind.STAGING) and size})
    return found


@pytest.mark.parametrize("commit", ["after_norm", "shadow"])
def test_units_that_are_built_anew_leave_nothing_behind(ranks: Ranks, commit: str) -> None:
    first, *others = ranks.run(1, refitted, commit)[0]
    assert any(tier is Tier.HOST for _, _, tier in first)
    # Blocks are alike. Which of them have other memory for speculation, chance decides.
    most = {state: max(size for (its, _, _), size in first.items() if its is state) for state, _, _ in first}
    assert all(size <= most[state] for found in others for (state, _, _), size in found.items())


class Infinite(torch.autograd.Function):
    """As it is forward, and not finite backward."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient * float("inf")


def read_directly(engine: shardwell.Engine) -> dict[str, Tensor]:
    """Parameters that are whole, as any code of the user would read them."""
    found = {}
    for name, parameter in engine.module.named_parameters():
        with contextlib.suppress(ReleasedParameterError):
            found[name] = parameter.detach().clone()
    return found


def left_out(stage: int, commit: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters before and after a step whose gradients are not finite in one unit."""
    block = {**HOST, "stage3_param_persistence_threshold": 100 if stage == 3 else 0}
    engine = engine_with(block, stage=stage, commit=commit, nonfinite="skip" if commit == "shadow" else "error")
    train(engine)
    engine.state_dict()
    before = read_directly(engine)
    handle = engine.module.embed.register_forward_hook(lambda module, inputs, output: Infinite.apply(output))
    with slowly(), contextlib.suppress(NonFiniteError):
        train(engine, 1)
    handle.remove()
    return before, read_directly(engine)


@pytest.mark.parametrize(("stage", "commit"), [(1, "at_once"), (2, "shadow"), (3, "at_once"), (3, "shadow")])
def test_after_a_step_that_was_left_out_all_ranks_read_the_same(ranks: Ranks, stage: int, commit: str) -> None:
    (before, first), (_, other) = ranks.run(2, left_out, stage, commit)
    assert first.keys() == other.keys() == before.keys()
    assert first
    for name, value in first.items():
        assert (value == other[name]).all(), name
        assert commit == "at_once" or (value == before[name]).all(), name


def read_alone(where: str) -> str:
    block = {**HOST, "stage3_param_persistence_threshold": 100}
    engine = engine_with(block, stage=3, commit="at_once", divergence_timeout=5)
    train(engine)
    if where == "between":
        backward(engine, 2)
    if dist.get_rank() == 0:
        weight = next(p for name, p in engine.module.named_parameters() if name == "blocks.2.up.weight")
        safe_get_local_fp32_param(weight)
        safe_get_local_optimizer_state(weight, "exp_avg")
    if where == "between":
        engine.step()
    train(engine, 1)
    return "fine"


@pytest.mark.parametrize("where", ["between", "after"])
def test_a_rank_may_read_its_own_part_alone(ranks: Ranks, where: str) -> None:
    assert ranks.run(2, read_alone, where) == ["fine"] * 2


# ---------------------------------------------------------------------------------------- what a boundary is not told


Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),  # stepped in line
}


def forked(stage: int, block: dict[str, Any], commit: str, name: str) -> tuple[dict[str, Tensor], list[float]]:
    """Every second step uses all parameters. Small ones rest whole, and are stepped on the device."""
    torch.manual_seed(0)
    model = Forks()
    zeros = {**block, "stage3_param_persistence_threshold": 100}
    config = zero(stage, zero_optimization=zeros, gradient_accumulation_steps=2, shardwell={"commit": commit})
    optimizer = OPTIMIZERS[name](model.parameters())
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=config, device="cpu").engine
    norms = []
    for step in range(4):
        rows = torch.randn(4, 32, generator=torch.Generator().manual_seed(step))
        with slowly():
            for leave_out in (-1, 0):  # the first block gets nothing in the last micro-step
                engine.backward(engine(rows, step % 2 == 0, leave_out))
                engine.step()
        norms.append(float(engine.get_global_grad_norm() or 0.0))
    return whole_parameters(model), norms


@pytest.mark.parametrize(("stage", "name"), [(0, "AdamW"), (2, "NAdam"), (3, "AdamW"), (3, "NAdam")])
def test_parameters_that_are_used_now_and_then_step_as_on_the_device(ranks: Ranks, stage: int, name: str) -> None:
    expected, norms = ranks.run(2, forked, stage, {}, "auto", name)[0]
    for commit in ("at_once", "after_norm", "shadow"):
        for found, its_norms in ranks.run(2, forked, stage, HOST, commit, name):
            assert its_norms == pytest.approx(norms, rel=1e-4), commit
            for key, value in expected.items():
                one, other = torch.as_tensor(found[key]), torch.as_tensor(value)
                assert torch.allclose(one, other, rtol=1e-4, atol=1e-5), (commit, key, one - other)


def changed_gradient(block: dict[str, Any], commit: str, value: float) -> tuple[float, float, int] | str:
    """The norm, how far a weight moves, and steps that were left out."""
    torch.manual_seed(0)
    model = Gpt()
    own = {"commit": commit, "nonfinite": "skip"}
    config = zero(2, zero_optimization=block, gradient_clipping=0.0 if commit == "at_once" else 1.0, shardwell=own)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=config, device="cpu").engine
    weight = model.blocks[0].up.weight
    backward(engine)
    try:
        safe_set_full_grad(weight, torch.full(weight.shape, value))
    except shardwell.ShardwellError as error:
        return str(error)
    before = safe_get_full_fp32_param(weight)
    engine.step()
    moved = (safe_get_full_fp32_param(weight) - before).abs().max()
    return float(engine.get_global_grad_norm() or 0.0), float(moved), engine.skipped_steps


@pytest.mark.parametrize("commit", ["after_norm", "shadow"])
@pytest.mark.parametrize("value", [100.0, float("inf")])
def test_gradients_that_are_changed_before_the_step_count(ranks: Ranks, value: float, commit: str) -> None:
    expected = ranks.run(2, changed_gradient, {}, "after_norm", value)
    assert expected[0][2] == (0 if value == 100.0 else 1)
    for found, its in zip(ranks.run(2, changed_gradient, HOST, commit, value), expected, strict=True):
        assert found == pytest.approx(its, rel=1e-4)


def test_gradients_that_were_used_already_cannot_be_changed(ranks: Ranks) -> None:
    for found in ranks.run(2, changed_gradient, HOST, "at_once", 1.0):
        assert "has begun with the gradients that backward gave" in found
