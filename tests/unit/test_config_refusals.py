"""What is refused in a configuration, and what the refusal says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwell.config import load
from shardwell.config.deepspeed_keys import KEYS, Limited, Unsupported
from shardwell.version import __version__
from tests.support.configs import at, nested, pairs, refusal

FEATURES = {key: row for key, row in KEYS.items() if isinstance(row, Unsupported)}
LIMITED = {key: row for key, row in KEYS.items() if isinstance(row, Limited)}


@pytest.mark.parametrize("value", [1.5, True, "many", "1.5", [1]])
def test_what_is_not_a_whole_number_is_refused(value: Any) -> None:
    text = refusal({"zero_optimization": {"reduce_bucket_size": value}})
    assert f"zero_optimization.reduce_bucket_size: expected a whole number, found {json.dumps(value)}" in text


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("bf16.enabled", 2, "expected true or false, found 2"),
        ("zero_optimization.stage", 4, "expected 0, 1, 2 or 3, found 4"),
        ("zero_optimization.stage", True, "expected a whole number, found true"),
        ("gradient_clipping", -1.0, "expected at least 0, found -1.0"),
        ("gradient_clipping", True, "expected a finite number, found true"),
        ("train_batch_size", 0, "expected at least 1, found 0"),
        ("shardwell.divergence_timeout", 0, "expected more than 0, found 0"),
        ("shardwell.nonfinite", "ignore", 'expected "auto", "error" or "skip", found "ignore"'),
        ("communication_data_type", "int8", 'expected "fp32", "bf16" or "fp16", found "int8"'),
        ("communication_data_type", 16, 'expected "fp32", "bf16" or "fp16", found 16'),
        ("data_types.grad_accum_dtype", "double", 'expected "fp32", "bf16" or "fp16", found "double"'),
        ("torch_autocast.dtype", "float32", 'expected "bf16" or "fp16", found "float32"'),
        ("torch_autocast.dtype", True, 'expected "bf16" or "fp16", found true'),
        ("torch_autocast.lower_precision_safe_modules", "Linear", 'expected a list of strings, found "Linear"'),
        ("gradient_predivide_factor", 0, "expected more than 0, found 0"),
        ("fp16.loss_scale_window", 0, "expected at least 1, found 0"),
        ("fp16.hysteresis", 0, "expected at least 1, found 0"),
        ("fp16.loss_scale", -1, "expected at least 0, found -1"),
        ("fp16.initial_scale_power", 1.5, "expected a whole number, found 1.5"),
        ("activation_checkpointing.cpu_checkpointing", "often", 'expected true or false, found "often"'),
        ("activation_checkpointing", True, "expected an object, found true"),
        ("shardwell.device_room", 1.0, "expected less than 1, found 1.0"),
        ("shardwell.host_room", -0.5, "expected at least 0, found -0.5"),
        ("shardwell.host_memory", "8GB", 'expected a whole number or "auto", found "8GB"'),
        ("shardwell.memory.host", "8GB", 'expected a share from 0 to 1, or a whole number of bytes, found "8GB"'),
        ("shardwell.memory.disk", 1.5, "expected a share from 0 to 1, or a whole number of bytes, found 1.5"),
        ("shardwell.memory.device", -1, "expected a share from 0 to 1, or a whole number of bytes, found -1"),
        ("shardwell.keep_frozen", -1, "expected at least 0, found -1"),
        ("shardwell.keep_frozen", 1.5, 'expected a whole number or "auto", found 1.5'),
        ("shardwell.keep_frozen", True, 'expected a whole number or "auto", found true'),
        ("shardwell.keep_frozen", "all", 'expected a whole number or "auto", found "all"'),
        ("zero_optimization.zero_quantized_weights", 2, 'expected true, false or "auto", found 2'),
        ("zero_optimization.zero_quantized_gradients", "some", 'expected true, false or "auto", found "some"'),
        ("zero_optimization.zero_hpz_partition_size", "node", 'expected a whole number or "auto", found "node"'),
        ("zero_optimization.zero_hpz_partition_size", -1, "expected at least 1, found -1"),
        ("zero_optimization.offload_param.device", "gpu", 'expected "none", "cpu" or "nvme", found "gpu"'),
        ("zero_optimization.leaf_module.classes", "Block", 'expected a list of strings, found "Block"'),
        ("optimizer.type", 3, "expected a string, found 3"),
        ("zero_optimization", 3, "expected an object, found 3"),
        ("zero_optimization.offload_optimizer.ratio", 2, 'expected a number from 0 to 1, or "auto", found 2'),
    ],
)
def test_a_wrong_value_says_what_was_expected_and_what_was_found(key: str, value: Any, expected: str) -> None:
    assert f"  {key}: {expected}" in refusal(nested(key, value))


@pytest.mark.parametrize(("block", "such_as"), [("optimizer", "AdamW"), ("scheduler", "WarmupLR")])
def test_an_optimizer_or_scheduler_without_type_is_refused(block: str, such_as: str) -> None:
    assert refusal({block: {"params": {"lr": 1e-3}}}).splitlines()[1:] == [
        f'  {block}.type: missing; name it, such as "{such_as}"'
    ]


@pytest.mark.parametrize(("block", "kind"), [("optimizer", "SGD"), ("scheduler", "OneCycle")])
def test_arguments_that_are_no_object_are_refused(block: str, kind: str) -> None:
    text = refusal({block: {"type": kind, "params": [1]}})
    assert f"  {block}.params: expected an object, found [1]" in text


@pytest.mark.parametrize("kind", ["Warmup", "", 3, None])
def test_an_unknown_scheduler_is_refused_with_the_known_ones(kind: Any) -> None:
    known = "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle or LRRangeTest"
    assert f"scheduler.type: expected {known}, found {json.dumps(kind)}" in refusal({"scheduler": {"type": kind}})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"bf16": {\n  "enabled": 5x}}', "not valid JSON, line 2 column 15"),
        (b'{"bf16": {\n  "enabled": true', "not valid JSON, line 2 column 18"),
        (b"{zero_optimization {stage: 3}}", "not valid JSON, line 1 column 20: Expecting ':' delimiter"),
        (b"{a: " * 2000, "not valid JSON, line 1 column 401: nested too deeply"),
        (b"", "not valid JSON, line 1 column 1"),
        (b"[1]", "expected a JSON object at the top, found a list"),
        (b'{"gradient_clipping": NaN}', "NaN is not a number in JSON"),
        (b"\xff\xfe\x00", "not a text file in UTF-8"),
    ],
)
def test_a_file_that_is_no_json_object_is_refused_by_name(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "bad.json"
    file.write_bytes(content)
    assert f"{file}: {said}" in refusal(file)


def test_a_missing_file_is_named_in_full() -> None:
    assert str(Path("nowhere.json").absolute()) in refusal("nowhere.json")


def test_a_folder_is_refused(tmp_path: Path) -> None:
    assert "a folder, not a file" in refusal(tmp_path)


def test_a_source_of_another_type_is_refused() -> None:
    assert "found int" in refusal(3)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('{"bf16": {}, "bf16": {"enabled": true}}', "bf16"),
        ('{"zero_optimization": {"stage": 1, "stage": 3}}', "zero_optimization.stage"),
        ('{"optimizer": {"type": "SGD", "params": {"lr": 1, "lr": 2}}}', "optimizer.params.lr"),
        ('{"scheduler": {"type": "OneCycle", "params": {"x": 1, "x": 2}}}', "scheduler.params.x"),
    ],
)
def test_a_key_written_twice_is_refused_with_its_path(text: str, key: str) -> None:
    assert f"{key}: written 2 times" in refusal(text)


MEANT = """
gradient_cliping "gradient_clipping"  zero_optimisation "zero_optimization"  schedular "scheduler"
stage "zero_optimization.stage"  Stage "zero_optimization.stage"  lr "optimizer.params.lr"
train_micro_batch_size "train_micro_batch_size_per_gpu"  zero_optimization.gradient_clipping "gradient_clipping"
zero_optimization.leaf_module.class "zero_optimization.leaf_module.classes"
zero_optimization.offload_param.pin_memry "zero_optimization.offload_param.pin_memory"
zero_optimization.stag "zero_optimization.stage"  optimizer.param "optimizer.params"
scheduler.param "scheduler.params"  warmup_num_steps "scheduler.params.warmup_num_steps"
fp16.hysterisis "fp16.hysteresis"  torch_autocast.dtyp "torch_autocast.dtype"  loss_scale "fp16.loss_scale"
activation_checkpoint "activation_checkpointing"  partition_activations "activation_checkpointing.partition_activations"
activation_checkpointing.cpu_checkpoint "activation_checkpointing.cpu_checkpointing"
shardwell.keep_frosen "shardwell.keep_frozen"  shardwell.device_memori "shardwell.memory.device"
"""


@pytest.mark.parametrize(("key", "meant"), pairs(MEANT))
def test_an_unknown_key_names_the_one_that_was_meant(key: str, meant: str) -> None:
    assert f"  {key}: unknown key; did you mean {meant}?" in refusal(nested(key, 1))


def test_a_key_that_resembles_nothing_lists_the_keys_of_its_block() -> None:
    assert "the keys of shardwell are: divergence_timeout, " in refusal({"shardwell": {"xyzzy": 1}})


def test_a_refusal_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "zero3.json"
    file.write_text('{"stage": 3}')
    assert refusal(file).startswith(f"{file}: 1 problem")


def test_all_problems_come_in_one_error_sorted_by_path() -> None:
    zero = {"stage": 9, "stagee": 1, "offload_optimizer": {"device": "nvme"}}
    new = {"scheduler": {"type": "Cosine"}, "fp16": {"hysteresis": 0}, "activation_checkpointing": {"profil": True}}
    text = refusal(
        {**new, "zero_optimization": zero, "wall_clock_breakdown": 2, "amp": True, "gradient_clipping": "much"}
    )
    keys = [line.strip().split(":")[0] for line in text.splitlines()[1:]]
    outer = ["activation_checkpointing.profil", "amp", "fp16.hysteresis", "gradient_clipping", "scheduler.type"]
    inner = [f"zero_optimization.{key}" for key in ("offload_optimizer.nvme_path", "stage", "stagee")]
    assert keys == [*outer, "wall_clock_breakdown", *inner]


ASKING = """
zero_optimization.zenflow {"topk_ratio":0.1}  zero_optimization.zeropp_loco_param {"err_beta":0.8}
compile {"deepcompile":true}
sparse_attention {"mode":"fixed"}  weight_quantization {"post_init_quant":{}}  quantize_training {"quantize_bits":{}}
compression_training {"weight_quantization":{"shared_parameters":{"enabled":true}}}  amp true  elasticity "yes"
"""


@pytest.mark.parametrize(("key", "value"), [*((key, {"enabled": True}) for key in sorted(FEATURES)), *pairs(ASKING)])
def test_a_block_that_asks_for_what_is_not_there_is_refused(key: str, value: Any) -> None:
    text = refusal(nested(key, value))
    assert f"  {key}: {FEATURES[key].refusal}" in text
    known = "removed, and will not come", 'experts are shared by ranks with "shardwell"'
    assert f"shardwell {__version__} does not have" in text or any(words in text for words in known)


@pytest.mark.parametrize("key", sorted(key for key, row in LIMITED.items() if row.type == "any"))
def test_a_value_that_would_be_ignored_to_harm_is_refused(key: str) -> None:
    assert f"  {key}: 7: {LIMITED[key].refusal}" in refusal(nested(key, 7))


@pytest.mark.parametrize("kind", ["OneBitAdam", "ZeroOneAdam", "OneBitLamb"])
def test_one_bit_optimizers_are_removed(kind: str) -> None:
    assert f'optimizer.type: "{kind}": removed, and will not come' in refusal({"optimizer": {"type": kind}})


NOT_YET = """
aio.use_gds true  checkpoint.use_node_local_storage true
"""


@pytest.mark.parametrize(("key", "value"), pairs(NOT_YET))
def test_a_value_that_is_not_built_yet_is_refused_with_the_version(key: str, value: Any) -> None:
    assert f"{key}: {json.dumps(value)}: shardwell {__version__} does not have" in refusal(nested(key, value))


def switched_on(*blocks: str) -> dict[str, Any]:
    return {block: {"enabled": True} for block in blocks}


def test_bf16_and_fp16_together_contradict() -> None:
    text = refusal(switched_on("bf16", "fp16"))
    assert text.splitlines()[1:] == ["  fp16.enabled: contradicts bf16.enabled, both are true; keep one"]


@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_autocast_contradicts_weights_in_16_bits(half: str) -> None:
    text = refusal(switched_on(half, "torch_autocast"))
    assert text.startswith("dict: 1 problem")
    assert f"torch_autocast.enabled: contradicts {half}.enabled" in text


def test_all_three_precisions_together_are_two_problems() -> None:
    text = refusal(switched_on("bf16", "fp16", "torch_autocast"))
    assert "2 problems" in text
    assert "torch_autocast.enabled: contradicts bf16.enabled and fp16.enabled" in text


def test_two_divisions_before_the_sum_contradict() -> None:
    text = refusal({"prescale_gradients": True, "gradient_predivide_factor": 2})
    assert "gradient_predivide_factor: 2.0 contradicts prescale_gradients" in text


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_parameter_offload_below_stage_3_contradicts_and_shows_the_stage(stage: int) -> None:
    text = refusal({"zero_optimization": {"stage": stage, "offload_param": {"device": "cpu"}}})
    assert f'"cpu" contradicts zero_optimization.stage {stage}' in text


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_second_copy_below_stage_3_contradicts_and_any_size_is_taken_there(stage: int) -> None:
    key = "zero_optimization.zero_hpz_partition_size"
    text = refusal({"zero_optimization": {"stage": stage, "zero_hpz_partition_size": 8}})
    assert f"{key}: 8 contradicts zero_optimization.stage {stage}" in text
    assert at(load({"zero_optimization": {"stage": stage, "zero_hpz_partition_size": 1}}), key) == 1
    for size in (2, 3, 1000):
        zero = {"stage": 3, "zero_hpz_partition_size": size}
        assert at(load({"zero_optimization": zero}, world_size=4), key) == size
    zero = {"stage": 3, "zero_hpz_partition_size": 0}
    assert f"{key}: expected at least 1, found 0" in refusal({"zero_optimization": zero})


@pytest.mark.parametrize("paths", [None, "", " , "])
def test_state_on_disk_needs_a_path(paths: str | None) -> None:
    block = {"offload_optimizer": {"device": "nvme", "nvme_path": paths}}
    text = refusal({"zero_optimization": block})
    assert 'offload_optimizer.nvme_path: missing, and offload_optimizer.device is "nvme"; name a folder' in text
