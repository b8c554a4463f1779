"""What people have in their files: what changes nothing is accepted, what has one meaning is translated, and told."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardwell.config import load, remarks, told
from shardwell.config.deepspeed_keys import KEYS, Inert, Limited, Unsupported
from shardwell.config.translate import RENAMED, SWITCHES
from tests.support.configs import at, nested, pairs, refusal

# DeepSpeed's documented configuration, each key at its documented default or off.
FEATURES = {key: row for key, row in KEYS.items() if isinstance(row, Unsupported)}
IDLE = {key: row for key, row in KEYS.items() if isinstance(row, Inert | Limited)}
DOCUMENTED: dict[str, Any] = json.loads(Path(__file__).with_name("deepspeed_defaults.json").read_text())


def test_every_documented_key_at_its_default_or_off_is_accepted() -> None:
    load(DOCUMENTED, world_size=2)


@pytest.mark.parametrize("key", sorted(DOCUMENTED))
def test_each_documented_key_alone_is_accepted(key: str) -> None:
    load({key: DOCUMENTED[key]}, world_size=2)


OFFLOADED = """{"zero_optimization": {"stage": 3,
  "offload_param": {"device": "cpu", "nvme_path": "/local_nvme", "pin_memory": true, "buffer_count": 5,
    "buffer_size": 1e8, "max_in_cpu": 1e9},
  "offload_optimizer": {"device": "cpu", "nvme_path": "/local_nvme", "pin_memory": true, "ratio": 1, "buffer_count": 4,
    "fast_init": false, "pipeline_read": false, "pipeline_write": false, "super_offload": false,
    "cpuadam_cores_perc": 0.8, "convert_grad_on_cpu": true}}}"""


def test_every_documented_key_of_offload_is_accepted() -> None:
    load(OFFLOADED)


@pytest.mark.parametrize("block", [None, {}, False, 0, "false", {"enabled": False, "x": 1}, {"enabled": 0}, {"x": {}}])
@pytest.mark.parametrize("key", sorted(key for key, kind in FEATURES.items() if not kind.any_content_asks))
def test_a_feature_may_be_off_in_any_way(key: str, block: Any) -> None:
    load(nested(key, block))


@pytest.mark.parametrize("block", [None, {}, False, {"enabled": False, "x": 1}])
@pytest.mark.parametrize("key", sorted(key for key, kind in FEATURES.items() if kind.any_content_asks))
def test_a_feature_that_is_asked_for_by_its_content_may_be_off(key: str, block: Any) -> None:
    load(nested(key, block))


VALUES: dict[str, tuple[Any, ...]] = {
    "any": (True, False, 3, "x"),
    "flag": (True, False, "on"),
    "count": (0, 3, "5"),
    "size": (0, 5e8, 0.9 * 1025 * 1025),
    "strings": ([], ["torch.nn.Linear"]),
    "flags by name": ({}, {"pipeline_stage": True}),
    "tag validation": ("Warn", "ignore", "FAIL"),
}


@pytest.mark.parametrize("key", sorted(IDLE))
def test_a_key_that_changes_nothing_is_accepted(key: str) -> None:
    row = IDLE[key]
    for value in row.allowed if isinstance(row, Limited) else VALUES[row.type]:
        config = load(
            nested(key, value) | ({"optimizer": {"type": "SGD", "legacy_fusion": value}} if "fusion" in key else {})
        )
        assert (key in config.inert_keys) == bool(row.reason and value is not None)


@pytest.mark.parametrize(("old", "new"), sorted(RENAMED.items()))
def test_an_old_spelling_is_read_as_the_new_one_and_told(old: str, new: str) -> None:
    value: Any = {"enabled": True} if new in ("bf16", "fp16") else True if "16bit" in new else 7
    config = load(nested(old, value))
    if new in ("bf16", "fp16"):
        assert at(config, new).enabled
    else:
        assert at(config, new) == value
    assert [note.text for note in config.notes] == [f"{old} is read as {new}"]


@pytest.mark.parametrize("old", sorted(SWITCHES))
def test_an_old_switch_means_what_it_meant(old: str) -> None:
    new, meaning = SWITCHES[old]
    config = load(in_stage_3(old, True) if "." in old else {old: True})
    assert at(config, new) == meaning
    assert [note.text for note in config.notes] == [f'{old} true is read as {new}: "{meaning}"']
    assert at(load(nested(old, False)), new) == at(load({}), new)


def in_stage_3(key: str, value: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, key.rpartition(".")[2]: value}}


def test_an_old_spelling_against_the_new_one_contradicts() -> None:
    zero = {"cpu_offload": True, "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}}
    assert "offload_optimizer.device: contradicts zero_optimization.cpu_offload true" in refusal(
        {"zero_optimization": zero}
    )
    load({"zero_optimization": {"stage": 1, "cpu_offload": True, "offload_optimizer": {"device": "cpu"}}})


@pytest.mark.parametrize(
    ("written", "tier", "meant"),
    [
        ({"device_memory": 10**9}, "device", 10**9),
        ({"host_memory": 0}, "host", 0),
        ({"disk_memory": "1e12"}, "disk", 10**12),
        ({"device_room": 0.1}, "device", 0.9),
        ({"host_room": 0}, "host", 1.0),
        ({"host_memory": 5, "memory": {"host": 5}}, "host", 5),
        ({"host_memory": 5, "host_room": 0.5}, "host", 5),
        ({"host_memory": "auto", "host_room": 0.5}, "host", 0.5),
    ],
)
def test_an_old_memory_budget_is_read_into_its_block_and_told(written: dict[str, Any], tier: str, meant: Any) -> None:
    config = load({"shardwell": written})
    assert getattr(config.shardwell.memory, tier) == meant
    assert f"is read as shardwell.memory.{tier}" in config.notes[0].text
    assert told(remarks(config))[0] == []  # no other numbers than DeepSpeed's are meant


@pytest.mark.parametrize("old", [{"device_memory": 10**9}, {"device_room": 0.5}])
def test_an_old_memory_budget_against_the_new_one_contradicts(old: dict[str, Any]) -> None:
    text = refusal({"shardwell": {**old, "memory": {"device": 10**8}}})
    assert f"shardwell.memory.device: contradicts shardwell.{next(iter(old))}, which is the old spelling of it" in text


@pytest.mark.parametrize(
    ("written", "key", "meant"),
    [
        ({"zero_optimization": True}, "zero_optimization.stage", 1),
        ({"zero_optimization": False}, "zero_optimization.stage", 0),
        ({"bf16": True}, "bf16.enabled", True),
        ({"fp16": 1}, "fp16.enabled", True),
        ({"bf16": False}, "bf16.enabled", False),
        ({"zero_optimization.stage": 2}, "zero_optimization.stage", 2),
        ({"zero_optimization.offload_param.max_in_cpu": 5}, "zero_optimization.offload_param.max_in_cpu", 5),
        ({"gradient_clipping": None}, "gradient_clipping", 0.0),
        ({"gradient_clipping": False}, "gradient_clipping", 0.0),
        ({"bfloat16": True}, "bf16.enabled", True),
        ({"optimizer": {}}, "optimizer", None),
        ({"scheduler": False}, "scheduler", None),
        ({"zero_optimization": {"reduce_bucket_size": 0}}, "zero_optimization.reduce_bucket_size", 0),
        (
            {"zero_optimization": {"stage3_prefetch_bucket_size": 0.9 * 1025 * 1025}},
            "zero_optimization.stage3_prefetch_bucket_size",
            945562,
        ),
        (
            {"zero_optimization": {"stage3_max_live_parameters": None}},
            "zero_optimization.stage3_max_live_parameters",
            1_000_000_000,
        ),
        ({"zero_optimization": {"offload_param": {"device": None}}}, "zero_optimization.offload_param.device", "none"),
        (
            {"zero_optimization": {"offload_param": {"device": "NONE"}}},
            "zero_optimization.offload_param.device",
            "none",
        ),
        (
            {"zero_optimization": {"offload_param": {"device": "auto"}}},
            "zero_optimization.offload_param.device",
            "none",
        ),
        ({"steps_per_print": float("inf")}, "steps_per_print", None),
        ({"steps_per_print": 0}, "steps_per_print", None),
        ({"steps_per_print": "10"}, "steps_per_print", 10),
        ({"train_batch_size": "8"}, "train_batch_size", 8),
        ({"train_batch_size": np.int64(8)}, "train_batch_size", 8),
        ({"gradient_clipping": np.float32(0.5)}, "gradient_clipping", 0.5),
        ({"gradient_clipping": torch.tensor(0.5)}, "gradient_clipping", 0.5),
        ({"gradient_clipping": "1e-1"}, "gradient_clipping", 0.1),
        ({"bf16": {"enabled": np.True_}}, "bf16.enabled", True),
        ({"communication_data_type": torch.bfloat16}, "communication_data_type", "bf16"),
        ({"zero_optimization": {"reduce_bucket_size": "5e8"}}, "zero_optimization.reduce_bucket_size", 500_000_000),
        ({"zero_optimization": {"stage": "3"}}, "zero_optimization.stage", 3),
        (
            {"zero_optimization": {"offload_param": {"nvme_path": Path("/a/b")}}},
            "zero_optimization.offload_param.nvme_path",
            "/a/b",
        ),
        ({"zero_optimization": {"stage": Enum("Stage", {"three": 3}).three}}, "zero_optimization.stage", 3),  # type: ignore[attr-defined]
        ({"_comment": "stage 2", "zero_optimization": {"stage": 2, "//": "two"}}, "zero_optimization.stage", 2),
    ],
)
def test_what_has_one_meaning_is_taken(written: dict[str, Any], key: str, meant: Any) -> None:
    found = at(load(written), key)
    assert found == meant
    assert type(found) is type(meant)


@pytest.mark.parametrize("value", [True, 1, 1.0, "true", "True", "yes", "on", "1"])
def test_a_flag_may_be_a_number_or_a_word(value: Any) -> None:
    assert load({"bf16": {"enabled": value}}).bf16.enabled is True
    assert (
        load(
            {"zero_optimization": {"stage": 3, "zero_quantized_weights": value}}
        ).zero_optimization.zero_quantized_weights
        is True
    )


@pytest.mark.parametrize("value", [False, 0, 0.0, "false", "False", "no", "off", "0"])
def test_a_flag_that_is_off_may_be_a_number_or_a_word(value: Any) -> None:
    assert load({"bf16": {"enabled": value}}).bf16.enabled is False


DTYPES = """
"torch.bfloat16" "bf16"  "bfloat16" "bf16"  "BF16" "bf16"  "torch.float16" "fp16"  "half" "fp16"
"torch.float32" "fp32"  "float" "fp32"  "FP32" "fp32"
"""


@pytest.mark.parametrize(("spelled", "short"), [(json.loads(key), value) for key, value in pairs(DTYPES)])
def test_a_dtype_may_be_spelled_as_torch_does(spelled: str, short: str) -> None:
    assert load({"communication_data_type": spelled}).communication_data_type == short
    assert load({"data_types": {"grad_accum_dtype": spelled}}).data_types.grad_accum_dtype == short


def test_a_block_that_says_a_dotted_key_itself_wins_and_that_is_told() -> None:
    config = load({"zero_optimization": {"stage": 3}, "zero_optimization.stage": 2})
    assert config.zero_optimization.stage == 3
    assert config.notes[0].text == '"zero_optimization.stage" at the top has no effect: the value in its block holds'


def test_numbers_among_the_arguments_may_be_strings() -> None:
    optimizer = {"type": "AdamW", "params": {"lr": "1e-3", "betas": ["0.9", 0.95], "amsgrad": "false", "eps": 1e-8}}
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": "1e2", "warmup_type": "linear"}}
    config = load({"optimizer": optimizer, "scheduler": scheduler})
    assert config.optimizer is not None
    assert config.scheduler is not None
    assert config.optimizer.params == {"lr": 1e-3, "betas": [0.9, 0.95], "amsgrad": False, "eps": 1e-8}
    assert config.scheduler.params == {"warmup_num_steps": 100.0, "warmup_type": "linear"}


HJSON = """
# a comment, and another
{
  // stage 3
  zero_optimization: {
    stage: 3          # no comma
    'reduce_bucket_size': 5e8,
    offload_param: { device: cpu, pin_memory: True },   /* Python's true
    over two lines */
  },
  "gradient_clipping": 1.0,
  optimizer: { type: AdamW, params: { lr: "2e-4", betas: [0.9, 0.95,], weight_decay: .1 } }
  bf16: { enabled: true },
  steps_per_print: Infinity,
}
"""


def test_comments_and_the_liberties_of_hjson_are_read(tmp_path: Path) -> None:
    file = tmp_path / "zero3.hjson"
    file.write_text(HJSON)
    for config in (load(file), load(HJSON)):
        zero = config.zero_optimization
        bucket = config.inert_keys["zero_optimization.reduce_bucket_size"]
        assert (zero.stage, bucket, zero.offload_param.device) == (3, 500_000_000, "cpu")
        assert (config.gradient_clipping, config.bf16.enabled, config.steps_per_print) == (1.0, True, None)
        assert config.optimizer is not None
        assert config.optimizer.params == {"lr": 2e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}


def test_a_string_keeps_its_slashes_and_signs() -> None:
    path = {"zero_optimization": {"offload_param": {"nvme_path": "/a//b#c, {d}"}}}
    text = json.dumps(path)[:-1] + ", // comment\n}"
    assert load(text).zero_optimization.offload_param.nvme_path == "/a//b#c, {d}"


def test_a_key_written_twice_is_refused_in_hjson_too() -> None:
    assert "bf16: written 2 times" in refusal("{bf16: {enabled: true}, bf16: {enabled: false}}")


def test_the_users_dictionary_is_left_alone() -> None:
    written = {"zero_optimization": {"cpu_offload": True, "prefetch_bucket_size": 5}, "bfloat16": {"enabled": True}}
    before = json.dumps(written)
    load(written)
    assert json.dumps(written) == before


# As Accelerate, Transformers, TRL and Lightning write them.
CLIENTS = {
    "accelerate": """{"train_batch_size": 2, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none", "nvme_path": null},
        "offload_param": {"device": "none", "nvme_path": null}, "stage3_gather_16bit_weights_on_model_save": false},
        "gradient_clipping": 1.0, "steps_per_print": Infinity, "bf16": {"enabled": true}, "fp16": {"enabled": false},
        "zero_allow_untested_optimizer": true}""",
    "trl": """{"zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8},
        "zero_optimization.reduce_bucket_size": 1024, "zero_optimization.stage3_param_persistence_threshold": 320,
        "zero_optimization.stage3_prefetch_bucket_size": 1843.2, "train_micro_batch_size_per_gpu": 1}""",
    "transformers at evaluation": """{"zero_optimization": {"stage": 3}, "scheduler": {"type": "WarmupLR", "params":
        {"warmup_min_lr": 0, "warmup_max_lr": 5e-05, "warmup_num_steps": 0}}}""",
    "lightning": """{"activation_checkpointing": {"partition_activations": false, "cpu_checkpointing": false,
        "contiguous_memory_optimization": false, "synchronize_checkpoint_boundary": false},
        "aio": {"block_size": 1048576, "queue_depth": 8, "single_submit": false, "overlap_events": true,
        "thread_count": 1},
        "zero_allow_untested_optimizer": true, "zero_optimization": {"stage": 3, "contiguous_gradients": true,
        "overlap_comm": true, "allgather_partitions": true, "reduce_scatter": true, "allgather_bucket_size": 200000000,
        "reduce_bucket_size": 200000000, "sub_group_size": 1000000000000, "offload_optimizer": {"device": "nvme",
        "nvme_path": "/local_nvme", "buffer_count": 4, "pin_memory": false}}, "train_micro_batch_size_per_gpu": 1}""",
}


@pytest.mark.parametrize("client", sorted(CLIENTS))
def test_files_as_clients_write_them_are_accepted(client: str) -> None:
    load(CLIENTS[client], world_size=2)
