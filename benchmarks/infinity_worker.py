"""One run in one process: what ``benchmarks.infinity`` starts, and nobody calls by hand."""

from __future__ import annotations

import gc
import json
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.disk import rewritten_by_threads, rewritten_rate
from benchmarks.infinity_floor import PLAIN, Place, demands, measure_floors
from benchmarks.infinity_variants import SIZES, VARIANTS, disk_bytes_in_all, disk_bytes_of, located
from benchmarks.infinity_watch import Watch
from benchmarks.offload_variants import SOME, EngineSteps, Size, TorchSteps, Variant, build, clip_rate, workload_of
from benchmarks.offload_worker import HostMemory, start, steady_pass
from shardwell.offload.disk import DiskExtent, DiskTier, aligned

DRIVE = {"cuda": (2 << 30, 6.0), "cpu": (1 << 22, 0.1)}  # bytes, and seconds in which they are read and written


class Told:
    """Steps that say how long each took, for the log of a process that may be stopped."""

    def __init__(self, trainer: EngineSteps | TorchSteps) -> None:
        self.trainer, self.seconds = trainer, list[float]()

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        begin = time.perf_counter()
        loss = self.trainer.step(tokens, targets)
        self.seconds.append(time.perf_counter() - begin)
        print(f"step {len(self.seconds)}: {self.seconds[-1]:.2f} s", flush=True)
        return loss


def variant_of(spec: dict[str, Any]) -> Variant:
    """The variant that a run names, with what the command line adds to it."""
    variant = located(VARIANTS[spec["variant"]], spec["drive"])
    own = {**variant.own, **spec["own"]}
    if spec["clip"]:
        return replace(variant, clip=SOME, own={**own, "commit": "after_norm"})
    return replace(variant, own=own)


def size_of(name: str, batch: int) -> Size:
    """A size with as many sequences as the command line says, or its own."""
    return replace(SIZES[name], batch=batch or SIZES[name].batch)


def places_of(engine: Any) -> list[Place]:
    """How many elements rest where."""
    sums: Counter[tuple[str, str]] = Counter()
    for group in (group for unit in engine._scheduler.units for group in unit.trainable):
        sums[group.spec.parameters.tier.value, group.spec.optimizer.tier.value] += group.layout.numel
    return [Place(*tiers, numel) for tiers, numel in sums.items()]


def bytes_by_tier(engine: Any) -> dict[str, dict[str, int]]:
    """The engine's account: tiers, and what they hold."""
    found: dict[str, Counter[str]] = {}
    for (state, _, tier), size in engine.memory().now.items():
        found.setdefault(tier.value, Counter())[state.value] += size
    return {tier: dict(states) for tier, states in found.items()}


def at_rest(engine: Any) -> dict[str, Any]:
    """Wait for every update that is on its way; then what rests where, and what a step asks for."""
    begin = time.perf_counter()
    for unit in engine._scheduler.units:
        unit.wait()
    drained, tiers, places = time.perf_counter() - begin, bytes_by_tier(engine), places_of(engine)
    queue = getattr(engine.optimizer.executor, "queue", None)
    return {
        "drain_seconds": drained,
        "read_in_advance": 0 if queue is None else queue.bytes_in_advance(),
        "bytes": tiers,
        "places": [asdict(place) for place in places],
        "demands": demands(places, tiers.get("disk", {})),
    }


def tier_of(engine: Any) -> DiskTier | None:
    """Where its states rest on disk, if they do."""
    queue = getattr(engine.optimizer.executor, "queue", None)
    store = None if queue is None else queue.store
    return None if store is None else store._tier


def kept_up(tier: DiskTier, extents: Sequence[DiskExtent], device: str) -> dict[str, float]:
    """Bytes a second that the drive keeps up over bytes that stay as they are: by the tier, and without it."""
    ways = {"tier": rewritten_rate, "threads": rewritten_by_threads}
    return {name: way(tier, extents, DRIVE[device][1]) for name, way in ways.items()}


