"""A configuration as DeepSpeed reads it: where it comes from, its defaults, its schedules, and a word on every key."""

from __future__ import annotations

import base64
import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwell
from shardwell.compat.deepspeed_api import lr_schedules
from shardwell.compat.deepspeed_api.config_reading import for_engine
from shardwell.compat.deepspeed_api.key_names import FEATURES_OF_DEEPSPEED, KEYS_OF_DEEPSPEED, dotted_keys
from shardwell.compat.deepspeed_api.migration import disposition, page
from shardwell.config import load
from shardwell.errors import ConfigError
from tests.support.configs import nested, refusal

ROOT = Path(__file__).parents[2]
ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 0.5}}}


def in_base64(config: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(config).encode()).decode()


def test_base64_of_json_is_a_configuration() -> None:
    config = load(in_base64({"train_batch_size": 8, "zero_optimization": {"stage": 2}}))
    assert (config.train_batch_size, config.zero_optimization.stage) == (8, 2)
    assert config.origins["train_batch_size"] == "base64 text"


@pytest.mark.parametrize("text", ["ds_config", "abcd", in_base64([1]), in_base64("x")])
def test_a_name_that_is_no_base64_of_an_object_is_a_file_that_is_missing(text: str) -> None:
    assert "no such file" in refusal(text)


def test_a_file_whose_name_could_be_base64_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = in_base64({"train_batch_size": 8})
    (tmp_path / name).write_text('{"train_batch_size": 4}')
    assert load(name).train_batch_size == 4


def test_deepspeeds_defaults_hold_where_they_change_numbers() -> None:
    config = load(for_engine({"train_batch_size": 1}).config)
    assert (config.gradient_clipping, config.shardwell.nonfinite) == (1.0, "skip")
    given = {"gradient_clipping": 0.0, "shardwell": {"nonfinite": "error"}}
    config = load(for_engine(given).config)
    assert (config.gradient_clipping, config.shardwell.nonfinite) == (0.0, "error")
    assert "gradient_clipping" in given  # the user's dictionary stays as it is


@pytest.mark.parametrize("value", [None, "auto"])
def test_clipping_that_nobody_filled_in_is_deepspeeds(value: Any) -> None:
    assert load(for_engine({"gradient_clipping": value}).config).gradient_clipping == 1.0


def test_unknown_keys_at_the_top_are_told_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "DeepSpeed"):
        config = for_engine({"my_run": 3, "gradient_cliping": 2, "zero_optimization.nope": 1, "_comment": "x"}).config
    load(config)
    assert [word for word in ("my_run", "gradient_clipping?", "zero_optimization.nope") if word in caplog.text] == [
        "my_run",
        "gradient_clipping?",
        "zero_optimization.nope",
    ]
    assert "_comment" not in caplog.text


def test_an_unknown_key_inside_a_block_is_an_error_as_in_deepspeed() -> None:
    config = for_engine({"zero_optimization": {"stagee": 2}}).config
    assert "did you mean zero_optimization.stage?" in refusal(config)


def test_dotted_keys_at_the_top_are_read() -> None:
    config = load(for_engine({"zero_optimization.reduce_bucket_size": 0.9 * 1025 * 1025}).config)
    assert config.inert_keys["zero_optimization.reduce_bucket_size"] == 945562


@pytest.mark.parametrize(
    ("zero", "told"),
    [
        (
            {"stage": 2, "offload_param": {"device": "cpu", "pin_memory": True}},
            "offload_param has no effect at stage 2",
        ),
        ({"offload_param": {"device": "cpu"}}, "offload_param has no effect at stage 0"),
        ({"stage": "1", "cpu_offload_params": True}, "cpu_offload_params has no effect at stage 1"),
        ({"stage": 2, "zero_quantized_weights": True}, "zero_quantized_weights has no effect at stage 2"),
        ({"stage": 1, "zero_quantized_gradients": 1}, "zero_quantized_gradients has no effect at stage 1"),
        ({"stage": 2, "zero_hpz_partition_size": 8}, "zero_hpz_partition_size has no effect at stage 2"),
        ({"stage": 2, "offload_param": {"device": "none", "nvme_path": None}, "zero_hpz_partition_size": 1}, ""),
        ({"stage": 0, "offload_param": None, "zero_quantized_weights": False}, ""),
    ],
)
def test_what_a_stage_does_not_have_is_told_and_ignored(
    zero: dict[str, Any], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "DeepSpeed"):
        config = load(for_engine({"zero_optimization": zero}).config)
    assert told in caplog.text
    assert bool(told) == bool(caplog.text)
    assert config.zero_optimization.offload_param.device == "none"


