"""DeepSpeed's configuration as objects: what code that builds or reads one gets."""

from __future__ import annotations

import base64
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import Field, ValidationError

from shardwell.compat.deepspeed_api import config_models as models
from shardwell.compat.deepspeed_api import constants
from shardwell.compat.deepspeed_api import runtime_names as names
from shardwell.compat.deepspeed_api.config_object import DeepSpeedConfig, DtypeEnum
from shardwell.compat.deepspeed_api.config_reading import for_engine
from shardwell.compat.deepspeed_api.key_names import KEYS_OF_DEEPSPEED, dotted_keys
from shardwell.config import load
from shardwell.errors import ConfigError


class Simple(models.DeepSpeedConfigModel):
    """A block with an old field, and one with another name."""

    count: int = 0
    word_old: str | None = Field(
        None, json_schema_extra={"deprecated": True, "new_param": "words", "new_param_fn": lambda word: [word]}
    )
    words: list[str] | None = None
    size: int = Field(0, alias="size_alias")


def test_a_block_takes_fields_old_fields_and_other_names() -> None:
    assert Simple(count=42).count == 42
    assert Simple(word_old="DS").words == ["DS"]
    assert Simple(size=10).size == Simple(size_alias=10).size == 10
    assert Simple(count="auto").count == 0


