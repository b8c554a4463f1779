"""Small courtesies: tab completion, an example in every help, ranks in a notebook, reports as tables."""

from __future__ import annotations

import dataclasses
import itertools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import typer
from typer.main import get_command
from typer.testing import CliRunner

import shardwell
from shardwell.cli import app
from shardwell.cli.examples import EXAMPLES
from shardwell.cli.failures import RankFailure, RanksFailedError, RunInterruptedError, exit_like_ranks
from shardwell.cli.train_command import _way_on
from shardwell.errors import ShardwellError
from shardwell.train.recipe import Recipe
from tests.support.command import ROOT, environment
from tests.support.patience import HANG


def commands(group: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    found = {}
    for name, command in getattr(group, "commands", {}).items():
        found |= commands(command, (*path, name)) or {(*path, name): command}
    return found


def test_every_command_shows_an_example_that_names_it() -> None:
    found = commands(get_command(app))
    assert {path[-1] for path in found} == set(EXAMPLES)
    for path, command in found.items():
        assert f"Example: shardwell {' '.join(path)}" in command.epilog


@pytest.mark.parametrize("command", sorted(EXAMPLES))
def test_the_options_of_an_example_exist(command: str) -> None:
    example = EXAMPLES[command][0]
    found = next(one for path, one in commands(get_command(app)).items() if path[-1] == command)
    known = {option for parameter in found.params for option in parameter.opts}
    own = example.split("train.py")[0]  # what follows a script is the script's
    assert {word for word in own.split() if word.startswith("-")} <= known
    assert isinstance(found, typer.core.TyperCommand)


def test_errors_of_train_name_options_that_exist() -> None:
    """Those of a recipe that have no option of their own are set by `--set`."""
    found = commands(get_command(app))[("train",)]
    known = {option for parameter in found.params for option in parameter.opts} | {"--local-dir"}  # hf's
    for file in (ROOT / "src" / "shardwell" / "train").glob("*.py"):
        assert set(re.findall(r"--[a-z][a-z-]+", file.read_text())) <= known, file
    fields = set(Recipe.model_fields)
    named = [re.findall(r"--set (\w+)=", file.read_text()) for file in (ROOT / "src" / "shardwell").glob("train/*.py")]
    assert {"tokenizer", "text_field"} <= set(itertools.chain(*named)) <= fields


@pytest.mark.parametrize("command", [("run",), ("plan",), ("checkpoint", "export"), ()])
def test_help_names_no_types(command: tuple[str, ...]) -> None:
    text = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "160"}).output
    assert "Usage: " in text
    assert not re.search(r"<\w+|bool|x>=|<=x", text), text
    if command == ("run",):
        assert re.search(r"--ranks\s+-n\s+N\s+Ranks on this node", text)
        assert CliRunner().invoke(app, ["run", "-n", "0", "x.py"]).exit_code == 2  # a range is still one


def test_tab_completion_shows_the_api() -> None:
    assert set(shardwell.__all__) == set(dir(shardwell))
    for name in shardwell.__all__:
        assert getattr(shardwell, name) is not None