def test_stage_3_keeps_what_it_is_asked_for() -> None:
    zero = {"stage": 3, "offload_param": {"device": "cpu"}, "zero_quantized_weights": True}
    found = load(for_engine({"zero_optimization": zero}).config).zero_optimization
    assert (found.offload_param.device, found.zero_quantized_weights) == ("cpu", True)


def test_a_factor_before_the_sum_is_ignored_with_prescaling(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "DeepSpeed"):
        load(for_engine({"prescale_gradients": True, "gradient_predivide_factor": 2.0}).config)
    assert "gradient_predivide_factor has no effect with prescale_gradients" in caplog.text


AUTO = "auto"
STOCK: dict[str, dict[str, Any]] = {
    "a fine-tuning front end, stage 3 with offload": {
        **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), AUTO),
        "gradient_clipping": AUTO,
        "zero_allow_untested_optimizer": True,
        "fp16": {"enabled": AUTO, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
        "bf16": {"enabled": AUTO},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "cpu", "pin_memory": True},
            "overlap_comm": False,
            "contiguous_gradients": True,
            "sub_group_size": 1e9,
            "reduce_bucket_size": AUTO,
            "stage3_prefetch_bucket_size": AUTO,
            "stage3_param_persistence_threshold": AUTO,
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    },
    "a chat pipeline, stage 2": {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 10,
        "zero_optimization": {
            "stage": 2,
            "offload_param": {"device": "cpu"},
            "offload_optimizer": {"device": "cpu"},
            "stage3_param_persistence_threshold": 1e4,
            "stage3_max_live_parameters": 3e7,
            "memory_efficient_linear": False,
        },
        "bfloat16": {"enabled": True},
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
        "hybrid_engine": {"enabled": False, "max_out_tokens": 512, "inference_tp_size": 1},
        "tensorboard": {"enabled": False, "output_path": "x/ds_tensorboard_logs/", "job_name": "x"},
    },
    "a wrapper's plugin": {
        "train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {
            "stage": 1,
            "offload_optimizer": {"device": "none", "nvme_path": None},
            "offload_param": {"device": "none", "nvme_path": None},
            "stage3_gather_16bit_weights_on_model_save": False,
        },
        "steps_per_print": float("inf"),
        "fp16": {"enabled": False},
        "bf16": {"enabled": False},
    },
    "a trainer's strategy": {
        "activation_checkpointing": {
            "partition_activations": False,
            "cpu_checkpointing": False,
            "contiguous_memory_optimization": False,
            "synchronize_checkpoint_boundary": False,
        },
        "aio": {
            "block_size": 1048576,
            "queue_depth": 8,
            "single_submit": False,
            "overlap_events": True,
            "thread_count": 1,
        },
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3, "sub_group_size": 1000000000000, "allgather_bucket_size": 200000000},
        "gradient_clipping": 0.0,
    },
    "an old tutorial": {
        "train_batch_size": 16,
        "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001}},
        "zero_optimization": {"stage": 2, "cpu_offload": True},
        "allgather_size": 5e8,
        "fp16": {"enabled": 1, "loss_scale": 0},
        "wall_clock_breakdown": 0,
    },
}


@pytest.mark.parametrize("name", STOCK)
def test_files_as_people_have_them_are_read(name: str) -> None:
    given = copy.deepcopy(STOCK[name])
    config = load(for_engine(given, optimizer=object()).config, world_size=2, optimizer_given=True)
    assert config.zero_optimization.stage == given["zero_optimization"]["stage"]
    assert given == STOCK[name]  # the user's dictionary is only read