def drive_before(tier: DiskTier, drive: Path, device: str) -> list[dict[str, float]]:
    """That over bytes of its own, if there is room for them."""
    size = DRIVE[device][0]
    if shutil.disk_usage(drive).free < 4 * size:
        return []
    extent, memory = tier.allocate(size), aligned(size)
    memory.view(torch.int64).random_()  # some drives know zeros, and have no work with them
    tier.write(extent, 0, memory).wait()
    found = kept_up(tier, [extent], device)
    tier.free(extent)
    return [found]


def drive_after(tier: DiskTier, device: str) -> list[dict[str, float]]:
    """That over all that the engine has there."""
    extents = sorted(tier._extents, key=lambda extent: extent.regions[0].offset)
    return [kept_up(tier, extents, device)] if extents else []


def against_formula(variant: Variant, parameters: int, steps: int, moved: dict[str, Any]) -> dict[str, Any]:
    """Bytes that the tier moved in all steps, beside the formula; None where the engine chose what rests there."""
    counted = moved["disk_read"] + moved["disk_written"]
    if "placement" in variant.own:
        return {"counted": counted, "formula": None, "each": None}
    each = disk_bytes_of(variant, parameters)
    return {"counted": counted, "formula": disk_bytes_in_all(variant, parameters, steps), "each": each}


def measure(variant: Variant, size: Size, spec: dict[str, Any]) -> dict[str, Any]:
    """Build, take steps, and look at what they used."""
    began, host, used = time.perf_counter(), HostMemory(), shutil.disk_usage(spec["drive"]).used
    workload, parameters = workload_of(size, variant, spec["device"]), size.model.num_parameters
    with Watch() as watch:
        trainer = build(variant, workload)
        steps = Told(trainer)
        gc.collect()
        if spec["device"] == "cuda":
            torch.cuda.empty_cache()  # what is reserved later is what training needs
        built = time.perf_counter() - began
        print(f"built: {built:.1f} s", flush=True)
        engine = trainer.engine if isinstance(trainer, EngineSteps) and variant.engine == "shardwell" else None
        tier = None if engine is None else tier_of(engine)
        rates = [] if tier is None else drive_before(tier, Path(spec["drive"]), spec["device"])
        watch.note()
        left = spec["seconds"] - built
        figures = steady_pass(steps, workload, spec["steps"], spec["warm_up"], watch.note, left)
        rest = {} if engine is None else at_rest(engine)
        watch.note()
        rates += [] if tier is None else drive_after(tier, spec["device"])
        first, begin, end, last = watch.notes
        usage, in_all = watch.between(begin, end), watch.between(first, last)
    return {
        **figures,
        **host.figures(parameters),
        **rest,
        "kept_up": [max(ways.values()) for ways in rates],
        "kept_up_by": rates,
        "disk_engine": None if tier is None else asdict(tier.choice),
        "usage": {**usage, "seconds": end.at - begin.at},
        "disk_bytes": against_formula(variant, parameters, len(steps.seconds), in_all),
        "disk_used": shutil.disk_usage(spec["drive"]).used - used,
        "build_seconds": built,
        "step_seconds": steps.seconds,
        "tokens_per_second": size.batch * size.model.seq / figures["seconds"],
        "clip_rate": clip_rate(trainer, variant),
        "commit": variant.commit,
        "moments": variant.own.get("moments", "fp32"),
        "note": trainer.note,
    }


def have_peer_compiled() -> dict[str, Any]:
    """What DeepSpeed compiles at its first use takes longer than a run may; raises if it cannot be compiled."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    AsyncIOBuilder().load(verbose=False)
    return {}


def main() -> None:
    """Run the pass that the JSON in argv[1] describes."""
    spec = json.loads(sys.argv[1])
    if spec["pass"] == "peer":
        result = have_peer_compiled()
        start(VARIANTS["deepspeed3:disk"], spec["device"], None)
    elif spec["pass"] == "floor":
        start(PLAIN, spec["device"], None)
        sizes = {name: size_of(name, spec["batch"]) for name in spec["sizes"]}
        result = measure_floors(sizes, spec["device"], spec["drive"])
        result["device"] = torch.cuda.get_device_name(0) if spec["device"] == "cuda" else "cpu"
    else:
        variant = variant_of(spec)
        start(variant, spec["device"], None)
        result = measure(variant, size_of(spec["size"], spec["batch"]), spec)
    Path(spec["folder"], f"{dist.get_rank()}.json").write_text(json.dumps(result))
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
