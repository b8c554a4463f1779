"""The arithmetic of where units rest: bytes of their states on each tier, and the plan that fits."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import shardwell
from shardwell.config import load
from shardwell.memory import Tier
from shardwell.memory.machine import ThisMachine
from shardwell.offload import budget
from shardwell.offload.placement import plan, tier_ladder
from shardwell.offload.plan import deepest
from shardwell.optim.factory import factory_for
from shardwell.sharding import GroupPrecision
from shardwell.sharding.model_states import Bytes, GroupKey, ModelStates, StateFormula, TierPlacement, total
from shardwell.sharding.spec import CommitPolicy
from tests.support.placements import DEVICE, DISK, HOST

BF16 = GroupPrecision.of(torch.bfloat16, torch.bfloat16, True)
FP32 = GroupPrecision.of(torch.float32, None, True)
FP16 = GroupPrecision.of(torch.float16, torch.float16, True)


@pytest.mark.parametrize(
    ("deepest", "rungs"),
    [
        (TierPlacement(), [(DEVICE, DEVICE)]),
        (TierPlacement(DEVICE, HOST), [(DEVICE, DEVICE), (DEVICE, HOST)]),
        (TierPlacement(DEVICE, DISK), [(DEVICE, DEVICE), (DEVICE, HOST), (DEVICE, DISK)]),
        (TierPlacement(HOST, HOST), [(DEVICE, DEVICE), (HOST, HOST)]),
        (TierPlacement(HOST, DISK), [(DEVICE, DEVICE), (HOST, HOST), (HOST, DISK)]),
        (TierPlacement(DISK, DISK), [(DEVICE, DEVICE), (HOST, HOST), (DISK, DISK)]),
        (TierPlacement(DISK, HOST), [(DEVICE, DEVICE), (HOST, HOST), (DISK, HOST)]),
    ],
)
def test_both_states_go_down_together_as_far_as_each_may(
    deepest: TierPlacement, rungs: list[tuple[Tier, Tier]]
) -> None:
    assert tier_ladder(deepest) == [TierPlacement(*tiers) for tiers in rungs]
    below = deepest._replace(gradients=DISK)
    assert tier_ladder(below) == [*tier_ladder(deepest), *([below] if deepest.optimizer is DISK else [])]


@pytest.mark.parametrize(
    ("precision", "place", "each"),
    [
        (BF16, TierPlacement(), {DEVICE: 12}),
        (FP32, TierPlacement(), {DEVICE: 12}),
        (FP16, TierPlacement(), {DEVICE: 12}),
        (BF16, TierPlacement(DEVICE, HOST), {DEVICE: 2, HOST: 12}),
        (FP32, TierPlacement(DEVICE, DISK), {DEVICE: 4, DISK: 12}),
        (BF16, TierPlacement(HOST, HOST), {HOST: 12}),  # the parameters are halves of their masters
        (BF16, TierPlacement(DISK, DISK), {DISK: 12}),
        (FP16, TierPlacement(HOST, HOST), {HOST: 14}),
        (BF16, TierPlacement(HOST, DISK), {HOST: 2, DISK: 12}),
        (BF16, TierPlacement(HOST, DEVICE), {HOST: 2, DEVICE: 12}),
    ],
)
def test_bytes_at_rest_for_each_parameter(
    precision: GroupPrecision, place: TierPlacement, each: dict[Tier, int]
) -> None:
    kind = GroupKey(precision, trains=True, persistent=False)
    found = StateFormula(3, num_ranks=4).stored_bytes(kind, 4001, place)
    assert +found == {tier: size * 1001 for tier, size in each.items()}  # shares are rounded up


def test_what_else_decides_on_bytes() -> None:
    kind, frozen = (
        GroupKey(BF16, True, False),
        GroupKey(GroupPrecision.of(torch.bfloat16, torch.bfloat16, False), False, False),
    )
    below, formula = TierPlacement(DEVICE, HOST), StateFormula(3, 2)
    assert +formula.stored_bytes(frozen, 512, TierPlacement(DISK, DISK)) == {DISK: 512}
    assert +formula.needs(frozen, 512, TierPlacement(HOST, HOST)) == {HOST: 512}
    assert +StateFormula(3, 2, eight_bits=True).stored_bytes(kind, 512, below) == {DEVICE: 512, HOST: 256 * (4 + 2) + 2}
    assert +StateFormula(3, 2, eight_bits=True).stored_bytes(kind, 512, TierPlacement()) == {DEVICE: 256 * 12}
    assert +StateFormula(3, 2, num_states=1).stored_bytes(kind, 512, below) == {DEVICE: 512, HOST: 256 * 8}
    assert +formula.needs(kind, 512, TierPlacement()) == {DEVICE: 256 * 14}  # with the gradients
    assert +formula.needs(kind, 512, below) == {DEVICE: 512, HOST: 256 * 14}
    assert +StateFormula(3, 2, commit=CommitPolicy.IMMEDIATE).needs(kind, 512, below) == {DEVICE: 512, HOST: 256 * 12}
    assert +StateFormula(3, 2, accumulates=True).needs(kind, 512, below) == {DEVICE: 512, HOST: 256 * 16}
    last = TierPlacement(DISK, DISK, gradients=DISK)
    assert +formula.needs(kind, 512, last) == {DISK: 256 * 14}
    assert +formula.needs(kind, 512, last._replace(gradients=HOST)) == {DISK: 256 * 12, HOST: 256 * 2}
    assert +StateFormula(3, 2, accumulates=True).needs(kind, 512, last) == {DISK: 256 * 16}
    assert +StateFormula(3, 2, commit=CommitPolicy.IMMEDIATE).needs(kind, 512, last) == {DISK: 256 * 12}
    assert +StateFormula(3, 2, accumulates=True).needs(kind, 512, TierPlacement()) == {DEVICE: 256 * 16}
    assert +StateFormula(3, 2, commit=CommitPolicy.SPECULATIVE).needs(kind, 512, below) == {DEVICE: 512, HOST: 256 * 26}
    near = StateFormula(3, 4, ranks_per_copy=2)  # a second copy, of what is frozen for good
    assert +near.stored_bytes(kind, 512, TierPlacement()) == {DEVICE: 128 * 12}
    assert +near.needs(kind, 512, TierPlacement()) == {DEVICE: 128 * 14 + 256 * 2}
    assert +near.needs(kind, 512, TierPlacement(HOST, HOST)) == {DEVICE: 256 * 2, HOST: 128 * 14}
    assert +near.stored_bytes(frozen, 512, TierPlacement(HOST, HOST)) == {HOST: 128 * 2, DEVICE: 256 * 2}
    small = GroupKey(BF16, True, persistent=True)
    assert near.stored_bytes(small, 512, TierPlacement()) == StateFormula(3, 4).stored_bytes(
        small, 512, TierPlacement()
    )
    assert +formula.stored_bytes(small, 512, TierPlacement(DISK, DISK)) == {DEVICE: 512 * 2 + 256 * 10}


@pytest.mark.parametrize(
    ("optimizer", "options", "num_states"),
    [
        ("AdamW", {}, 2),
        ("AdamW", {"amsgrad": True}, 3),
        ("SGD", {"lr": 0.1}, 0),
        ("SGD", {"lr": 0.1, "momentum": 0.9}, 1),
        ("Adagrad", {}, 1),
    ],
)
def test_the_states_of_an_optimizer_are_known_before_it_is_made(
    optimizer: str, options: dict[str, Any], num_states: int
) -> None:
    model = nn.Linear(2, 2)
    device = shardwell.memory.Device("cpu")
    block = load({"optimizer": {"type": optimizer, "params": options}}).optimizer
    made = getattr(torch.optim, optimizer)(model.parameters(), **options)
    for recipe in (factory_for(None, model, None, block, device), factory_for(made, model, None, None, device)):
        assert recipe is not None
        assert recipe.num_states == num_states
    assert factory_for(shardwell.optim.lion.Lion, model, None, None, device).num_states == 1  # type: ignore[union-attr]


sizes = st.integers(0, 40)
places = st.builds(
    TierPlacement, st.sampled_from(list(Tier)), st.sampled_from(list(Tier)), st.sampled_from([HOST, DISK])
)
formulas = st.builds(
    StateFormula,
    st.just(3),
    st.integers(1, 3),
    shard_at_world_one=st.booleans(),
    eight_bits=st.booleans(),
    accumulates=st.booleans(),
    commit=st.sampled_from(list(CommitPolicy)),
    ranks_per_copy=st.integers(0, 2),
)
kinds = st.builds(GroupKey, st.sampled_from([BF16, FP32, FP16]), st.booleans(), st.booleans())
models = st.lists(st.dictionaries(kinds, sizes, max_size=2), min_size=1, max_size=5)


@settings(deadline=None)
@given(models, formulas, places, st.tuples(*[st.integers(0, 1500)] * 3), st.integers(0, 200))
def test_a_plan_fits_if_any_does_and_rests_no_deeper_than_it_must(
    model: list[dict[GroupKey, int]], formula: StateFormula, deepest: TierPlacement, budget: tuple[int, ...], extra: int
) -> None:
    rungs = tier_ladder(deepest)
    states = ModelStates({str(number): unit for number, unit in enumerate(model)}, formula)
    needs = [[states.needs(name, rung) for rung in rungs] for name in states.units]
    buffers = [Counter({HOST: extra * depth}) for depth in range(len(rungs))]
    free = dict(zip(Tier, budget, strict=True))
    found = plan(needs, buffers, free)
    deep = max(found.rungs)
    assert found.rungs == sorted(found.rungs)
    assert found.needed == total([buffers[deep if found.fits(free) else -1], *rows(needs, found.rungs)])

    def fits(choice: tuple[int, ...], depth: int) -> bool:
        needed: Bytes = total([buffers[depth], *rows(needs, choice)])
        return all(size <= free[tier] for tier, size in needed.items())

    depths = range(len(rungs))
    possible = {
        depth: [c for c in itertools.combinations_with_replacement(range(depth + 1), len(needs)) if fits(c, depth)]
        for depth in depths
    }
    assert found.fits(free) == any(possible.values())
    if found.fits(free):
        shallowest = next(depth for depth in depths if possible[depth])
        best = min(possible[shallowest])  # as many as possible on the device, then as many on the host
        assert tuple(found.rungs) == best


def rows(needs: list[list[Bytes]], rungs: Any) -> list[Bytes]:
    return [unit[rung] for unit, rung in zip(needs, rungs, strict=True)]


def test_bytes_that_fit_on_striped_drives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = {tmp_path / "one": 1000, tmp_path / "two": 600}
    for path in free:
        path.mkdir()
    machine = ThisMachine()
    monkeypatch.setattr(machine, "free_disk_bytes", free.get)
    assert budget.free_on([tmp_path / "one"], machine) == 1000
    assert budget.free_on(list(free), machine) == 600  # one file system: all of it goes there
    assert math.isinf(budget.free_on([tmp_path / "gone"], machine))


def test_gradients_wait_on_disk_only_where_optimizer_state_is_there() -> None:
    for device, expected in (("cpu", Tier.HOST), ("nvme", Tier.DISK), ("none", Tier.DEVICE)):
        settings = load({"zero_optimization": {"offload_optimizer": {"device": device, "nvme_path": "."}}})
        assert deepest(settings).gradient_tier is expected
