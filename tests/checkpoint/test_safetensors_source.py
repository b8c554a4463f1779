"""A model in safetensors files is read as it was written, in part, and nothing that its index says is trusted."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from shardwell.checkpoint.sources import SafetensorsSource, open_source
from shardwell.errors import CheckpointError
from tests.support.checkpoint_samples import assert_same, everything

INDEX = "model.safetensors.index.json"
CONTENT = {
    "a": torch.arange(12, dtype=torch.float32).view(3, 4),
    "b": torch.randn(5).bfloat16(),
    "c": torch.tensor(7),
    "d": torch.randn(2, 2).half(),
}


def named(content: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"model/{name}": tensor for name, tensor in content.items()}


@pytest.fixture
def split(tmp_path: Path) -> Path:
    """A directory with two files and their index."""
    files = {"model-00001-of-00002.safetensors": ("a", "b"), "model-00002-of-00002.safetensors": ("c", "d")}
    for file, names in files.items():
        save_file({name: CONTENT[name] for name in names}, tmp_path / file, {"format": "pt"})
    set_index(tmp_path, {name: file for file, names in files.items() for name in names})
    return tmp_path


def set_index(path: Path, weights: object) -> None:
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weights}))


def weights_of(path: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((path / INDEX).read_text())["weight_map"]
    return found


# --- what is read -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.safetensors", "other.safetensors"])
def test_one_file_is_read_by_its_path_and_by_its_directory(tmp_path: Path, name: str) -> None:
    save_file(CONTENT, tmp_path / name)
    assert_same(everything(SafetensorsSource(tmp_path / name)), named(CONTENT))
    assert_same(everything(SafetensorsSource(tmp_path)), named(CONTENT))
    assert isinstance(open_source(tmp_path), SafetensorsSource)
    assert isinstance(open_source(tmp_path / name), SafetensorsSource)


def test_several_files_are_read_through_their_index(split: Path) -> None:
    assert_same(everything(SafetensorsSource(split)), named(CONTENT))


def test_what_transformers_saves_in_several_files_is_read(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    source = SafetensorsSource(tmp_path)
    assert_same(everything(source), named(model.state_dict()))
    assert source.values["model_config"]["hidden_size"] == 32


def test_only_the_bytes_asked_for_are_read(split: Path) -> None:
    source = SafetensorsSource(split)
    assert source.bytes_read == 0
    assert source.read("model/a", 3, 5).tolist() == [3.0, 4.0]
    assert source.bytes_read == 8
    source.close()
    assert source.read("model/c", 0, 1).item() == 7
    assert source.bytes_read == 16


def test_files_are_open_only_from_the_first_read_to_close(split: Path) -> None:
    def num_open() -> int:
        return sum(
            link.resolve().parent == split.resolve() for link in Path("/proc/self/fd").iterdir() if link.exists()
        )

    source = SafetensorsSource(split)
    assert num_open() == 0
    source.read("model/a", 0, 1)
    assert num_open() == 1
    source.read("model/d", 0, 1)
    assert num_open() == 2
    source.close()
    assert num_open() == 0


def test_several_threads_read_at_once(split: Path) -> None:
    source = SafetensorsSource(split)
    wrong: list[str] = []

    def read() -> None:
        for _ in range(50):
            for name, tensor in CONTENT.items():
                if not torch.equal(source.read(f"model/{name}", 0, tensor.numel()), tensor.view(-1)):
                    wrong.append(name)

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_directory_of_links_is_read_like_one_of_files(split: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    snapshot = tmp_path_factory.mktemp("snapshot")  # as in the cache of Hugging Face
    for file in split.iterdir():
        (snapshot / file.name).symlink_to(file)
    assert_same(everything(SafetensorsSource(snapshot)), named(CONTENT))
    (split / "model-00002-of-00002.safetensors").write_bytes(b"too short")
    with pytest.raises(CheckpointError, match=f"{snapshot}/model-00002-of-00002.safetensors: a link: .*truncated"):
        SafetensorsSource(snapshot)


def test_names_can_be_changed(split: Path) -> None:
    source = SafetensorsSource(split, rename=lambda name: f"net.{name}")
    assert_same(everything(source), {f"model/net.{name}": tensor for name, tensor in CONTENT.items()})
    with pytest.raises(CheckpointError, match='"a" and "b" are both renamed model/x'):
        SafetensorsSource(split, rename=lambda name: "x")


def test_a_broken_configuration_does_not_keep_the_weights_from_being_read(split: Path) -> None:
    (split / "config.json").write_text("{")
    with pytest.warns(UserWarning, match="without the model's configuration.*config.json: not valid JSON"):
        source = SafetensorsSource(split)
    assert source.values == {}
    assert_same(everything(source), named(CONTENT))


# --- what is refused --------------------------------------------------------------------------------------------


def test_an_unknown_tensor_and_a_range_beyond_the_end_are_refused(split: Path) -> None:
    source = SafetensorsSource(split)
    with pytest.raises(CheckpointError, match="tensor 'model/e': not in this checkpoint"):
        source.read("model/e", 0, 1)
    with pytest.raises(CheckpointError, match=r'model-00001.*"a": has 12 elements, asked for 3 to 13'):
        source.read("model/a", 3, 13)


@pytest.mark.parametrize("file", ["../out.safetensors", "/tmp/out.safetensors", "x/out.safetensors", "..", "", 3, None])
def test_an_index_may_name_only_files_beside_it(split: Path, file: object) -> None:
    save_file({"a": CONTENT["a"]}, split.parent / "out.safetensors")
    set_index(split, {**weights_of(split), "a": file})
    with pytest.raises(CheckpointError, match=r'weight_map\["a"\]: expected the name of a file beside the index'):
        SafetensorsSource(split)


@pytest.mark.parametrize("weights", [{}, [], "x", None])
def test_an_index_without_tensors_is_refused(split: Path, weights: object) -> None:
    set_index(split, weights)
    with pytest.raises(CheckpointError, match="weight_map: expected an object"):
        SafetensorsSource(split)


def test_a_missing_file_is_named_with_its_tensor(split: Path) -> None:
    (split / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r'model-00002-of-00002.safetensors: missing; .* says that it holds "c"'):
        SafetensorsSource(split)


def test_a_truncated_file_is_named(split: Path) -> None:
    path = split / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002.safetensors: "):
        SafetensorsSource(split)


def test_a_tensor_that_is_not_where_the_index_says_is_named(split: Path) -> None:
    weights = weights_of(split)
    set_index(split, {**weights, "e": weights["c"]})
    with pytest.raises(
        CheckpointError, match=r'model-00002-of-00002.safetensors: tensor "e": missing; .* says it is here'
    ):
        SafetensorsSource(split)
    set_index(split, {**weights, "b": weights["c"]})
    with pytest.raises(CheckpointError, match=r'00001.*: holds tensor "b"; by .* it is in model-00002'):
        SafetensorsSource(split)
    del weights["b"]
    set_index(split, weights)
    with pytest.raises(CheckpointError, match=r'00001.*: holds tensor "b"; by .* it is in no file'):
        SafetensorsSource(split)


def test_a_directory_of_several_unrelated_files_is_refused(tmp_path: Path) -> None:
    for name in ("x.safetensors", "y.safetensors"):
        save_file(CONTENT, tmp_path / name)
    with pytest.raises(CheckpointError, match=r"not exactly one other .safetensors file"):
        SafetensorsSource(tmp_path)
