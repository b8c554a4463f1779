"""Checkpoints that DeepSpeed wrote are read to the bit, without DeepSpeed; bad ones are errors, and run nothing.

The checkpoints, and what is true of them, come from `deepspeed/make.py`.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import pickle
import shutil
import sys
import threading
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardwell.checkpoint.files import Reader
from shardwell.checkpoint.sources import torch_files
from shardwell.checkpoint.sources.base import Source
from shardwell.checkpoint.sources.deepspeed import STUBS, DeepSpeedSource, is_deepspeed
from shardwell.checkpoint.sources.flat import ALIGNMENT, Span, cut_each, cut_together
from shardwell.checkpoint.sources.torch_files import Stub, json_entries, load
from shardwell.errors import CheckpointError

FOLDER = Path(__file__).parent / "deepspeed"
CASES = sorted(path.parent.name for path in FOLDER.glob("*/latest"))
TAG = "global_step3"
MAIN = "mp_rank_00_model_states.pt"
SECOND = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


@pytest.fixture(autouse=True)
def no_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here DeepSpeed cannot be imported, even where it is installed."""
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ImportError):
        importlib.import_module("deepspeed")


@pytest.fixture
def copy(tmp_path: Path) -> Callable[[str], Path]:
    """Copies a checkpoint to where it can be damaged, and gives the directory of its tag."""

    def made(case: str) -> Path:
        shutil.copytree(FOLDER / case, tmp_path / case)
        return tmp_path / case / TAG

    return made


