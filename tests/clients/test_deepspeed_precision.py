"""fp16 and optimizers as DeepSpeed reads them: when the loss scale changes, which optimizers and keys are taken."""

from __future__ import annotations

import logging
import math
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwell.compat.deepspeed_api.config_reading import dtype_of_model, for_engine
from shardwell.compat.deepspeed_api.initialization import initialize
from shardwell.compat.deepspeed_api.logging import logger
from shardwell.compat.deepspeed_api.zero import TiledLinearReturnBias
from tests.support.ranks import Ranks


def fp16(stage: int, **others: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": stage},
        "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 8, "loss_scale_window": 2, **others},
    }


def scales(stage: int, values: list[float], others: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return the scale, the number of steps, the last overflow and the overflows left, after each gradient."""
    engine, optimizer, *_ = initialize(model=nn.Linear(1, 1), config=fp16(stage, **others))
    scaler, found = optimizer.loss_scaler, []
    for value in values:
        for parameter in engine.module.parameters():
            parameter.grad = torch.full_like(parameter, value)
        engine.step()
        found.append((scaler.cur_scale, scaler.cur_iter, scaler.last_overflow_iter, scaler.cur_hysteresis))
    assert optimizer.needs_scaler()
    saved = deepcopy(engine.optimizer.scale.state_dict())
    engine.optimizer.scale.load_state_dict(saved)
    assert (scaler.cur_scale, scaler.cur_iter) == found[-1][:2]
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [0, 2])
def test_the_scale_doubles_one_step_after_the_window_as_in_deepspeed(ranks: Ranks, stage: int) -> None:
    found = ranks.run(1, scales, stage, [0.1] * 6, {})[0]
    assert [one[0] for one in found] == [2**8, 2**8, 2**9, 2**9, 2**10, 2**10]
    assert [one[1] for one in found] == [1, 2, 3, 4, 5, 6]


def test_overflows_halve_the_scale_down_to_its_minimum_and_the_window_begins_again(ranks: Ranks) -> None:
    values = [math.inf, math.nan, 0.1, 0.1, 0.1, -math.inf]
    found = ranks.run(1, scales, 1, values, {"hysteresis": 1})[0]
    assert [one[0] for one in found] == [2**7, 2**6, 2**6, 2**6, 2**7, 2**6]
    assert [one[2] for one in found] == [0, 1, 1, 1, 1, 5]
    least = {"hysteresis": 1, "initial_scale_power": 2, "min_loss_scale": 2.0}
    assert [one[0] for one in ranks.run(1, scales, 0, [math.nan] * 3, least)[0]] == [2.0, 2.0, 2.0]


def test_hysteresis_absorbs_overflows_before_the_scale_halves(ranks: Ranks) -> None:
    found = ranks.run(1, scales, 0, [math.inf] * 4, {"hysteresis": 3})[0]
    assert [one[0] for one in found] == [2**8, 2**8, 2**7, 2**6]
    assert [one[3] for one in found] == [2, 1, 1, 1]


class Plain(torch.optim.Optimizer):
    """An optimizer that nobody lists."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"])


def take(optimizer: type[torch.optim.Optimizer], others: dict[str, Any]) -> str:
    model = nn.Linear(2, 2)
    settings = {"train_batch_size": 1, "zero_optimization": {"stage": 1}, **others}
    try:
        initialize(model=model, optimizer=optimizer(model.parameters()), config=settings)[0].destroy()  # type: ignore[call-arg]
    except AssertionError as error:
        return str(error)
    return ""


def test_an_untested_optimizer_is_refused_only_if_the_file_says_so(ranks: Ranks) -> None:
    said = ranks.run(1, take, Plain, {"zero_allow_untested_optimizer": False})[0]
    assert "Plain is not one of the optimizers that DeepSpeed has tested" in said
    assert ranks.run(1, take, Plain, {})[0] == ""
    assert ranks.run(1, take, torch.optim.AdamW, {"zero_allow_untested_optimizer": False})[0] == ""


def test_keys_beside_the_optimizers_params_are_reported_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.WARNING):
            read = for_engine({"optimizer": {"type": "Adam", "torch_adam": True, "params": {"lr": 1}}}).config
    finally:
        logger.removeHandler(caplog.handler)
    assert read["optimizer"] == {"type": "Adam", "params": {"lr": 1}}
    assert "optimizer.torch_adam has no effect" in caplog.text


@pytest.mark.parametrize(
    ("block", "dtype"),
    [
        ({"bf16": {"enabled": True}}, torch.bfloat16),
        ({"bfloat16": {"enabled": "true"}}, torch.bfloat16),
        ({"fp16": {"enabled": 1}, "bf16": {"enabled": False}}, torch.float16),
        ({"fp16": {"enabled": False}}, None),
        ({"bf16": {"enabled": "auto"}}, None),
        ({}, None),
    ],
)
def test_the_dtype_of_a_model_is_that_of_the_block_that_is_on(block: dict[str, Any], dtype: Any) -> None:
    assert dtype_of_model(block) is dtype


class WithBias(nn.Linear):
    """A layer that returns its bias, as Megatron's do."""

    def forward(self, input: Tensor) -> Any:
        return nn.functional.linear(input, self.weight), self.bias


@pytest.mark.parametrize("bias", [True, False])
def test_tiles_that_return_their_bias_give_the_layers_output_and_bias(bias: bool) -> None:
    base = WithBias(23, 29, bias=bias)
    tiled = TiledLinearReturnBias(
        23, 29, bias, in_splits=2, out_splits=3, linear_cls=WithBias, init_linear=deepcopy(base)
    )
    assert (tiled.in_parts, tiled.out_parts) == ([0, 12, 23], [0, 10, 20, 29])
    x = torch.randn(4, 23)
    (expected, added), (output, found) = base(x), tiled(x)
    torch.testing.assert_close(output, expected)
    assert torch.equal(found, added) if bias else found is None
    output.sum().backward()
    assert all(tile.weight.grad is not None for tile in tiled.tiles())
    tiled.combine_out_splits = False
    parts, biases = tiled(x)
    assert [part.shape[-1] for part in parts] == [10, 10, 9]
    assert (biases is None) is not bias
