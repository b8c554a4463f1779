"""How near planned times get to recorded ones: ``python -m benchmarks.plan_time [--only NAME] [--json FILE]``.

Every case is a run of one H200 in ``benchmarks/results``. Its step is planned from figures of datasheets alone and,
where the file has rates of that machine's bus, host and drive, with those in their place. Matrix products were not
measured in these runs. The table has planned / measured, and at the end whether policies are in the right order.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.infinity_variants import SIZES as GROWN
from benchmarks.infinity_variants import VARIANTS as ON_DISK
from benchmarks.infinity_variants import located
from benchmarks.model import LARGE, Decoder, DecoderConfig
from benchmarks.offload_variants import SIZES, VARIANTS, Variant, shardwell_config, workload_of
from shardwell.plan import BlockModel, PlanReport, SimulatedMachine, Speeds, estimate
from shardwell.plan.devices import gpu, speeds_of

RESULTS = Path(__file__).parent / "results"
HOST_BYTES, DISK_BYTES = 128 * 2**30, 64 * 2**30
UPDATE_BYTES = 28  # of host memory for each element: gradient, master in halves, two moments, parameter
ORDERS = (  # of each, the faster first
    ("1b: on the device, at once, shadow, after the norm", ("1b device", "1b at-once", "1b shadow", "1b after-norm")),
    ("1b: host before disk", ("1b at-once", "1b disk")),
    ("1b: optimizer state on disk before parameters as well", ("1b disk", "1b disk:parameters")),
)


@dataclass(frozen=True)
class Case:
    """A recorded run, and what it ran."""

    file: str
    path: tuple[str, ...]  # to its seconds
    model: DecoderConfig
    batch: int
    config: dict[str, Any]
    rates: tuple[str, ...] = ()  # to measured rates of the machine

    def found(self, path: tuple[str, ...]) -> Any:
        """Return what the file has at a path."""
        value = json.loads((RESULTS / f"{self.file}.json").read_text())
        for key in path:
            value = value[key]
        return value

    @property
    def seconds(self) -> float:
        """The recorded seconds of a step."""
        return float(self.found(self.path))

    def planned(self, speeds: Speeds) -> PlanReport:
        """Return the plan of the same step."""
        tokens = torch.empty(self.batch, self.model.seq, dtype=torch.long, device="meta")

        def build(blocks: int) -> nn.Module:
            with torch.device("meta"):
                return Decoder(replace(self.model, blocks=blocks), checkpoint=True)

        machine = SimulatedMachine(gpu("h200").memory_bytes, HOST_BYTES, DISK_BYTES, cores=16, speeds=speeds)
        return estimate(BlockModel("decoder", self.model.blocks, build, (tokens, tokens)), self.config, machine)


def with_rates(speeds: Speeds, rates: dict[str, Any]) -> Speeds:
    """Return speeds with the rates of a bus, a host and a drive that a benchmark measured."""
    found: dict[str, float] = {"copy_up": rates["bus"]["up"], "copy_down": rates["bus"]["down"]}
    found["host_update"] = UPDATE_BYTES * rates["update"]["fp32"]
    if "drive" in rates:
        found |= {"disk_read": rates["drive"]["mixed"], "disk_write": rates["drive"]["mixed"]}
    return replace(speeds, **found)


def _offload(file: str, size: str, variant: str) -> Case:
    base, shape = ("sizes", size), SIZES[size]
    config = shardwell_config(VARIANTS[variant], workload_of(shape, VARIANTS[variant], "cuda"))
    rates = (*base, "floor", "rates")
    return Case(file, (*base, "summary", variant, "seconds"), shape.model, shape.batch, config, rates)


def _on_disk(file: str, size: str, run: str, variant: Variant) -> Case:
    shape, put = GROWN[size], located(variant, "/nvme")
    config = shardwell_config(put, workload_of(shape, put, "cuda"))
    return Case(file, ("runs", run, "figures", "seconds"), shape.model, shape.batch, config, ("rates",))


def _plain(contender: str, stage: int, **own: Any) -> Case:
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "shardwell": own,
    }
    return Case("gpu-2026-11-15", ("summary", contender, "seconds"), LARGE, 8, config)


def cases() -> dict[str, Case]:
    """Return all cases by name."""
    disk, growth = "infinity-disk-2026-11-16", "infinity-growth-2026-11-16"
    return {
        "1b stage 1": _plain("shardwell1", 1),
        "1b stage 2": _plain("shardwell2", 2),
        "1b stage 3": _plain("shardwell3", 3),
        "1b stage 3 sharded": _plain("shardwell3-sharded", 3, shard_at_world_one=True),
        "1b device": _offload("offload-2026-11-16", "1b", "shardwell2-device:clip"),
        "1b at-once": _offload("offload-2026-11-16", "1b", "shardwell2:at-once"),
        "1b shadow": _offload("offload-2026-11-16", "1b", "shardwell2:shadow:never-clips"),
        "1b after-norm": _offload("offload-2026-11-16", "1b", "shardwell2:after-norm:clip"),
        "3b at-once": _offload("offload-3b-2026-11-15", "3b", "shardwell2:at-once"),
        **{
            f"{size} placed": _on_disk(growth, size, size, ON_DISK["shardwell3:auto"])
            for size in ("1.3b", "3.1b", "6.7b", "13b")
        },
        "1b disk": _on_disk(disk, "1b", "shardwell3:disk", ON_DISK["shardwell3:disk"]),
        "1b disk:parameters": _on_disk(disk, "1b", "shardwell3:disk:parameters", ON_DISK["shardwell3:disk:parameters"]),
    }


def compare(name: str, case: Case) -> dict[str, Any]:
    """Plan a case, and return planned and measured seconds."""
    stated = speeds_of(gpu("h200"))
    planned = case.planned(stated).time
    assert planned is not None
    found: dict[str, Any] = {"measured": case.seconds, "planned": planned.seconds, "bound": planned.bound}
    if case.rates:
        again = case.planned(with_rates(stated, case.found(case.rates))).time
        assert again is not None
        found["planned with rates"] = again.seconds
    rated = found.get("planned with rates")
    words = "" if rated is None else f"{rated / case.seconds:8.2f}"
    print(
        f"{name:24}{case.seconds:10.3f}{planned.seconds:10.3f}{planned.seconds / case.seconds:8.2f}{words:>8}"
        f"  {planned.bound}",
        flush=True,
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="the cases whose names begin so")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    options = parser.parse_args()
    print(f"{'':24}{'measured':>10}{'planned':>10}{'ratio':>8}{'rated':>8}  bound by")
    found = {name: compare(name, case) for name, case in cases().items() if name.startswith(options.only or "")}
    for words, names in ORDERS:
        if all(name in found for name in names):
            measured, planned = ([found[name][key] for name in names] for key in ("measured", "planned"))
            verdict = "right" if measured == sorted(measured) and planned == sorted(planned) else "WRONG"
            print(f"order {verdict}: {words}")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
