"""What `shardwell plan` asks about time and money: speeds of the machine, a number of tokens, a price."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwell.errors import ConfigError
from shardwell.plan import PlanReport, SimulatedMachine
from shardwell.plan import devices as known
from shardwell.plan.calibration import read_calibration
from shardwell.plan.time_report import cost
from shardwell.virtual_time.speeds import Speeds

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}


def with_speeds(
    machine: SimulatedMachine, gpu: str, link: str | None, drive: str, measured: Path | None
) -> SimulatedMachine:
    """Return a machine with speeds of datasheets, or with measured ones; without GPUs it has CPU ranks."""
    stated = _stated(gpu, link, drive)
    if measured is None:
        return replace(machine, speeds=stated)
    found = read_calibration(measured)
    if found.has_gpus:
        speeds = found.speeds(stated)
        words = f"speeds were measured on a device {found.device or 'without a name'}, and memory is that of {gpu}"
        return replace(machine, speeds=replace(speeds, origins={"machine": words, **speeds.origins}))
    ranks = replace(machine.ranks, backend="gloo")
    return replace(machine, speeds=found.speeds(), has_gpus=False, ranks=ranks)


def _stated(gpu: str, link: str | None, drive: str) -> Speeds:
    match = re.fullmatch(r"(?:([1-9][0-9]?)x)?([\w-]+)", drive)
    if match is None:
        raise ConfigError(f"--drive {drive}: expected the name of a drive, as nvme-gen4, or of several, as 4xnvme-gen4")
    return known.speeds_of(known.gpu(gpu), link, match[2], int(match[1] or 1))


def parse_count(text: str, what: str) -> int:
    """Return a number such as 4M or 1.5T."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([KMBGT]?)", text.strip().upper())
    number = float(match[1]) * _UNITS[match[2]] if match is not None else 0.0
    if not 1 <= number < 1e30:
        raise ConfigError(f"{what} {text}: expected a number such as 4000000, 4M or 1.5T")
    return int(number)


def cost_of(report: PlanReport, tokens: int | None, price: float | None) -> dict[str, Any] | None:
    """Return what a number of tokens takes and costs; None if neither was asked."""
    if tokens is None and price is None:
        return None
    if tokens is None:
        raise ConfigError("--price: how much is to be trained? Add --tokens, as --tokens 1T")
    if report.time is None or not report.time.tokens:
        raise ConfigError("--tokens: this model takes no tokens, so that their number says nothing")
    return cost(report.time, tokens, report.num_ranks, price)
