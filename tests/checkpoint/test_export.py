"""Any checkpoint can be written in any format, with the same values, in bounded memory, whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from shardwell.checkpoint import Folder, export_dcp
from shardwell.checkpoint.export import to_dcp, to_own, to_safetensors
from shardwell.checkpoint.sources import DcpSource, SafetensorsSource, ShardwellSource, Source, open_source, reading
from shardwell.errors import CheckpointError
from tests.support.checkpoint_samples import VALUES, Counting, assert_same, everything, save_own, tensors

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def weights_of(content: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("model/"): tensor for name, tensor in content.items() if name.startswith("model/")}


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        tie_word_embeddings=False, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    return LlamaForCausalLM(config)


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=16,
        bos_token_id=1,
        eos_token_id=2,
        architectures=["GPT2LMHeadModel"],
    )
    return GPT2LMHeadModel(config)


def checkpoint_of(model: PreTrainedModel, root: Path) -> Source:
    """A checkpoint of ours, with names as an engine gives them: those of shared parameters once."""
    content = {f"model/{name}": parameter.detach() for name, parameter in model.named_parameters()}
    content.update({f"state/{name.removeprefix('model/')}/exp_avg": tensor + 1 for name, tensor in content.items()})
    values = {"model_config": json.loads(model.config.to_json_string(use_diff=False)), "world_size": 2}
    save_own(root, "step-1", content, values)
    return open_source(root)


# --- for Transformers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [llama, gpt2])
@pytest.mark.parametrize("limit", [10**9, 20_000])
def test_from_pretrained_gives_the_model_back(tmp_path: Path, build: Any, limit: int) -> None:
    model = build().eval()
    to_safetensors(checkpoint_of(model, tmp_path / "own"), tmp_path / "out", max_file_bytes=limit)
    back, told = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    assert type(back) is type(model)
    assert_same(dict(back.state_dict()), dict(model.state_dict()))
    text = torch.arange(10)[None]
    assert torch.equal(back(text).logits, model(text).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_cast_as_torch_casts_them(tmp_path: Path, dtype: torch.dtype) -> None:
    model = llama()
    to_safetensors(checkpoint_of(model, tmp_path / "own"), tmp_path / "out", dtype=dtype)
    assert_same(load_file(tmp_path / "out/model.safetensors"), dict(model.to(dtype).state_dict()))
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert back.dtype == dtype


def test_only_floating_tensors_are_cast(tmp_path: Path) -> None:
    to_safetensors(Counting(tensors()), tmp_path / "out", dtype=torch.float32)
    expected = {
        name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in weights_of(tensors()).items()
    }
    assert_same(load_file(tmp_path / "out/model.safetensors"), expected)


def test_values_that_become_infinite_are_told(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"'w': some values are too large for torch.float16"):
        to_safetensors(Counting({"model/w": torch.tensor([1.0, 1e6])}), tmp_path / "out", dtype=torch.float16)


def test_tensors_in_another_memory_order_become_contiguous(tmp_path: Path) -> None:
    content = tensors()
    assert not content["model/conv.weight"].is_contiguous()
    save_own(tmp_path / "own", "a", content)
    to_safetensors(open_source(tmp_path / "own"), tmp_path / "out")
    assert_same(load_file(tmp_path / "out/model.safetensors"), weights_of(content))


def test_a_shared_parameter_is_written_once(tmp_path: Path) -> None:
    to_safetensors(Counting(tensors(), VALUES), tmp_path / "out")
    names = set(load_file(tmp_path / "out/model.safetensors"))
    assert "embed.weight" in names
    assert "head.weight" not in names


def test_files_hold_at_most_what_they_may_and_the_index_says_where_all_is(tmp_path: Path) -> None:
    content = {f"model/w{index}": torch.randn(10) for index in range(7)}
    content["model/large"] = torch.randn(50)
    to_safetensors(Counting(content), tmp_path / "out", max_file_bytes=90)
    names = sorted(os.listdir(tmp_path / "out"))
    assert names == [
        *(f"model-{number:05}-of-00005.safetensors" for number in range(1, 6)),
        "model.safetensors.index.json",
    ]
    index = json.loads((tmp_path / "out" / names[-1]).read_text())
    assert index["metadata"] == {"total_size": 7 * 40 + 200}
    found = {}
    for name in names[:-1]:
        with safe_open(tmp_path / "out" / name, "pt") as file:
            assert file.metadata() == {"format": "pt"}
        part = load_file(tmp_path / "out" / name)
        assert sum(tensor.nbytes for tensor in part.values()) <= 90 or list(part) == ["large"]
        assert all(index["weight_map"][key] == name for key in part)
        found.update(part)
    assert_same(found, weights_of(content))
    assert index["weight_map"].keys() == found.keys()


def test_a_configuration_is_written_if_there_is_one(tmp_path: Path) -> None:
    config = {"hidden_size": 8, "torch_dtype": "float32", "nested": {"a": [1, None]}}
    source = Counting(tensors(), {"model_config": config})
    to_safetensors(source, tmp_path / "as-is")
    assert json.loads((tmp_path / "as-is/config.json").read_text()) == config
    to_safetensors(source, tmp_path / "bf16", dtype=torch.bfloat16)
    assert json.loads((tmp_path / "bf16/config.json").read_text()) == {**config, "torch_dtype": "bfloat16"}
    to_safetensors(Counting(tensors()), tmp_path / "none")
    assert os.listdir(tmp_path / "none") == ["model.safetensors"]


def test_weights_that_were_not_saved_are_told(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="saved without its frozen weights"):
        to_safetensors(Counting(tensors(), {"frozen_excluded": True}), tmp_path / "out")


# --- memory -----------------------------------------------------------------------------------------------------


def is_read_once_in_parts(source: Counting, names: list[str], limit: int) -> bool:
    """Whether each tensor was read from start to end, one after the other, no more than `limit` elements at a time."""
    expected = []
    for name in names:
        numel = source.tensors[name].numel
        expected += [(name, start, min(start + limit, numel)) for start in range(0, numel, limit)]
    return sorted(source.asked) == sorted(expected)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_no_more_than_a_part_of_a_tensor_is_asked_for_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype | None
) -> None:
    content = {"model/a": torch.randn(100), "model/b": torch.randn(9, 7), "state/a/m": torch.randn(100)}
    monkeypatch.setattr(reading, "PART", 16)
    source = Counting(content)
    told: list[int] = []
    to_safetensors(source, tmp_path / "out", dtype, progress=told.append)
    assert is_read_once_in_parts(source, ["model/a", "model/b"], 16)
    assert max(told) == 16 * 4
    assert sum(told) == 163 * 4
    source.asked.clear()
    to_own(source, tmp_path / "own", "a", progress=told.append)
    assert is_read_once_in_parts(source, list(content), 16)
    assert sum(told) == 163 * 4 + 263 * 4


def test_a_large_tensor_goes_to_dcp_in_chunks_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_dcp, "CHUNK", 100)
    content = {"model/a": torch.randn(100), "model/b": torch.randn(9, 7), "model/c": torch.randn(2, 3)}
    source = Counting(content)
    to_dcp(source, tmp_path / "out")
    assert max(stop - start for _, start, stop in source.asked) == 25
    assert [(start, stop) for name, start, stop in source.asked if name == "model/b"] == [(0, 21), (21, 42), (42, 63)]
    target = {name.removeprefix("model/"): torch.zeros_like(tensor) for name, tensor in content.items()}
    dcp.load({"model": target}, checkpoint_id=tmp_path / "out", no_dist=True)
    assert_same(target, weights_of(content))
    assert_same(everything(DcpSource(tmp_path / "out")), content)


def test_no_tensor_outlives_its_turn_on_the_way_to_dcp(tmp_path: Path) -> None:
    alive: list[int] = []
    most = 0

    class Watching(Counting):
        def read(self, name: str, start: int, stop: int) -> Tensor:
            nonlocal most
            import weakref

            tensor = super().read(name, start, stop)
            alive.append(1)
            weakref.finalize(tensor.untyped_storage(), alive.pop)
            most = max(most, len(alive))
            return tensor

    to_dcp(Watching({f"model/{index}": torch.randn(10) for index in range(20)}), tmp_path / "out")
    assert most <= 2


# --- for torch.distributed.checkpoint ---------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 6)
        self.conv = nn.Conv2d(3, 2, (4, 5))
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x).sum() + self.embed(x).sum() + self.conv(torch.ones(1, 3, 4, 5) * x.mean()).sum()


def test_dcp_loads_model_and_optimizer(tmp_path: Path) -> None:
    content = {name: tensor for name, tensor in tensors().items() if "embed.weight" in name or "conv.weight" in name}
    for name in ("embed.bias", "conv.bias"):
        numel = 6 if name == "embed.bias" else 2
        content |= {f"model/{name}": torch.randn(numel)}
        content |= {f"state/{name}/{key}": torch.rand(numel) for key in ("exp_avg", "exp_avg_sq")}
    values = VALUES | {f"scalar/{name}/step": 30.0 for name in ("embed.bias", "conv.bias")}
    save_own(tmp_path / "own", "a", content, values)
    to_dcp(open_source(tmp_path / "own"), tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out")) == [".metadata", "__0_0.distcp"]

    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    model(torch.randn(2, 4)).backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    keys = ("lr", "betas", "weight_decay")
    state["param_groups"] = [
        {key: value for key, value in state["param_groups"][0].items() if key in (*keys, "params")}
    ]
    dcp.load({"model": weights, "optim": state}, checkpoint_id=tmp_path / "out", no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    assert_same({f"model/{name}": one.detach() for name, one in model.named_parameters()}, {
        name: tensor for name, tensor in content.items() if name.startswith("model/")
    })  # fmt: skip
    for name, parameter in model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[parameter][key], content[f"state/{name}/{key}"])
        assert optimizer.state[parameter]["step"].item() == 30.0
    assert [optimizer.param_groups[0][key] for key in keys] == [0.25, (0.9, 0.99), 0.5]


def test_an_error_while_dcp_is_written_is_one_of_ours_and_leaves_nothing(tmp_path: Path) -> None:
    path = save_own(tmp_path / "own", "a", tensors())
    source = open_source(tmp_path / "own")
    file = path / "rank-1.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"rank-1.safetensors: tensor \"model/mask\": damaged"):
        to_dcp(source, tmp_path / "out")
    assert os.listdir(tmp_path) == ["own"]


# --- from any format to any other -------------------------------------------------------------------------------


def test_everything_survives_the_way_through_all_formats(tmp_path: Path) -> None:
    content = tensors()
    save_own(tmp_path / "own", "a", content, VALUES)
    to_dcp(open_source(tmp_path / "own"), tmp_path / "dcp")
    source = open_source(tmp_path / "dcp")
    tied = {"model/head.weight": content["model/embed.weight"]}  # of which dcp has each name
    assert_same(everything(source), content | tied)
    to_own(source, tmp_path / "own", "b")
    back = open_source(tmp_path / "own")
    assert isinstance(back, ShardwellSource)
    assert back.where == str(tmp_path / "own/b")
    assert_same(everything(back), content | tied)
    for key in ("scalar/embed.weight/step", "scalar/conv.weight/step"):
        assert back.values[key] == 30.0
    group = {"lr": 0.25, "betas": [0.9, 0.99], "weight_decay": 0.5, "params": ["embed.weight", "conv.weight"]}
    assert [dict(one, params=sorted(one["params"], reverse=True)) for one in back.values["param_groups"]] == [group]
    to_safetensors(back, tmp_path / "hf")
    to_own(open_source(tmp_path / "hf"), tmp_path / "last", "c")
    assert_same(everything(open_source(tmp_path / "last")), {
        name: tensor for name, tensor in (content | tied).items() if name.startswith("model/")
    })  # fmt: skip


def test_our_own_format_keeps_the_order_of_memory_the_values_and_the_kinds(tmp_path: Path) -> None:
    content = tensors()
    save_own(tmp_path / "own", "a", content, VALUES)
    to_own(open_source(tmp_path / "own"), tmp_path / "copy", "a", max_file_bytes=300)
    first, second = Folder(tmp_path / "own").open("a"), Folder(tmp_path / "copy").open("a")
    assert second.values == first.values == VALUES
    assert len(second.files) == 5
    for name, record in second.tensors.items():
        assert (record.dtype, record.shape, record.stride, record.kind) == (
            content[name].dtype, tuple(content[name].shape), content[name].stride(), first.tensors[name].kind,
        )  # fmt: skip
    assert_same(everything(open_source(tmp_path / "copy")), content)


# --- where it goes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("convert", [to_safetensors, to_dcp])
def test_what_exists_is_not_overwritten_unless_it_is_empty(tmp_path: Path, convert: Any) -> None:
    out = tmp_path / "new/out"
    convert(Counting(tensors()), out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(CheckpointError, match="out: exists; move it"):
        convert(Counting(tensors(1)), out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    (tmp_path / "empty").mkdir()
    convert(Counting(tensors()), tmp_path / "empty")
    assert os.listdir(tmp_path / "empty")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="link: exists"):
        convert(Counting(tensors()), tmp_path / "link")


def test_a_tag_that_exists_is_not_overwritten(tmp_path: Path) -> None:
    to_own(Counting(tensors()), tmp_path, "a")
    with pytest.raises(CheckpointError, match="a: exists; remove it, or use another tag"):
        to_own(Counting(tensors(1)), tmp_path, "a")


class Failing(Counting):
    def read(self, name: str, start: int, stop: int) -> Tensor:
        if name == "model/mask":
            raise CheckpointError("it broke")
        return super().read(name, start, stop)


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    for convert in (
        lambda source: to_safetensors(source, tmp_path / "out", max_file_bytes=50),
        lambda source: to_dcp(source, tmp_path / "out"),
        lambda source: to_own(source, tmp_path / "own", "a"),
    ):
        with pytest.raises(CheckpointError, match="it broke"):
            convert(Failing(tensors()))
        assert sorted(os.listdir(tmp_path)) == ["own"]
        assert os.listdir(tmp_path / "own") == []


def test_a_checkpoint_without_a_model_is_refused(tmp_path: Path) -> None:
    for convert in (to_safetensors, to_dcp):
        with pytest.raises(CheckpointError, match="memory: holds no tensor of a model"):
            convert(Counting({"state/a/m": torch.ones(1)}), tmp_path / "out")


# --- finding out what a path is ---------------------------------------------------------------------------------


def test_a_path_is_recognised(tmp_path: Path) -> None:
    for tag in ("a", "b"):
        save_own(tmp_path / "own", tag, tensors())
    assert open_source(tmp_path / "own").where == str(tmp_path / "own/b")
    assert open_source(tmp_path / "own", "a").where == str(tmp_path / "own/a")
    assert isinstance(open_source(tmp_path / "own/a"), ShardwellSource)
    assert isinstance(open_source(tmp_path / "own/a", "a"), ShardwellSource)
    to_safetensors(Counting(tensors()), tmp_path / "hf")
    assert isinstance(open_source(tmp_path / "hf"), SafetensorsSource)
    to_dcp(Counting(tensors()), tmp_path / "dcp")
    assert isinstance(open_source(tmp_path / "dcp"), DcpSource)


def test_one_of_ours_is_found_from_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(save_own(tmp_path, "a", tensors()))
    assert_same(everything(open_source(".")), tensors())


def test_a_path_that_holds_no_checkpoint_is_refused_with_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    for path in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(
            CheckpointError, match=r"Looked for manifest.json .* model.safetensors .* \.metadata .* DeepSpeed"
        ):
            open_source(path)
    with pytest.raises(CheckpointError, match="nowhere: no such file or directory"):
        open_source(tmp_path / "nowhere")


def test_a_tag_that_cannot_be_meant_is_refused(tmp_path: Path) -> None:
    save_own(tmp_path / "own", "a", tensors())
    with pytest.raises(CheckpointError, match="own/a: is one checkpoint; the tag 'b' needs the folder"):
        open_source(tmp_path / "own/a", "b")
    with pytest.raises(CheckpointError, match="own/b: no such checkpoint; those here are: a"):
        open_source(tmp_path / "own", "b")
    to_safetensors(Counting(tensors()), tmp_path / "hf")
    with pytest.raises(CheckpointError, match="hf: tag 'a': no folder of checkpoints"):
        open_source(tmp_path / "hf", "a")
