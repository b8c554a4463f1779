"""The well-known estimates of model states, by their names and with the bytes that an engine stores."""

from __future__ import annotations

import pytest
from torch import nn

from shardwell import plan
from shardwell.compat.deepspeed_api.names import resolve
from shardwell.errors import ConfigError
from shardwell.memory import Tier
from shardwell.plan import SimulatedMachine, SimulatedRanks, estimate
from shardwell.plan.models import PRESETS, decoder


def rows(text: str) -> dict[str, float]:
    """Return the GB of a GPU by options."""
    lines = [line.split("|") for line in text.splitlines() if "GB |" in line]
    return {options.strip(): float(device.strip().removesuffix("GB")) for _, device, options in lines}


def test_the_table_of_a_model_has_the_bytes_of_its_simulation(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = decoder("7.5B", PRESETS["zero-7.5b"], 1, 16, recomputes=True)
    model = blocks.build(blocks.layers)
    for stage, print_table in (
        (2, plan.estimate_zero2_model_states_mem_needs_all_live),
        (3, plan.estimate_zero3_model_states_mem_needs_all_live),
    ):
        print_table(model, num_gpus_per_node=8, num_nodes=2)
        found = rows(capsys.readouterr().out)
        told = next(size for options, size in found.items() if "offload_optimizer=none" in options)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        }
        report = estimate(blocks, config, SimulatedMachine(ranks=SimulatedRanks(0, 16, 8)))
        stored = report.at_rest(Tier.DEVICE) / 2**30
        assert stored < told < 1.35 * stored + 1.0, (stage, stored, told)  # gradients, and two units at stage 3


def test_frozen_parameters_have_no_states(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False, device="meta") for _ in range(8)))
    plan.estimate_zero2_model_states_mem_needs_all_live(model)
    trained = rows(capsys.readouterr().out)["offload_optimizer=none"]
    model.requires_grad_(False)
    plan.estimate_zero2_model_states_mem_needs_all_live(model)
    frozen = rows(capsys.readouterr().out)["offload_optimizer=none"]
    size = 8 * 4096 * 4096 / 2**30
    assert trained == pytest.approx(14 * size, abs=0.01)
    assert frozen == pytest.approx(2 * size, abs=0.01)


@pytest.mark.parametrize("kind", ["", "_all_live", "_all_cold"])
@pytest.mark.parametrize(("stage", "module"), [(2, "stage_1_and_2"), (3, "stage3")])
def test_deepspeeds_paths_have_these_functions(stage: int, module: str, kind: str) -> None:
    name = f"estimate_zero{stage}_model_states_mem_needs{kind}"
    assert resolve(f"deepspeed.runtime.zero.{module}", name) is getattr(plan, name)


def test_numbers_alone_give_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    plan.estimate_zero3_model_states_mem_needs_all_cold(int(3e9), int(1e8), 8, 1)
    text = capsys.readouterr().out
    assert "SW: Model with 3000M total params, 100M largest layer params." in text
    assert len(rows(text)) == 6


def test_impossible_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_nodes is 0: expected 1 or more"):
        plan.estimate_zero2_model_states_mem_needs_all_cold(10, 1, 0)
