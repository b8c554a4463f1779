"""One rank of one contender in one pass: what ``benchmarks.peers`` starts, and nobody calls by hand.

A timing pass leaves the step undisturbed and reads clocks and interface counters around it. A memory pass runs the
whole life of the engine under the tensor ledger, which slows it, so its times are thrown away.
"""

from __future__ import annotations

import gc
import json
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.contenders import PEER_CONTENDERS, Contender, Workload, by_name
from benchmarks.measure import TensorLedger, cpu_seconds, gc_tensor_bytes, loopback_bytes, wait_for_quiet
from benchmarks.model import PRESETS

WARM_UP_STEPS = 2
LEDGER_STEPS = 2
BATCHES_IN_TURN = 2


def batch_for(workload: Workload, rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Few batches in turn: the loss falls fast, so a wrong update shows in the next losses."""
    generator = torch.Generator().manual_seed(1000 * (rank + 1) + step % BATCHES_IN_TURN)
    tokens = torch.randint(0, workload.model.vocab, (workload.batch, workload.model.seq + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def timing_pass(contender: Contender, workload: Workload, steps: int) -> dict[str, Any]:
    """Seconds, CPU-seconds and loopback bytes of ``steps`` steps after the warm-up."""
    rank = dist.get_rank()
    trainer = contender.build(workload)
    losses = [trainer.step(*batch_for(workload, rank, step)) for step in range(WARM_UP_STEPS)]
    seconds: list[float] = []
    gc.collect()
    dist.barrier()
    wait_for_quiet()
    sent, cpu = loopback_bytes(), cpu_seconds()
    dist.barrier()
    for step in range(WARM_UP_STEPS, WARM_UP_STEPS + steps):
        batch = batch_for(workload, rank, step)
        begin = time.perf_counter()
        losses.append(trainer.step(*batch))
        seconds.append(time.perf_counter() - begin)
    dist.barrier()
    wait_for_quiet()
    cpu = cpu_seconds() - cpu
    sent_after = loopback_bytes()
    wire = None if sent is None or sent_after is None else (sent_after - sent) / steps
    return {
        "losses": losses,
        "seconds": statistics.median(seconds),
        "cpu_seconds": cpu / steps,
        "wire_bytes": wire,
        "rss_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def memory_pass(contender: Contender, workload: Workload) -> dict[str, Any]:
    """Live tensor bytes and collective payload of steps after the warm-up."""
    rank = dist.get_rank()
    with TensorLedger() as traffic_stats:
        trainer = contender.build(workload)
        for step in range(WARM_UP_STEPS):
            trainer.step(*batch_for(workload, rank, step))
        gc.collect()
        traffic_stats.reset()
        for step in range(WARM_UP_STEPS, WARM_UP_STEPS + LEDGER_STEPS):
            trainer.step(*batch_for(workload, rank, step))
        peak, heap_peak = traffic_stats.peak, traffic_stats.heap_peak
        payload, collectives = traffic_stats.payload / LEDGER_STEPS, dict(traffic_stats.collectives)
        gc.collect()
        rest, heap_rest = traffic_stats.live(), traffic_stats.heap()
    return {
        "peak_bytes": peak,
        "rest_bytes": rest,
        "gc_rest_bytes": gc_tensor_bytes(),
        "heap_peak_bytes": heap_peak,
        "heap_rest_bytes": heap_rest,
        "payload_bytes": payload,
        "collectives": collectives,
    }


def main() -> None:
    """Run the pass that the JSON in argv[1] describes and write its figures beside the other ranks'."""
    spec = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    workload = Workload(PRESETS[spec["size"]], spec["batch"])
    contender = by_name(PEER_CONTENDERS, spec["contender"])
    if spec["pass"] == "memory":
        result = memory_pass(contender, workload)
    else:
        result = timing_pass(contender, workload, spec["steps"])
    Path(spec["folder"], f"{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
