"""What is said of a file that is right, by `shardwell config` and at the start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwell.cli.config_command import show
from shardwell.config import load, remarks, told
from shardwell.config.schedules import NEEDED


def said(source: Any) -> tuple[str, str]:
    """What hurts if it is not heard, and the rest."""
    hurting, rest = told(remarks(load(source, world_size=2)))
    return "\n".join(hurting), "\n".join(rest)


WITHOUT_EFFECT = {
    "zero_optimization": {
        "stage": 2,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "round_robin_gradients": True,
        "reduce_bucket_size": 5e8,
        "allgather_bucket_size": 5e8,
        "sub_group_size": 1e9,
        "stage3_max_live_parameters": 1e9,
        "memory_efficient_linear": False,
        "offload_optimizer": {"device": "cpu", "pin_memory": True, "fast_init": True},
    },
    "aio": {"queue_depth": 16},
}


def test_keys_without_effect_are_one_sentence_with_the_reasons() -> None:
    hurting, rest = said({**WITHOUT_EFFECT, "gradient_clipping": 1.0})
    assert hurting == ""
    assert rest.startswith("without effect: ")
    assert "\n" not in rest
    for key in (
        "overlap_comm",
        "contiguous_gradients",
        "round_robin_gradients",
        "reduce_bucket_size",
        "sub_group_size",
    ):
        assert f"zero_optimization.{key}" in rest
    assert "zero_optimization.stage3_max_live_parameters (at stage 2)" in rest
    assert "aio.queue_depth (nothing is stored on NVMe)" in rest
    assert "zero_optimization.memory_efficient_linear (linear layers stay torch's own)" in rest
    assert "offload_optimizer.pin_memory, " not in rest
    assert "zero_optimization.offload_optimizer.pin_memory (staging buffers are pinned, stored state is not)" in rest


@pytest.mark.parametrize(
    "source",
    [
        {"gradient_clipping": 1.0, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}},
        {
            "gradient_clipping": 1.0,
            "wall_clock_breakdown": False,
            "zero_optimization": {"round_robin_gradients": False},
        },
        {"gradient_clipping": 0.0, "fp16": {"enabled": False, "loss_scale": 0}, "amp": {"enabled": False}},
        {"gradient_clipping": 1, "zero_optimization": {"offload_param": {"device": "none", "pin_memory": True}}},
    ],
)
def test_nothing_is_said_of_a_file_of_which_everything_holds(source: dict[str, Any]) -> None:
    assert said(source) == ("", "")


def test_output_that_does_not_come_hurts() -> None:
    words = said({"activation_checkpointing": {"profile": True}})[0]
    assert "activation_checkpointing.profile has no effect: use torch.profiler" in words


def test_no_clipping_hurts_who_brings_a_file_of_deepspeeds() -> None:
    sentence = "nothing is clipped: gradient_clipping is not given (DeepSpeed since mid-2026 clips at 1.0 then)"
    assert sentence in said({"zero_optimization": {"stage": 1}})[1]
    assert sentence in said({"zero_optimization": {"stage": 1, "stage3_param_persistence_threshold": 0}})[1]
    assert sentence in said({"zero_optimization": {"stage": 1, "overlap_comm": True}})[0]
    assert sentence in said({"zero_optimization": {"stage": 1, "cpu_offload": True}})[0]
    assert "clipped" not in "".join(said({"gradient_clipping": 0.0}))


@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle"])
def test_a_schedule_with_other_rates_than_deepspeeds_says_so(kind: str) -> None:
    block = {"type": kind, "params": dict.fromkeys(NEEDED.get(kind, ()), 2000)}
    assert f"{kind}: " in said({"scheduler": block})[1]
    assert f"{kind}: " in said({"scheduler": block, "zero_allow_untested_optimizer": True})[0]


def test_auto_that_nobody_fills_in_hurts() -> None:
    source = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "eps": 1e-6, "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
        "gradient_clipping": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"offload_optimizer": {"device": "auto"}, "reduce_bucket_size": "auto"},
    }
    hurting, rest = said(source)
    assert (
        'optimizer.params: lr, weight_decay "auto": nothing fills that in here; the defaults of AdamW hold' in hurting
    )
    assert 'scheduler.params: warmup_num_steps "auto"' in hurting
    assert 'gradient_clipping "auto": nothing fills it in here, and nothing is clipped' in hurting
    assert "so train_batch_size 2, train_micro_batch_size_per_gpu 1, gradient_accumulation_steps 1" in hurting
    assert "bf16.enabled false (the model's own dtype decides)" in hurting
    assert 'offload_optimizer.device "auto": nothing fills it in here, and nothing is offloaded' in hurting
    assert "reduce_bucket_size" not in hurting + rest


def test_a_sum_over_micro_steps_in_fp32_is_said_where_deepspeed_sums_in_16_bits() -> None:
    source = {"bf16": {"enabled": True}, "gradient_accumulation_steps": 4, "gradient_clipping": 1}
    assert said(source)[1] == "gradients add up over micro-steps in fp32 (DeepSpeed: bf16 by default)"
    assert said({**source, "data_types": {"grad_accum_dtype": "fp32"}}) == ("", "")


def test_the_command_prints_what_is_to_be_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "zero2.json"
    file.write_text(json.dumps({**WITHOUT_EFFECT, "bfloat16": {"enabled": True}}))
    show(file, 2, False)
    out = capsys.readouterr().out.replace("\n", " ")
    assert "note: nothing is clipped" in out
    assert "note: bfloat16 is read as bf16" in out
    assert "note: without effect: " in out
