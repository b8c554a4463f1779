"""Checkpoints that DeepSpeed wrote are read to the bit, without DeepSpeed.

The checkpoints, and what is true of them, come from `deepspeed/make.py`.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from itertools import combinations_with_replacement
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwell.checkpoint.sources.base import Source
from shardwell.checkpoint.sources.deepspeed import STUBS, DeepSpeedSource, is_deepspeed
from shardwell.checkpoint.sources.flat_parts import ALIGNMENT, FlatSpan, cut_each, cut_together
from shardwell.checkpoint.sources.torch_files import _names_in as names_in
from shardwell.checkpoint.sources.torch_files import _pickle_in as pickle_in
from shardwell.checkpoint.sources.torch_files import load
from shardwell.errors import CheckpointError
from tests.support.checkpoint_samples import same_bits
from tests.support.deepspeed_checkpoints import CASES, FOLDER, MAIN, TAG, rewrite, truth, whole

pytestmark = pytest.mark.usefixtures("no_deepspeed")


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


class ByName:
    """A stage as Python 3.11.0 to 3.11.3, and with them Debian 12, pickle it: as an attribute of its class."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (sys.modules["deepspeed.runtime.zero.config"].ZeroStageEnum, self.name)


@pytest.mark.parametrize(("case", "name"), [("stage2-bf16", "gradients"), ("stage3-bf16", "weights")])
def test_a_stage_may_be_pickled_by_its_name(
    case: str, name: str, copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModuleType("deepspeed.runtime.zero.config")
    config.ZeroStageEnum = type("ZeroStageEnum", (), {name: 0, "__module__": config.__name__})  # type: ignore[attr-defined]
    path = copy(case)
    with monkeypatch.context() as patch:
        for name_of in ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.zero", config.__name__):
            patch.setitem(sys.modules, name_of, config)
        for file in path.glob("*_optim_states.pt"):
            rewrite(file, lambda content: content["optimizer_state_dict"].update(zero_stage=ByName(name)))
            assert "__builtin__.getattr" in names_in(pickle_in(file), file)
    source, (expected, _) = DeepSpeedSource(path), truth(case)
    for tensor in source.tensors:
        assert same_bits(whole(source, tensor), expected[tensor]), tensor


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
            right.extend(same_bits(whole(source, name), tensor) for name, tensor in expected.items())

    threads = [threading.Thread(target=read_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * (4 * 5 * len(expected))
    assert set(torch.serialization.get_safe_globals()) == set(allowed)  # nothing is left allowed


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
    assert "param_names" not in groups[0]
    assert {"embedding.weight", "blocks.1.down.weight"} <= set(groups[0]["params"])
    assert {"norm.weight", "head.bias"} <= set(groups[1]["params"])
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
        assert same_bits(whole(source, name), tensor)


def test_masters_are_read_where_the_state_was_removed(copy: Callable[[str], Path]) -> None:
    directory = copy("stage3-bf16")
    for path in directory.glob("*_optim_states.pt"):
        rewrite(path, lambda content: content["optimizer_state_dict"].pop("optimizer_state_dict"))
    source = DeepSpeedSource(directory)
    expected = {name: tensor for name, tensor in truth("stage3-bf16")[0].items() if name.startswith("model/")}
    assert source.tensors.keys() == expected.keys()
    assert all(same_bits(whole(source, name), tensor) for name, tensor in expected.items())


# --- where elements lie -----------------------------------------------------------------------------------------

NUMELS = st.lists(st.integers(0, 9), min_size=0, max_size=6)


def gather(spans: list[FlatSpan], flats: list[list[Any]]) -> list[Any]:
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
