"""Scripts of DeepSpeed's tutorials on two ranks, at stages 0 to 3: the losses, norms and weights of DDP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.as_deepspeed import results, run_ranks
from tests.support.deepspeed_scripts import ACCUMULATION, CIFAR, INIT

NEAR = 2e-4

pytestmark = pytest.mark.slow


def _run(script: str, folder: Path, *args: str, options: tuple[str, ...] = ()) -> list[Any]:
    path = folder / "script.py"
    path.write_text(script)
    return results(run_ranks(path, *args, options=options))


def test_a_cifar_script_trains_like_ddp_at_every_stage(tmp_path: Path) -> None:
    config = {
        "train_batch_size": 16,
        "steps_per_print": 2000,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "betas": [0.9, 0.999], "eps": 1e-8}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0.01, "warmup_max_lr": 0.01}},
        "prescale_gradients": False,
        "bf16": {"enabled": False},
        "fp16": {"enabled": False, "fp16_master_weights_and_grads": False, "loss_scale": 0, "initial_scale_power": 15},
        "wall_clock_breakdown": False,
        "zero_optimization": {
            "stage": 0,
            "allgather_partitions": True,
            "reduce_scatter": True,
            "allgather_bucket_size": 50000000,
            "reduce_bucket_size": 50000000,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "cpu_offload": False,
        },
    }
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    arguments = ("--deepspeed", "--deepspeed_config", str(tmp_path / "ds_config.json"), "--epochs", "2")
    found = _run(CIFAR, tmp_path, *arguments, options=("--pass-local-rank",))
    assert [one["stage"] for one in found] == [0, 1, 2, 3]
    for one in found:
        assert one["losses"] < NEAR, one
        assert one["norms"] < NEAR, one
        assert one["weights"] < NEAR, one
        assert (one["steps"], one["config"], one["name"]) == (8, one["stage"], "DeepSpeedEngine")


def test_accumulation_has_ddps_norms_with_and_without_the_engines_division(tmp_path: Path) -> None:
    found = _run(ACCUMULATION, tmp_path)
    assert len(found) == 16
    for one in found:
        assert one["losses"] < NEAR, one
        assert one["norms"] < NEAR, one
        assert one["weights"] < NEAR, one
        assert one["applied"] == [False, False, False, True] * 2
        assert one["steps"] == [2, 8]


def test_zero_init_of_the_tutorial(tmp_path: Path) -> None:
    [found] = _run(INIT, tmp_path)
    assert all(found["flags"]), found["flags"]
    for name, (numel, shape, part) in found["sizes"].items():
        assert found["early"][name][1:] == [numel, shape]
        assert found["late"][name] == [*found["early"][name], False, name]
        assert part == -(-numel // 2)
    assert len({identity for identity, *_ in found["early"].values()}) == len(found["early"])
    assert max(found["losses"], found["norms"], found["weights"], found["fp32"]) < NEAR
    assert found["momentum"] == found["gradient"] == [10, 64]
