"""How near plans get to this GPU: time and peak memory of steps that calibration did not see.

    python -m benchmarks.plan_gpu [--json FILE] [--budget SECONDS] [--only NAME,...] [--ranks 2,4] [--device cuda]
    python -m benchmarks.plan_gpu --replan FILE    plans recorded steps anew, by the calibration in the file

The machine is calibrated as `shardwell calibrate` does it. Then the cases of ``benchmarks.plan_cases`` are trained,
each in a process of its own, and each step is planned twice: with the figures of the datasheet alone, and with what was
measured. The table has planned / measured. The file is written after every process: a run that is cut off loses one
case at most. Peaks are those of CUDA's allocator; the plan's has the workspaces of cuBLAS beside it.

With ``--ranks``, NCCL ranks that share the GPU train a few cases, too. They talk through sockets over loopback, which
no datasheet has: the link is measured in both columns. Ranks of one GPU take turns, so that each has one of N parts of
its time: with stated figures the rates of products and of memory are divided by N; those of a calibration need no
division, because N ranks measure at once.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.launch import LEAST_SECONDS, RunFailedError, run_ranks, without_folders
from benchmarks.measure import circumstances, command_line, keep, told
from benchmarks.plan_cases import CASES, ORDERS, RANK_CASES, PlanCase

STATED, CALIBRATED, ON_RANKS, PEAK = 0.30, 0.10, 0.20, 0.02  # how far off a plan may be
CALIBRATION_LIMIT, KERNELS_LIMIT, PLAN_LIMIT = 120.0, 60.0, 240.0  # seconds of a process


class Report:
    """The figures so far, which a file has after every process."""

    def __init__(self, values: dict[str, Any], path: str | None, budget: float) -> None:
        self.values, self._path, self._end = values, path, time.monotonic() + budget

    @property
    def seconds_left(self) -> float:
        return self._end - time.monotonic()

    def of(self, *keys: str) -> dict[str, Any]:
        """Return the part at a path of keys."""
        found = self.values
        for key in keys:
            found = found.setdefault(key, {})
        return found

    def run(self, module: str, spec: dict[str, Any], ranks: int, limit: float, device: str) -> list[dict[str, Any]]:
        """Run ranks, within the time that is left."""
        left = self.seconds_left
        if left < LEAST_SECONDS:
            raise RunFailedError("stopped: the time was over before this turn")
        try:
            return run_ranks(module, {**spec, "device": device}, ranks, min(limit, left), device)
        except RunFailedError as failure:
            raise RunFailedError(without_folders(str(failure))) from None

    def keep(self) -> Path | None:
        return keep(self.values, "plan-gpu", self._path)


def measure(report: Report, ranks: int, cases: dict[str, PlanCase], args: argparse.Namespace) -> None:
    """Calibrate with so many ranks, then train the cases."""
    worker, device, key = "benchmarks.plan_gpu_worker", args.device, str(ranks)
    try:
        found = report.run(worker, {"pass": "calibrate"}, ranks, CALIBRATION_LIMIT, device)[0]
    except RunFailedError as failure:
        report.of("failed")[f"calibrate, {ranks} rank(s)"] = str(failure)
        print(f"calibrate, {ranks} rank(s): {failure}", flush=True)
        return
    report.of("calibration")[key] = found
    report.keep()
    print(f"calibrated with {ranks} rank(s) in {found['seconds']:.0f} s", flush=True)
    for name, case in cases.items():
        spec = {"pass": "train", "case": name, "profiles": not args.without_profiles and ranks == 1}
        try:
            of_ranks = report.run(worker, spec, ranks, case.limit * (1 if ranks == 1 else 2), device)
        except RunFailedError as failure:
            report.of("failed")[f"{name}, {ranks} rank(s)"] = str(failure)
            print(f"{name}, {ranks} rank(s): {failure}", flush=True)
            continue
        slowest = max(of_ranks, key=lambda figures: figures["seconds"])
        report.of("measured", key)[name] = {**slowest, "peak_allocated": of_ranks[0]["peak_allocated"]}
        report.keep()
        print(f"{name}, {ranks} rank(s): {slowest['seconds']:.4f} s", flush=True)


def measure_kernels(report: Report, device: str) -> None:
    """Measure single kernels, which no plan uses: they show where the cost model is wrong."""
    try:
        report.values["kernels"] = report.run(
            "benchmarks.plan_gpu_worker", {"pass": "kernels"}, 1, KERNELS_LIMIT, device
        )[0]
    except RunFailedError as failure:
        report.of("failed")["kernels"] = str(failure)
    report.keep()


# ---------------------------------------------------------------------------------------------------------- the plans


def plan_all(report: Report, only: Sequence[str] = ()) -> None:
    """Plan all steps that were measured, several at a time."""
    jobs = [(ranks, name) for ranks, cases in report.of("measured").items() for name in cases]
    jobs = [(ranks, name) for ranks, name in jobs if not only or name in only]

    def plan(job: tuple[str, str]) -> None:
        ranks, name = job
        spec = {"case": name, "ranks": int(ranks), "calibration": report.values["calibration"][ranks]}
        try:
            found = run_ranks("benchmarks.plan_gpu_plan", spec, 1, PLAN_LIMIT)[0]
        except RunFailedError as failure:
            report.of("failed")[f"the plan of {name}, {ranks} rank(s)"] = without_folders(str(failure))
            return
        report.of("planned", ranks)[name] = found

    with ThreadPoolExecutor(max(1, min(8, (os.cpu_count() or 2) // 2))) as pool:
        list(pool.map(plan, jobs))


def ratios(report: Report, ranks: str, name: str) -> dict[str, float]:
    """Return planned / measured of one case, by what is compared."""
    real, plans = report.values["measured"][ranks][name], report.values.get("planned", {}).get(ranks, {}).get(name, {})
    found = {key: one["seconds"] / real["seconds"] for key, one in plans.items()}
    if real["peak_allocated"] and "calibrated" in plans:
        found["peak"] = (plans["calibrated"]["peak"] + real["workspace_bytes"]) / real["peak_allocated"]
    return found


def table(report: Report) -> list[str]:
    """Return the lines of the table, and how many cases are near enough."""
    lines, verdicts = [f"{'':44}{'measured':>10}{'stated':>9}{'calibr.':>9}{'peak':>8}"], []
    for ranks, cases in report.of("measured").items():
        allowed = {"stated": STATED, "calibrated": CALIBRATED if ranks == "1" else ON_RANKS, "peak": PEAK}
        near: dict[str, list[bool]] = {key: [] for key in allowed}
        for name, real in cases.items():
            found = ratios(report, ranks, name)
            for key in found:
                near[key].append(abs(found[key] - 1) <= allowed[key])
            cells = "".join(f"{found[key]:9.3f}" if key in found else f"{'-':>9}" for key in allowed)
            words = name if ranks == "1" else f"{name}, {ranks} ranks"
            lines.append(f"{words:44}{real['seconds']:10.4f}{cells}")
        for key, passed in near.items():
            if passed:
                verdicts.append(f"{ranks} rank(s), {key}: {sum(passed)} of {len(passed)} within {allowed[key]:.0%}")
    return [*lines, *verdicts, *orders(report)]


def orders(report: Report) -> list[str]:
    """Return for each order of policies whether plans have it, too."""
    measured, planned = report.of("measured", "1"), report.of("planned", "1")
    lines = []
    for names in ORDERS:
        if not all(name in measured and name in planned for name in names):
            continue
        by_time = sorted(names, key=lambda name: measured[name]["seconds"])
        for key in planned[names[0]]:
            same = by_time == sorted(names, key=lambda name: planned[name][key]["seconds"])
            lines.append(f"order by {key} figures {'right' if same else 'WRONG'}: {', '.join(by_time)}")
    return lines


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: tiny sizes, to try it")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds after which nothing is measured")
    parser.add_argument("--only", default="", help="names of cases, with semicolons")
    parser.add_argument("--ranks", default="", help="also with so many ranks on the GPU, as 2,4")
    parser.add_argument("--ranks-only", action="store_true", help="nothing with one rank")
    parser.add_argument("--without-profiles", action="store_true", help="no kernels of the trained steps")
    parser.add_argument("--without-kernels", action="store_true", help="no single kernels")
    parser.add_argument("--without-plans", action="store_true", help="measure only; --replan plans later")
    parser.add_argument("--replan", type=Path, help="a file with measured steps; nothing is measured")
    parser.add_argument("--json", help="where the figures go")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, plan, and print planned / measured."""
    args = parse(argv)
    only = [name.strip() for name in args.only.split(";") if name.strip()]
    if args.replan is not None:
        report = Report(json.loads(args.replan.read_text()), args.json or str(args.replan), 0.0)
    else:
        values = circumstances(command_line("plan_gpu", argv), args.device)
        report = Report(values, args.json, args.budget)
        for ranks in [*([] if args.ranks_only else [1]), *(int(one) for one in args.ranks.split(",") if one)]:
            cases = CASES if ranks == 1 else RANK_CASES
            measure(report, ranks, {name: one for name, one in cases.items() if not only or name in only}, args)
            if ranks == 1 and not args.without_kernels:
                measure_kernels(report, args.device)
    if not args.without_plans:
        plan_all(report, only)
        print("\n".join(table(report)))
    print(told(report.values))
    if path := report.keep():
        print(f"figures: {path.name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
