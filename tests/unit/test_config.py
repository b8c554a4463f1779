"""What a configuration file means, what is refused, and what the refusal says."""

from __future__ import annotations

import json
import pickle
from io import StringIO
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import ValidationError
from rich.console import Console

from shardwell.cli.config_command import show
from shardwell.config import (
    SCHEDULERS,
    Config,
    OffloadParamConfig,
    OptimizerConfig,
    SchedulerConfig,
    ShardwellConfig,
    ZeroConfig,
    explain,
    load,
    table,
)
from shardwell.config.load import AUTO, BATCH, PARAMS
from shardwell.config.schema import Block, block_of
from shardwell.config.unsupported import NOT_YET_BLOCKS, ONLY, REMOVED, RENAMED
from shardwell.errors import ConfigError
from shardwell.memory.disk import DiskSettings
from shardwell.version import __version__


def refusal(source: Any, world_size: int | None = None) -> str:
    """The text of the one error that `source` must raise."""
    with pytest.raises(ConfigError) as caught:
        load(source, world_size=world_size)
    return str(caught.value)


def nested(key: str, value: Any) -> dict[str, Any]:
    """{"a": {"b": value}} of "a.b"."""
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def pairs(text: str) -> list[tuple[str, Any]]:
    """[("a.b", 1), ...] of "a.b 1 ...": a key, then its value as JSON without blanks."""
    words = text.split()
    return [(key, json.loads(value)) for key, value in zip(words[::2], words[1::2], strict=True)]


def at(config: Config, key: str) -> Any:
    return attrgetter(key)(config)


def batch(config: Config) -> Any:
    return attrgetter(*BATCH)(config)


def sizes(train: Any = None, micro: Any = None, accumulation: Any = None) -> dict[str, Any]:
    return {key: size for key, size in zip(BATCH, (train, micro, accumulation), strict=True) if size is not None}


DEFAULTS = """
gradient_clipping 0.0  steps_per_print null  communication_data_type null  optimizer null  scheduler null
prescale_gradients false  gradient_predivide_factor 1.0
bf16.enabled false  fp16.enabled false  data_types.grad_accum_dtype null
fp16.auto_cast false  fp16.loss_scale 0.0  fp16.initial_scale_power 16  fp16.loss_scale_window 1000
fp16.hysteresis 2  fp16.consecutive_hysteresis false  fp16.min_loss_scale 1.0
torch_autocast.enabled false  torch_autocast.dtype "bf16"  torch_autocast.lower_precision_safe_modules null
activation_checkpointing.partition_activations false  activation_checkpointing.cpu_checkpointing false
activation_checkpointing.number_checkpoints null  activation_checkpointing.profile false
shardwell.divergence_timeout 60.0  shardwell.nonfinite "error"
shardwell.placement "asked"  shardwell.device_room 0.25  shardwell.host_room 0.1
shardwell.device_memory "auto"  shardwell.host_memory "auto"  shardwell.disk_memory "auto"
shardwell.shard_at_world_one false  shardwell.keep_pages true  shardwell.keep_frozen "auto"
zero_optimization.stage 0  zero_optimization.overlap_comm null
zero_optimization.reduce_bucket_size 500000000  zero_optimization.stage3_max_live_parameters 1000000000
zero_optimization.stage3_max_reuse_distance 0  zero_optimization.stage3_prefetch_bucket_size 50000000
zero_optimization.stage3_param_persistence_threshold 100000
zero_optimization.stage3_model_persistence_threshold null
zero_optimization.stage3_module_granularity_threshold 0
zero_optimization.zero_quantized_weights false  zero_optimization.zero_quantized_gradients false
zero_optimization.zero_hpz_partition_size 1
"""


@pytest.mark.parametrize(("key", "default"), pairs(DEFAULTS))
def test_an_absent_key_has_its_default(key: str, default: Any) -> None:
    assert at(load(None), key) == default


def undescribed(block: type[Block]) -> list[str]:
    missing = [name for name, info in block.model_fields.items() if "\n" in (info.description or "\n")]
    inner = filter(None, map(block_of, block.model_fields.values()))
    return missing + [name for each in inner for name in undescribed(each)]


def test_every_key_is_described_in_one_line() -> None:
    assert undescribed(Config) == []


