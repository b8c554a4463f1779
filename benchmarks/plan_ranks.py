"""How near planned times get to recorded ones of NCCL ranks: ``python -m benchmarks.plan_ranks [--json FILE]``.

Every case is a run of ``benchmarks.ranks`` in ``benchmarks/results``: ranks that share one H200 and talk through
sockets over loopback, which no datasheet has. The speed of that link is taken from plain NCCL calls of the same call
(``--floor``), on one communicator and on two. The rest is of the datasheet; the ranks take turns on the GPU, so each
has one of N parts of it. The table has planned / measured, of seconds and of the allocated peak.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.model import BASE
from benchmarks.plan_cases import SOME, PlanCase
from benchmarks.plan_gpu_plan import GPU, shared
from shardwell.memory import Tier
from shardwell.plan import SimulatedMachine, SimulatedRanks, Speeds, estimate
from shardwell.plan.devices import gpu, speeds_of

RESULTS = Path(__file__).parent / "results"
RUNS = {2: "ranks-2-2026-11-18", 4: "ranks-4-2026-11-18"}
LATENCY = 2e-4  # seconds of a collective without bytes: assumed, the floor has large ones only
WORKSPACES = 64 << 20  # of cuBLAS on an H200, which plans have beside the peak
QUANTIZED = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
CASES: dict[str, PlanCase] = {
    **{f"shardwell{stage}": PlanCase(BASE, 4, stage, clip=SOME) for stage in (1, 2, 3)},
    "shardwell3-zeropp": PlanCase(BASE, 4, 3, clip=SOME, zero=QUANTIZED),
}


def link(floor: dict[str, Any], ranks: int) -> dict[str, float]:
    """Return the speeds of a link by its plain collectives.

    A third of their bytes, the all-gathers of the forward, are alone in both measurements.
    """
    one, two = floor["1"], floor["2"]
    received = floor["bytes"] * (ranks - 1) / ranks
    return {"inside": received / one, "two_communicators": (2 / 3 * one) / (two - one / 3), "inside_seconds": LATENCY}


def planned(case: PlanCase, ranks: int, speeds: Speeds) -> dict[str, float]:
    """Return the planned seconds and peak of a step."""
    many = SimulatedRanks(0, ranks, ranks, "nccl")
    machine = SimulatedMachine(gpu(GPU).memory_bytes, 128 * 2**30, ranks=many, cores=16, speeds=speeds)
    report = estimate(case.block_model(), case.config(), machine)
    assert report.time is not None
    return {"seconds": report.time.seconds, "peak_allocated": report.peak(Tier.DEVICE) + WORKSPACES}


def main(argv: Sequence[str] | None = None) -> int:
    """Plan all recorded runs, and print how near the plans are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the figures go")
    args = parser.parse_args(argv)
    found: dict[str, dict[str, Any]] = {}
    print(f"{'':28}{'measured':>10}{'planned':>10}{'ratio':>8}{'peak':>8}")
    for ranks, file in RUNS.items():
        run = json.loads((RESULTS / f"{file}.json").read_text())["sizes"][f"base x {ranks}"]
        speeds = replace(shared(speeds_of(gpu(GPU)), ranks), **link(run["floor"], ranks))  # type: ignore[arg-type]
        for name, case in CASES.items():
            if (real := run["summary"].get(name)) is None:
                continue
            plan = planned(case, ranks, speeds)
            ratios = {key: plan[key] / real[key] for key in plan}
            found[f"{name}, {ranks} ranks"] = {"measured": {key: real[key] for key in plan}, "planned": plan}
            cells = (
                f"{real['seconds']:10.3f}{plan['seconds']:10.3f}{ratios['seconds']:8.3f}{ratios['peak_allocated']:8.3f}"
            )
            print(f"{name + f', {ranks} ranks':28}{cells}", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
