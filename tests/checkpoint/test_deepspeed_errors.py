"""Checkpoints of DeepSpeed that are not whole, or contradict themselves, are errors that say where."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwell.checkpoint.sources.deepspeed import DeepSpeedSource
from shardwell.errors import CheckpointError
from tests.support.checkpoint_samples import same_bits
from tests.support.deepspeed_checkpoints import CASES, FOLDER, MAIN, SECOND, TAG, rewrite, truth, whole

pytestmark = pytest.mark.usefixtures("no_deepspeed")


@pytest.mark.parametrize("case", CASES)
def test_a_missing_file_is_an_error_that_names_it(copy: Callable[[str], Path], case: str) -> None:
    directory = copy(case)
    for path in sorted(directory.iterdir()):
        aside = path.rename(directory.parent / "aside")
        rank = path.name.partition("zero_pp_rank_")[2][:1] or "0"
        kind = "model" if path.name.endswith("model_states.pt") else "optimizer"
        sentence = f"{directory}: the {kind} states of rank {rank} are missing"
        with pytest.raises(CheckpointError, match=sentence):
            DeepSpeedSource(directory.parent)
        aside.rename(path)
    assert DeepSpeedSource(directory).tensors


@pytest.mark.parametrize("case", ["stage1-bf16", "stage3-bf16"])
@pytest.mark.parametrize("keep", [0.0, 0.3, 0.7, 0.999])
def test_a_truncated_file_is_an_error_that_names_it(copy: Callable[[str], Path], case: str, keep: float) -> None:
    directory = copy(case)
    for path in directory.iterdir():
        content = path.read_bytes()
        path.write_bytes(content[: int(keep * len(content))])
        with pytest.raises(CheckpointError, match=f"{path}: truncated, damaged, or no file of torch.save"):
            DeepSpeedSource(directory)
        path.write_bytes(content)


def test_flipped_bytes_of_a_pickle_are_found(copy: Callable[[str], Path]) -> None:
    path = copy("stage1-bf16") / SECOND
    content = bytearray(path.read_bytes())
    content[content.index(b"partition_count")] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{path}: truncated, damaged.*CRC"):
        DeepSpeedSource(path.parent)


def test_files_of_another_number_of_ranks_are_an_error(copy: Callable[[str], Path]) -> None:
    directory = copy("stage1-bf16")
    extra = SECOND.replace("rank_1", "rank_2")
    shutil.copy(FOLDER / "stage1-bf16-three-ranks" / TAG / extra, directory / extra)
    with pytest.raises(CheckpointError, match=f"{extra}: 2 ranks wrote this checkpoint; remove"):
        DeepSpeedSource(directory)
    (directory / extra).unlink()
    shutil.copy(FOLDER / "stage1-bf16-three-ranks" / TAG / SECOND, directory / SECOND)
    with pytest.raises(CheckpointError, match=f"{SECOND}: partition_count: expected 2.*found .3, 3."):
        DeepSpeedSource(directory)


def test_two_files_of_one_rank_are_an_error(copy: Callable[[str], Path]) -> None:
    directory = copy("stage1-bf16")
    shutil.copy(directory / SECOND, directory / SECOND.removeprefix("bf16_"))
    with pytest.raises(CheckpointError, match="a second file of the same rank"):
        DeepSpeedSource(directory)


@pytest.mark.parametrize("case", ["stage1-bf16", "stage1-bf16-wide-gradients", "stage2-bf16-aligned", "stage3-bf16"])
@pytest.mark.parametrize("what", ["masters", "state"])
def test_sizes_that_do_not_add_up_are_an_error_that_names_file_and_tensor(
    copy: Callable[[str], Path], case: str, what: str
) -> None:
    directory = copy(case)

    def change(content: dict[str, Any]) -> None:
        optimizer = content["optimizer_state_dict"]
        masters = optimizer.get("fp32_flat_groups") or optimizer["single_partition_of_fp32_groups"]
        state = (optimizer.get("optimizer_state_dict") or optimizer["base_optimizer_state"])["state"]
        if what == "masters":
            masters[0] = masters[0].detach()[:-3].clone()
        else:
            state[0]["exp_avg_sq"] = torch.zeros(masters[0].numel() + 7)

    rewrite(directory / SECOND, change)
    tensor = "model/embedding.weight" if what == "masters" else "state/embedding.weight/exp_avg_sq"
    with pytest.raises(CheckpointError, match=rf"{directory / SECOND}: {tensor} and the rest.*expected \d+ elements"):
        DeepSpeedSource(directory)


def test_frozen_parts_of_the_wrong_size_are_an_error(copy: Callable[[str], Path]) -> None:
    path = copy("stage3-bf16") / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    rewrite(path, lambda content: content["frozen_param_fragments"].update(shift=torch.zeros(2)))
    with pytest.raises(CheckpointError, match=rf"{path}: model/shift .*expected 3 elements, found \[2\]"):
        DeepSpeedSource(path.parent)
    rewrite(path, lambda content: content["frozen_param_fragments"].clear())
    with pytest.raises(CheckpointError, match=rf"{path}: model/shift .*expected 3 elements, found null"):
        DeepSpeedSource(path.parent)


def test_files_of_different_steps_are_an_error(copy: Callable[[str], Path]) -> None:
    directory = copy("stage3-bf16")
    step = torch.tensor(2.0)
    rewrite(
        directory / SECOND,
        lambda content: content["optimizer_state_dict"]["optimizer_state_dict"]["state"][0].update(step=step),
    )
    with pytest.raises(CheckpointError, match=f"{SECOND}: state/embedding.weight/step: ranks disagree"):
        DeepSpeedSource(directory)


def test_parts_that_do_not_fit_each_other_are_errors(copy: Callable[[str], Path]) -> None:
    directory = copy("stage2-bf16-aligned")

    def halve(content: dict[str, Any]) -> None:
        masters = content["optimizer_state_dict"]["single_partition_of_fp32_groups"]
        masters[1] = masters[1].detach().half()

    rewrite(directory / SECOND, halve)
    with pytest.raises(CheckpointError, match=r"model/blocks.0.up.bias.*different dtypes"):
        DeepSpeedSource(directory)
    shutil.copy(FOLDER / "stage2-bf16-aligned" / TAG / SECOND, directory / SECOND)
    rewrite(directory / MAIN, lambda content: content["param_shapes"][1].update({"more": [0]}))
    with pytest.raises(CheckpointError, match=r"param_alignment_paddings: expected one size for each parameter"):
        DeepSpeedSource(directory)


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("mp_world_size", 2, "mp_world_size is 2: tensor or pipeline parallelism splits this model"),
        ("mp_world_size", None, "mp_world_size: expected int, found nothing"),
        ("dp_world_size", "2", 'dp_world_size: expected int, found "2"'),
        ("dp_world_size", 3, "the optimizer states of rank 2 are missing; 3 ranks wrote them"),
        ("param_shapes", 5, "param_shapes: expected list, found 5"),
        ("param_shapes", [], "2 groups of masters, 2 of state; expected 0"),
        ("param_shapes", [5, 5], "not as DeepSpeed writes it"),
        ("param_shapes", [{"a": [2**40, 2**40]}, {}], "model/a: shape: .* has more than"),
        ("param_shapes", [{"a": [2**40]}, {}], "param_alignment_paddings: expected one size for each parameter"),
        (
            "param_shapes",
            [{key: [2**40] for key in "abcdef"}, {key: [1] for key in "ghijk"}],
            "model/a and the rest of its group: expected",
        ),
        ("param_shapes", [{"a": [-1]}, {}], "model/a: shape: expected"),
        ("module", None, "module: expected dict, found nothing"),
    ],
)
def test_entries_that_are_wrong_are_errors(copy: Callable[[str], Path], key: str, value: Any, sentence: str) -> None:
    directory = copy("stage1-bf16")
    rewrite(directory / MAIN, lambda content: content.update({key: value}))
    with pytest.raises(CheckpointError, match=sentence):
        DeepSpeedSource(directory)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("mp_rank_01_model_states.pt", "tensor or pipeline parallelism splits this model"),
        ("bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt", "tensor or pipeline parallelism splits this model"),
        ("layer_00-model_00-model_states.pt", "pipeline parallelism; such checkpoints cannot be read"),
        ("layer_0_expert_1_mp_rank_00_model_states.pt", "experts that are split"),
        ("expp_rank_0_mp_rank_00_optim_states.pt", "experts that are split"),
    ],
)
def test_checkpoints_of_other_kinds_are_refused(copy: Callable[[str], Path], name: str, sentence: str) -> None:
    directory = copy("stage1-bf16")
    (directory / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"{name}: .*{sentence}"):
        DeepSpeedSource(directory)


def test_masters_without_names_are_refused(copy: Callable[[str], Path]) -> None:
    directory = copy("stage0-fp32")
    rewrite(directory / MAIN, lambda content: content.update(optimizer={"fp32_groups_flat": [torch.zeros(3)]}))
    with pytest.raises(CheckpointError, match=f"{MAIN}: the masters of stage 0 in 16 bits have no names"):
        DeepSpeedSource(directory)


def test_stage_0_without_names_gives_the_model_alone(copy: Callable[[str], Path]) -> None:
    directory = copy("stage0-fp32")

    def forget(content: dict[str, Any]) -> None:
        for group in content["optimizer"]["param_groups"]:
            del group["param_names"]

    rewrite(directory / MAIN, forget)
    source = DeepSpeedSource(directory)
    expected = {name: tensor for name, tensor in truth("stage0-fp32")[0].items() if name.startswith("model/")}
    assert source.tensors.keys() == expected.keys()
    assert all(same_bits(whole(source, name), tensor) for name, tensor in expected.items())
