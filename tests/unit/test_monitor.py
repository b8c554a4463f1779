"""What rank 0 prints and writes while a model trains: the numbers are those of the run, and nothing waits for them."""

from __future__ import annotations

import csv
import os
import re
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwell
from shardwell.errors import ConfigError
from shardwell.memory import Device
from shardwell.monitor.flops import flops_per_token, peak_flops
from shardwell.monitor.inputs import BatchSize, size_of
from shardwell.monitor.numbers import counted, duration, short
from shardwell.monitor.phases import Phases, phases_line
from tests.support.models import Gpt, batches, share, zero
from tests.support.ranks import Ranks

ADAMW = {"type": "AdamW", "params": {"lr": 0.01}}


def trained(config: dict[str, Any], steps: int = 4, model: nn.Module | None = None) -> tuple[Any, list[float]]:
    """An engine after some steps with engine.backward, and the losses that it had."""
    torch.manual_seed(0)
    engine = shardwell.initialize(model=model or Gpt(), config=zero(1, optimizer=ADAMW, **config), device="cpu").engine
    losses = []
    for batch in batches(steps, 4):
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return engine, losses


def column(path: Path) -> list[tuple[int, float]]:
    with path.open() as file:
        rows = list(csv.reader(file))[1:]
    return [(int(place), float(value)) for place, value in rows]


def test_a_line_has_loss_norm_rate_speed_memory_and_the_time_that_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    schedule = {"type": "WarmupDecayLR", "params": {"total_num_steps": 20, "warmup_num_steps": 1}}
    engine, losses = trained({"steps_per_print": 4, "scheduler": schedule})
    line = capsys.readouterr().out.splitlines()[-1]
    number = r"[\d.e+-]+"
    assert re.fullmatch(
        rf"step 4/20  loss {short(losses[-1])}  norm {short(engine.get_global_grad_norm())}  lr {number}"
        rf"  {number} s/step  {number}k? tokens/s  {number} [kM]FLOP/s  device 110.8 KiB  ETA \d\d:\d\d",
        line,
    ), line


def test_the_last_step_of_a_schedule_has_a_line_if_none_was_due(capsys: pytest.CaptureFixture[str]) -> None:
    schedule = {"type": "WarmupDecayLR", "params": {"total_num_steps": 3, "warmup_num_steps": 1}}
    trained({"steps_per_print": 10, "scheduler": schedule}, steps=3)
    assert re.match(r"step 3/3  loss \d", capsys.readouterr().out.splitlines()[-1])


def test_work_that_takes_long_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Set-up, a save and a load, which take no time here."""
    monkeypatch.setattr("shardwell.long_work.BEFORE_THE_FIRST", 0.0)
    engine, _ = trained({}, steps=1)
    engine.save_checkpoint(str(tmp_path))
    engine.load_checkpoint(str(tmp_path))
    said = capsys.readouterr().err
    for words in ("initialize: units sharded: 1 of ", "saving global_step1: ", f"loading {tmp_path}"):
        assert words in said


def test_the_loss_of_accumulated_micro_steps_is_their_mean(tmp_path: Path) -> None:
    config = {"gradient_accumulation_steps": 2, "csv_monitor": {"enabled": True, "output_path": str(tmp_path)}}
    engine, losses = trained(config)
    engine.destroy()
    found = column(tmp_path / "shardwell" / "Train_Samples_train_loss.csv")
    assert found == [
        (2, pytest.approx((losses[0] + losses[1]) / 2)),
        (4, pytest.approx((losses[2] + losses[3]) / 2)),
    ]


@pytest.mark.parametrize("calls", ["optimizer.step", "engine.step"])
def test_a_plain_backward_shows_the_models_own_loss(tmp_path: Path, calls: str) -> None:
    config = zero(1, csv_monitor={"enabled": True, "output_path": str(tmp_path)})
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters())
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=config, device="cpu").engine
    losses = []
    for batch in batches(3, 4):
        loss = engine(batch)
        loss.backward()
        optimizer.step() if calls == "optimizer.step" else engine.step()
        losses.append(float(loss.detach()))
    engine.destroy()
    found = column(tmp_path / "shardwell" / "Train_Samples_train_loss.csv")
    assert [value for _, value in found] == pytest.approx(losses)


class Refuses(torch.overrides.TorchFunctionMode):
    """Fails where a tensor's value is read by the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert getattr(func, "__name__", "") not in ("item", "tolist", "__float__", "cpu", "__bool__"), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("writes", [True, False])
def test_no_value_is_read_between_two_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str], writes: bool) -> None:
    """With files all steps wait to be read; without, only the step of a line does."""
    files = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path)}} if writes else {}
    engine, _ = trained({"steps_per_print": 100, "wall_clock_breakdown": True, **files}, steps=1)
    monitor = engine.monitor
    assert monitor is not None
    loss = torch.zeros(1, requires_grad=True) * 2
    with Refuses():
        for _ in range(5):
            monitor._forward_begins(engine, (torch.zeros(2, 3, dtype=torch.long),), {})
            monitor._forward_ends(engine, (), loss)
            monitor.backward_begins(loss, is_divided=False)
            monitor.backward_ends()
            monitor.step_begins()
            monitor.step_ends()
    assert len(monitor._output.waiting) == (6 if writes else 0)
    assert monitor._losses == []
    assert "step" not in capsys.readouterr().out.splitlines()[-1][:5]


