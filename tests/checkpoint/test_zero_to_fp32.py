"""`zero_to_fp32`: the weights of checkpoints in fp32, by DeepSpeed's functions, command and script."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

from shardwell.checkpoint.contents import Contents
from shardwell.checkpoint.sources import open_source
from shardwell.compat.deepspeed_api import zero_to_fp32 as z
from shardwell.errors import CheckpointError
from tests.support.checkpoint_samples import same_bits
from tests.support.command import environment
from tests.support.command import shardwell as command
from tests.support.deepspeed_checkpoints import CASES, FOLDER, truth
from tests.support.odd_model import CLIENT, Odd, save, trained
from tests.support.patience import HANG

pytestmark = pytest.mark.usefixtures("no_deepspeed")


def saved(root: Path, stage: int = 3, **config: Any) -> dict[str, Tensor]:
    """Save a checkpoint; return what a state dictionary in fp32 of it is, from the model itself."""
    engine = trained(stage, **config)
    engine.save_checkpoint(root, client_state=CLIENT)
    state = engine.state_dict()
    return {
        name: state[name].float() if state[name].is_floating_point() else state[name] for name in Odd().state_dict()
    }


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert same_bits(found[name], tensor), name


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_weights_of_an_engine_load_into_a_plain_model(stage: int, tmp_path: Path) -> None:
    expected = saved(tmp_path, stage)
    state = z.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert_same(state, expected)
    assert state["head.weight"] is state["embedding.weight"]
    model = Odd()
    model.load_state_dict(state)  # strict: all names are there
    other = z.load_state_dict_from_zero_checkpoint(Odd(), tmp_path, "global_step3")
    assert_same(dict(other.state_dict()), expected)


@pytest.mark.parametrize("case", CASES)
def test_the_weights_of_deepspeeds_checkpoints_are_what_deepspeed_says(case: str) -> None:
    state = z.get_fp32_state_dict_from_zero_checkpoint(str(FOLDER / case))
    expected = {name.removeprefix("model/"): one for name, one in truth(case)[0].items() if name.startswith("model/")}
    assert expected.keys() == state.keys() - {"head.weight"} | (expected.keys() & {"head.weight"})
    for name, tensor in expected.items():
        assert same_bits(state[name].to(tensor.dtype), tensor), name
        if tensor.is_floating_point() and name != "shift":  # a frozen one, which stays as it is
            assert state[name].dtype is torch.float32


def test_masters_of_bf16_keep_all_their_bits(tmp_path: Path) -> None:
    engine = trained(2, bf16={"enabled": True})
    engine.save_checkpoint(tmp_path)
    state = z.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert state["norm.weight"].dtype is torch.float32
    assert not torch.equal(state["embedding.weight"], state["embedding.weight"].bfloat16().float())
    current = dict(engine.module.named_parameters())["embedding.weight"]
    assert torch.equal(state["embedding.weight"].bfloat16(), current.detach())


def test_lazy_mode_reads_when_asked(tmp_path: Path) -> None:
    expected = saved(tmp_path)
    lazy = z.get_fp32_state_dict_from_zero_checkpoint(tmp_path, lazy_mode=True)
    assert all(isinstance(one, z.GatheredTensor) for one in lazy.values())
    assert lazy["conv.weight"].shape == torch.Size([5, 3, 2, 2])
    assert_same({name: one.contiguous() for name, one in lazy.items()}, expected)
    empty = z.to_torch_tensor(lazy, return_empty_tensor=True, dtype="bf16")
    assert {one.dtype for name, one in empty.items() if name != "calls"} == {torch.bfloat16}


def test_frozen_parameters_are_left_out_on_request(tmp_path: Path) -> None:
    expected = saved(tmp_path)
    state = z.get_fp32_state_dict_from_zero_checkpoint(tmp_path, exclude_frozen_parameters=True)
    assert expected.keys() - state.keys() == {"shift"}


@pytest.mark.parametrize("safe", [False, True])
def test_files_are_split_and_indexed(safe: bool, tmp_path: Path) -> None:
    expected = saved(tmp_path / "run", bf16={"enabled": True})
    z.convert_zero_checkpoint_to_fp32_state_dict(
        tmp_path / "run", tmp_path / "out", max_shard_size=400, safe_serialization=safe
    )
    stem, kind = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    index = json.loads((tmp_path / "out" / f"{stem}.{kind}.index.json").read_text())
    files = sorted((tmp_path / "out").glob(f"*.{kind}"))
    assert len(files) > 2
    assert {path.name for path in files} == set(index["weight_map"].values())
    read = load_file if safe else lambda path: torch.load(path, weights_only=True)
    found: dict[str, Tensor] = {}
    for path in files:
        content = read(path)
        assert all(index["weight_map"][name] == path.name for name in content)
        assert sum({one.data_ptr(): one.nbytes for one in content.values()}.values()) <= 400 or len(content) == 1
        found |= content
    if safe:
        found["head.weight"] = found["embedding.weight"]  # written once
    assert found.keys() == expected.keys()
    assert all(one.dtype is torch.float32 for name, one in found.items() if name != "calls")
    if not safe:
        assert found["head.weight"].data_ptr() == found["embedding.weight"].data_ptr()


def test_one_file_is_what_plain_torch_and_safetensors_load(tmp_path: Path) -> None:
    expected = saved(tmp_path / "run")
    z.convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "run", tmp_path / "bin")
    assert_same(torch.load(tmp_path / "bin" / "pytorch_model.bin", weights_only=True), expected)
    z.convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "run", tmp_path / "safe", safe_serialization=True)
    with safe_open(tmp_path / "safe" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embedding.weight"}
    model = Odd()
    load_model(model, tmp_path / "safe" / "model.safetensors")
    assert_same(dict(model.state_dict()), expected)
    z.convert_zero_checkpoint_to_state_dict(tmp_path / "run", tmp_path / "half", "fp16", tag="global_step3")
    half = torch.load(tmp_path / "half" / "pytorch_model.bin", weights_only=True)
    assert (half["norm.weight"].dtype, half["calls"].dtype) == (torch.float16, torch.int64)


def test_weights_of_another_conversion_are_not_mixed_with_new_ones(tmp_path: Path) -> None:
    saved(tmp_path / "run")
    z.convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "run", tmp_path / "run")  # beside the checkpoints
    z.convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "run", tmp_path / "run")  # again: it is replaced
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin: weights of another conversion"):
        z.convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "run", tmp_path / "run", max_shard_size="200")
    with pytest.raises(CheckpointError, match="max_shard_size many: expected a size such as 5GB"):
        z.convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "run", tmp_path / "other", max_shard_size="many")


def test_what_is_missing_has_the_errors_that_callers_expect(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="doesn't exist"):
        z.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "none")
    with pytest.raises(ValueError, match="Unable to find 'latest' file"):
        z.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    saved(tmp_path)
    with pytest.raises(FileNotFoundError, match="doesn't exist"):
        z.get_fp32_state_dict_from_zero_checkpoint(tmp_path, "global_step9")
    with pytest.raises(ValueError, match="Unsupported output dtype 'int8': expected one of"):
        z.convert_zero_checkpoint_to_state_dict(tmp_path, tmp_path / "out", "int8")
    with pytest.warns(UserWarning, match=r"is not in the checkpoint|is not in the model"):
        z.load_state_dict_from_zero_checkpoint(nn.Linear(2, 2), tmp_path)


def test_a_damaged_file_is_found(tmp_path: Path) -> None:
    saved(tmp_path)
    file = next((tmp_path / "global_step3").glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[8 + int.from_bytes(content[:8], "little")] ^= 1  # the first byte of the first tensor: a weight
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged"):
        z.get_fp32_state_dict_from_zero_checkpoint(tmp_path)


def test_files_of_a_checkpoint_of_ours_are_described(tmp_path: Path) -> None:
    saved(tmp_path)
    directory = tmp_path / "global_step3"
    before = sorted(path.name for path in directory.iterdir())
    optim = z.get_optim_files(directory)
    stage = torch.load(optim[0], weights_only=True)["optimizer_state_dict"]["zero_stage"]
    content = torch.load(z.get_model_state_file(directory, stage), weights_only=True)
    assert (stage, content["global_steps"], content["epoch"], content["pair"]) == (3, 3, 2, (1, 2))
    assert "module" not in content  # an empty one would be a lie
    assert sorted(path.name for path in directory.iterdir()) == before
    assert z.get_optim_files(directory) == optim
    with pytest.raises(FileNotFoundError, match="can't find"):
        z.get_optim_files(FOLDER / "stage0-fp32" / "global_step3")
    names = [Path(name).name for name in z.get_optim_files(FOLDER / "stage1-bf16-three-ranks" / "global_step3")]
    assert names == [f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(3)]


def test_signatures_are_deepspeeds() -> None:
    def of(function: Any) -> list[str]:
        return list(inspect.signature(function).parameters)

    convert = ["checkpoint_dir", "output_dir", "max_shard_size", "safe_serialization", "tag"]
    assert of(z.convert_zero_checkpoint_to_fp32_state_dict) == [*convert, "exclude_frozen_parameters"]
    get = ["checkpoint_dir", "tag", "exclude_frozen_parameters", "lazy_mode"]
    assert of(z.get_fp32_state_dict_from_zero_checkpoint) == get
    assert of(z.load_state_dict_from_zero_checkpoint) == ["model", "checkpoint_dir", "tag"]
    assert of(z.get_model_state_file) == ["checkpoint_dir", "zero_stage"]


def test_the_script_beside_checkpoints_and_the_command_do_the_same(tmp_path: Path) -> None:
    expected = saved(tmp_path)
    z.write_scripts(tmp_path)
    z.write_scripts(tmp_path)
    arguments = [".", "out", "--exclude_frozen_parameters", "-t", "global_step3"]
    other = [sys.executable, "zero_to_torch.py", ".", "half", "--dtype", "fp16", "-t", "global_step3"]
    subprocess.run(other, cwd=tmp_path, env=environment(), check=True, timeout=HANG)
    half = torch.load(tmp_path / "half" / "pytorch_model.bin", weights_only=True)
    assert {tensor.dtype for name, tensor in half.items() if expected[name].is_floating_point()} == {torch.float16}
    script = [sys.executable, "zero_to_fp32.py", *arguments]
    out = subprocess.run(script, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=HANG)
    assert (out.returncode, out.stderr) == (0, "")
    assert out.stdout.strip() == f"written: {Path('out') / 'pytorch_model.bin'}"
    del expected["shift"]
    assert_same(torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True), expected)
    done = command("checkpoint", "zero-to-fp32", FOLDER / "stage2-bf16", tmp_path / "ds", "--safe_serialization")
    assert (done.returncode, done.stderr) == (0, "")
    assert load_file(tmp_path / "ds" / "model.safetensors")["norm.weight"].dtype is torch.float32
    done = command("checkpoint", "zero-to-fp32", tmp_path, tmp_path / "x", "-t", "nothing")
    assert done.returncode == 2
    assert "nothing" in done.stderr


def test_a_folder_without_frozen_information_counts_what_has_state(tmp_path: Path) -> None:
    """Checkpoints of earlier versions do not name what was frozen."""
    save(tmp_path, 1)
    with closing(open_source(tmp_path)) as source:
        assert Contents.of(source).frozen == ("shift",)
        source.values = {key: value for key, value in source.values.items() if key != "frozen"}
        contents = Contents.of(source)
    assert set(contents.frozen) == {"shift", "nothing"}  # that one has no elements
    assert set(contents.buffers) == {"calls", "scale"}
    assert contents.aliases == {"head.weight": "embedding.weight"}
