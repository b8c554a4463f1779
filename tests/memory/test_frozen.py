"""Frozen parameters cost their own bytes and nothing else, and may stay whole if there is room for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardwell
from shardwell.engine import TraceAction
from shardwell.memory import StateKind
from shardwell.parallel import TrafficKind
from shardwell.zero import GatheredParameters
from tests.support.adapters import STEPS, WIDTH, Adapted
from tests.support.internals import finish_backward, groups_of, units_of
from tests.support.live_bytes import live_bytes
from tests.support.models import whole_parameters, zero
from tests.support.ranks import Ranks

STAGES = {"fp32": (0, 3), "bf16": (0, 1, 2, 3), "fp16": (1, 3)}


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class Net(nn.Module):
    """Blocks that train, frozen blocks between them, and adapted blocks; a frozen matrix of the root at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.ModuleList([Plain().requires_grad_(False) for _ in range(3)])
        self.adapted = nn.ModuleList([Adapted() for _ in range(2)])
        self.trained = nn.ModuleList([Plain() for _ in range(2)])
        self.table = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in (self.trained[0], *self.frozen, *self.adapted, self.trained[1]):
            x = block(x)
        return F.linear(x, self.table).float().square().mean()


FROZEN = 3 * (WIDTH * WIDTH + WIDTH) + 2 * (WIDTH * WIDTH + WIDTH) + WIDTH * WIDTH


def build() -> Net:
    torch.manual_seed(0)
    return Net()


def initialize(stage: int, **config: Any) -> shardwell.Engine:
    model = build()
    return shardwell.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), config=zero(stage, **config)
    ).engine


def rows(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2 * dist.get_world_size(), WIDTH, generator=generator).chunk(dist.get_world_size())[
        dist.get_rank()
    ]


def micro_step(engine: shardwell.Engine, step: int) -> None:
    engine.backward(engine(rows(step)))


def settle(engine: shardwell.Engine) -> None:
    finish_backward(engine)
    for unit in units_of(engine):
        for group in unit.trainable:
            group.gradients.wait()


# -------------------------------------------------------------------------------------------------------------- bytes


def bytes_of_a_run(stage: int, precision: str) -> dict[str, Any]:
    counts = precision == "fp32"  # looking at everything alive takes its time
    before = live_bytes() if counts else 0
    engine = initialize(
        stage, bf16={"enabled": precision == "bf16"}, fp16={"enabled": precision == "fp16", "loss_scale": 8.0}
    )
    micro_step(engine, 0)
    settle(engine)
    with_gradients = engine.memory()
    engine.step()
    at_rest, live = engine.memory(), live_bytes() - before if counts else None
    books = {**with_gradients.now, **with_gradients.peak, **at_rest.now, **at_rest.peak}
    groups = groups_of(engine)
    return {
        "owners": sorted({unit for state, unit, _ in books if state in (StateKind.GRADIENTS, StateKind.OPTIMIZER)}),
        "trainable": sum(group.layout.padded for group in groups if group.trainable),
        "frozen": sum(group.layout.padded for group in groups if not group.trainable),
        "frozen without pads": sum(group.layout.numel for group in groups if not group.trainable),
        "parameters": at_rest.total(StateKind.PARAMETERS),
        "optimizer": at_rest.total(StateKind.OPTIMIZER),
        "gradients": with_gradients.total(StateKind.GRADIENTS),
        "left": at_rest.total(StateKind.GRADIENTS) + at_rest.total(StateKind.STAGING),
        "books": at_rest.total(),
        "live": live,
    }


def all_bytes(precision: str) -> list[dict[str, Any]]:
    return [bytes_of_a_run(stage, precision) for stage in STAGES[precision]]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_frozen_units_hold_their_parameters_and_nothing_else(ranks: Ranks, precision: str) -> None:
    """A frozen parameter takes the bytes of the dtype that it computes in: 1/N of them at stage 3."""
    compute = 4 if precision == "fp32" else 2
    beside = {"fp32": 8, "bf16": 8 + 2, "fp16": 8 + 4}[precision]  # moments, and what a whole parameter's master needs
    for by_stage in ranks.run(2, all_bytes, precision):
        for stage, answer in zip(STAGES[precision], by_stage, strict=True):
            trainable, frozen = answer["trainable"], answer["frozen"]
            share = trainable if stage == 0 else trainable / 2
            assert answer["frozen without pads"] == FROZEN
            assert answer["owners"] == ["adapted.0", "adapted.1", "trained.0", "trained.1"]
            whole = compute * (trainable + frozen)
            assert answer["parameters"] == (whole if stage < 3 else (4 * trainable + compute * frozen) / 2)
            assert answer["optimizer"] == pytest.approx((beside if stage < 3 else 8) * share, abs=200)
            assert answer["gradients"] == compute * share
            assert answer["left"] == 0
            if answer["live"] is not None:
                assert answer["live"] == pytest.approx(answer["books"], abs=600)  # counters, norms, the last loss


# -------------------------------------------------------------------------------------------------------- keep_frozen


def kept(room: int | str, **config: Any) -> dict[str, Any]:
    engine = initialize(3, shardwell={"keep_frozen": room}, **config)
    found: dict[str, Any] = {"gathered": [], "parameters": [], "traces": []}
    for step in range(STEPS):
        with engine.record() as trace:
            micro_step(engine, step)
            engine.step()
        found["gathered"].append(engine.traffic().total(TrafficKind.ALL_GATHER))
        found["parameters"].append(engine.memory().total(StateKind.PARAMETERS))
        found["traces"].append(sorted({trace.unit_names[e.unit] for e in trace if e.action is TraceAction.ALL_GATHER}))
    groups = groups_of(engine)
    return {
        **found,
        "frozen": {group.unit: group.layout.padded for group in groups if not group.trainable},
        "trainable": sum(group.layout.padded for group in groups if group.trainable),
        "itemsize": groups[0].precision.compute.itemsize,
        "whole": whole_parameters(engine.module),
        "norm": engine.get_global_grad_norm(),
    }