REAL = """
fp16.enabled true  fp16.auto_cast true  fp16.loss_scale 128.0  fp16.initial_scale_power 0  fp16.loss_scale_window 1
fp16.hysteresis 1  fp16.consecutive_hysteresis true  fp16.min_loss_scale 0.0
torch_autocast.enabled true  torch_autocast.dtype "fp16"
data_types.grad_accum_dtype "fp32"  data_types.grad_accum_dtype "bf16"  data_types.grad_accum_dtype "fp16"
communication_data_type "fp32"  communication_data_type "bf16"  communication_data_type "fp16"
prescale_gradients true  gradient_predivide_factor 2.0  gradient_predivide_factor 0.5
activation_checkpointing.partition_activations true  activation_checkpointing.cpu_checkpointing true
activation_checkpointing.contiguous_memory_optimization true  activation_checkpointing.number_checkpoints 4
activation_checkpointing.synchronize_checkpoint_boundary true
shardwell.device_room 0.0  shardwell.host_room 0.5  shardwell.device_memory 0  shardwell.disk_memory "auto"
shardwell.keep_frozen 0  shardwell.keep_frozen 5000000000  shardwell.keep_frozen "auto"
zero_optimization.zero_quantized_weights "auto"  zero_optimization.zero_quantized_gradients "auto"
zero_optimization.zero_hpz_partition_size "auto"
"""


@pytest.mark.parametrize(("key", "value"), pairs(REAL))
def test_a_value_that_is_built_is_in_force_with_its_origin(key: str, value: Any) -> None:
    config = load(nested(key, value))
    assert (at(config, key), config.origins[key]) == (value, "dict")


@pytest.mark.parametrize(("key", "value"), pairs(REAL))
def test_a_value_that_is_built_survives_the_round_trip(key: str, value: Any) -> None:
    config = load(nested(key, value), world_size=2)
    again = load(json.dumps(config.to_dict()), world_size=2)
    assert again.to_dict() == config.to_dict()
    assert pickle.loads(pickle.dumps(config)).to_dict() == config.to_dict()


SPELLINGS = """
communication_data_type ["float32","fp32"]  communication_data_type ["bfloat16","bf16"]
communication_data_type ["bfp16","bf16"]  communication_data_type ["float16","fp16"]
data_types.grad_accum_dtype ["bfloat16","bf16"]
torch_autocast.dtype ["bfloat16","bf16"]  torch_autocast.dtype ["float16","fp16"]  torch_autocast.dtype [null,"bf16"]
"""


@pytest.mark.parametrize(("key", "spelling"), pairs(SPELLINGS))
def test_a_dtype_has_one_name_however_it_is_spelled(key: str, spelling: list[Any]) -> None:
    spelled, short = spelling
    assert at(load(nested(key, spelled)), key) == short


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *pairs("zero_optimization.reduce_bucket_size 5e8  zero_optimization.stage 3.0"),
        *pairs("train_batch_size 8.0  shardwell.keep_frozen 5e8"),
    ],
)
def test_a_whole_float_is_an_int(key: str, value: float) -> None:
    assert type(at(load(nested(key, value)), key)) is int


