"""One rank of the links benchmark: what ``benchmarks.links`` starts on its hosts, and nobody calls by hand.

All variants live side by side in one process, because importing torch takes longer than most of what is measured. A
question names a variant to build, or some steps of one; nothing is sent between ranks besides what the steps send.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.contenders import (
    EngineTrainer,
    TorchTrainer,
    Trainer,
    Workload,
    build_shardwell,
    fused_adamw,
    seeded_model,
    shard_all_units,
)
from benchmarks.hosts import NUM_HOSTS, answering
from benchmarks.model import PRESETS
from benchmarks.worker import batch_for
from shardwell.parallel.traffic import BETWEEN

HPZ, QWZ, QGZ = "zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients"


def build_fsdp2(workload: Workload, hybrid: bool) -> Trainer:
    """With reduces in the dtype of the forward, the fewest bytes it can send; `hybrid` splits inside a host only."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    world = dist.get_world_size()
    shape, names = ((NUM_HOSTS, world // NUM_HOSTS), ("hosts", "inside")) if hybrid else ((world,), ("all",))
    more: dict[str, Any] = {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=names)}
    if workload.bf16:
        more["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    model = seeded_model(workload)
    shard_all_units(model, workload, **more)
    return TorchTrainer(model, fused_adamw(model.parameters(), workload), workload)


def shardwell_with(**zero: Any) -> Callable[[Workload], Trainer]:
    return lambda workload: build_shardwell(workload, 3, zero=zero)


VARIANTS: dict[str, Callable[[Workload], Trainer]] = {
    "shardwell3": shardwell_with(),
    "qwZ": shardwell_with(**{QWZ: True}),
    "hpZ": shardwell_with(**{HPZ: 2}),
    "qgZ": shardwell_with(**{QGZ: True}),
    "zero++": shardwell_with(**{QWZ: True, HPZ: 2, QGZ: True}),
    "auto": shardwell_with(**dict.fromkeys((QWZ, HPZ, QGZ), "auto")),
    "fsdp2": lambda workload: build_fsdp2(workload, hybrid=False),
    "fsdp2-hybrid": lambda workload: build_fsdp2(workload, hybrid=True),
}


CHOOSING = ("auto",)  # the variants that look at the link when they are built


class Worker:
    """The variants that were built, and how many steps each has run."""

    def __init__(self) -> None:
        self._built: dict[str, tuple[Trainer, Workload]] = {}
        self._steps: dict[str, int] = {}

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """`{"error": ...}` where the variant raised."""
        try:
            return self._build(**question["build"]) if "build" in question else self._run(**question["run"])
        except Exception as error:
            traceback.print_exc()
            return {"error": f"{type(error).__name__}: {error}"}

    def _build(self, variant: str, size: str, seq: int, batch: int, bf16: bool) -> dict[str, Any]:
        """Build in place of what was built before; tells what is in force of ZeRO++."""
        workload = Workload(replace(PRESETS[size], seq=seq), batch, bf16=bf16)
        before = self._built.pop(variant, None)
        if before is not None and isinstance(before[0], EngineTrainer):
            before[0].engine.destroy()
        trainer = VARIANTS[variant](workload)
        self._built[variant] = trainer, workload
        if not isinstance(trainer, EngineTrainer):
            return {"chosen": None}
        zero = trainer.engine.config.zero_optimization
        return {"chosen": {key: getattr(zero, key) for key in (QWZ, QGZ, HPZ)}}

    def _run(self, variant: str, steps: int) -> dict[str, Any]:
        """Seconds, loss and bytes from other nodes (by the engine's own books, if it keeps any) of each step."""
        trainer, workload = self._built[variant]
        seconds, losses, traffic_stats = [], [], []
        for _ in range(steps):
            number = self._steps.get(variant, 0)
            self._steps[variant] = number + 1
            batch = batch_for(workload, dist.get_rank(), number)
            begin = time.perf_counter()
            losses.append(trainer.step(*batch))
            seconds.append(time.perf_counter() - begin)
            if isinstance(trainer, EngineTrainer):
                received = trainer.engine.traffic().received
                traffic_stats.append(sum(size for (_, hop), size in received.items() if hop == BETWEEN))
        gc.collect()  # now, because ranks that begin at different times wait for each other in the first step
        return {"seconds": seconds, "losses": losses, "ledger": traffic_stats or None}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    answering(Worker().answer)


if __name__ == "__main__":
    main()
