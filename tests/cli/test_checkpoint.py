"""The commands for checkpoints, on real files."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from shardwell.checkpoint import Folder
from shardwell.checkpoint.sources import open_source
from shardwell.cli import app
from tests.support.checkpoint_samples import VALUES, assert_same, everything, save_own, tensors
from tests.support.command import shardwell
from tests.support.internals import locks_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def checkpoint(*args: str | Path) -> Result:
    """Runs a command in this process; an exception is that of the command."""
    return CliRunner().invoke(app, ["checkpoint", *map(str, args)])


def rows(text: str) -> dict[str, str]:
    """A table of two columns."""
    cells = [line.strip("│ ").split("│") for line in text.splitlines() if line.startswith("│")]
    return {cell[0].strip(): cell[1].strip() for cell in cells if len(cell) == 2}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with two checkpoints; the later differs."""
    root = tmp_path / "run"
    save_own(root, "step-20", tensors(0), VALUES)
    changed = tensors(0)
    changed["model/embed.weight"][2, 1] += 0.5
    save_own(root, "step-30", changed, {**VALUES, "world_size": 4})
    return root


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model in the format of Hugging Face, with the weights of step-20."""
    weights = {
        name.removeprefix("model/"): one.contiguous() for name, one in tensors(0).items() if name.startswith("model/")
    }
    (tmp_path / "hf").mkdir()
    save_file(weights, tmp_path / "hf/model.safetensors")
    return tmp_path / "hf"


def damage(path: Path, offset: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


# --- inspect ----------------------------------------------------------------------------------------------------


def test_inspect_shows_what_a_checkpoint_holds(root: Path) -> None:
    result = checkpoint("inspect", root)
    assert result.exit_code == 0
    found = rows(result.stdout)
    content = tensors()
    assert found["kind"] == "shardwell"
    assert found["step"] == "30"
    assert found["world size"] == "4"
    assert found["versions"] == "python 3.11.7, shardwell 0.1.0, torch 2.13.0"
    assert found["optimizer"] == "AdamW"
    assert found["tensors"] == str(len(content))
    assert found["parameters"] == str(sum(one.numel() for name, one in content.items() if name.startswith("model/")))
    assert found["files"] == "3"  # two of data, and the manifest
    assert found["other checkpoints"] == "step-20"
    assert "embed.weight" not in result.stdout
    assert "step-30" in result.stdout


def test_inspect_lists_tensors_and_shows_the_configuration_on_demand(root: Path) -> None:
    result = checkpoint("inspect", root / "step-20", "--tensors", "--config")
    line = next(line for line in result.stdout.splitlines() if "model/conv.weight" in line)
    assert [cell.strip() for cell in line.strip("│").split("│")] == ["model/conv.weight", "float32", "2×3×4×5", "480 B"]
    assert '"stage": 3' in result.stdout


def test_inspect_gives_json(root: Path) -> None:
    found = json.loads(checkpoint("inspect", root, "--tag", "step-20", "--json").stdout)
    assert found["path"] == str(root / "step-20")
    assert found["world_size"] == 2
    assert found["bytes"] == sum(tensor.nbytes for tensor in tensors().values())
    assert found["values"]["counters"] == VALUES["counters"]
    assert {"name": "model/embed.weight", "dtype": "float32", "shape": [6, 4], "bytes": 96} in found["tensor_list"]


def test_inspect_knows_the_formats_of_others(root: Path, model: Path, tmp_path: Path) -> None:
    assert json.loads(checkpoint("inspect", model, "--json").stdout)["kind"] == "safetensors (Hugging Face)"
    assert json.loads(checkpoint("inspect", model / "model.safetensors", "--json").stdout)["files"] == 1
    assert checkpoint("export", root, tmp_path / "dcp", "--format", "dcp").exit_code == 0
    found = json.loads(checkpoint("inspect", tmp_path / "dcp", "--json").stdout)
    assert (found["kind"], found["files"]) == ("torch.distributed.checkpoint", 2)


# --- verify -----------------------------------------------------------------------------------------------------


def test_verify_passes_what_is_whole(root: Path) -> None:
    for path in (root, root / "step-20"):
        result = checkpoint("verify", path)
        assert result.exit_code == 0
        assert "10 tensors in 2 files match their checksums" in result.stdout


def test_verify_lists_every_damage_with_file_and_tensor(root: Path) -> None:
    path = root / "step-20"
    manifest = Folder(root).open("step-20")
    damage(path / "rank-0.safetensors")
    size = manifest.files["rank-0.safetensors"].size
    damage(path / "rank-0.safetensors", size - sum(one.nbytes for one in tensors().values()) // 2 + 40)
    os.truncate(path / "rank-1.safetensors", 900)
    result = checkpoint("verify", root, "--tag", "step-20")
    assert result.exit_code == 1
    lines = result.stderr.splitlines()
    assert len(lines) == 3
    first = [line for line in lines if "rank-0.safetensors: tensor" in line]
    assert len(first) == 2
    assert 'tensor "model/mask": damaged: crc32 is' in first[1]
    cut = next(line for line in lines if "rank-1" in line)
    assert "rank-1.safetensors: 900 bytes" in cut
    assert "tensors in it:" in cut
    assert "state/conv.weight/exp_avg_sq" in cut
    assert checkpoint("verify", root).exit_code == 0  # the other one is whole


def test_verify_finds_a_missing_file_and_a_damaged_header(root: Path) -> None:
    (root / "step-30/rank-0.safetensors").unlink()
    damage(root / "step-30/rank-1.safetensors", 20)
    result = checkpoint("verify", root)
    assert result.exit_code == 1
    assert "rank-0.safetensors: cannot be read (No such file or directory)" in result.stderr
    assert "rank-1.safetensors: the header is damaged" in result.stderr


def test_verify_finds_every_flipped_byte_of_a_data_file(root: Path) -> None:
    path = root / "step-30/rank-1.safetensors"
    good = path.read_bytes()
    for offset in range(0, len(good), 97):
        damage(path, offset)
        assert checkpoint("verify", root).exit_code == 1, offset
        path.write_bytes(good)
    assert checkpoint("verify", root).exit_code == 0


def test_verify_reads_what_has_no_checksums(model: Path) -> None:
    result = checkpoint("verify", model)
    assert result.exit_code == 0
    assert "6 tensors can be read; safetensors (Hugging Face) has no checksums" in result.stdout
    damage(model / "model.safetensors")  # a boolean that is neither true nor false
    data = bytearray((model / "model.safetensors").read_bytes())
    data[-1] = 7
    (model / "model.safetensors").write_bytes(data)
    result = checkpoint("verify", model)
    assert result.exit_code == 1
    assert "neither true nor false" in result.stderr


# --- export -----------------------------------------------------------------------------------------------------


def test_export_writes_safetensors_in_the_dtype_and_sizes_asked_for(root: Path, tmp_path: Path) -> None:
    result = checkpoint(
        "export", root, tmp_path / "out", "--tag", "step-20", "--dtype", "bf16", "--max-file-size", "0.2KB"
    )
    assert (result.exit_code, result.stdout) == (0, f"written: {tmp_path / 'out'}\n")
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert [file.name for file in files] == [f"model-{number:05}-of-00002.safetensors" for number in (1, 2)]
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    expected = {
        name.removeprefix("model/"): one.bfloat16() if one.is_floating_point() else one
        for name, one in tensors(0).items()
        if name.startswith("model/")
    }
    assert_same(found, expected)


@pytest.mark.parametrize("form", ["dcp", "shardwell"])
def test_export_converts_everything_to_the_other_formats(root: Path, tmp_path: Path, form: str) -> None:
    assert checkpoint("export", root / "step-20", tmp_path / "new/first", "--format", form).exit_code == 0
    source = open_source(tmp_path / "new/first")
    found = everything(source)
    found.pop("model/head.weight", None)  # the other name of a shared weight, in dcp
    assert_same(found, tensors(0))
    assert source.values["scalar/embed.weight/step"] == 30.0
    if form == "shardwell":
        assert (tmp_path / "new/latest").read_text() == "first"


def test_export_brings_the_formats_of_others_to_ours(model: Path, tmp_path: Path) -> None:
    assert checkpoint("export", model, tmp_path / "run/start", "--format", "shardwell").exit_code == 0
    assert checkpoint("diff", model, tmp_path / "run").exit_code == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-file-size", "five"], "--max-file-size five: expected a size such as 5GB"),
        (["--max-file-size", "0GB"], "expected a size such as 5GB"),
        (["--format", "dcp", "--dtype", "bf16"], "--dtype: only for safetensors, not for dcp"),
        (["--tag", "step-9"], "step-9: no such checkpoint; those here are: step-30, step-20"),
    ],
)
def test_export_refuses_what_it_cannot_do(root: Path, tmp_path: Path, options: Sequence[str], message: str) -> None:
    result = checkpoint("export", root, tmp_path / "out", *options)
    assert result.exit_code != 0
    assert message in str(result.exception)
    assert not (tmp_path / "out").exists()


def test_export_does_not_copy_damage_unless_it_is_told_to(root: Path, tmp_path: Path) -> None:
    path = root / "step-30/rank-0.safetensors"
    with_embed = path.read_bytes().rfind(tensors(0)["model/embed.weight"].numpy().tobytes()[:16])
    damage(path, with_embed)
    result = checkpoint("export", root, tmp_path / "out")
    assert result.exit_code == 1
    assert 'rank-0.safetensors: tensor "model/embed.weight": damaged' in result.stderr
    assert not (tmp_path / "out").exists()
    result = checkpoint("export", root, tmp_path / "out", "--no-verify", "--max-file-size", "1TB")
    assert "damaged" in str(result.exception)  # a stretch that is read whole is checked in any case
    assert checkpoint("export", root, tmp_path / "out", "--tag", "step-20", "--no-verify").exit_code == 0


def test_export_does_not_overwrite(root: Path, model: Path) -> None:
    assert "hf: exists" in str(checkpoint("export", root, model).exception)
    assert "step-20: exists" in str(checkpoint("export", model, root / "step-20", "--format", "shardwell").exception)


def test_export_tells_warnings(tmp_path: Path) -> None:
    save_own(tmp_path / "run", "a", {"model/w": torch.tensor([1.0, 1e6])})
    result = checkpoint("export", tmp_path / "run", tmp_path / "out", "--dtype", "fp16")
    assert result.exit_code == 0
    assert "warning: tensor 'w': some values are too large for torch.float16" in result.stderr


# --- diff -------------------------------------------------------------------------------------------------------


def test_diff_of_the_same_is_nothing(root: Path) -> None:
    result = checkpoint("diff", root, root, "--tag-a", "step-20", "--tag-b", "step-20")
    assert (result.exit_code, result.stdout) == (0, "10 tensors are the same, 0 differ\n")


def test_diff_shows_the_tensors_and_values_that_differ(root: Path) -> None:
    result = checkpoint("diff", root / "step-20", root / "step-30")
    assert result.exit_code == 1
    line = next(line for line in result.stdout.splitlines() if "embed.weight" in line)
    before = tensors(0)["model/embed.weight"][2, 1].item()
    share = f"{0.5 / max(abs(before), abs(before + 0.5)):.3g}"
    assert [cell.strip() for cell in line.strip("│").split("│")] == [
        "model/embed.weight",
        "6×4",
        "float32",
        "1",
        "0.5",
        share,
    ]
    assert "world_size: 2 and 4" in result.stdout
    assert "9 tensors are the same, 1 differ" in result.stdout


def test_diff_tells_what_only_one_has_and_other_shapes_and_dtypes(tmp_path: Path) -> None:
    save_own(tmp_path, "a", {"model/x": torch.ones(2), "model/y": torch.ones(3), "model/z": torch.ones(2)}, {"k": 1})
    save_own(tmp_path, "b", {"model/w": torch.ones(2), "model/y": torch.ones(4), "model/z": torch.ones(2).half()})
    result = checkpoint("diff", tmp_path / "a", tmp_path / "b")
    assert result.exit_code == 1
    assert f"only in {tmp_path / 'a'}: model/x" in result.stdout
    assert f"only in {tmp_path / 'b'}: model/w" in result.stdout
    assert "3 and 4" in result.stdout
    assert "float32 and float16" in result.stdout
    assert "k: 1 and nothing" in result.stdout


def test_diff_has_a_tolerance_and_can_look_at_the_weights_alone(root: Path, model: Path, tmp_path: Path) -> None:
    assert checkpoint("diff", root / "step-20", model).exit_code == 1  # which has no optimizer state
    assert checkpoint("diff", root / "step-20", model, "--weights").exit_code == 0
    assert checkpoint("diff", root / "step-30", model, "--weights").exit_code == 1
    assert checkpoint("diff", root / "step-30", model, "--weights", "--tolerance", "0.5").exit_code == 0
    assert checkpoint("diff", root / "step-30", model, "--weights", "--tolerance", "0.001").exit_code == 1
    checkpoint("export", model, tmp_path / "bf16", "--dtype", "bf16")
    assert checkpoint("diff", model, tmp_path / "bf16").exit_code == 1
    assert checkpoint("diff", model, tmp_path / "bf16", "--tolerance", "0.004").exit_code == 0  # of 8 bits: 2**-8
    assert checkpoint("diff", model, tmp_path / "bf16", "--tolerance", "0.00001").exit_code == 1


@pytest.mark.parametrize(
    ("one", "two", "same"),
    [
        (torch.tensor([float("nan"), float("inf")]), torch.tensor([float("nan"), float("inf")]), True),
        (torch.tensor([float("nan")]), torch.tensor([1.0]), False),
        (torch.tensor([float("inf")]), torch.tensor([-float("inf")]), False),
        (torch.tensor([0.0]), torch.tensor([-0.0]), True),
        (torch.tensor([2**53]), torch.tensor([2**53 + 1]), False),
        (torch.tensor([True]), torch.tensor([False]), False),
        (torch.tensor(1.0), torch.tensor(1.0), True),
        (torch.empty(0, 3), torch.empty(0, 3), True),
    ],
)
def test_diff_compares_odd_numbers_rightly(tmp_path: Path, one: torch.Tensor, two: torch.Tensor, same: bool) -> None:
    save_own(tmp_path, "a", {"model/x": one}, num_files=1)
    save_own(tmp_path, "b", {"model/x": two}, num_files=1)
    assert checkpoint("diff", tmp_path / "a", tmp_path / "b").exit_code == (0 if same else 1)


# --- prune ------------------------------------------------------------------------------------------------------


def test_prune_removes_the_oldest_and_old_leftovers(root: Path) -> None:
    save_own(root, "step-40", tensors(), VALUES)
    folder = Folder(root)
    fresh, old = folder.begin("x"), folder.begin("y")
    os.close(locks_of(folder).pop(old.name))  # whoever wrote it is gone
    for path in (old / ".lock", old):
        os.utime(path, (0, 0))
    result = checkpoint("prune", root, "--keep-last", "2", "--dry-run")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == ["would remove step-20", f"would remove {old.name}", "kept step-40, step-30"]
    assert folder.tags() == ["step-40", "step-30", "step-20"]
    assert old.exists()
    result = checkpoint("prune", root, "--keep-last", "2")
    assert result.stdout.splitlines() == ["removed step-20", f"removed {old.name}", "kept step-40, step-30"]
    assert folder.tags() == ["step-40", "step-30"]
    assert (fresh.exists(), old.exists()) == (True, False)


def test_prune_never_removes_the_latest(root: Path) -> None:
    (root / "latest").write_text("step-20\n")
    save_own_later = Folder(root)
    assert checkpoint("prune", root, "--keep-last", "1").exit_code == 0
    assert save_own_later.tags() == ["step-30", "step-20"]


def test_prune_works_where_latest_is_broken_and_inspect_names_the_newest_that_is_whole(root: Path) -> None:
    (root / "latest").write_text("gone\n")
    assert "complete checkpoint here is 'step-30'" in str(checkpoint("inspect", root).exception)
    assert checkpoint("prune", root, "--keep-last", "1").exit_code == 0
    assert Folder(root).tags() == ["step-30"]


def test_prune_takes_only_folders_of_ours(root: Path, model: Path) -> None:
    for path in (model, root / "step-20"):
        assert "no folder of shardwell's checkpoints" in str(checkpoint("prune", path, "--keep-last", "1").exception)
    assert Folder(root).tags() == ["step-30", "step-20"]
    assert checkpoint("prune", root, "--keep-last", "0").exit_code == 2


# --- as a user runs them ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_error_is_one_line_and_exit_code_two(tmp_path: Path) -> None:
    result = shardwell("checkpoint", "inspect", tmp_path / "nowhere")
    assert result.returncode == 2
    assert result.stderr == f"error: {tmp_path / 'nowhere'}: no such file or directory\n"


def test_a_process_verifies_a_damaged_checkpoint(root: Path) -> None:
    damage(root / "step-30/rank-1.safetensors")
    result = shardwell("checkpoint", "verify", root)
    assert result.returncode == 1
    assert "rank-1.safetensors: tensor" in result.stderr
    assert "Traceback" not in result.stderr
