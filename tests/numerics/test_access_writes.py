"""Changing sharded state of single parameters through `shardwell.utils`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwell
from shardwell import utils
from tests.support.ranks import Ranks
from tests.support.state_access import (
    NEAR,
    STAGES,
    WIDTH,
    Plain,
    backward,
    in_memory_order,
    initialize,
    near,
    read,
)


def value_for(name: str, shape: Any, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(map(ord, name)))
    return torch.randn(tuple(shape), generator=generator) / 10


def change(stage: int, precision: str, local: bool) -> dict[str, Any]:
    """Train, change everything that can be changed, train on."""
    engine = initialize(stage, precision)
    backward(engine, 0)
    engine.step()
    for name, parameter in engine.module.named_parameters():
        master, first, second = (value_for(name, parameter.shape, seed) for seed in (1, 2, 3))
        if local:
            set_parts(parameter, master, first, second.square())
        else:
            utils.safe_set_full_fp32_param(parameter, master)
            utils.safe_set_full_optimizer_state(parameter, first, "exp_avg")
            utils.safe_set_full_optimizer_state(parameter, second.square(), "exp_avg_sq")
            utils.safe_set_full_optimizer_state(parameter, 5.0, "step")
    backward(engine, 1)
    for name, parameter in engine.module.named_parameters():
        gradient = value_for(name, parameter.shape, 4)
        if local:
            part = mine(parameter, gradient)
            if part is not None:
                utils.safe_set_local_grad(parameter, part)
        else:
            utils.safe_set_full_grad(parameter, gradient)
    got = read(engine, utils.safe_get_full_grad)
    engine.step()
    backward(engine, 2)
    engine.step()
    return {"gradients": got, "masters": read(engine, utils.safe_get_full_fp32_param)}


def mine(parameter: nn.Parameter, value: Tensor) -> Tensor | None:
    """This rank's part of a whole value, cut by hand: ranks come in order."""
    held = utils.safe_get_local_fp32_param(parameter)
    sizes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(sizes, 0 if held is None else held.numel())
    flat = in_memory_order(value, parameter.stride())
    if held is None or held.numel() == flat.numel():
        return None if held is None else flat
    start = sum(sizes[: dist.get_rank()])
    return flat[start : start + held.numel()]


def set_parts(parameter: nn.Parameter, master: Tensor, first: Tensor, second: Tensor) -> None:
    values = [mine(parameter, value) for value in (master, first, second)]
    if values[0] is not None:
        utils.safe_set_local_fp32_param(parameter, values[0])
        utils.safe_set_local_optimizer_state(parameter, values[1], "exp_avg")
        utils.safe_set_local_optimizer_state(parameter, values[2], "exp_avg_sq")
        utils.safe_set_local_optimizer_state(parameter, 5.0, "step")


def plain_change(precision: str, num_ranks: int) -> dict[str, Tensor]:
    plain = Plain(precision, num_ranks)
    plain.backward(0)
    plain.step()
    for name, master in plain.masters.items():
        values = [value_for(name, master.shape, seed) for seed in (1, 2, 3)]
        master.data.copy_(values[0])
        plain.state(name, "exp_avg").copy_(values[1])
        plain.state(name, "exp_avg_sq").copy_(values[2].square())
        plain.state(name, "step").fill_(5.0)
    plain.backward(1)
    for name, master in plain.masters.items():
        master.grad = value_for(name, master.shape, 4)
    plain.step()
    plain.backward(2)
    plain.step()
    return {name: master.detach() for name, master in plain.masters.items()}


CHANGES = [(0, False), (1, False), (2, False), (3, False), (3, True)]


def all_changes(precision: str, changes: list[tuple[int, bool]]) -> list[dict[str, Any]]:
    return [change(stage, precision, local) for stage, local in changes]


@pytest.mark.parametrize(
    ("precision", "num_ranks", "changes"),
    [("fp32", 3, CHANGES[1::2]), ("bf16", 2, CHANGES), ("fp16", 2, CHANGES[::2]), ("fp16", 3, CHANGES[3:])],
    ids=lambda value: "" if isinstance(value, list) else str(value),
)
def test_training_goes_on_from_what_was_set(
    ranks: Ranks, precision: str, num_ranks: int, changes: list[tuple[int, bool]]
) -> None:
    rtol, atol = NEAR[precision]
    expected = plain_change(precision, num_ranks)
    for answers in ranks.run(num_ranks, all_changes, precision, changes):
        for (stage, local), answer in zip(changes, answers, strict=True):
            for name, wanted in expected.items():
                where = f"{name} at stage {stage}, {'local' if local else 'full'}"
                near(answer["masters"][name], wanted, rtol, atol, where)
                near(answer["gradients"][name], value_for(name, wanted.shape, 4), rtol, atol, where)


