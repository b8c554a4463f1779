"""DeepSpeed's monitors: one for each place that metrics are written to, and one for all of them.

Each takes the configuration as `get_monitor_config` returns it, and writes on rank 0 only, as DeepSpeed's do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shardwell.compat.deepspeed_api import comm
from shardwell.config.monitoring import CometConfig, CsvMonitorConfig, TensorBoardConfig, WandbConfig
from shardwell.monitor.writers import (
    CometWriter,
    CsvWriter,
    MetricEvent,
    MetricWriter,
    TensorBoardWriter,
    WandbWriter,
)


class Monitor:
    """A monitor that writes events of (name, value, x) if its block is enabled."""

    _block, _config_class, _writer_class = "", CsvMonitorConfig, CsvWriter  # of the places below

    def __init__(self, monitor_config: Any) -> None:
        self.monitor_config = monitor_config
        given = getattr(monitor_config, self._block, monitor_config)
        self.enabled = bool(getattr(given, "enabled", False))
        self._writer: MetricWriter | None = None
        if self.enabled and comm.get_rank() == 0:
            fields = self._config_class.model_fields
            found = {name: getattr(given, name) for name in fields if getattr(given, name, None) is not None}
            self._writer = self._writer_class(self._config_class.model_validate(found))

    def write_events(self, event_list: Iterable[MetricEvent]) -> None:
        """Write events on rank 0."""
        if self._writer is not None:
            self._writer.write([(name, float(value), int(place)) for name, value, place in event_list])


class csvMonitor(Monitor):  # noqa: N801  (DeepSpeed's name)
    """CSV files."""

    _block, _config_class, _writer_class = "csv_monitor", CsvMonitorConfig, CsvWriter


class TensorBoardMonitor(Monitor):
    """TensorBoard."""

    _block, _config_class, _writer_class = "tensorboard", TensorBoardConfig, TensorBoardWriter  # type: ignore[assignment]


class WandbMonitor(Monitor):
    """Weights & Biases."""

    _block, _config_class, _writer_class = "wandb", WandbConfig, WandbWriter  # type: ignore[assignment]


class CometMonitor(Monitor):
    """Comet."""

    _block, _config_class, _writer_class = "comet", CometConfig, CometWriter  # type: ignore[assignment]


class MonitorMaster:
    """All monitors that are enabled."""

    def __init__(self, monitor_config: Any) -> None:
        kinds = (TensorBoardMonitor, WandbMonitor, csvMonitor, CometMonitor)
        self.tb_monitor, self.wandb_monitor, self.csv_monitor, self.comet_monitor = (
            kind(monitor_config) for kind in kinds
        )
        self._all = (self.tb_monitor, self.wandb_monitor, self.csv_monitor, self.comet_monitor)
        self.enabled = any(one.enabled for one in self._all)

    def write_events(self, event_list: Iterable[MetricEvent]) -> None:
        """Write events to all places, on rank 0."""
        events = list(event_list)
        for one in self._all:
            one.write_events(events)


class SilentMonitor:
    """The monitor of an engine that was asked for no output: `engine.monitor.enabled` is false."""

    enabled = False
    comms = None

    def write_events(self, event_list: Iterable[MetricEvent]) -> None:
        """Do nothing."""

    def backward_begins(self, loss: Any, *, is_divided: bool) -> None:
        """Do nothing."""

    def backward_ends(self) -> None:
        """Do nothing."""

    def batch_ends(self, batches: Iterable[Any], loss: Any) -> None:
        """Do nothing."""

    begin_anew = step_begins = step_ends = write_steps = close = backward_ends
