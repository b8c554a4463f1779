"""What a configuration means, from a file, a mapping or Python: its defaults, its values and their spellings."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from shardwell.config import SCHEDULERS, Config, OffloadParamConfig, OptimizerConfig, SchedulerConfig, ZeroConfig, load
from shardwell.config.block import ConfigBlock, block_of
from shardwell.config.schedules import NEEDED
from shardwell.offload.disk import AioSettings
from tests.support.configs import at, batch, nested, pairs, refusal

DEFAULTS = """
gradient_clipping 0.0  steps_per_print null  communication_data_type null  optimizer null  scheduler null
prescale_gradients false  gradient_predivide_factor 1.0
bf16.enabled false  fp16.enabled false  data_types.grad_accum_dtype null
fp16.loss_scale 0.0  fp16.initial_scale_power 16  fp16.loss_scale_window 1000
fp16.hysteresis 2  fp16.consecutive_hysteresis false  fp16.min_loss_scale 1.0
torch_autocast.enabled false  torch_autocast.dtype "bf16"
activation_checkpointing.partition_activations false  activation_checkpointing.cpu_checkpointing false
shardwell.divergence_timeout 60.0  shardwell.nonfinite "auto"  shardwell.find_unused_parameters false
shardwell.expert_parallel_size 1
shardwell.placement "asked"
shardwell.memory.device 0.75  shardwell.memory.host 0.9  shardwell.memory.disk 0.95
shardwell.shard_at_world_one false  shardwell.keep_pages true  shardwell.keep_frozen "auto"
shardwell.bundle_size "auto"  shardwell.gathers_take_turns false
zero_optimization.stage 0  zero_optimization.stage3_max_live_parameters 1000000000
zero_optimization.stage3_max_reuse_distance 0  zero_optimization.stage3_prefetch_bucket_size 50000000
zero_optimization.stage3_param_persistence_threshold "auto"
zero_optimization.stage3_model_persistence_threshold null
zero_optimization.zero_quantized_weights false  zero_optimization.zero_quantized_gradients false
zero_optimization.zero_hpz_partition_size 1
"""


@pytest.mark.parametrize(("key", "default"), pairs(DEFAULTS))
def test_an_absent_key_has_its_default(key: str, default: Any) -> None:
    assert at(load(None), key) == default


def test_the_frequencies_of_rotary_embeddings_are_kept_by_default() -> None:
    assert load(None).shardwell.keep_fp32_buffers == ("rotary_emb.inv_freq", "rotary_emb.original_inv_freq")


def undescribed(block: type[ConfigBlock]) -> list[str]:
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
shardwell.memory.device 1.0  shardwell.memory.host 0.5  shardwell.memory.device 0  shardwell.memory.disk 1000000000
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


def test_an_optimizer_keeps_its_type_and_params() -> None:
    config = load({"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}}})
    assert config.optimizer == OptimizerConfig(type="AdamW", params={"lr": 1e-3, "betas": [0.9, 0.95]})


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_scheduler_is_known_in_any_case_and_keeps_its_params(kind: str) -> None:
    for spelled in (kind, kind.lower(), kind.upper()):
        params = {**dict.fromkeys(NEEDED.get(kind, ()), 2000), "last_batch_iteration": 10}
        config = load({"scheduler": {"type": spelled, "params": params}})
        assert config.scheduler == SchedulerConfig(type=kind, params=params)


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


def test_the_settings_of_disks_are_those_of_the_disk_tier() -> None:
    block = {"block_size": 8192, "queue_depth": 3, "intra_op_parallelism": 2, "single_submit": True}
    found = load({"aio": {**block, "overlap_events": False}}).aio
    assert AioSettings(**found.model_dump()) == AioSettings(**block, overlap_events=False)
    assert AioSettings(**load({}).aio.model_dump()) == AioSettings()


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
    schedule = {"type": "onecycle", "params": {"cycle_min_lr": [0.1, 0.2], "cycle_max_lr": 1, "decay_lr_rate": "auto"}}
    optimizer = {"type": "SGD", "params": {"lr": 1}}
    config = load({"optimizer": optimizer, "scheduler": schedule, "bf16": {"enabled": True}}, world_size=2)
    assert load(json.dumps(config.to_dict()), world_size=2).to_dict() == config.to_dict()


def test_origins_are_not_part_of_the_dump() -> None:
    assert set(load(None).to_dict()) == set(Config.model_fields)


def test_a_config_survives_pickling_with_its_origins() -> None:
    config = load({"bf16": {"enabled": True}}, world_size=2)
    assert pickle.loads(pickle.dumps(config)).origins == config.origins
