"""What is exported in DeepSpeed's layout is, by DeepSpeed's rules, the checkpoint to the bit: any stage, any ranks."""

from __future__ import annotations

import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwell.checkpoint import export_deepspeed
from shardwell.checkpoint.export import to_deepspeed, to_own, to_safetensors, to_universal
from shardwell.checkpoint.sources import DeepSpeedSource, open_source
from shardwell.checkpoint.sources.reading import read_full
from shardwell.checkpoint.sources.torch_files import load
from shardwell.errors import CheckpointError
from tests.support.checkpoint_samples import same_bits
from tests.support.command import shardwell as command
from tests.support.deepspeed_checkpoints import CASES, FOLDER, truth
from tests.support.deepspeed_layout import Layout
from tests.support.odd_model import CLIENT, Odd, save, trained
from tests.support.ranks import Ranks

pytestmark = pytest.mark.usefixtures("no_deepspeed")
RANKS = (1, 2, 3, 7)
SCALERS = [f"deepspeed.runtime.fp16.loss_scaler.{name}" for name in ("LossScaler", "DynamicLossScaler")]


def everything(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    with closing(open_source(path)) as source:
        return {name: read_full(source, name) for name in source.tensors}, dict(source.values)


def of(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert same_bits(found[name], tensor), name


def assert_layout_is(layout: Layout, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
    """Every tensor of a checkpoint is in the layout, where DeepSpeed looks for it, to the bit."""
    model = of(tensors, "model/")
    assert_same(layout.buffers(), {name: model[name] for name in values["buffers"]})
    assert_same(layout.frozen() | layout.masters() | layout.buffers(), model)
    for key in ("exp_avg", "exp_avg_sq"):
        states = {
            name.removesuffix(f"/{key}"): one for name, one in of(tensors, "state/").items() if name.endswith(key)
        }
        held = layout.state(key)
        assert_same({name: held[name] for name in states}, states)
    assert layout.main["shared_params"] == values["aliases"]
    assert layout.main["global_steps"] == values["counters"]["global_steps"]


CUT = [case for case in CASES if not case.startswith("stage0")]


@pytest.mark.slow
@pytest.mark.parametrize("case", CUT)
def test_deepspeeds_own_checkpoints_are_cut_for_other_ranks_and_stages(case: str, tmp_path: Path) -> None:
    """Each of them at each stage; the numbers of ranks take turns."""
    expected, values = truth(case)[0], everything(FOLDER / case)[1]
    for stage in (1, 2, 3):
        ranks = RANKS[(CUT.index(case) + stage) % len(RANKS)]
        out = tmp_path / f"{stage}-{ranks}"
        with closing(open_source(FOLDER / case)) as source:
            to_deepspeed(source, out, ranks, stage)
        layout = Layout(out)
        assert (layout.stage, len(layout.optim)) == (stage, ranks)
        assert_layout_is(layout, expected, values)
        assert_same(everything(out)[0], expected)  # and shardwell's own reader agrees


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_checkpoints_of_an_engine_are_exported(stage: int, tmp_path: Path, ranks: Ranks) -> None:
    ranks.run(2, save, tmp_path / "own", stage, bf16={"enabled": True})
    tensors, values = everything(tmp_path / "own")
    with closing(open_source(tmp_path / "own")) as source:
        to_deepspeed(source, tmp_path / "out")
    layout = Layout(tmp_path / "out")
    assert_layout_is(layout, tensors, values)
    assert layout.tag == "global_step3"
    prefix = "" if max(stage, 1) < 3 else "zero_pp_rank_0_"
    assert f"{prefix}mp_rank_00_model_states.pt" in layout.names
    assert [name for name in layout.names if "optim" in name] == [
        f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)
    ]
    groups = layout.groups()
    assert [(group["weight_decay"], group["betas"]) for group in groups] == [(0.1, (0.8, 0.95)), (0.0, (0.8, 0.95))]
    expected = Odd()
    named = {id(parameter): name for name, parameter in expected.named_parameters()}
    trained = [one for one in expected.parameters() if one.requires_grad and one.numel()]
    assert [list(shapes) for shapes in layout.main["param_shapes"]] == [
        [named[id(one)] for one in trained if one.dim() > 1],
        [named[id(one)] for one in trained if one.dim() == 1],
    ]
    assert {key: layout.main[key] for key in ("epoch", "best", "pair", "note")} == {
        key: CLIENT[key] for key in ("epoch", "best", "pair", "note")
    }
    assert torch.equal(layout.main["numbers"], torch.arange(3))
    if layout.stage < 3:
        module = layout.main["module"]
        assert torch.equal(module["head.weight"], tensors["model/embedding.weight"].bfloat16())
        assert module["head.weight"].data_ptr() == module["embedding.weight"].data_ptr()


def test_fp16_has_the_plain_names_and_keeps_its_loss_scale(tmp_path: Path) -> None:
    save(tmp_path / "own", 2, fp16={"enabled": True, "initial_scale_power": 4})
    with closing(open_source(tmp_path / "own")) as source:
        to_deepspeed(source, tmp_path / "out")
        scale = source.values["loss_scale"]["value"]
    assert "zero_pp_rank_0_mp_rank_00_optim_states.pt" in Layout(tmp_path / "out").names
    assert everything(tmp_path / "out")[1]["loss_scale"] == {"value": scale}


def test_an_engine_continues_from_the_layout_as_from_its_own(tmp_path: Path) -> None:
    save(tmp_path / "own", 3)
    with closing(open_source(tmp_path / "own")) as source:
        to_deepspeed(source, tmp_path / "layout", 5, 2)
        to_universal(source, tmp_path / "universal")
    results = []
    for folder in ("own", "layout", "universal"):
        engine = trained(1, steps=0)
        where, client = engine.load_checkpoint(tmp_path / folder)
        assert where is not None
        assert client["epoch"] == 2
        engine.backward(engine(torch.arange(8).view(2, 4)))
        engine.step()
        assert engine.global_steps == 4
        results.append({name: one.detach().clone() for name, one in engine.module.named_parameters()})
    for other in results[1:]:
        assert_same(other, results[0])


@pytest.mark.parametrize("case", ["own", "stage2-bf16", "stage3-bf16", "stage3-bf16-three-ranks"])
def test_the_universal_format_holds_the_checkpoint(case: str, tmp_path: Path) -> None:
    root = FOLDER / case
    if case == "own":
        root = tmp_path / "own"
        save(root, 3, bf16={"enabled": True})
    tensors, values = everything(root)
    with closing(open_source(root)) as source:
        to_universal(source, tmp_path / "run" / "universal")
    assert (tmp_path / "run" / "latest_universal").read_text() == "universal"
    zero = tmp_path / "run" / "universal" / "zero"
    trained = {name.removeprefix("state/").rpartition("/")[0] for name in tensors if name.startswith("state/")}
    for name in trained:
        for file, key in (("fp32", f"model/{name}"), ("exp_avg", f"state/{name}/exp_avg")):
            assert same_bits(torch.load(zero / name / f"{file}.pt", weights_only=True)["param"], tensors[key])
        assert torch.load(zero / name / "step.pt", weights_only=True) == 3
    back, told = everything(tmp_path / "run" / "universal")
    assert_same(back, {name: one for name, one in tensors.items() if not name.startswith("other/")})
    assert told["aliases"] == values["aliases"]
    assert [group["params"] for group in told["optimizer"]["param_groups"]] == [
        [name for name in group["params"] if name != "nothing"] for group in values["optimizer"]["param_groups"]
    ]


def test_the_universal_format_as_deepspeed_writes_it_at_stage_3_is_read(tmp_path: Path) -> None:
    """There masters and states are flat tensors, and shapes are in the model states."""
    root = FOLDER / "stage3-bf16"
    with closing(open_source(root)) as source:
        to_universal(source, tmp_path / "universal")
    (tmp_path / "universal" / "mp_rank_00_model_states.pt").unlink()
    for file in (root / "global_step3").glob("*_model_states.pt"):
        (tmp_path / "universal" / file.name).unlink(missing_ok=True)
        (tmp_path / "universal" / file.name).write_bytes(file.read_bytes())
    for file in (tmp_path / "universal" / "zero").glob("*/*.pt"):
        content = torch.load(file, weights_only=True)
        if isinstance(content, dict):
            torch.save(content["param"].flatten(), file)
    assert_same(everything(tmp_path / "universal")[0], truth("stage3-bf16")[0])


@pytest.mark.parametrize("key", ["fp32", "exp_avg"])
def test_a_file_of_another_parameter_with_as_many_elements_is_refused_by_its_shape(tmp_path: Path, key: str) -> None:
    with closing(open_source(FOLDER / "stage2-bf16")) as source:
        to_universal(source, tmp_path / "universal")
    file = next(
        file
        for file in sorted((tmp_path / "universal" / "zero").glob(f"*/{key}.pt"))
        if torch.load(file, weights_only=True)["param"].dim() == 2
    )
    content = torch.load(file, weights_only=True)
    rows, columns = content["param"].shape
    torch.save({**content, "param": content["param"].reshape(rows * columns // 2, 2, 1)}, file)
    with pytest.raises(CheckpointError, match=rf"{key}\.pt: has the shape .* is it the file of another parameter"):
        open_source(tmp_path / "universal")


def test_files_are_plain_for_every_reader_but_for_the_scaler_that_stage_3_demands(tmp_path: Path) -> None:
    save(tmp_path / "own", 3)
    for stage in (2, 3):
        with closing(open_source(tmp_path / "own")) as source:
            to_deepspeed(source, tmp_path / str(stage), 2, stage)
        for file in (tmp_path / str(stage) / "global_step3").iterdir():
            has_scaler = stage == 3 and file.name.endswith("_optim_states.pt")
            load(file, SCALERS if has_scaler else ())  # raises if a pickle names anything else
            if has_scaler:
                with pytest.raises(CheckpointError, match="loss_scaler"):
                    load(file)


def test_deepspeed_finds_its_loss_scaler_at_stage_3(tmp_path: Path, ranks: Ranks) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 3, "loss_scale_window": 7}
    ranks.run(1, save, tmp_path / "own", 3, fp16=fp16)
    with closing(open_source(tmp_path / "own")) as source:
        saved = dict(source.values["loss_scale"])
        to_deepspeed(source, tmp_path / "out")
    scaler = vars(Layout(tmp_path / "out").states[0]["loss_scaler"])
    assert (scaler["dynamic"], scaler["cur_scale"], scaler["cur_iter"]) == (True, saved["value"], saved["clean"])
    assert (scaler["delayed_shift"], scaler["scale_window"], scaler["dtype"]) == (3, 7, torch.float16)
    assert everything(tmp_path / "out")[1]["loss_scale"]["value"] == saved["value"]
    save(tmp_path / "plain", 3)
    with closing(open_source(tmp_path / "plain")) as source:
        to_deepspeed(source, tmp_path / "without")
    assert vars(Layout(tmp_path / "without").states[0]["loss_scaler"]) == {"cur_scale": 1.0, "dynamic": False}


def test_large_groups_are_cut_as_deepspeed_cuts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "own", 3)
    tensors, values = everything(tmp_path / "own")
    monkeypatch.setattr(export_deepspeed, "SUB_GROUP_SIZE", 40)
    with closing(open_source(tmp_path / "own")) as source:
        to_deepspeed(source, tmp_path / "out", 2)
    layout = Layout(tmp_path / "out")
    shapes = layout.main["param_shapes"]
    assert len(shapes) > 1
    for group in shapes:  # all but its last parameter are less than the limit
        sizes = [-(-size.numel() // 2) for size in group.values()]
        assert sum(sizes[:-1]) < 40
    optimizer = layout.states[0]["optimizer_state_dict"]
    numbers = [number for group in optimizer["param_groups"] for number in group["params"]]
    assert sorted(numbers) == list(range(len(shapes))) == sorted(optimizer["state"])
    assert all(group["bias_correction"] for group in optimizer["param_groups"])
    assert_layout_is(layout, tensors, values)
    held = {name: tensor for name, tensor in tensors.items() if not name.startswith("other/")}
    assert_same(everything(tmp_path / "out")[0], held)


def test_what_the_layout_cannot_hold_is_told(tmp_path: Path) -> None:
    save(tmp_path / "own", 1)
    with closing(open_source(tmp_path / "own")) as source:
        values = dict(source.values)
        values["client"] = {"module": 3}
        source.values = values
        with pytest.raises(CheckpointError, match="client_state has 'module', which is an entry of DeepSpeed's own"):
            to_deepspeed(source, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        values["client"] = {}
        values["scalar/norm.weight/step"] = 2
        with pytest.warns(UserWarning, match="step counts differ in a parameter group"):
            to_deepspeed(source, tmp_path / "out")
        values["optimizer"] = {"param_groups": [{"lr": 1}, {"lr": 2}]}
        with pytest.raises(CheckpointError, match="does not say which parameters belong to which of its 2"):
            to_deepspeed(source, tmp_path / "other")
        values["optimizer"] = {"param_groups": [{"lr": 1}]}
        values["frozen"] = ["../shift"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            to_deepspeed(source, tmp_path / "one")
    assert len(Layout(tmp_path / "one").main["param_shapes"]) == 1


def test_names_that_are_no_folders_are_refused(tmp_path: Path) -> None:
    with closing(open_source(FOLDER / "stage2-bf16")) as source:
        source.tensors["model/../../escape"] = source.tensors["model/norm.weight"]
        source.values["frozen"].append("../../escape")
        with pytest.raises(CheckpointError, match="the universal format needs a folder of that name"):
            to_universal(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_buffers_stay_buffers_in_copies(tmp_path: Path) -> None:
    save(tmp_path / "own", 1)
    with closing(open_source(tmp_path / "own")) as source:
        to_own(source, tmp_path / "copies", "one")
    assert set(everything(tmp_path / "copies")[1]["buffers"]) == {"calls", "scale"}


def test_the_commands_convert(tmp_path: Path) -> None:
    save(tmp_path / "own", 2)
    tensors, values = everything(tmp_path / "own")
    out = command("checkpoint", "export", tmp_path / "own", tmp_path / "ds", "--format", "deepspeed", "--ranks", "3")
    assert (out.returncode, out.stderr) == (0, "")
    assert len(Layout(tmp_path / "ds").optim) == 3
    assert_layout_is(Layout(tmp_path / "ds"), tensors, values)
    out = command("checkpoint", "ds-to-universal", tmp_path / "ds", tmp_path / "u")
    assert (out.returncode, out.stderr) == (0, "")
    assert_same(
        everything(tmp_path / "u")[0],
        {name: one for name, one in tensors.items() if not name.startswith("other/")},
    )
    out = command("checkpoint", "export", tmp_path / "own", tmp_path / "x", "--format", "dcp", "--ranks", "3")
    assert out.returncode == 2
    assert "--ranks: only for deepspeed, not for dcp" in out.stderr


def test_a_model_without_training_state_is_exported(tmp_path: Path) -> None:
    save(tmp_path / "own", 2)
    with closing(open_source(tmp_path / "own")) as source:
        to_safetensors(source, tmp_path / "hf")
    with closing(open_source(tmp_path / "hf")) as source:
        to_deepspeed(source, tmp_path / "out", 2, 3)
    assert_same(DeepSpeedModel(tmp_path / "out").tensors, everything(tmp_path / "hf")[0])


class DeepSpeedModel:
    def __init__(self, path: Path) -> None:
        with closing(DeepSpeedSource(path)) as source:
            self.tensors = {name: read_full(source, name) for name in source.tensors}