def calls_in(entries: Callable[[], None]) -> int:
    """How many functions of Python and of C are called."""
    found = [0]

    def count(frame: Any, event: str, argument: Any) -> None:
        found[0] += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        entries()
    finally:
        sys.setprofile(None)
    return found[0]


@pytest.mark.parametrize("named", [True, False])
def test_a_step_without_a_line_costs_a_few_calls(named: bool) -> None:
    """Calls do not depend on the load of the machine; one that nothing precedes takes about a microsecond."""
    engine, _ = trained({"steps_per_print": 100}, steps=1)
    monitor, tokens, loss = engine.monitor, torch.zeros(2, 3, dtype=torch.long), torch.zeros(1, requires_grad=True)

    def step() -> None:
        monitor._forward_begins(engine, () if named else (tokens,), {"input_ids": tokens} if named else {})
        monitor._forward_ends(engine, (), loss)
        monitor.backward_begins(loss, is_divided=False)
        monitor.backward_ends()
        monitor.step_begins()
        monitor.step_ends()

    step()
    assert calls_in(step) <= 18


def test_a_resumed_run_has_its_lines_at_the_same_steps_and_no_load_in_their_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = trained({}, steps=3)
    engine.save_checkpoint(str(tmp_path))
    engine.destroy()
    engine, _ = trained({"steps_per_print": 4}, steps=0)
    now = time.perf_counter
    monkeypatch.setattr("shardwell.monitor.monitor.time.perf_counter", lambda: now() + (1000 if loaded else 0))
    loaded: list[bool] = []
    restore = shardwell.engine.checkpoints.restore_values
    monkeypatch.setattr(
        "shardwell.engine.checkpoints.restore_values", lambda *given: (loaded.append(True), restore(*given))
    )
    engine.load_checkpoint(str(tmp_path))
    engine.backward(engine(batches(1, 4)[0]))
    engine.step()
    line = capsys.readouterr().out.splitlines()[-1]
    found = re.fullmatch(r"step 4  loss \S+ .*  ([\d.e-]+) s/step .*", line)
    assert found, line
    assert float(found[1]) < 100  # 250 if the clock that was put forward counts


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((torch.zeros(4, 7, dtype=torch.long),), {}),
        ((), {"labels": torch.zeros(2, 3, dtype=torch.long), "input_ids": torch.zeros(4, 7, dtype=torch.long)}),
        ((torch.zeros(4, 3, 8, 8),), {}),
        ((torch.zeros(4, 7), torch.zeros(4, 9, dtype=torch.long)), {}),
        ((torch.zeros(4, 3, dtype=torch.long),), {"input_ids": torch.zeros(4, 7, dtype=torch.long)}),
        (({"input_ids": torch.zeros(4, 7, dtype=torch.int32)},), {}),
        ((torch.zeros(()),), {}),
        ((), {}),
    ],
)
def test_the_short_way_to_a_batchs_size_finds_what_the_long_one_finds(args: Any, kwargs: Any) -> None:
    size = BatchSize()
    size.add(args, kwargs)
    samples, length = size_of(args, kwargs)
    assert (size.last_samples, size.samples, size.tokens) == (samples, samples, samples * length)


def test_the_passes_of_a_pipeline_are_one_phase() -> None:
    phases = Phases(Device(torch.device("cpu")))
    phases.mark("forward and backward")
    phases.mark("step")
    line = phases_line(phases.take(), steps=1)
    assert line.startswith("  time of a step: forward and backward ")
    assert "other" not in line


def test_the_numbers_of_a_run_do_not_depend_on_its_monitor(tmp_path: Path) -> None:
    every = {
        "steps_per_print": 1,
        "wall_clock_breakdown": True,
        "memory_breakdown": True,
        "comms_logger": {"enabled": True},
        "flops_profiler": {"enabled": True, "output_file": str(tmp_path / "flops.txt")},
        "csv_monitor": {"enabled": True, "output_path": str(tmp_path)},
    }
    assert trained(every)[1] == trained({})[1]
    assert "blocks.0.up" in (tmp_path / "flops.txt").read_text()


def test_without_keys_there_is_no_monitor() -> None:
    assert trained({}, steps=1)[0].monitor is None


def on_two_ranks(folder: str) -> tuple[str, bool, int]:
    """What is printed at stage 3, whether this rank has a monitor, and how many collectives traffic counts."""
    config = zero(
        3,
        optimizer=ADAMW,
        steps_per_print=2,
        wall_clock_breakdown=True,
        memory_breakdown=True,
        comms_logger={"enabled": True},
        csv_monitor={"enabled": True, "output_path": folder},
    )
    torch.manual_seed(0)
    engine = shardwell.initialize(model=Gpt(), config=config).engine
    path = Path(folder, f"out{dist.get_rank()}")
    before = os.dup(1)
    with path.open("w") as file:
        os.dup2(file.fileno(), 1)
        for batch in batches(2, 4):
            engine.backward(engine(share(batch, dist.get_rank(), 2)))
            engine.step()
        sys.stdout.flush()
        os.dup2(before, 1)
    return path.read_text(), engine.monitor is not None, sum(engine.traffic().calls.values())