@pytest.mark.parametrize("value", [1.5, True, "1e5", "5", None, [1]])
def test_what_is_not_a_whole_number_is_refused(value: Any) -> None:
    text = refusal({"zero_optimization": {"reduce_bucket_size": value}})
    assert f"zero_optimization.reduce_bucket_size: expected a whole number, found {json.dumps(value)}" in text


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("bf16.enabled", 1, "expected true or false, found 1"),
        ("zero_optimization.stage", 4, "expected 0, 1, 2 or 3, found 4"),
        ("zero_optimization.stage", True, "expected a whole number, found true"),
        ("gradient_clipping", -1.0, "expected at least 0, found -1.0"),
        ("gradient_clipping", True, "expected a finite number, found true"),
        ("train_batch_size", 0, "expected at least 1, found 0"),
        ("shardwell.divergence_timeout", 0, "expected more than 0, found 0"),
        ("shardwell.nonfinite", "ignore", 'expected "error" or "skip", found "ignore"'),
        ("communication_data_type", "int8", 'expected "fp32", "bf16" or "fp16", found "int8"'),
        ("communication_data_type", 16, 'expected "fp32", "bf16" or "fp16", found 16'),
        ("data_types.grad_accum_dtype", "half", 'expected "fp32", "bf16" or "fp16", found "half"'),
        ("torch_autocast.dtype", "float32", 'expected "bf16" or "fp16", found "float32"'),
        ("torch_autocast.dtype", True, 'expected "bf16" or "fp16", found true'),
        ("torch_autocast.lower_precision_safe_modules", "Linear", 'expected a list of strings, found "Linear"'),
        ("gradient_predivide_factor", 0, "expected more than 0, found 0"),
        ("fp16.loss_scale_window", 0, "expected at least 1, found 0"),
        ("fp16.hysteresis", 0, "expected at least 1, found 0"),
        ("fp16.loss_scale", -1, "expected at least 0, found -1"),
        ("fp16.initial_scale_power", 1.5, "expected a whole number, found 1.5"),
        ("activation_checkpointing.cpu_checkpointing", "yes", 'expected true or false, found "yes"'),
        ("activation_checkpointing", True, "expected an object, found true"),
        ("shardwell.device_room", 1.0, "expected less than 1, found 1.0"),
        ("shardwell.host_room", -0.5, "expected at least 0, found -0.5"),
        ("shardwell.host_memory", "8GB", 'expected a whole number or "auto", found "8GB"'),
        ("shardwell.keep_frozen", -1, "expected at least 0, found -1"),
        ("shardwell.keep_frozen", 1.5, 'expected a whole number or "auto", found 1.5'),
        ("shardwell.keep_frozen", True, 'expected a whole number or "auto", found true'),
        ("shardwell.keep_frozen", "all", 'expected a whole number or "auto", found "all"'),
        ("shardwell.keep_frozen", None, 'expected a whole number or "auto", found null'),
        ("zero_optimization.zero_quantized_weights", 1, 'expected true, false or "auto", found 1'),
        ("zero_optimization.zero_quantized_gradients", "on", 'expected true, false or "auto", found "on"'),
        ("zero_optimization.zero_hpz_partition_size", "node", 'expected a whole number or "auto", found "node"'),
        ("zero_optimization.zero_hpz_partition_size", -1, "expected at least 1, found -1"),
        ("zero_optimization.offload_param.device", "gpu", 'expected "none", "cpu" or "nvme", found "gpu"'),
        ("zero_optimization.leaf_module.classes", "Block", 'expected a list of strings, found "Block"'),
        ("optimizer.type", 3, "expected a string, found 3"),
        ("zero_optimization", True, "expected an object, found true"),
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


