"""The plan of one case in one process: what ``benchmarks.plan_gpu`` starts, and nobody calls by hand.

It needs no GPU: the measured figures of the machine come with the job, so that a plan can be made anew elsewhere.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.plan_cases import CASES, RANK_CASES
from shardwell.memory import Tier
from shardwell.plan import MatmulRates, SimulatedMachine, SimulatedRanks, Speeds, estimate
from shardwell.plan.calibration import Calibration, MeasuredFigure
from shardwell.plan.devices import gpu, speeds_of

GPU = "h200"


def calibration_of(found: dict[str, Any], ranks: int) -> Calibration:
    """Return what the ranks measured, as `shardwell calibrate` would keep it."""
    figures = {
        name: MeasuredFigure([(size, rate) for size, rate in value] if isinstance(value, list) else value, how, "")
        for name, value, how in found["figures"]
    }
    return Calibration(found["device"], found["has_gpus"], ranks, "", figures)


def shared(speeds: Speeds, ranks: int) -> Speeds:
    """Return stated speeds of a rank that has one of so many parts of a GPU's time."""
    rates = {
        dtype: MatmulRates(tuple((size, rate / ranks) for size, rate in one.points), one.peak)
        for dtype, one in speeds.matmul.items()
    }
    return replace(speeds, matmul=rates, device_memory=speeds.device_memory / ranks)


def speeds_for(found: dict[str, Any], ranks: int, *, measured: bool) -> Speeds | None:
    """Return measured speeds, or stated ones; a link through which ranks of one GPU talk is measured in both."""
    calibration = calibration_of(found, ranks)
    if not found["has_gpus"]:
        return calibration.speeds() if measured else None
    stated = speeds_of(gpu(GPU))
    if measured:
        return calibration.speeds(stated)
    links = {name: one.value for name, one in calibration.figures.items() if name in ("inside", "inside_seconds")}
    return replace(shared(stated, ranks), **links) if ranks > 1 else stated  # type: ignore[arg-type]


def planned(job: dict[str, Any]) -> dict[str, Any]:
    """Return the planned seconds and peak of a case."""
    found, ranks = job["calibration"], job["ranks"]
    case = (CASES if ranks == 1 else RANK_CASES)[job["case"]]
    if not found["has_gpus"]:
        case = case.tiny()
    result: dict[str, Any] = {}
    for key, measured in (("stated", False), ("calibrated", True)):
        speeds = speeds_for(found, ranks, measured=measured)
        if speeds is None:
            continue
        machine = SimulatedMachine(
            found["device_bytes"] or float(1 << 60),
            found["host_bytes"],
            has_gpus=found["has_gpus"],
            ranks=SimulatedRanks(0, ranks, ranks, "nccl" if found["has_gpus"] else "gloo"),
            cores=found["cores"],
            speeds=speeds,
        )
        report = estimate(case.block_model(), case.config(), machine)
        assert report.time is not None
        result[key] = {
            "seconds": report.time.seconds,
            "bounds": report.time.bounds,
            "busy": {name: one.busy for name, one in report.time.by_resource.items()},
            "peak": report.peak(Tier.DEVICE),
            "peaks": report.costs.peaks,
        }
    return result


def main() -> None:
    """Plan the case that the JSON in argv[1] describes."""
    spec = json.loads(sys.argv[1])
    Path(spec["folder"], "0.json").write_text(json.dumps(planned(spec)))


if __name__ == "__main__":
    main()
