"""Writers of metrics: CSV files, TensorBoard, Weights & Biases, Comet. Each takes events of (name, value, x).

A package that a writer needs is imported when the writer is made; without it there is an error that says how to install
it.
"""

from __future__ import annotations

import csv
import importlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol, TextIO

from shardwell.config import Config
from shardwell.config.monitoring import CometConfig, CsvMonitorConfig, TensorBoardConfig, WandbConfig
from shardwell.errors import ConfigError

MetricEvent = tuple[str, float, int]  # name, value, and the place on the x-axis


class MetricWriter(Protocol):
    """A place that metrics are written to."""

    def write(self, events: Iterable[MetricEvent]) -> None:
        """Write events, so that they can be read when this returns."""

    def close(self) -> None:
        """Write what is left, and release the place."""


def writers_for(config: Config) -> list[MetricWriter]:
    """Return the writers that a configuration asks for."""
    found: list[MetricWriter] = []
    if config.csv_monitor.enabled:
        found.append(CsvWriter(config.csv_monitor))
    if config.tensorboard.enabled:
        found.append(TensorBoardWriter(config.tensorboard))
    if config.wandb.enabled:
        found.append(WandbWriter(config.wandb))
    if config.comet.enabled:
        found.append(CometWriter(config.comet))
    return found


class CsvWriter:
    """One file for each name, such as Train_Samples_train_loss.csv: a header (step,train_loss), then a row an event."""

    def __init__(self, config: CsvMonitorConfig) -> None:
        self._folder = _folder(config.output_path or "csv_monitor", config.job_name, "csv_monitor")
        self._files: dict[str, TextIO] = {}

    def write(self, events: Iterable[MetricEvent]) -> None:
        """Append the events to their files."""
        used = set()
        for name, value, place in events:
            csv.writer(self._file(name)).writerow([place, value])
            used.add(name)
        for name in used:
            self._files[name].flush()

    def _file(self, name: str) -> TextIO:
        if name not in self._files:
            path = self._folder / f"{re.sub(r'[^A-Za-z0-9.-]+', '_', name)}.csv"
            is_new = not path.exists() or path.stat().st_size == 0
            self._files[name] = path.open("a", newline="", encoding="utf-8")
            if is_new:
                csv.writer(self._files[name]).writerow(["step", name.rpartition("/")[2]])
        return self._files[name]

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()


class TensorBoardWriter:
    """Event files in a folder that `tensorboard --logdir` shows."""

    def __init__(self, config: TensorBoardConfig) -> None:
        _package("tensorboard", "tensorboard", "tensorboard")
        module = importlib.import_module("torch.utils.tensorboard")
        folder = _folder(config.output_path or "runs", config.job_name, "tensorboard")
        self._writer: Any = module.SummaryWriter(log_dir=os.fspath(folder))

    def write(self, events: Iterable[MetricEvent]) -> None:
        """Add the events as scalars."""
        for name, value, place in events:
            self._writer.add_scalar(name, value, place)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class WandbWriter:
    """A run of Weights & Biases."""

    def __init__(self, config: WandbConfig) -> None:
        module = _package("wandb", "wandb", "wandb")
        self._run: Any = module.init(project=config.project, group=config.group, entity=config.team)

    def write(self, events: Iterable[MetricEvent]) -> None:
        """Log the events, all of one place in one call: a later call may not go back to an earlier place."""
        by_place: dict[int, dict[str, float]] = {}
        for name, value, place in events:
            by_place.setdefault(place, {})[name] = value
        for place in sorted(by_place):
            self._run.log(by_place[place], step=place)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class CometWriter:
    """An experiment of Comet; a metric is sent once in `samples_log_interval` samples."""

    def __init__(self, config: CometConfig) -> None:
        module = _package("comet_ml", "comet", "comet_ml")
        options = {
            "api_key": config.api_key,
            "workspace": config.workspace,
            "project": config.project,
            "experiment_key": config.experiment_key,
            "mode": config.mode,
            "online": config.online,
        }
        self._experiment: Any = module.start(**{name: value for name, value in options.items() if value is not None})
        if config.experiment_name is not None:
            self._experiment.set_name(config.experiment_name)
        self._interval, self._last = config.samples_log_interval, dict[str, int]()

    def write(self, events: Iterable[MetricEvent]) -> None:
        """Log the events that are due."""
        for name, value, place in events:
            if name not in self._last or place - self._last[name] >= self._interval:
                self._experiment.log_metric(name, value, step=place)
                self._last[name] = place

    def close(self) -> None:
        """End the experiment."""
        self._experiment.end()


def _package(module: str, block: str, name: str) -> Any:
    """Return a package that a block of the configuration needs."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != module:
            raise
        raise ConfigError(
            f"{block}.enabled is true, but the package {name} is not installed: pip install {name}, or set it to false"
        ) from None


def _folder(path: str, job: str, block: str) -> Path:
    """Return the folder of a run, and make it."""
    folder = Path(path, job)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{block}.output_path: the folder '{folder}' cannot be made ({error.strerror}); name another one"
        ) from None
    return folder