def test_an_optimizer_keeps_its_type_and_params() -> None:
    config = load({"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}}})
    assert config.optimizer == OptimizerConfig(type="AdamW", params={"lr": 1e-3, "betas": [0.9, 0.95]})


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_scheduler_is_known_in_any_case_and_keeps_its_params(kind: str) -> None:
    for spelled in (kind, kind.lower(), kind.upper()):
        config = load({"scheduler": {"type": spelled, "params": {"warmup_num_steps": 10}}})
        assert config.scheduler == SchedulerConfig(type=kind, params={"warmup_num_steps": 10})


@pytest.mark.parametrize("kind", ["Warmup", "", 3, None])
def test_an_unknown_scheduler_is_refused_with_the_known_ones(kind: Any) -> None:
    known = "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle or LRRangeTest"
    assert f"scheduler.type: expected {known}, found {json.dumps(kind)}" in refusal({"scheduler": {"type": kind}})


@pytest.mark.parametrize("key", ["scheduler", "optimizer", "activation_checkpointing", "torch_autocast"])
def test_a_null_block_at_the_top_is_an_absent_block(key: str) -> None:
    assert load({key: None}).to_dict() == load(None).to_dict()


def test_a_null_block_is_an_absent_block() -> None:
    assert load({"zero_optimization": {"stage": 3, "offload_param": None}}).zero_optimization == ZeroConfig(stage=3)


@pytest.mark.parametrize(
    "block",
    [
        {"fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1}},
        {"torch_autocast": {"enabled": False, "dtype": "bfloat16", "lower_precision_safe_modules": None}},
        {"bf16": {"enabled": True}, "fp16": {"enabled": False}, "torch_autocast": {"enabled": False}},
        {"prescale_gradients": True, "gradient_predivide_factor": 1},
        {"zero_optimization": {"offload_param": {"device": "none", "nvme_path": "/tmp", "buffer_size": 1e8}}},
        {"zero_optimization": {"contiguous_gradients": False, "overlap_comm": True, "round_robin_gradients": True}},
        {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False},
    ],
)
def test_settings_that_change_nothing_are_accepted(block: dict[str, Any]) -> None:
    load(block)


def test_a_path_is_read(tmp_path: Path) -> None:
    file = tmp_path / "zero3.json"
    file.write_text('{"zero_optimization": {"stage": 3}}')
    assert load(str(file)).zero_optimization.stage == load(file).zero_optimization.stage == 3


def test_a_byte_order_mark_is_no_problem(tmp_path: Path) -> None:
    file = tmp_path / "windows.json"
    file.write_bytes(b'\xef\xbb\xbf{"gradient_clipping": 1}')
    assert load(file).gradient_clipping == 1.0


def test_a_string_that_opens_a_brace_is_json_text() -> None:
    assert load(' {"gradient_clipping": 1}').gradient_clipping == 1.0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"bf16": {\n  "enabled": True}}', "not valid JSON, line 2 column 14"),
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
    assert "cannot be read" in refusal(tmp_path)


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
zero_optimization.prefetch_bucket_size "zero_optimization.stage3_prefetch_bucket_size"
zero_optimization.leaf_module.class "zero_optimization.leaf_module.classes"
zero_optimization.offload_param.pin_memry "zero_optimization.offload_param.pin_memory"
zero_optimization.stag "zero_optimization.stage"  optimizer.param "optimizer.params"
scheduler.param "scheduler.params"  warmup_num_steps "scheduler.params.warmup_num_steps"
fp16.hysterisis "fp16.hysteresis"  torch_autocast.dtyp "torch_autocast.dtype"  loss_scale "fp16.loss_scale"
activation_checkpoint "activation_checkpointing"  partition_activations "activation_checkpointing.partition_activations"
activation_checkpointing.cpu_checkpoint "activation_checkpointing.cpu_checkpointing"
shardwell.keep_frosen "shardwell.keep_frozen"
"""


@pytest.mark.parametrize(("key", "meant"), pairs(MEANT))
def test_an_unknown_key_names_the_one_that_was_meant(key: str, meant: str) -> None:
    assert f"  {key}: unknown key; did you mean {meant}?" in refusal(nested(key, 1))


def test_a_key_that_resembles_nothing_lists_the_keys_of_its_block() -> None:
    assert "the keys of shardwell are: divergence_timeout, nonfinite" in refusal({"shardwell": {"xyzzy": 1}})


def test_a_refusal_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "zero3.json"
    file.write_text('{"stage": 3}')
    assert refusal(file).startswith(f"{file}: 1 problem")


def test_all_problems_come_in_one_error_sorted_by_path() -> None:
    zero = {"stage": 9, "stagee": 1, "offload_optimizer": {"device": "nvme"}}
    new = {"scheduler": {"type": "Cosine"}, "fp16": {"hysteresis": 0}, "activation_checkpointing": {"profile": True}}
    text = refusal(
        {**new, "zero_optimization": zero, "wall_clock_breakdown": True, "amp": {}, "gradient_clipping": "much"}
    )
    keys = [line.strip().split(":")[0] for line in text.splitlines()[1:]]
    outer = ["activation_checkpointing.profile", "amp", "fp16.hysteresis", "gradient_clipping", "scheduler.type"]
    inner = [f"zero_optimization.{key}" for key in ("offload_optimizer.nvme_path", "stage", "stagee")]
    assert keys == [*outer, "wall_clock_breakdown", *inner]


@pytest.mark.parametrize("key", sorted(NOT_YET_BLOCKS))
def test_a_block_that_is_not_built_yet_is_refused_with_the_version(key: str) -> None:
    assert f"{key}: shardwell {__version__} does not have" in refusal({key: {"enabled": True}})


@pytest.mark.parametrize("block", [None, {}, {"enabled": False, "anything": 1}])
@pytest.mark.parametrize("key", sorted(NOT_YET_BLOCKS))
def test_a_block_that_is_not_built_yet_may_be_switched_off(key: str, block: Any) -> None:
    load({key: block})


@pytest.mark.parametrize("key", sorted(REMOVED))
def test_a_removed_feature_is_said_to_never_come(key: str) -> None:
    text = refusal(nested(key, {"enabled": True}))
    assert f"{key}: removed, and will not come" in text
    assert " yet" not in text


@pytest.mark.parametrize("kind", ["OneBitAdam", "ZeroOneAdam", "OneBitLamb"])
def test_one_bit_optimizers_are_removed(kind: str) -> None:
    assert f'optimizer.type: "{kind}": removed, and will not come' in refusal({"optimizer": {"type": kind}})


@pytest.mark.parametrize(("old", "new"), sorted(RENAMED.items()))
def test_an_old_spelling_names_the_new_one(old: str, new: str) -> None:
    assert f"{old}: old spelling; write {new}" in refusal(nested(old, True))


NOT_YET = """
wall_clock_breakdown true  torch_autocast.lower_precision_safe_modules ["torch.nn.Linear"]
torch_autocast.lower_precision_safe_modules []  activation_checkpointing.profile true
aio.use_gds true
"""


@pytest.mark.parametrize(("key", "value"), pairs(NOT_YET))
def test_a_value_that_is_not_built_yet_is_refused_with_the_version(key: str, value: Any) -> None:
    assert f"{key}: {json.dumps(value)}: shardwell {__version__} does not have" in refusal(nested(key, value))


@pytest.mark.parametrize("key", sorted(ONLY))
def test_every_value_that_is_built_is_accepted(key: str) -> None:
    for value in ONLY[key].allowed:
        block = nested(key, value)
        if "offload_param" in key:
            block["zero_optimization"]["stage"] = 3
        assert at(load(block), key) == value


def test_reduce_scatter_false_is_refused_by_design() -> None:
    assert "shardwell always reduces by scatter" in refusal({"zero_optimization": {"reduce_scatter": False}})


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


def test_modules_for_autocast_are_refused_because_torch_decides() -> None:
    text = refusal({"torch_autocast": {"lower_precision_safe_modules": ["torch.nn.Linear"]}})
    assert "torch's own list of operations decides" in text


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


def test_the_settings_of_disks_are_those_of_the_disk_tier() -> None:
    block = {"block_size": 8192, "queue_depth": 3, "intra_op_parallelism": 2, "single_submit": True}
    found = load({"aio": {**block, "overlap_events": False}}).aio
    assert DiskSettings(**found.model_dump(exclude={"use_gds"})) == DiskSettings(**block, overlap_events=False)
    assert DiskSettings(**load({}).aio.model_dump(exclude={"use_gds"})) == DiskSettings()


@pytest.mark.parametrize(
    ("given", "world_size", "resolved"),
    [
        (sizes(), 4, (4, 1, 1)),
        (sizes(micro=3), 4, (12, 3, 1)),
        (sizes(accumulation=5), 4, (20, 1, 5)),
        (sizes(micro=3, accumulation=5), 4, (60, 3, 5)),
        (sizes(train=32), 4, (32, 8, 1)),
        (sizes(train=32, micro=2), 4, (32, 2, 4)),
        (sizes(train=32, accumulation=2), 4, (32, 4, 2)),
        (sizes(train=32, micro=4, accumulation=2), 4, (32, 4, 2)),
        (sizes(train="auto", micro=4, accumulation="auto"), 2, (8, 4, 1)),
        (sizes(train="auto", micro="auto", accumulation="auto"), 2, (2, 1, 1)),
        (sizes(), None, (None, 1, 1)),
        (sizes(train=32), None, (32, None, 1)),
        (sizes(train=32, micro=2), None, (32, 2, None)),
        (sizes(train=32, accumulation=2), None, (32, None, 2)),
        (sizes(train=32, micro=4, accumulation=2), None, (32, 4, 2)),
    ],
)
def test_batch_sizes_follow_from_those_given(given: dict[str, Any], world_size: int | None, resolved: Any) -> None:
    assert batch(load(given, world_size=world_size)) == resolved


@pytest.mark.parametrize(
    ("given", "world_size", "numbers"),
    [
        (sizes(32, 4, 2), 3, "train_batch_size 32 != 4 (micro) x 2 (accumulation) x 3 (ranks) = 24"),
        (sizes(train=32), 3, "32 cannot be divided by 1 (accumulation) x 3 (ranks) = 3"),
        (sizes(train=32, micro=3), 4, "32 cannot be divided by 3 (micro) x 4 (ranks) = 12"),
        (sizes(train=32, accumulation=3), 4, "32 cannot be divided by 3 (accumulation) x 4 (ranks) = 12"),
        (sizes(train=32, micro=3), None, "32 cannot be divided by 3 (micro)"),
        (sizes(32, 4, 3), None, "train_batch_size 32 is no multiple of 4 (micro) x 3 (accumulation) = 12"),
    ],
)
def test_batch_sizes_that_do_not_fit_show_the_numbers(given: dict[str, Any], world_size: Any, numbers: str) -> None:
    assert numbers in refusal(given, world_size)


def test_a_batch_size_of_the_wrong_type_is_reported_once() -> None:
    assert refusal(sizes(train="many", micro=3), 4).startswith("dict: 1 problem")


def test_a_loaded_config_is_resolved_again_for_another_world() -> None:
    assert batch(load(load(sizes(micro=4), world_size=2), world_size=8)) == (32, 4, 1)


def test_a_config_loaded_without_a_world_is_resolved_once_it_is_known() -> None:
    assert batch(load(load(sizes(train=32)), world_size=8)) == (32, 4, 1)


@pytest.mark.parametrize("world_size", [0, -1, True, 2.0])
def test_a_world_size_that_is_no_positive_int_is_refused(world_size: Any) -> None:
    assert "world_size: expected a whole number of at least 1" in refusal({}, world_size)


@pytest.mark.parametrize("key", sorted(AUTO))
def test_auto_is_the_same_as_absent(key: str) -> None:
    assert at(load(nested(key, "auto"), world_size=2), key) == at(load(None, world_size=2), key)


@pytest.mark.parametrize("key", sorted(AUTO))
def test_the_origin_of_auto_shows_what_it_became(key: str) -> None:
    config = load(nested(key, "auto"), world_size=2)
    assert config.origins[key].startswith(f"auto -> {json.dumps(at(config, key))} (")


@pytest.mark.parametrize(
    "key",
    [
        *("optimizer.type", "optimizer", "scheduler.type", "scheduler", "zero_optimization.stage"),
        *("steps_per_print", "bf16", "communication_data_type", "torch_autocast.dtype", "fp16.loss_scale"),
    ],
)
def test_what_cannot_be_auto_is_refused(key: str) -> None:
    assert refusal(nested(key, "auto")).splitlines()[1:] == [
        f'  {key}: cannot be "auto"; write a value or remove the key'
    ]


OPEN = [("optimizer", "AdamW", OptimizerConfig), ("scheduler", "WarmupLR", SchedulerConfig)]


@pytest.mark.parametrize(("block", "kind", "made"), OPEN)
def test_auto_arguments_are_left_open(block: str, kind: str, made: Any) -> None:
    config = load({block: {"type": kind, "params": {"lr": "auto", "eps": 1e-6}}})
    assert getattr(config, block) == made(type=kind, params={"eps": 1e-6})


@pytest.mark.parametrize(("block", "kind", "made"), OPEN)
def test_an_auto_argument_is_reported_as_a_default(block: str, kind: str, made: Any) -> None:
    config = load({block: {"type": kind, "params": {"lr": "auto", "eps": 1e-6}}})
    line = next(line for line in explain(config) if line.key == f"{block}.params.lr")
    assert line.origin == f"auto -> the {block}'s own default (the file leaves it open)"
    assert line.value == f"the {block}'s own default"
    assert config.origins[f"{block}.params.eps"] == "dict"


@pytest.mark.parametrize("block", [params.partition(".")[0] for params in PARAMS])
def test_the_table_shows_an_argument_that_is_left_open(block: str) -> None:
    console = Console(width=160, file=StringIO(), record=True)
    console.print(table(load({block: {"type": "OneCycle", "params": {"lr": "auto"}}})))
    assert f"{block}.params.lr " in console.export_text(clear=False)
    assert f" the {block}'s own default " in console.export_text()


def test_auto_for_frozen_parameters_is_a_value_of_its_own() -> None:
    config = load({"shardwell": {"keep_frozen": "auto"}})
    assert (config.shardwell.keep_frozen, config.origins["shardwell.keep_frozen"]) == ("auto", "dict")
    assert load(Config(shardwell=ShardwellConfig(keep_frozen=7))).shardwell.keep_frozen == 7


def test_a_config_is_frozen() -> None:
    with pytest.raises(ValidationError):
        load(None).gradient_clipping = 1.0  # type: ignore[misc]


def test_a_block_built_in_python_refuses_unknown_keys() -> None:
    with pytest.raises(ValueError, match="stagee"):
        ZeroConfig(stagee=3)  # type: ignore[call-arg]


def test_a_config_built_in_python_gets_its_batch_sizes() -> None:
    built = Config(train_micro_batch_size_per_gpu=2, zero_optimization=ZeroConfig(stage=3))
    assert batch(load(built, world_size=4)) == (8, 2, 1)


def test_a_config_built_in_python_knows_what_python_set() -> None:
    origins = load(Config(zero_optimization=ZeroConfig(stage=3))).origins
    assert (origins["zero_optimization.stage"], origins["gradient_clipping"]) == ("python", "default")


def test_a_config_built_in_python_is_held_to_the_same_rules() -> None:
    offloaded = ZeroConfig(stage=2, offload_param=OffloadParamConfig(device="cpu"))
    assert "contradicts zero_optimization.stage 2" in refusal(Config(zero_optimization=offloaded))


def test_a_block_object_may_stand_in_a_mapping() -> None:
    assert load({"zero_optimization": ZeroConfig(stage=3)}).zero_optimization.stage == 3


def test_to_dict_is_json_that_loads_back() -> None:
    schedule = {"type": "onecycle", "params": {"cycle_min_lr": [0.1, 0.2], "cycle_max_lr": "auto"}}
    optimizer = {"type": "SGD", "params": {"lr": 1}}
    config = load({"optimizer": optimizer, "scheduler": schedule, "bf16": {"enabled": True}}, world_size=2)
    assert load(json.dumps(config.to_dict()), world_size=2).to_dict() == config.to_dict()


def test_origins_are_not_part_of_the_dump() -> None:
    assert set(load(None).to_dict()) == set(Config.model_fields)


def test_a_config_survives_pickling_with_its_origins() -> None:
    config = load({"bf16": {"enabled": True}}, world_size=2)
    assert pickle.loads(pickle.dumps(config)).origins == config.origins


def test_origins_name_the_file_the_default_and_the_derivation(tmp_path: Path) -> None:
    file = tmp_path / "zero3.json"
    file.write_text('{"train_batch_size": 32, "zero_optimization": {"stage": 3}}')
    origins = load(file, world_size=4).origins
    assert origins["zero_optimization.stage"] == "zero3.json"
    assert origins["gradient_clipping"] == "default"
    assert origins["train_micro_batch_size_per_gpu"].startswith("derived from train_batch_size 32 / (")


def test_explain_has_a_line_for_every_origin() -> None:
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_min_lr": 0}}
    optimizer = {"type": "AdamW", "params": {"lr": "auto", "eps": 1e-6}}
    config = load({"optimizer": optimizer, "scheduler": schedule}, world_size=2)
    assert {line.key for line in explain(config)} == set(config.origins)


def test_the_table_has_a_row_for_every_line() -> None:
    config = load(None)
    assert table(config).row_count == len(explain(config))


def test_the_table_shows_brackets_as_they_are() -> None:
    console = Console(width=160, file=StringIO(), record=True)
    console.print(table(load({"optimizer": {"type": "AdamW", "params": {"note": "[red]"}}})))
    assert '"[red]"' in console.export_text()


def test_the_command_prints_the_effective_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "zero3.json"
    file.write_text('{"zero_optimization": {"stage": 3}}')
    show(file, 2, False)
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("zero_optimization.stage "))
    assert row.split() == ["zero_optimization.stage", "3", "zero3.json"]


def test_the_command_prints_json_that_loads_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "zero3.json"
    file.write_text('{"train_batch_size": 32}')
    show(file, 4, True)
    assert batch(load(capsys.readouterr().out, world_size=4)) == (32, 8, 1)


def test_the_command_exits_with_2_on_a_wrong_file() -> None:
    with pytest.raises(typer.Exit) as caught:
        show(Path("nowhere.json"), 1, False)
    assert caught.value.exit_code == 2


def test_the_command_says_what_is_wrong_on_stderr_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "zero3.json"
    file.write_text('{"stage": 3}')
    with pytest.raises(typer.Exit):
        show(file, 1, False)
    said = (
        f"error: {file}: 1 problem in the configuration\n  stage: unknown key; did you mean zero_optimization.stage?\n"
    )
    assert tuple(capsys.readouterr()) == ("", said)
