"""Many steps of all-gathers and reductions over two NCCL communicators, with random sizes and delays: none may hang.

    python -m benchmarks.deadlocks [--ranks 2] [--steps 10000] [--limit 110] [--seed 0] [--device cuda]

Each step draws units of random sizes from a seed that all ranks share, and issues what the engine would: one all-gather
ahead of another, reductions behind, sums and copies between them, through the engine's own transport; each third unit
has groups of several dtypes, whose collectives are joined. Each rank sleeps at places of its own, on host and device. A
step that all ranks have finished is counted; the program fails if the ranks have not ended 30 s after the
limit. It stops after the limit and says how many steps were made.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.launch import run_ranks
from shardwell.memory import Device, MemoryStats, TemporaryBuffers
from shardwell.parallel import Collectives
from shardwell.parallel.mesh import world_mesh
from shardwell.parallel.traffic import TrafficKind, TrafficStats
from shardwell.parallel.transport import Reduction, Work

STILL = 30.0  # seconds without progress after which a rank has failed
CHECK_EVERY = 100  # steps between two comparisons of numbers
SIZES = (8, 1024, 65_536, 1 << 20)  # elements of a unit, up to these


class Step:
    """One step over random units, with the arithmetic that shows whether bytes went to the right place."""

    def __init__(self, comm: Collectives, seed: int) -> None:
        self.comm, self.shared, self.own = comm, random.Random(seed), random.Random(1000 * seed + dist.get_rank())
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.device = comm.device.torch_device
        self.is_beside = False  # the last all-gather was on the communicator of reductions

    def __call__(self) -> None:
        """Issue the collectives of a forward and a backward; raise if a number is wrong."""
        units = [
            self.size * self.shared.randint(1, self.shared.choice(SIZES)) for _ in range(self.shared.randint(1, 6))
        ]
        dtype = self.shared.choice((torch.float32, torch.bfloat16))
        pending: list[tuple[list[torch.Tensor], Work]] = []
        for numel in units:
            flats = [torch.zeros(numel, dtype=each, device=self.device) for each in self._groups(dtype)]
            for flat in flats:
                flat.chunk(self.size)[self.rank].fill_(self.rank + 1.0)
            pending.append((flats, self._gather(flats)))
            self._dally()
            if len(pending) > 2:
                self._check_gathered(*pending.pop(0))
        reductions: list[tuple[list[Reduction], Work]] = []
        for place, numel in enumerate(units):
            if self.shared.random() < 0.5 and pending:
                self._check_gathered(*pending.pop(0))
            parts = [
                Reduction(
                    torch.full((numel,), self.rank + 1.0, dtype=each, device=self.device),
                    torch.empty(numel // self.size, dtype=each, device=self.device),
                    1.0,
                    False,
                )
                for each in self._groups(dtype)
            ]
            if len(parts) == 1:
                work = self.comm.reduce_scatter(parts[0].flat, parts[0].into, 1.0, False, None)
            else:
                work = self.comm.reduce_scatters(parts, "REDUCE", TrafficKind.REDUCE_SCATTER)
            reductions.append((parts, work))  # what is sent must stay as it is until the work is waited for
            self._dally()
            if place % 2 or len(reductions) > 2:
                self._check_reduced(*reductions.pop(0))
        for flats, work in pending:
            self._check_gathered(flats, work)
        for parts, work in reductions:
            self._check_reduced(parts, work)

    def _gather(self, flats: list[torch.Tensor]) -> Work:
        """Start an all-gather, every other one on the communicator of reductions, as in a forward."""
        device = self.comm.device
        usual = device.all_gather_stream
        self.is_beside = not self.is_beside
        if self.is_beside:
            device.all_gather_stream = device.reduce_stream
        try:
            if len(flats) == 1:
                return self.comm.all_gather(flats[0], None)
            return self.comm.all_gathers(flats, "GATHER", TrafficKind.ALL_GATHER)
        finally:
            device.all_gather_stream = usual

    def _groups(self, dtype: torch.dtype) -> list[torch.dtype]:
        """Return the dtypes of a unit's groups: of two or three in each third unit, whose collectives are joined."""
        if self.shared.random() < 2 / 3:
            return [dtype]
        return [
            dtype,
            *self.shared.choices((torch.float32, torch.bfloat16, torch.float64), k=self.shared.randint(1, 2)),
        ]

    def _dally(self) -> None:
        """Wait now and then, on the host or on the device, where no other rank does."""
        if self.own.random() < 0.05:
            time.sleep(self.own.random() * 2e-3)
        if self.device.type == "cuda" and self.own.random() < 0.1:
            torch.cuda._sleep(int(self.own.random() * 1e6))

    def _check_gathered(self, flats: list[torch.Tensor], work: Work) -> None:
        work.wait()
        for flat in flats:
            self.wrong = getattr(self, "wrong", 0) + sum(
                (part != rank + 1.0).sum() for rank, part in enumerate(flat.chunk(self.size))
            )

    def _check_reduced(self, parts: list[Reduction], work: Work) -> None:
        work.wait()
        for part in parts:
            self.wrong = getattr(self, "wrong", 0) + (part.into != self.size * (self.size + 1) / 2).sum()


def worker(spec: dict[str, object]) -> None:
    """Run the steps on this rank."""
    on_gpu = spec["device"] == "cuda"
    device = Device(torch.device("cuda", 0) if on_gpu else torch.device("cpu"), keep_pages=False)
    if on_gpu:
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device.torch_device if on_gpu else None)
    comm = Collectives(world_mesh(device.torch_device), device, TrafficStats(), TemporaryBuffers(device, MemoryStats()))
    begin = last = time.monotonic()
    steps, most = 0, int(str(spec["steps"]))
    step = Step(comm, int(str(spec["seed"])))
    slowest, keeps_on = 0.0, torch.ones(1, device=device.torch_device)
    while steps < most and keeps_on.item():
        for _ in range(min(CHECK_EVERY, most - steps)):
            step()
            steps += 1
        if step.wrong.item():  # the host waits for the device here, and for all ranks below
            raise ValueError(f"rank {dist.get_rank()}: {step.wrong.item():.0f} numbers are wrong after {steps} steps")
        now = time.monotonic()
        slowest, last = max(slowest, now - last), now
        keeps_on.fill_(float(now - begin < float(str(spec["limit"]))))
        dist.all_reduce(keeps_on, dist.ReduceOp.MIN)
    result = {"steps": steps, "seconds": time.monotonic() - begin, "slowest_of_100": slowest}
    Path(str(spec["folder"]), f"{dist.get_rank()}.json").write_text(json.dumps(result))
    comm.close()
    dist.destroy_process_group()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--limit", type=float, default=110.0, help="seconds after which no more steps begin")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Start the ranks, and print how many steps they made."""
    args = parse(argv)
    spec = {"steps": args.steps, "limit": args.limit, "seed": args.seed, "device": args.device}
    found = run_ranks("benchmarks.deadlocks", spec, args.ranks, args.limit + STILL, args.device)
    figures = found[0]
    print(
        f"{args.ranks} ranks: {figures['steps']} steps in {figures['seconds']:.1f} s without a hang or a wrong number; "
        f"the slowest {CHECK_EVERY} took {max(one['slowest_of_100'] for one in found):.2f} s"
    )
    return 0 if figures["steps"] >= args.steps else 1


if __name__ == "__main__":
    if "RANK" in os.environ and len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        worker(json.loads(sys.argv[1]))
        raise SystemExit(0)
    raise SystemExit(main())