def test_only_rank_0_speaks_and_its_tables_count_what_was_moved(ranks: Ranks, tmp_path: Path) -> None:
    (text, speaks, calls), (other, is_second, _) = ranks.run(2, on_two_ranks, str(tmp_path))
    assert (speaks, is_second, other) == (True, False, "")
    assert "time of a step: forward" in text
    assert "memory on this rank" in text
    logged = [int(row.split("│")[2]) for row in text.splitlines() if row.startswith(("│ all_gather", "│ reduce_sc"))]
    assert sum(logged) == 2 * (calls - 1)  # two steps, without the norm
    assert (tmp_path / "shardwell" / "Train_Samples_tokens_per_sec.csv").exists()


@pytest.mark.parametrize(
    ("block", "package"), [("tensorboard", "tensorboard"), ("wandb", "wandb"), ("comet", "comet_ml")]
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, block: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=f"{block}.enabled is true.*pip install {package}"):
        trained({block: {"enabled": True}}, steps=0)


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Stand-ins for the packages of trackers, which tests cannot reach: they note what they are told."""
    told: list[tuple[str, Any]] = []

    class Run:
        def log(self, values: Any, step: int) -> None:
            told.append(("wandb", (step, dict(values))))

        def log_metric(self, name: str, value: float, step: int) -> None:
            told.append(("comet", (name, step)))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            told.append(("tensorboard", (name, step)))

        def set_name(self, name: str) -> None:
            told.append(("named", name))

        def flush(self) -> None: ...
        def close(self) -> None: ...

        finish = end = close

    def made(kind: str) -> Any:
        def make(**options: Any) -> Run:
            told.append((f"{kind} made", options))
            return Run()

        return make

    modules = {
        "wandb": {"init": made("wandb")},
        "comet_ml": {"start": made("comet")},
        "tensorboard": {},
        "torch.utils.tensorboard": {"SummaryWriter": made("tensorboard")},
    }
    for name, content in modules.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return told


def test_trackers_get_every_step_under_deepspeeds_names(packages: list[tuple[str, Any]], tmp_path: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "tensorboard": {"enabled": True, "output_path": str(tmp_path), "job_name": "a"},
        "wandb": {"enabled": True, "project": "p", "team": "t"},
        "comet": {"enabled": True, "experiment_name": "e", "samples_log_interval": 8},
    }
    engine, _ = trained(config, steps=10)
    engine.monitor.write_events([("mine", 1.5, 40)])
    engine.destroy()
    names = {one[0] for kind, one in packages if kind == "tensorboard"}
    assert {"Train/Samples/train_loss", "Train/Samples/lr", "Train/Samples/grad_norm", "mine"} <= names
    assert ("wandb made", {"project": "p", "group": None, "entity": "t"}) in packages
    losses = [place for kind, (place, found) in packages_of(packages, "wandb") if "Train/Samples/train_loss" in found]
    assert losses == [4 * step for step in range(1, 11)]
    assert ("named", "e") in packages
    spaced = [place for kind, (name, place) in packages_of(packages, "comet") if name.endswith("train_loss")]
    assert spaced == [4, 12, 20, 28, 36]


def packages_of(told: list[tuple[str, Any]], kind: str) -> list[tuple[str, Any]]:
    return [one for one in told if one[0] == kind]


def test_flops_follow_from_the_parameters_that_multiply() -> None:
    model = Gpt(width=16, blocks=2, vocab=29)
    looked_up = model.embed.weight.numel()
    numel = sum(p.numel() for p in model.parameters())
    assert flops_per_token(model, 8) == 6 * (numel - looked_up)
    tied = Gpt(width=16, blocks=2, vocab=29, tied=True)
    assert flops_per_token(tied, 8) == 6 * sum(p.numel() for p in tied.parameters())
    for parameter in model.parameters():
        parameter.requires_grad = False
    assert flops_per_token(model, 8) == 4 * (numel - looked_up)
    assert flops_per_token(nn.Sequential(nn.Conv2d(1, 1, 1)), 8) is None
    assert flops_per_token(nn.Linear(2, 2), 8) is None


def test_peaks_are_those_of_the_device_and_of_16_bits() -> None:
    assert peak_flops("NVIDIA H200", torch.bfloat16) == 989e12
    assert peak_flops("NVIDIA H200", None) is None
    assert peak_flops("cpu", torch.bfloat16) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (3.14159, "3.142"),
        (0.00012346, "0.0001235"),
        (1e-9, "1e-09"),
        (12345.6, "12350"),
        (float("inf"), "inf"),
    ],
)
def test_numbers_have_four_digits(value: float, text: str) -> None:
    assert short(value) == text


def test_counts_and_times_are_short() -> None:
    assert (counted(1_345_000_000), counted(12), duration(59.6), duration(3661)) == ("1.345G", "12", "01:00", "1:01:01")