def kept_all() -> dict[str, dict[str, Any]]:
    one = WIDTH * WIDTH + WIDTH
    return {
        "nothing": kept(0),
        "some": kept(2 * one + 64),
        "everything": kept(10**9),
        "everything in bf16": kept(10**9, bf16={"enabled": True}),
        "nothing in bf16": kept(0, bf16={"enabled": True}),
        "auto": kept("auto"),
    }


def test_frozen_units_that_fit_stay_whole_after_the_first_step(ranks: Ranks) -> None:
    for answers in ranks.run(2, kept_all):
        for name, answer in answers.items():
            frozen, size = sum(answer["frozen"].values()), answer["itemsize"]
            always = 2 * answer["trainable"] * size // 2  # forward and backward, half of it from the other rank
            every = always + 2 * frozen * size // 2
            if name in ("nothing", "nothing in bf16", "auto"):  # a CPU has no memory of its own to fill
                assert answer["gathered"][1:] == [every] * (STEPS - 1), name  # the first step guesses the order
                assert len(set(answer["parameters"])) == 1, name
                continue
            # room is given unit after unit, and the root comes first
            stays = frozen if "everything" in name else sum(list(answer["frozen"].values())[:2])
            rest = always + 2 * (frozen - stays) * size // 2
            # the second step gathers once more, and keeps what it has gathered
            assert answer["gathered"][0] >= every, name
            assert rest <= answer["gathered"][1] <= rest + stays * size // 2, name
            assert answer["gathered"][2:] == [rest] * (STEPS - 2), name
            assert answer["parameters"][-1] - answer["parameters"][0] == stays * size // 2, name  # instead of the shard
        trained = ["adapted.0", "adapted.1", "trained.0", "trained.1"]
        assert answers["everything"]["traces"][-1] == trained
        assert answers["everything in bf16"]["traces"][-1] == trained
        check_bits(answers)


def check_bits(answers: dict[str, dict[str, Any]]) -> None:
    """Who stays whole changes no result."""
    for one, others in (("nothing", ["some", "everything", "auto"]), ("nothing in bf16", ["everything in bf16"])):
        for other in others:
            assert answers[one]["norm"] == answers[other]["norm"]
            for name, value in answers[one]["whole"].items():
                assert (answers[other]["whole"][name] == value).all(), f"{name} with {other} kept"


# ---------------------------------------------------------------------------------------------------- changing them


def change_kept(room: int) -> dict[str, Any]:
    """A kept weight is changed on one rank, and then thawed."""
    engine = initialize(3, shardwell={"keep_frozen": room})
    model = engine.module
    losses = []
    for step in range(8):
        if step == 3:
            with GatheredParameters(model.parameters(), modifier_rank=0):
                if dist.get_rank() == 0:
                    with torch.no_grad():
                        model.frozen[1].inner.weight.mul_(0.5)
                        model.adapted[0].base.bias.fill_(0.1)
        if step == 5:
            model.frozen[1].requires_grad_(True)
            model.adapted[0].base.weight.requires_grad_(True)
        micro_step(engine, step)
        engine.step()
        losses.append(engine.get_global_grad_norm())
    return {"whole": whole_parameters(model), "norms": losses}


def change_plainly(num_ranks: int) -> dict[str, Tensor]:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(8):
        if step == 3:
            with torch.no_grad():
                model.frozen[1].inner.weight.mul_(0.5)
                model.adapted[0].base.bias.fill_(0.1)
        if step == 5:
            model.frozen[1].requires_grad_(True)
            model.adapted[0].base.weight.requires_grad_(True)
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step)
        for own in torch.randn(2 * num_ranks, WIDTH, generator=generator).chunk(num_ranks):
            (model(own) / num_ranks).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_kept_weights_can_be_changed_and_thawed(ranks: Ranks) -> None:
    expected = change_plainly(2)
    released, whole = ranks.run(2, change_kept, 0), ranks.run(2, change_kept, 10**9)
    for answer in (*released, *whole):
        for name, value in expected.items():
            torch.testing.assert_close(torch.as_tensor(answer["whole"][name]), value, rtol=1e-3, atol=1e-4)
    assert released[0]["norms"] == whole[0]["norms"] == whole[1]["norms"]
    for name, value in released[0]["whole"].items():
        assert (whole[0]["whole"][name] == value).all(), name


def kept_after_a_rebuild() -> list[int]:
    """Thawing one unit must not send the others' frozen weights on the wire again."""
    engine = initialize(3, shardwell={"keep_frozen": 10**9})
    gathered = []
    for step in range(6):
        if step == 3:
            engine.module.adapted[0].base.bias.requires_grad_(True)
        micro_step(engine, step)
        engine.step()
        gathered.append(engine.traffic().total(TrafficKind.ALL_GATHER))
    return gathered


def test_what_is_kept_stays_kept_when_a_unit_is_rebuilt(ranks: Ranks) -> None:
    """Only the rebuilt unit's bias is trainable now; its frozen matrix may stay whole as before."""
    for gathered in ranks.run(2, kept_after_a_rebuild):
        assert gathered[5] - gathered[2] <= 2 * (WIDTH + 16) * 4 // 2
