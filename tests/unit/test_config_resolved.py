"""What a configuration becomes: batch sizes, "auto", and where each value comes from, as it is shown."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console

from shardwell.cli.config_command import show
from shardwell.config import Config, OptimizerConfig, SchedulerConfig, ShardwellConfig, explain, load, table
from shardwell.config.load import AUTO, BATCH, PARAMS
from tests.support.configs import at, batch, nested, refusal


def sizes(train: Any = None, micro: Any = None, accumulation: Any = None) -> dict[str, Any]:
    return {key: size for key, size in zip(BATCH, (train, micro, accumulation), strict=True) if size is not None}


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
        *("optimizer.type", "optimizer", "scheduler.type", "scheduler"),
        *("steps_per_print", "bf16", "communication_data_type", "torch_autocast.dtype", "fp16.loss_scale"),
    ],
)
def test_what_cannot_be_auto_is_refused(key: str) -> None:
    assert refusal(nested(key, "auto")).splitlines()[1:] == [
        f'  {key}: cannot be "auto"; write a value or remove the key'
    ]


OPEN = [  # and an argument to leave open, and one to give
    ("optimizer", OptimizerConfig(type="AdamW", params={"eps": 1e-6}), "lr"),
    ("scheduler", SchedulerConfig(type="WarmupLR", params={"warmup_min_lr": 1e-6}), "warmup_max_lr"),
]


def left_open(made: OptimizerConfig | SchedulerConfig, name: str) -> dict[str, Any]:
    return {"type": made.type, "params": {**made.params, name: "auto"}}


@pytest.mark.parametrize(("block", "made", "name"), OPEN)
def test_auto_arguments_are_left_open(block: str, made: Any, name: str) -> None:
    assert getattr(load({block: left_open(made, name)}), block) == made


@pytest.mark.parametrize(("block", "made", "name"), OPEN)
def test_an_auto_argument_is_reported_as_a_default(block: str, made: Any, name: str) -> None:
    config = load({block: left_open(made, name)})
    line = next(line for line in explain(config) if line.key == f"{block}.params.{name}")
    assert line.origin == f"auto -> the {block}'s own default (the file leaves it open)"
    assert line.value == f"the {block}'s own default"
    assert [config.origins[f"{block}.params.{given}"] for given in made.params] == ["dict"]


@pytest.mark.parametrize(("block", "made", "name"), OPEN)
def test_the_table_shows_an_argument_that_is_left_open(block: str, made: Any, name: str) -> None:
    assert f"{block}.params" in PARAMS
    console = Console(width=160, file=StringIO(), record=True)
    console.print(table(load({block: left_open(made, name)})))
    assert f"{block}.params.{name} " in console.export_text(clear=False)
    assert f" the {block}'s own default " in console.export_text()


def test_auto_for_frozen_parameters_is_a_value_of_its_own() -> None:
    config = load({"shardwell": {"keep_frozen": "auto"}})
    assert (config.shardwell.keep_frozen, config.origins["shardwell.keep_frozen"]) == ("auto", "dict")
    assert load(Config(shardwell=ShardwellConfig(keep_frozen=7))).shardwell.keep_frozen == 7


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
    console.print(table(load({"optimizer": {"type": "Muon", "params": {"adjust_lr_fn": "[red]"}}})))
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