def trained(stage: int) -> float:
    """A step on this rank, as a cell of a notebook would do it."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # a fork has no other threads
    config = {"zero_optimization": {"stage": stage}, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    model = torch.nn.Linear(4, 1)
    engine = shardwell.initialize(model=model, config=config, device="cpu").engine
    for _ in range(3):
        loss = engine(torch.full((2, 4), 1.0 + dist.get_rank())).square().mean()
        engine.backward(loss)
        engine.step()
    return float(loss.detach()) + 100 * dist.get_world_size()


def refuse() -> None:
    if dist.is_initialized():
        raise AssertionError
    raise ValueError("the cell is wrong")


def test_a_notebook_runs_a_function_on_ranks() -> None:
    found = shardwell.notebook_launcher(trained, (1,), num_ranks=2)
    assert [200 <= value < 300 for value in found] == [True, True]


def multiplied() -> float:
    return float((torch.ones(300, 300) @ torch.ones(300, 300)).exp().sum().isinf())


def test_ranks_compute_after_the_notebook_has_used_threads() -> None:
    """In a process of its own: this one computes with one thread."""
    code = (
        "import torch, shardwell\ntorch.set_num_threads(2)\nfrom tests.cli.test_courtesies import multiplied\n"
        "torch.set_num_threads(2)\ntorch.nn.functional.gelu(torch.randn(1000, 1000)); multiplied()\n"
        "print(shardwell.notebook_launcher(multiplied, num_ranks=2))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=HANG
    )
    assert done.stdout.strip() == "[1.0, 1.0]", done.stderr


def test_an_error_of_a_rank_is_shown_in_the_notebook() -> None:
    with pytest.raises(ShardwellError, match=r"a rank failed:[\s\S]*ValueError: the cell is wrong"):
        shardwell.notebook_launcher(refuse, num_ranks=2)
    with pytest.raises(ShardwellError, match="found 0 ranks"):
        shardwell.notebook_launcher(refuse, num_ranks=0)


def test_reports_are_tables_in_a_notebook_and_never_empty() -> None:
    config = {"zero_optimization": {"stage": 1}, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine = shardwell.initialize(model=torch.nn.Linear(4, 1), config=config, device="cpu").engine
    with engine.record(timing=True) as trace:
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
    with engine.record() as plain:
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
    starts = {
        "<table>": (engine.memory(), engine.traffic(), engine.units),
        "<svg": (trace, trace.timeline),
        "<pre": (plain,),
    }
    for start, reports in starts.items():
        for report in reports:
            assert report._repr_html_().startswith(start)
            assert str(report).strip()
    assert '<td style="text-align:right">5</td>' in engine.units._repr_html_()
    engine.destroy()


def test_a_notebook_that_is_a_rank_already_is_told() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ShardwellError, match="this notebook is a rank already"):
            shardwell.notebook_launcher(trained, (1,))
    finally:
        dist.destroy_process_group()


def test_an_error_of_a_command_that_runs_own_code_has_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = RankFailure(0, 1, "ShardwellError: no rows", "Traceback ...", 0.0, ("ShardwellError", "Exception"))
    other = dataclasses.replace(own, message="KeyError: 'a'", kinds=("KeyError", "Exception"))
    shown = []
    for failure, runs_own_code in ((own, True), (own, False), (other, True)):
        RanksFailedError([failure]).show(runs_own_code=runs_own_code)
        shown.append("Traceback" in capsys.readouterr().err)
    assert shown == [False, True, True]
    monkeypatch.setenv("SHARDWELL_DEBUG", "1")
    RanksFailedError([own]).show(runs_own_code=True)
    assert "Traceback" in capsys.readouterr().err


def test_who_interrupts_a_run_reads_how_it_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ("No checkpoint was saved yet", "The same command goes on from the last checkpoint in"):
        with pytest.raises(typer.Exit), exit_like_ranks(then=lambda: _way_on(tmp_path)):
            raise RunInterruptedError(2)
        assert words in " ".join(capsys.readouterr().err.split())
        (tmp_path / "checkpoints" / "global_step4").mkdir(parents=True, exist_ok=True)
        (tmp_path / "checkpoints" / "global_step4" / "manifest.json").touch()


@pytest.mark.parametrize("named", ["argument", "SHARDWELL_DEVICE"])
def test_a_gpu_that_is_not_there_is_said_in_words(monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    device = f"cuda:{torch.cuda.device_count()}"
    if named == "SHARDWELL_DEVICE":
        monkeypatch.setenv(named, device)
    config = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    given = device if named == "argument" else None
    with pytest.raises(
        ShardwellError, match=rf"'{device}', but torch .* finds .* CUDA devices? here. Leave the device"
    ):
        shardwell.initialize(model=torch.nn.Linear(2, 2), config=config, device=given)