def engine_with(config: dict[str, Any], **given: Any) -> Any:
    model = torch.nn.Linear(2, 2)
    if given.pop("own", False):
        given["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.5)
    arguments = for_engine(config, optimizer=given.get("optimizer"), lr_scheduler=given.pop("lr_scheduler", None))
    return shardwell.initialize(
        model=model, config=arguments.config, lr_scheduler=arguments.lr_scheduler, **given
    ).engine


def rates(engine: Any, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        found.append(engine.get_lr()[0])
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
    return found


def test_a_schedule_of_the_file_has_deepspeeds_class_and_its_late_warmup() -> None:
    warmup = {"type": "WarmupLR", "params": {"warmup_max_lr": "1.0", "warmup_num_steps": 4, "warmup_type": "linear"}}
    engine = engine_with({**ADAM, "scheduler": warmup})
    assert isinstance(engine.lr_scheduler, lr_schedules.WarmupLR)
    assert rates(engine, 7) == [0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0]


def test_a_schedule_may_be_torchs_and_needs_an_optimizer() -> None:
    step = {"scheduler": {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}}}
    assert rates(engine_with({**ADAM, **step}), 3) == [0.5, 0.25, 0.125]
    assert rates(engine_with(step, own=True), 3) == [0.5, 0.25, 0.125]
    assert engine_with(step).lr_scheduler is None  # evaluation: clients leave the schedule in the file


def test_a_schedule_in_the_code_has_precedence_over_the_file() -> None:
    def halved(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    engine = engine_with({**ADAM, "scheduler": {"type": "WarmupLR"}}, lr_scheduler=halved)
    assert isinstance(engine.lr_scheduler, torch.optim.lr_scheduler.StepLR)


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"type": "Cosine"}, "'Cosine' is not known; known are WarmupLR"),
        ({"type": "Optimizer"}, "is not known"),
        ({"params": {}}, "an object with a type"),
        ({"type": "WarmupLR", "params": {"warmup_steps": 3}}, "did you mean warmup_num_steps?"),
        ({"type": "WarmupDecayLR"}, "total_num_steps: missing"),
        ({"type": "WarmupLR", "params": {"warmup_num_steps": -1}}, "expected at least 0"),
    ],
)
def test_a_schedule_that_cannot_be_built_is_refused_before_the_engine(block: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("?", r"\?")):
        for_engine({**ADAM, "scheduler": block})


def test_torchs_schedule_with_wrong_arguments_is_an_error_of_the_configuration() -> None:
    with pytest.raises(ConfigError, match="StepLR does not take these"):
        engine_with({**ADAM, "scheduler": {"type": "StepLR", "params": {"size": 1}}})


def test_a_warmup_that_is_longer_than_the_run_is_told_and_taken(caplog: pytest.LogCaptureFixture) -> None:
    block = {"type": "WarmupDecayLR", "params": {"total_num_steps": 5, "warmup_num_steps": 10}}
    with caplog.at_level(logging.WARNING, "DeepSpeed"):
        engine_with({**ADAM, "scheduler": block})
    assert "total_num_steps 5 is less than warmup_num_steps 10" in caplog.text


# --- every key of DeepSpeed's -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("key", [*dotted_keys(), *FEATURES_OF_DEEPSPEED])
def test_every_key_of_deepspeed_works_or_has_a_reason(key: str) -> None:
    kind = disposition(key)
    assert kind.startswith(("works: ", "no effect: ", "refused if it is on: ", "`"))
    assert len(kind) > 15


@pytest.mark.slow
@pytest.mark.parametrize(
    "key",
    [
        key
        for key in (*dotted_keys(), *FEATURES_OF_DEEPSPEED)
        if not key.startswith("scheduler.") and key != "optimizer.type"
    ],
)
def test_every_key_of_deepspeed_that_is_null_is_as_if_absent(key: str) -> None:
    block, _, name = key.partition(".")
    load({block: {"type": "SGD", name: None}} if block == "optimizer" and name != "type" else nested(key, None))


def test_the_documented_defaults_are_in_the_list() -> None:
    defaults = json.loads((ROOT / "tests/unit/deepspeed_defaults.json").read_text())
    blocks = set(KEYS_OF_DEEPSPEED) - {""}
    found = {key for key in defaults if key not in blocks | set(FEATURES_OF_DEEPSPEED) | set(dotted_keys())}
    assert found == {"datastates"}  # DeepSpeed reads it as datastates_ckpt
    inner = {f"{block}.{key}" for block in blocks & set(defaults) for key in defaults[block]}
    assert inner - set(dotted_keys()) - blocks == set()


def test_the_migration_page_is_what_the_tables_say() -> None:
    written = (ROOT / "docs" / "deepspeed-migration.md").read_text()
    assert written == page(), "run python -m shardwell.compat.deepspeed_api.migration > docs/deepspeed-migration.md"


def test_a_key_without_a_row_is_an_error_of_the_page() -> None:
    with pytest.raises(shardwell.ShardwellError, match=r"zero_optimization\.new_key"):
        disposition("zero_optimization.new_key")