@pytest.mark.parametrize("given", [{"count": "DS"}, {"words": "DS"}, {"count_typo": 0}])
def test_a_block_refuses_what_it_does_not_know(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Simple(**given)


def test_an_old_field_beside_the_new_one_is_refused() -> None:
    with pytest.raises(AssertionError, match="word_old is the old name of words"):
        Simple(words=["DS"], word_old="DS")


def test_the_block_of_zero_has_deepspeeds_defaults_and_names() -> None:
    config = models.DeepSpeedZeroConfig
    assert config(stage3_prefetch_bucket_size=12345).prefetch_bucket_size == 12345
    assert config(stage3_gather_fp16_weights_on_model_save=True).gather_16bit_weights_on_model_save is True
    assert [config(stage=stage).overlap_comm for stage in range(4)] == [False, False, False, True]
    assert config().offload_param is None
    assert config(offload_param={}).offload_param is not None
    assert config(cpu_offload=True).offload_optimizer == models.DeepSpeedZeroOffloadOptimizerConfig(device="cpu")
    assert config(cpu_offload_param=True).offload_param == models.DeepSpeedZeroOffloadParamConfig(device="cpu")
    assert config().model_persistence_threshold > 1 << 60
    assert repr(models.pp_int(100000)) == "100,000"
    with pytest.raises(ValueError):
        config(reduce_bucket_size=0)
    with pytest.raises(ValueError):
        config(stage=2, offload_optimizer={"ratio": 0.5})


@pytest.mark.parametrize(("read", "write"), [(True, False), (False, True), (True, True)])
def test_offload_says_whether_it_is_a_pipeline(read: bool, write: bool) -> None:
    kind = models.DeepSpeedZeroOffloadOptimizerConfig
    assert kind(pipeline_read=read, pipeline_write=write).pipeline
    assert not kind().pipeline


@pytest.mark.parametrize("value", [-1, float("inf"), float("nan"), True, [], {}])
def test_a_loss_scale_is_a_finite_number(value: Any) -> None:
    with pytest.raises(ValidationError, match="must be"):
        models.DeepSpeedFP16Config(loss_scale=value)


@pytest.mark.parametrize("field", ["loss_scale_window", "min_loss_scale"])
def test_a_dynamic_scale_has_a_window_and_an_end(field: str) -> None:
    for value in (float("inf"), float("nan"), True, [], {}):
        with pytest.raises(ValidationError, match="must be a"):
            models.DeepSpeedFP16Config(**{field: value})
    with pytest.raises(ValidationError, match="above 0"):
        models.DeepSpeedFP16Config(enabled=True, **{field: 0})
    assert getattr(models.DeepSpeedFP16Config(**{field: "2"}), field) == 2
    models.DeepSpeedFP16Config(enabled=True, loss_scale=8, **{field: 0})  # a fixed scale does not read it


def test_both_names_of_bf16_are_read() -> None:
    assert models.get_bfloat16_config({"bf16": {"enabled": True}}).enabled
    assert models.get_bfloat16_config({"bfloat16": {"enabled": True}}).enabled
    assert not models.get_bfloat16_config({}).enabled


BATCHES = [
    ((32, 16, 1), (32, 16, 1)),
    ((32, 8, None), (32, 8, 2)),
    ((32, None, 2), (32, 8, 2)),
    ((None, 8, 2), (32, 8, 2)),
    ((32, None, None), (32, 16, 1)),
    ((None, 16, None), (32, 16, 1)),
    ((33, 17, 2), None),
    ((32, 18, None), None),
    ((None, None, 2), None),
    ((33, None, 2), None),
]


@pytest.mark.parametrize(("given", "expected"), BATCHES)
def test_batch_sizes_follow_from_one_another(given: tuple[Any, ...], expected: tuple[int, ...] | None) -> None:
    config = DeepSpeedConfig({"train_batch_size": 1})
    config.world_size = 2
    config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps = given
    if expected is None:
        with pytest.raises(AssertionError):
            config._configure_train_batch_size()
    else:
        config._configure_train_batch_size()
        found = config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
        assert found == expected


def test_a_configuration_comes_from_a_file_a_dictionary_or_base64(tmp_path: Path) -> None:
    given = {"train_batch_size": 64, "zero_optimization": {"stage": 2}}
    (tmp_path / "c.json").write_text(json.dumps(given))
    (tmp_path / "c.hjson").write_text("{\n  # a comment\n  train_batch_size: 64\n  zero_optimization: {stage: 2}\n}")
    text = base64.urlsafe_b64encode(json.dumps(given).encode()).decode()
    for source in (given, str(tmp_path / "c.json"), tmp_path / "c.hjson", text):
        config = DeepSpeedConfig(source)
        assert (config.train_batch_size, config.zero_optimization_stage, config.gradient_clipping) == (64, 2, 1.0)
        assert config.zero_enabled
        assert config._param_dict == given
    assert DeepSpeedConfig(given)._param_dict is given


def test_what_is_written_twice_or_missing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text('{"train_batch_size": 24, "train_batch_size": 24}')
    with pytest.raises(ValueError, match="more than once"):
        DeepSpeedConfig(str(tmp_path / "c.json"))
    with pytest.raises(ValueError, match="no such file"):
        DeepSpeedConfig("nowhere.json")


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"gradient_allreduce_op": "max"}, ValueError),
        ({"gradient_allreduce_op": "sum", "zero_optimization": {"stage": 3}}, ValueError),
        ({"communication_data_type": "int8"}, ValueError),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, AssertionError),
        ({"bf16": {"bf16_optimizer_states": True}, "zero_optimization": {"stage": 1}}, AssertionError),
        ({"fp16": {"fp16_master_weights_and_grads": True}}, AssertionError),
        ({"checkpoint": {"tag_validation": "often"}}, names.DeepSpeedConfigError),
    ],
)
def test_what_contradicts_itself_is_refused(given: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind):
        DeepSpeedConfig({"train_batch_size": 1, **given})


def test_the_attributes_that_programs_read() -> None:
    config = DeepSpeedConfig(
        {
            "train_batch_size": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1}},
            "scheduler": {"type": "WarmupLR"},
            "communication_data_type": "bf16",
            "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
            "activation_checkpointing": {"cpu_checkpointing": True},
            "checkpoint": {"tag_validation": "Fail"},
            "csv_monitor": {"enabled": True, "output_path": "x"},
        }
    )
    assert (config.optimizer_name, config.optimizer_params, config.scheduler_name) == ("adamw", {"lr": 1}, "WarmupLR")
    assert config.communication_data_type is config.torch_autocast_dtype is torch.bfloat16
    assert config.activation_checkpointing_config.cpu_checkpointing
    assert config.checkpoint_tag_validation_fail
    assert config.monitor_config.enabled
    assert config.aio_config["queue_depth"] == 8
    assert DtypeEnum("half").value is DtypeEnum(torch.float16).value is torch.float16