def truth(case: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    with Reader(FOLDER / case / "truth.safetensors") as reader:
        return {name: reader.read(name) for name in reader.entries}, json.loads(reader.metadata["facts"])


def same_bits(one: Tensor, other: Tensor) -> bool:
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    return torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes what a file holds. Of DeepSpeed's own objects only the stage is kept, as a number."""
    content = load(path, STUBS)
    optimizer = content.get("optimizer_state_dict", {})
    for key in ("loss_scaler", "param_slice_mappings"):
        optimizer.pop(key, None)
    if "zero_stage" in optimizer:
        optimizer["zero_stage"] = optimizer["zero_stage"].arguments[0]
    change(content)
    torch.save(content, path.with_suffix(".new"))
    path.with_suffix(".new").rename(path)


# --- what is read -----------------------------------------------------------------------------------------------


def test_there_are_checkpoints_of_every_stage() -> None:
    assert {case[:6] for case in CASES} == {"stage0", "stage1", "stage2", "stage3"}
    assert len(CASES) == 12


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_is_what_deepspeed_says_to_the_bit(case: str) -> None:
    source: Source = DeepSpeedSource(FOLDER / case)
    expected, _ = truth(case)
    assert source.tensors.keys() == expected.keys()
    assert sum(name.startswith("state/") for name in expected) >= 20
    for name, tensor in expected.items():
        stored = source.tensors[name]
        assert (stored.dtype, stored.shape) == (tensor.dtype, tuple(tensor.shape)), name
        found = source.read(name, 0, stored.numel)
        assert not found.requires_grad
        assert same_bits(found.view(stored.shape), tensor), name
    assert source.bytes_read == sum(tensor.nbytes for tensor in expected.values())


@pytest.mark.parametrize("case", CASES)
def test_a_stretch_is_a_slice(case: str) -> None:
    source = DeepSpeedSource(FOLDER / case)
    for name, tensor in truth(case)[0].items():
        numel, flat = tensor.numel(), tensor.flatten()
        cuts = sorted({0, 1, numel // 3, numel // 2, -(-numel // 2), -(-2 * numel // 3), numel - 1, numel})
        for start, stop in combinations_with_replacement(cuts, 2):
            before = source.bytes_read
            assert same_bits(source.read(name, start, stop), flat[start:stop]), (name, start, stop)
            assert source.bytes_read - before == (stop - start) * tensor.itemsize


@pytest.mark.parametrize("case", ["stage1-bf16-three-ranks", "stage3-bf16-three-ranks"])
def test_every_stretch_over_several_ranks_is_a_slice(case: str) -> None:
    source = DeepSpeedSource(FOLDER / case)
    for name in ("model/blocks.1.up.weight", "state/head.weight/exp_avg_sq"):
        flat = truth(case)[0][name].flatten()
        for start, stop in combinations_with_replacement(range(flat.numel() + 1), 2):
            assert same_bits(source.read(name, start, stop), flat[start:stop])


def test_what_is_read_is_a_copy() -> None:
    source = DeepSpeedSource(FOLDER / "stage2-bf16")
    source.read("model/norm.weight", 0, 6).fill_(9)
    assert same_bits(source.read("model/norm.weight", 0, 6), truth("stage2-bf16")[0]["model/norm.weight"])


def test_several_threads_may_open_and_read_at_once() -> None:
    expected = truth("stage3-bf16")[0]
    allowed = torch.serialization.get_safe_globals()
    right: list[bool] = []

    def read_all() -> None:
        for _ in range(5):
            source = DeepSpeedSource(FOLDER / "stage3-bf16")
            right.extend(same_bits(_whole(source, name), tensor) for name, tensor in expected.items())

    threads = [threading.Thread(target=read_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * (4 * 5 * len(expected))
    assert set(torch.serialization.get_safe_globals()) == set(allowed)  # nothing is left allowed


def _whole(source: Source, name: str) -> Tensor:
    return source.read(name, 0, source.tensors[name].numel).view(source.tensors[name].shape)


@pytest.mark.parametrize("case", CASES)
def test_values_are_what_deepspeed_says(case: str) -> None:
    source, (tensors, facts) = DeepSpeedSource(FOLDER / case), truth(case)
    values = source.values
    trained = {name.split("/")[1] for name in tensors if name.startswith("state/")}
    assert {key: value for key, value in values.items() if key.startswith("scalar/")} == {
        f"scalar/{name}/step": facts["steps"] for name in trained
    }
    assert values["counters"] == facts["counters"]
    assert values["client"] == {"epoch": 2, "best": [0.5, None], "note": "mine"}
    assert values["config"]["zero_optimization"]["stage"] == int(case[5])
    assert values["world_size"] == (3 if "three" in case else 2)
    assert values["versions"] == {"deepspeed": "0.19.8"}
    assert values["scheduler"] == {"last_batch_iteration": facts["steps"] - 1}
    assert values.get("frozen_excluded", False) == ("no-frozen" in case)
    if case != "stage2-fp16-elastic":
        assert [group["lr"] for group in values["optimizer"]["param_groups"]] == facts["lr"]
    assert json.loads(json.dumps(values)) == values


def test_hyperparameters_and_the_kind_of_the_optimizer_are_read() -> None:
    groups = DeepSpeedSource(FOLDER / "stage3-bf16").values["optimizer"]["param_groups"]
    assert [(group["weight_decay"], group["betas"]) for group in groups] == [(0.1, [0.8, 0.95]), (0.0, [0.8, 0.95])]
    assert not {"params", "param_names"} & groups[0].keys()
    assert DeepSpeedSource(FOLDER / "stage1-fp32").values["optimizer"]["kind"] == "AdamW"
    assert DeepSpeedSource(FOLDER / "stage2-fp16-elastic").values["optimizer"] == {}  # such checkpoints have none


def test_the_loss_scale_is_read_where_there_is_one() -> None:
    for case in CASES:
        values, facts = DeepSpeedSource(FOLDER / case).values, truth(case)[1]
        if "fp16" in case.split("-"):
            assert facts["counters"]["skipped_steps"] == 1
            assert values["loss_scale"] == {"value": facts["loss_scale"]}
        else:
            assert "loss_scale" not in values


@pytest.mark.parametrize("case", ["stage0-fp32", "stage2-bf16", "stage3-bf16"])
def test_tied_weights_are_there_once_and_have_an_alias(case: str) -> None:
    source = DeepSpeedSource(FOLDER / case)
    assert source.values["aliases"] == {"head.weight": "embedding.weight"}
    assert "model/head.weight" not in source.tensors
    assert DeepSpeedSource(FOLDER / "stage1-bf16").values["aliases"] == {}


@pytest.mark.parametrize("case", CASES)
def test_frozen_parameters_and_buffers_keep_their_dtype(case: str) -> None:
    tensors = DeepSpeedSource(FOLDER / case).tensors
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    if "no-frozen" in case:
        assert "model/shift" not in tensors
    else:
        assert tensors["model/shift"].dtype == kinds[case.split("-")[1]]
    assert tensors["model/calls"].dtype == torch.int64
    assert "model/secret" not in tensors
    assert tensors["model/norm.weight"].dtype == torch.float32


def test_the_checkpoints_have_what_makes_reading_hard() -> None:
    """Padding, cuts through parameters, padding between parameters, another order, several groups on a rank."""

    def optim(case: str, rank: int) -> dict[str, Any]:
        (path,) = (FOLDER / case / TAG).glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        found: dict[str, Any] = load(path, STUBS)["optimizer_state_dict"]
        return found

    assert any(optim("stage1-bf16", 1)["group_paddings"])
    assert any(padding for group in optim("stage2-bf16-aligned", 0)["param_alignment_paddings"] for padding in group)
    assert isinstance(optim("stage2-fp16-elastic", 0)["base_optimizer_state"], list)
    assert "zero_stage" not in optim("stage1-bf16-wide-gradients", 0)
    assert len(optim("stage3-bf16", 0)["fp32_flat_groups"]) > 2
    names = [list(group) for group in load(FOLDER / "stage2-bf16" / TAG / MAIN)["param_shapes"]]
    assert names[0][:2] == ["embedding.weight", "blocks.0.down.weight"]  # of every second parameter first


# --- where a checkpoint is --------------------------------------------------------------------------------------


def test_a_checkpoint_is_found_by_folder_by_tag_and_by_its_own_directory() -> None:
    root = FOLDER / "stage1-bf16"
    for source in (DeepSpeedSource(root), DeepSpeedSource(root, TAG), DeepSpeedSource(str(root / TAG))):
        assert source.where == str(root / TAG)
        assert "model/norm.bias" in source.tensors
    assert is_deepspeed(root)
    assert is_deepspeed(root / TAG)


def test_what_is_no_checkpoint_of_deepspeed_is_known(tmp_path: Path) -> None:
    assert not is_deepspeed(tmp_path)
    assert not is_deepspeed(tmp_path / "nowhere")
    (tmp_path / "latest").write_text("own")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "manifest.json").write_text("{}")
    assert not is_deepspeed(tmp_path)
    assert not is_deepspeed(tmp_path / "latest")
    with pytest.raises(CheckpointError, match="own: the model states of rank 0 are missing"):
        DeepSpeedSource(tmp_path)


@pytest.mark.parametrize("tag", ["../stage3-bf16/global_step3", "..", "/", "a/b", "", ".hidden"])
def test_a_tag_cannot_lead_elsewhere(copy: Callable[[str], Path], tag: str) -> None:
    directory = copy("stage1-bf16")
    with pytest.raises(CheckpointError, match="expected a plain name"):
        DeepSpeedSource(directory.parent, tag)
    (directory.parent / "latest").write_text(tag)
    with pytest.raises(CheckpointError, match="expected a plain name"):
        DeepSpeedSource(directory.parent)


def test_without_latest_a_tag_has_to_be_named(copy: Callable[[str], Path]) -> None:
    directory = copy("stage1-bf16")
    (directory.parent / "latest").unlink()
    with pytest.raises(CheckpointError, match="latest: missing; name the tag"):
        DeepSpeedSource(directory.parent)
    assert "model/norm.bias" in DeepSpeedSource(directory.parent, TAG).tensors


def test_a_closed_source_and_wrong_requests_are_errors() -> None:
    source = DeepSpeedSource(FOLDER / "stage1-bf16")
    for start, stop in ((-1, 2), (3, 2), (0, 7)):
        with pytest.raises(CheckpointError, match=r"model/norm.bias.*has 6 elements, asked for"):
            source.read("model/norm.bias", start, stop)
    with pytest.raises(CheckpointError, match=r"model/norm.none.*not in this checkpoint"):
        source.read("model/norm.none", 0, 0)
    source.close()
    with pytest.raises(CheckpointError, match="not in this checkpoint"):
        source.read("model/norm.bias", 0, 1)


# --- other versions ---------------------------------------------------------------------------------------------


def test_numbers_of_a_group_stand_for_those_of_its_parameters(copy: Callable[[str], Path]) -> None:
    """Some optimizers count steps in the group; the stage may be a plain number; there may be no padding inside."""
    directory = copy("stage1-bf16")

    def change(content: dict[str, Any]) -> None:
        optimizer = content["optimizer_state_dict"]
        del optimizer["param_alignment_paddings"]
        for state in optimizer["base_optimizer_state"]["state"].values():
            del state["step"]
        for group in optimizer["base_optimizer_state"]["param_groups"]:
            group["step"] = 7

    for path in directory.glob("*_optim_states.pt"):
        rewrite(path, change)
    source = DeepSpeedSource(directory)
    assert {value for key, value in source.values.items() if key.startswith("scalar/")} == {7}
    for name, tensor in truth("stage1-bf16")[0].items():
        assert same_bits(_whole(source, name), tensor)


def test_masters_are_read_where_the_state_was_removed(copy: Callable[[str], Path]) -> None:
    directory = copy("stage3-bf16")
    for path in directory.glob("*_optim_states.pt"):
        rewrite(path, lambda content: content["optimizer_state_dict"].pop("optimizer_state_dict"))
    source = DeepSpeedSource(directory)
    expected = {name: tensor for name, tensor in truth("stage3-bf16")[0].items() if name.startswith("model/")}
    assert source.tensors.keys() == expected.keys()
    assert all(same_bits(_whole(source, name), tensor) for name, tensor in expected.items())


# --- errors -----------------------------------------------------------------------------------------------------


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
        ("zero", "universal format"),
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
    assert all(same_bits(_whole(source, name), tensor) for name, tensor in expected.items())


# --- files that want to do harm ---------------------------------------------------------------------------------


class Evil:
    """Something that a pickle would run."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


class FakeStorage:
    """A storage of so many elements, as a pickle of torch.save names it."""

    def __init__(self, numel: int) -> None:
        self.numel = numel


class Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, FakeStorage):
            return "storage", torch.FloatStorage, "0", "cpu", value.numel
        return None


def forge(path: Path, content: Any, compression: int = zipfile.ZIP_STORED, protocol: int = 2) -> None:
    """A file as torch.save writes it, with any pickle and one small storage in it."""
    buffer = io.BytesIO()
    Pickler(buffer, protocol).dump(content)
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in (("data.pkl", buffer.getvalue()), ("byteorder", b"little"), ("version", b"3\n")):
            archive.writestr(f"archive/{name}", data)
        archive.writestr("archive/data/0", bytes(16))


def tensor_of(numel: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> Evil:
    return Evil(torch._utils._rebuild_tensor_v2, FakeStorage(numel), 0, shape, stride, False, OrderedDict())


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[Path]:
    """A file that must not come to be."""
    yield tmp_path / "marker"
    assert not (tmp_path / "marker").exists()


def test_a_forged_file_with_honest_content_is_read(tmp_path: Path) -> None:
    forge(tmp_path / "file", {"w": tensor_of(4, (2, 2), (2, 1))})
    assert same_bits(load(tmp_path / "file")["w"], torch.zeros(2, 2))


@pytest.mark.parametrize("case", ["stage1-bf16", "stage3-bf16"])
@pytest.mark.parametrize("protocol", [2, 4])
def test_no_file_can_run_a_command(copy: Callable[[str], Path], marker: Path, case: str, protocol: int) -> None:
    directory = copy(case)
    content = {
        "module": Evil(os.system, f"touch {marker}"),
        "optimizer_state_dict": Evil(eval, f"open('{marker}', 'w')"),
    }
    for path in sorted(directory.iterdir()):
        honest = path.read_bytes()
        forge(path, content, protocol=protocol)
        with pytest.raises(CheckpointError, match=str(path)) as caught:
            DeepSpeedSource(directory)
        found = (
            "refers to __builtin__.eval, posix.system"
            if protocol == 2
            else "a pickle of protocol 4; torch.save writes protocol 2"
        )
        assert found in str(caught.value)
        with pytest.raises(CheckpointError, match=str(path)):
            DeepSpeedSource(directory, ignore=["posix.system", "__builtin__.eval", "builtins.eval"])
        path.write_bytes(honest)


def test_objects_of_unknown_classes_are_refused_by_name_or_ignored(copy: Callable[[str], Path]) -> None:
    directory = copy("stage1-bf16")

    class Settings:
        pass

    settings = Settings()
    settings.rate = 0.1  # type: ignore[attr-defined]
    Settings.__module__, Settings.__qualname__ = "mine.training", "Settings"
    module = type(sys)("mine.training")
    module.Settings = Settings  # type: ignore[attr-defined]
    sys.modules["mine"], sys.modules["mine.training"] = module, module
    try:
        rewrite(directory / MAIN, lambda content: content.update(settings=settings))
    finally:
        del sys.modules["mine"], sys.modules["mine.training"]
    with pytest.raises(CheckpointError, match=f"{MAIN}: refers to mine.training.Settings"):
        DeepSpeedSource(directory)
    source = DeepSpeedSource(directory, ignore=["mine.training.Settings"])
    assert source.values["client"] == {"epoch": 2, "best": [0.5, None], "note": "mine"}
    for name, tensor in truth("stage1-bf16")[0].items():
        assert same_bits(_whole(source, name), tensor)


def test_a_stub_holds_and_does_nothing(tmp_path: Path) -> None:
    forge(tmp_path / "file", [Evil(threading.Timer, 0.0, None)])
    (stub,) = load(tmp_path / "file", ["threading.Timer"])
    assert type(stub) is Stub
    assert (stub.arguments, stub.state) == ((0.0, None), None)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"w": Evil(bytearray, 10**13)}, "refers to __builtin__.bytearray"),
        ({"w": Evil(torch.FloatTensor, 10**13)}, "refers to torch.FloatTensor"),
        ({"w": tensor_of(10**12, (10**12,), (1,))}, "damaged, or no file of torch.save"),
        ({"w": tensor_of(4, (10**12,), (1,))}, "damaged, or no file of torch.save"),
        ({"w": tensor_of(4, (4,), (-1,))}, "damaged, or no file of torch.save"),
    ],
)
def test_a_small_file_cannot_ask_for_much_memory(tmp_path: Path, content: Any, sentence: str) -> None:
    forge(tmp_path / "file", content)
    with pytest.raises(CheckpointError, match=f"file: {sentence}"):
        load(tmp_path / "file")


def test_a_tensor_that_repeats_itself_is_refused(copy: Callable[[str], Path]) -> None:
    directory = copy("stage1-bf16")
    huge = torch.zeros(1).expand(2**40)
    rewrite(directory / MAIN, lambda content: content["module"].update(scale=huge))
    with pytest.raises(CheckpointError, match=f"{MAIN}: tensor .model/scale.: has more bytes than the file"):
        DeepSpeedSource(directory)
    shutil.copy(FOLDER / "stage1-bf16" / TAG / MAIN, directory / MAIN)

    def repeat(content: dict[str, Any]) -> None:
        masters = content["optimizer_state_dict"]["single_partition_of_fp32_groups"]
        masters[0] = torch.zeros(1).expand(masters[0].numel())

    rewrite(directory / SECOND, repeat)
    with pytest.raises(CheckpointError, match=r"model/embedding.weight and the rest"):
        DeepSpeedSource(directory)


def test_files_that_torch_save_does_not_write_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    forge(path, {"a": 1}, zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match="expected one pickle and no compression"):
        load(path)
    path.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(CheckpointError, match=r"no file of torch.save"):
        load(path)
    torch.save({"a": torch.ones(1)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"no file of torch.save"):
        load(path)
    with pytest.raises(CheckpointError, match="missing, or not a regular file"):
        load(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="missing, or not a regular file"):
        load(tmp_path / "pipe")


def test_only_what_json_can_hold_becomes_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_files, "MAX_NODES", 1000)
    kept = {"a": 1, "b": [1.5, None, "x", True], "c": {"d": {}}}
    circle: list[Any] = []
    circle.append(circle)
    bomb: list[Any] = []
    for _ in range(40):
        bomb = [bomb, bomb]
    dropped = {"e": {1: 2}, "f": float("nan"), "g": 10**5000, "h": Stub(1), "i": torch.ones(1), "j": circle, "k": b""}
    assert json_entries({**kept, **dropped, 3: 4}) == kept
    assert json_entries({"t": (1, 2), "z": torch.tensor(2.5), "bomb": bomb}) == {"t": [1, 2], "z": 2.5}
    assert json_entries({"long": [0] * 1000}) == {}
    assert json_entries({"long": [0] * 998}) == {"long": [0] * 998}


# --- where elements lie -----------------------------------------------------------------------------------------

NUMELS = st.lists(st.integers(0, 9), min_size=0, max_size=6)


def gather(spans: list[Span], flats: list[list[Any]]) -> list[Any]:
    """The elements of a tensor; each span begins where the one before it ends."""
    found: list[Any] = []
    for span in spans:
        assert span.start == len(found) < span.stop
        found += flats[span.rank][span.first : span.first + span.stop - span.start]
        assert span.stop == len(found)
    return found


@given(NUMELS, st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_parameters_that_were_cut_together_are_found(numels: list[int], ranks: int, align: int, lean: bool) -> None:
    """Against cutting a list of labels in the way of stages 1 and 2, with the padding at the end and without."""
    paddings = [-numel % align for numel in numels]
    flat: list[Any] = []
    for index, (numel, padding) in enumerate(zip(numels, paddings, strict=True)):
        flat += [(index, element) for element in range(numel)] + [None] * padding
    total = len(flat)
    flat += [None] * (-total % (ALIGNMENT * ranks))
    size = len(flat) // ranks
    flats = [flat[rank * size : min((rank + 1) * size, total if lean else len(flat))] for rank in range(ranks)]
    spans, sizes = cut_together({str(index): numel for index, numel in enumerate(numels)}, paddings, ranks)
    for index, numel in enumerate(numels):
        assert gather(spans[str(index)], flats) == [(index, element) for element in range(numel)]
    assert all(len(part) in allowed for part, allowed in zip(flats, sizes, strict=True))


@given(NUMELS, st.integers(1, 5))
def test_parameters_that_were_cut_each_are_found(numels: list[int], ranks: int) -> None:
    flats: list[list[Any]] = [[] for _ in range(ranks)]
    for index, numel in enumerate(numels):
        part = -(-numel // ranks)
        whole = [(index, element) for element in range(numel)] + [None] * (part * ranks - numel)
        for rank in range(ranks):
            flats[rank] += whole[rank * part : (rank + 1) * part]
    spans, sizes = cut_each({str(index): numel for index, numel in enumerate(numels)}, ranks)
    for index, numel in enumerate(numels):
        assert gather(spans[str(index)], flats) == [(index, element) for element in range(numel)]
    assert sizes == [{len(part)} for part in flats]
