"""`shardwell calibrate`: measures this machine, and writes the file that `shardwell plan --machine` uses."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from shardwell.cli.failures import exit_like_ranks
from shardwell.cli.launch import LaunchTopology, launch
from shardwell.cli.temporary_folder import kept_folder
from shardwell.errors import ConfigError


def calibrate(
    out: Annotated[Path, typer.Option("--out", help="The file to write.")] = Path("machine.json"),
    ranks: Annotated[int, typer.Option("--ranks", min=1, help="Ranks that measure at once, as training has them.")] = 1,
    disk: Annotated[Path | None, typer.Option("--disk", help="A directory on the drive to measure.")] = None,
) -> None:
    """Measure matrix products, memory, updates on the host, the bus, a drive and collectives, in about a minute."""
    from shardwell.cli.calibrate_rank import CalibrationJob
    from shardwell.plan.calibration import Calibration, MeasuredFigure

    if disk is not None and not disk.is_dir():
        raise ConfigError(f"--disk {disk}: is no directory")
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out}: expected a file in a directory that exists")
    console = Console()
    console.print(f"measuring with {ranks} rank(s); other work on this machine makes it look slower than it is")
    with kept_folder("shardwell-calibrate-") as folder:
        place = Path(folder, "figures.json")
        job = CalibrationJob(str(place), None if disk is None else str(disk.absolute()))
        with exit_like_ranks():
            launch(["-m", "shardwell.cli.calibrate_rank", job.to_json()], LaunchTopology(ranks), quiet_ranks=True)
        found: dict[str, Any] = json.loads(place.read_text(encoding="utf-8"))
    now = datetime.now(UTC).isoformat(timespec="seconds")
    figures = {name: MeasuredFigure(value, how, now) for name, value, how in found["figures"]}
    measured = Calibration(found["device"], found["has_gpus"], ranks, now, figures)
    measured.speeds()  # raises if the file would be of no use
    measured.write(out)
    for name, one in figures.items():
        console.print(f"  {name:18}{_said(name, one.value):>16}   {one.how}", highlight=False)
    console.print(f"{out}: shardwell plan MODEL --machine {out}", highlight=False)


def _said(name: str, value: Any) -> str:
    if isinstance(value, list):
        return f"{max(rate for _, rate in value) / 1e12:.3g} TFLOP/s"
    if name.endswith("seconds"):
        return f"{value * 1e6:.3g} us"
    return f"{value:.0%}" if name.endswith("share") else f"{value / 1e9:.3g} GB/s"