def set_small_gradients() -> list[float]:
    found = []
    for stage in STAGES:
        engine = initialize(stage, "fp16")
        backward(engine, 0)
        parameter = engine.module.blocks[0][0].weight
        utils.safe_set_full_grad(parameter, torch.full(parameter.shape, 1e-8))
        found.append(float(utils.safe_get_full_grad(parameter).min()))
    return found


def test_gradients_that_are_set_are_scaled_before_they_are_rounded(ranks: Ranks) -> None:
    """1e-8 is nothing in fp16; 256 times as much is something."""
    assert ranks.run(2, set_small_gradients)[0] == pytest.approx([1e-8] * 4, rel=2e-2)


def set_steps() -> list[float]:
    """As a tensor; on a parameter of one element too, where it could be taken for the parameter's own shape."""
    found = []
    for stage in STAGES:
        engine = initialize(stage)
        backward(engine, 0)
        engine.step()
        for parameter in (engine.module.single, engine.module.turned):
            utils.safe_set_full_optimizer_state(parameter, torch.tensor(5.0), "step")
            found.append(float(utils.safe_get_full_optimizer_state(parameter, "step")))
        backward(engine, 1)
        engine.step()
        found.append(float(utils.safe_get_full_optimizer_state(engine.module.single, "step")))
    return found


def test_a_count_of_steps_can_be_set_as_a_tensor(ranks: Ranks) -> None:
    assert ranks.run(2, set_steps)[0] == [5.0, 5.0, 6.0] * 4


def set_while_open() -> list[float]:
    """How far a master is from what it was set to inside a context."""
    found = []
    for stage, precision in [(0, "bf16"), (1, "fp16"), (2, "bf16"), (3, "bf16"), (3, "fp16")]:
        engine = initialize(stage, precision)
        parameter = engine.module.blocks[0][0].weight
        value = torch.full(parameter.shape, 1.0 + 2.0**-20)
        with shardwell.zero.GatheredParameters(engine.module.parameters(), modifier_rank=0):
            utils.safe_set_full_fp32_param(parameter, value)
        found.append(float((utils.safe_get_full_fp32_param(parameter) - value).abs().max()))
    return found


def test_masters_that_are_set_inside_a_context_keep_all_their_bits(ranks: Ranks) -> None:
    assert ranks.run(2, set_while_open)[0] == [0.0] * 5


def refusals(stage: int) -> dict[str, str]:
    engine = initialize(stage)
    parameter = engine.module.blocks[0][0].weight
    asks: dict[str, Callable[[], Any]] = {
        "foreign": lambda: utils.safe_get_full_fp32_param(nn.Parameter(torch.ones(2))),
        "no gradient": lambda: utils.safe_set_full_grad(parameter, torch.ones(9, WIDTH)),
        "size": lambda: utils.safe_set_full_fp32_param(parameter, torch.ones(9, WIDTH + 1)),
        "turned": lambda: utils.safe_set_full_fp32_param(parameter, torch.ones(WIDTH, 9)),
        "part of a whole": lambda: utils.safe_set_local_fp32_param(parameter, torch.ones(9 * WIDTH)),
    }
    said = {}
    for name, ask in asks.items():
        try:
            ask()
        except shardwell.ShardwellError as error:
            said[name] = str(error)
    return said


def test_what_cannot_be_asked_for_says_why(ranks: Ranks) -> None:
    for stage in (0, 2):
        said = ranks.run(2, refusals, stage)[0]
        assert "does not belong" in said["foreign"]
        assert "call backward first" in said["no gradient"]
        assert "(9, 5)" in said["size"]
        assert "safe_set_full_fp32_param" in said["part of a whole"]


def test_a_turned_value_is_refused(ranks: Ranks) -> None:
    assert "(9, 5)" in ranks.run(2, refusals, 1)[0].get("turned", "")
