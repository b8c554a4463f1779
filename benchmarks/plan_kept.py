"""What the state that host offload keeps on a GPU by default is worth, by plan: steps with clipping on one H200.

    python -m benchmarks.plan_kept [--calibration FILE]

Each step is planned without offload, with all optimizer state on the host, and with the default. `FILE` is one of
``benchmarks.plan_gpu``, whose measured figures of the machine are taken. Updates on the host wait for the norm, as they
do where every step is clipped. Nothing is measured here: ``benchmarks.offload`` does that.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.model import LARGE, XLARGE
from benchmarks.plan_cases import CPU, SOME, PlanCase
from benchmarks.plan_gpu_plan import speeds_for
from shardwell.memory import Tier
from shardwell.plan import PlanReport, SimulatedMachine, SimulatedRanks, estimate

MEASURED = Path(__file__).parent / "results" / "plan-gpu-2026-11-19.json"
WAYS: dict[str, dict[str, Any]] = {
    "no offload": {},
    "all on the host": {"offload_optimizer": CPU},
    "by default": {"offload_optimizer": {"device": "cpu"}},
}


def planned(case: PlanCase, found: dict[str, Any]) -> PlanReport:
    """Return the plan of a step on the machine that was calibrated."""
    machine = SimulatedMachine(
        found["device_bytes"],
        found["host_bytes"],
        ranks=SimulatedRanks(0, 1, 1, "nccl"),
        cores=found["cores"],
        speeds=speeds_for(found, 1, measured=True),
    )
    return estimate(case.block_model(), case.config(), machine)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Plan what state on the GPU is worth with host offload.")
    parser.add_argument("--calibration", type=Path, default=MEASURED, metavar="FILE")
    found = json.loads(parser.parse_args().calibration.read_text())["calibration"]["1"]
    for model, words in ((LARGE, "1.35B"), (XLARGE, "3.1B")):
        for batch in (8, 4):
            seconds: dict[str, float] = {}
            for way, zero in WAYS.items():
                own = {"commit": "after_norm"} if zero else {}
                report = planned(PlanCase(model, batch, 2, clip=SOME, zero=zero, own=own), found)
                assert report.time is not None
                seconds[way] = report.time.seconds
                print(
                    f"{words}, micro-batch {batch}, {way:16}{seconds[way]:8.3f} s "
                    f"{seconds['no offload'] / seconds[way]:6.2f}{report.peak(Tier.DEVICE) / 2**30:7.1f} GiB on the GPU"
                    f"{report.peak(Tier.HOST) / 2**30:6.1f} on the host, {len(report.costs.kept)} units kept",
                    flush=True,
                )


if __name__ == "__main__":
    main()