def test_large_numbers_are_written_in_scientific_notation() -> None:
    text = json.dumps({"a": 500000000, "b": [1, 2.5], "c": True}, cls=names.ScientificNotationEncoder)
    assert json.loads(text) == {"a": 5e8, "b": [1, 2.5], "c": True}
    assert "5.000000e+08" in text


def test_constants_are_keys_that_the_configuration_knows() -> None:
    known = {key.rpartition(".")[2] for key in dotted_keys()} | set(KEYS_OF_DEEPSPEED)
    names_of_keys = [name for name in vars(constants) if f"{name}_DEFAULT" in vars(constants)]
    assert len(names_of_keys) > 30
    assert [name for name in names_of_keys if getattr(constants, name) not in known | {"pipeline_stage"}] == []
    config = DeepSpeedConfig({"train_batch_size": 1})
    assert config.gradient_clipping == constants.GRADIENT_CLIPPING_DEFAULT
    assert config.steps_per_print == constants.STEPS_PER_PRINT_DEFAULT


def test_functions_read_one_key_with_deepspeeds_default() -> None:
    from shardwell.compat.deepspeed_api import config_functions as read

    given = {"optimizer": {"type": "Adam", "params": {"lr": 1.0}}, "gradient_clipping": 0.0}
    functions: Any = read
    assert functions.get_gradient_clipping(given) == 0.0
    assert functions.get_gradient_clipping({}) == 1.0
    assert functions.get_optimizer_name(given) == "Adam"
    assert functions.get_optimizer_params(given) == {"lr": 1.0}
    assert functions.get_scheduler_name(given) is None
    assert len(read.READERS) == len(read.__all__)


def test_folders_on_nvme_are_made_and_none_means_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed makes them, and `accelerate launch` hands the text "none" on in place of its own configuration's."""
    monkeypatch.setenv("SHARDWELL_NVME_PATH", str(tmp_path / "drive"))
    user = {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": f"{tmp_path / 'one'},{tmp_path / 'two' / 'three'}"},
            "offload_param": {"device": "nvme", "nvme_path": "none"},
        }
    }
    zero = for_engine(user).config["zero_optimization"]
    assert zero["offload_param"]["nvme_path"] == str(tmp_path / "drive")
    assert user["zero_optimization"]["offload_param"] == {"device": "nvme", "nvme_path": "none"}, "the user's own"
    assert all((tmp_path / part).is_dir() for part in ("one", "two/three", "drive"))
    monkeypatch.delenv("SHARDWELL_NVME_PATH")
    zero = for_engine(user).config["zero_optimization"]
    assert zero["offload_param"]["nvme_path"] == tempfile.gettempdir()
    (tmp_path / "file").write_text("")
    user["zero_optimization"]["offload_param"]["nvme_path"] = str(tmp_path / "file" / "inside")
    with pytest.raises(ConfigError, match="cannot be made"):
        for_engine(user)


def test_sizes_that_trl_writes_for_reference_models_are_read() -> None:
    """They are 0.9 times the square of the width, as for 768, and dotted keys at the top."""
    user = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "zero_optimization.reduce_bucket_size": 768 * 768,
        "zero_optimization.stage3_param_persistence_threshold": 10 * 768,
        "zero_optimization.stage3_prefetch_bucket_size": 0.9 * 768 * 768,
    }
    settings = load(for_engine(user).config)
    assert settings.zero_optimization.stage3_prefetch_bucket_size == 530841
