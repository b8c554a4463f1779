"""`"stage": "auto"`: the choice at `initialize`, its reasons, and that all ranks agree on it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwell
from shardwell.config import load, stage_is_open
from shardwell.errors import ConfigError, NoRoomError
from shardwell.memory import Tier
from shardwell.memory.machine import SimulatedMachine, SimulatedRanks, simulated
from tests.support.ranks import Ranks

SIZE = 64 * 64 * 8  # elements of the model below


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def model() -> nn.Module:
    torch.manual_seed(0)
    return Blocks()


def config(zero: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    more.setdefault("shardwell", {"bundle_size": 0})
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": "auto", "stage3_param_persistence_threshold": 0, **(zero or {})},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        **more,
    }


def with_memory(device_bytes: float, **more: Any) -> dict[str, Any]:
    own = {"memory": {"device": device_bytes}, "bundle_size": 0, **more.pop("shardwell", {})}
    return config(shardwell=own, **more)


def stages_and_losses(cases: list[dict[str, Any]]) -> list[tuple[int, float]]:
    found = []
    for one in cases:
        engine = shardwell.initialize(model=model(), config=one).engine
        loss = engine(torch.full((2, 64), 1.0 + dist.get_rank())).square().mean()
        engine.backward(loss)
        engine.step()
        found.append((engine.zero_optimization_stage(), float(loss.detach())))
    return found


def one_rank_has_less() -> int:
    memory = 1e9 if dist.get_rank() else 11 * SIZE  # in bytes: this rank alone needs stage 3
    return shardwell.initialize(model=model(), config=with_memory(memory)).engine.zero_optimization_stage()


# fp32 with Adam, bytes for each parameter on two ranks: stage 2 has 4, moments 4, gradients 2; stage 3 has 8 in all.
# A unit of 1/8 that computes with its gradients and the next one add 2 x 8 / 8.
def test_ranks_choose_the_first_stage_that_fits_and_train(ranks: Ranks) -> None:
    plenty, less = with_memory(1e9), with_memory(11 * SIZE)
    sums = with_memory(1e9, gradient_accumulation_steps=2)
    first, second = ranks.run(2, stages_and_losses, [plenty, less, sums])
    assert [stage for stage, _ in first] == [2, 3, 1]
    assert [stage for stage, _ in first] == [stage for stage, _ in second]
    assert first[0][1] == pytest.approx(first[1][1])


def test_the_rank_with_the_least_memory_decides_for_all(ranks: Ranks) -> None:
    assert ranks.run(2, one_rank_has_less) == [3, 3]


def on(machine: SimulatedMachine, asked: dict[str, Any]) -> shardwell.Engine:
    with simulated(machine):
        return shardwell.initialize(model=model().to("meta"), config=asked).engine


def gpus(device_bytes: float, ranks: int = 4, **more: Any) -> SimulatedMachine:
    return SimulatedMachine(device_bytes, ranks=SimulatedRanks(0, ranks), **more)


def test_states_leave_the_device_only_if_no_stage_fits(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "shardwell"):
        large = on(gpus(1e9), config())
        assert large.zero_optimization_stage() == 2
        assert not any(place.depth for place in large.offload.places.values())
        small = on(gpus(5 * SIZE), config())
    assert small.zero_optimization_stage() == 3
    assert any(place.optimizer is Tier.HOST for place in small.offload.places.values())
    lines = [record.getMessage() for record in caplog.records if 'stage "auto"' in record.getMessage()]
    assert len(lines) == 2
    assert "stage 3 with states below the device" in lines[1]
    assert "No inputs are known at initialize" in lines[1]
    assert "25% of the free bytes on a device are left to activations" in lines[1]
    assert "KiB" in lines[1]


def test_one_rank_has_stage_0_while_it_fits() -> None:
    assert on(gpus(1e9, 1), config()).zero_optimization_stage() == 0


def test_a_configuration_that_keeps_states_on_the_device_is_refused_if_they_do_not_fit() -> None:
    stays = {"offload_optimizer": {"device": "none"}, "offload_param": {"device": "none"}}
    with pytest.raises(NoRoomError, match=r'"auto": no stage fits.*stage 2: .*stage 3: .*Use more ranks'):
        on(gpus(SIZE), config(stays))


def test_other_keys_leave_only_the_stages_that_they_allow() -> None:
    assert on(gpus(1e9), config({"zero_quantized_weights": True})).zero_optimization_stage() == 3
    assert on(gpus(1e9), config({"offload_param": {"device": "cpu"}})).zero_optimization_stage() == 3


def test_a_model_of_zero_init_comes_sharded_and_stays_so() -> None:
    with shardwell.zero.Init(config=config()):
        built = model()
    assert shardwell.initialize(model=built, config=config()).engine.zero_optimization_stage() == 3


def test_the_origin_of_the_stage_says_why() -> None:
    asked = load(config())
    assert stage_is_open(asked)
    assert not stage_is_open(load({"zero_optimization": {"stage": 3}}))
    engine = on(gpus(1e9), config())
    assert engine.settings.origins["zero_optimization.stage"].startswith("auto -> 2 (stage 2: device ")


def test_who_needs_the_stage_before_initialize_is_told_to_write_a_number() -> None:
    from shardwell.compat.deepspeed_api.config_object import DeepSpeedConfig
    from shardwell.integrations.lightning_config import stage_of

    with pytest.raises(ConfigError, match="write a number"):
        stage_of(config())
    with pytest.raises(ConfigError, match="write a number"):
        DeepSpeedConfig(config())
