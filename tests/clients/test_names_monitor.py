"""DeepSpeed's monitors, FLOPs profiler and log of collectives under their own names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwell
from shardwell.compat.deepspeed_api import comm
from shardwell.compat.deepspeed_api.config_models import get_monitor_config
from shardwell.compat.deepspeed_api.flops_profiler import FlopsProfiler, get_model_profile
from shardwell.compat.deepspeed_api.initialization import initialize
from shardwell.compat.deepspeed_api.monitor import MonitorMaster, SilentMonitor, csvMonitor
from shardwell.compat.deepspeed_api.names import resolve
from shardwell.monitor.monitor import Monitor
from tests.support.models import Gpt, batches, share, zero
from tests.support.ranks import Ranks

ENGINE_SOURCE = "".join(path.read_text() for path in Path(shardwell.__file__).parent.glob("engine/*.py"))
ADAMW = {"type": "AdamW", "params": {"lr": 0.01}}


@pytest.mark.parametrize(
    "name",
    [
        "deepspeed.monitor.monitor.MonitorMaster",
        "deepspeed.monitor.config.get_monitor_config",
        "deepspeed.monitor.csv_monitor.csvMonitor",
        "deepspeed.monitor.tensorboard.TensorBoardMonitor",
        "deepspeed.monitor.wandb.WandbMonitor",
        "deepspeed.monitor.comet.CometMonitor",
        "deepspeed.profiling.flops_profiler.FlopsProfiler",
        "deepspeed.profiling.flops_profiler.get_model_profile",
        "deepspeed.profiling.flops_profiler.profiler.get_model_profile",
    ],
)
def test_the_names_are_in_the_table(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    assert callable(resolve(module, attribute))


def test_a_monitor_writes_the_events_that_it_is_given(tmp_path: Path) -> None:
    config = get_monitor_config({"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "a"}})
    master = MonitorMaster(config)
    assert (master.enabled, master.csv_monitor.enabled, master.tb_monitor.enabled) == (True, True, False)
    master.write_events([("Train/loss", torch.tensor(0.5), 8), ("Train/loss", 0.25, 16)])
    assert (tmp_path / "a" / "Train_loss.csv").read_text().split() == ["step,loss", "8,0.5", "16,0.25"]
    assert not csvMonitor(get_monitor_config({})).enabled


def test_the_profiler_counts_the_operations_of_a_forward(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False))
    flops, macs, parameters = get_model_profile(model, input_shape=(2, 8), as_string=False)
    expected = 2 * (8 * 16 + 16 * 4) * 2
    assert (flops, macs, parameters) == (expected, expected // 2, 192)
    assert "FLOPs of one forward by module" in capsys.readouterr().out
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(torch.ones(2, 8))
    profiler.stop_profile()
    assert (profiler.get_total_flops(), profiler.get_total_params(as_string=True)) == (expected, "192")
    profiler.end_profile()


def test_an_engine_without_output_has_a_monitor_that_is_off() -> None:
    engine: Any = initialize(model=Gpt(), config={**zero(1, optimizer=ADAMW), "train_batch_size": 4})[0]
    engine.backward(engine(batches(1, 4)[0]))
    engine.step()
    assert (engine.monitor.enabled, engine.flops_profiler_enabled()) == (False, False)
    engine.monitor.write_events([("a", 1.0, 1)])


def test_files_have_each_step_when_it_has_ended(tmp_path: Path) -> None:
    files = {"enabled": True, "output_path": str(tmp_path), "job_name": "a"}
    config = {**zero(1, optimizer=ADAMW), "train_batch_size": 4, "csv_monitor": files}
    engine: Any = initialize(model=Gpt(), config=config)[0]
    for number in (1, 2):
        engine.backward(engine(batches(1, 4)[0]))
        engine.step()
        for name in ("train_loss", "lr"):
            rows = (tmp_path / "a" / f"Train_Samples_{name}.csv").read_text().split()
            assert (rows[0], len(rows)) == (f"step,{name}", number + 1)
    assert rows[1:] == ["4,0.01", "8,0.01"]


def logged_collectives() -> tuple[int, dict[str, Any] | None]:
    """The payload of one step by engine.traffic(), and DeepSpeed's summary of the log."""
    config = {**zero(3, optimizer=ADAMW), "train_batch_size": 4, "comms_logger": {"enabled": True}}
    engine: Any = initialize(model=Gpt(), config=config)[0]
    comm.reset_log()
    engine.backward(engine(share(batches(1, 4)[0], dist.get_rank(), 2)))
    engine.step()
    found = comm.log_summary(return_dict=True)
    return engine.traffic().total(), found


def test_the_log_of_collectives_has_the_bytes_that_were_received(ranks: Ranks) -> None:
    (total, found), (_, other) = ranks.run(2, logged_collectives)
    assert other == {}
    assert found is not None
    assert sum(one["bytes"] for one in found.values()) == total
    assert set(found) == {"all_gather", "reduce_scatter"}
    assert all(one["seconds"] > 0 for one in found.values())


def test_a_silent_monitor_answers_all_that_an_engine_tells_a_monitor() -> None:
    told = {name for name in vars(Monitor) if not name.startswith("_") and callable(getattr(Monitor, name))}
    asked = {name for name in told if f"monitor.{name}(" in ENGINE_SOURCE}
    assert {"begin_anew", "step_ends", "close"} <= asked
    assert not {name for name in asked if not hasattr(SilentMonitor, name)}
