"""Four ranks as two nodes, on the library's route: what NCCL does on GPUs, gloo under another name does on CPUs.

The engine takes that route, on which the host waits for no hop, for every backend that is not called gloo.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwell
from tests.support.internals import collectives_of
from tests.support.live_bytes import live_bytes
from tests.support.models import Gpt, batches, share, zero

NAME = "library"  # gloo's own, on the CPU
NUM_RANKS, RANKS_PER_NODE, ROWS = 4, 2, 8
STEPS, SETTLED = 9, 5  # steps of a run, and after how many it holds what it holds: "auto" commits have been learnt
HOST = {"offload_optimizer": {"device": "cpu"}}
PARAMETERS_TOO = {**HOST, "offload_param": {"device": "cpu"}}
QGZ, QWZ, HPZ = {"zero_quantized_gradients": True}, {"zero_quantized_weights": True}, {"zero_hpz_partition_size": 2}


@dataclass(frozen=True)
class Run:
    stage: int
    dtype: str = "bf16"
    block: dict[str, Any] = field(default_factory=dict)
    accumulation: int = 1

    @property
    def is_exact(self) -> bool:
        """Whether it follows plain PyTorch but for rounding."""
        return not any(key in self.block for key in (*QGZ, *QWZ))

    def __str__(self) -> str:
        return f"stage {self.stage}, {self.dtype}, {self.block or 'plain'}, accumulation {self.accumulation}"


def runs(stage: int) -> list[Run]:
    """Return the runs of a stage: of all stages, they have both precisions, all codecs and both tiers."""
    if stage == 0:
        return [Run(0, "fp32", accumulation=2)]
    found = [Run(stage, accumulation=2)]
    if stage < 3:
        found.append(Run(stage, block=HOST, accumulation=2))
    if stage == 2:
        found.append(Run(2, block=QGZ))
    if stage == 3:
        found += [Run(3, "fp32", HPZ), Run(3, block={**QGZ, **QWZ})]
        found += [Run(3, block=block, accumulation=2) for block in ({**QGZ, **QWZ, **HPZ}, PARAMETERS_TOO)]
    return found


def make(dtype: str) -> nn.Module:
    torch.manual_seed(0)
    return Gpt(blocks=2).to(torch.bfloat16 if dtype == "bf16" else torch.float32)


def plainly(dtype: str, accumulation: int, device: torch.device) -> list[float]:
    """Losses of the first steps of plain PyTorch, over the whole batch; with bf16, masters are in fp32."""
    model = make(dtype).to(device)
    torch.manual_seed(0)
    masters = [p.detach().float().clone().requires_grad_() for p in Gpt(blocks=2).to(device).parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1)
    losses = []
    for batch in batches(SETTLED, ROWS):
        total = 0.0
        for micro in batch.to(device).chunk(accumulation):
            loss = model(micro) / accumulation
            loss.backward()
            total += loss.item()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
        losses.append(total)
    return losses


def train(run: Run, device: torch.device) -> dict[str, Any]:
    """Losses of this rank's rows in the first steps, and what is held after each step once that is settled."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Gpt(blocks=2)
    config = zero(
        run.stage,
        zero_optimization=run.block,
        gradient_accumulation_steps=run.accumulation,
        train_micro_batch_size_per_gpu=ROWS // NUM_RANKS // run.accumulation,
        **({"bf16": {"enabled": True}} if run.dtype == "bf16" else {}),
    )
    kind: Any = torch.optim.AdamW if "offload_optimizer" in run.block else torch.optim.SGD
    engine = shardwell.initialize(model=model, optimizer=kind(model.parameters(), lr=0.1), config=config).engine
    assert collectives_of(engine).hops is not None, "these are no two nodes"
    assert not collectives_of(engine).host_drives_progress
    losses, held = [], []
    for number, batch in enumerate(batches(STEPS, ROWS)):
        total = 0.0
        for micro in range(run.accumulation):
            loss = engine(share(batch, rank, NUM_RANKS, micro, run.accumulation))
            engine.backward(loss)
            engine.step()
            total += loss.item() / run.accumulation
        if number < SETTLED:
            losses.append(total)
        if number in (SETTLED, STEPS - 1):
            held.append((engine.memory().total(), bytes_in_use(device)))
    engine.destroy()
    return {"losses": losses, "held": held, "numel": sum(p.numel() for p in model.parameters())}


def bytes_in_use(device: torch.device) -> int:
    if device.type == "cpu":
        return live_bytes()
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)


def everything(device: torch.device, stages: tuple[int, ...]) -> list[dict[str, Any]]:
    """All runs, each with what plain PyTorch gives, as this rank sees them."""
    gc.collect()
    gc.freeze()  # what there is already need not be looked at for each count
    found = []
    for run in (run for stage in stages for run in runs(stage)):
        answer = train(run, device)
        losses = torch.tensor(answer["losses"], dtype=torch.float64, device=device)
        dist.all_reduce(losses)
        answer["losses"] = (losses / NUM_RANKS).tolist()
        if dist.get_rank() == 0 and run.is_exact and "offload_optimizer" not in run.block:  # that steps by another rule
            answer["plain"] = plainly(run.dtype, run.accumulation, device)
        found.append({"run": str(run), "dtype": run.dtype, **answer})
    return found


def complaints(found: list[dict[str, Any]]) -> Iterator[str]:
    """What is wrong with the answers of a rank."""
    for answer in found:
        limit = 5e-3 if answer["dtype"] == "bf16" else 1e-5  # sums of bf16 products have another order
        for step, (loss, plain) in enumerate(zip(answer["losses"], answer.get("plain", answer["losses"]), strict=True)):
            if not abs(loss - plain) <= limit * abs(plain):
                yield f"{answer['run']}: the loss of step {step} is {loss}, and {plain} in plain PyTorch"
        (books, live), (last_books, last_live) = answer["held"][0], answer["held"][-1]
        on_its_way = answer["numel"] / 2 if "offload" in answer["run"] else 0  # gradients come down when they can
        if last_books - books > on_its_way:
            yield f"{answer['run']}: the books hold {last_books} bytes after {STEPS} steps, {books} after {SETTLED + 1}"
        if last_live - live > answer["numel"] / 8:  # a leak of one bf16 gradient a step is 8 bytes a parameter
            yield f"{answer['run']}: {last_live} bytes are in use after {STEPS} steps, {live} after {SETTLED + 1}"


def on_the_cpu(stage: int) -> list[dict[str, Any]]:
    """In a rank of the pool: with real peers, and a process group that is not called gloo."""
    take_the_route(RANKS_PER_NODE)
    return everything(torch.device("cpu"), (stage,))


def take_the_route(ranks_per_node: int) -> None:
    """Give a rank of the pool a process group of another name, in nodes of so many ranks."""
    rank, size, store = dist.get_rank(), dist.get_world_size(), dist.distributed_c10d._get_default_store()
    os.environ.update(LOCAL_WORLD_SIZE=str(ranks_per_node), LOCAL_RANK=str(rank % ranks_per_node))
    dist.barrier()  # a rank that is quick must not cut links that others still make
    dist.destroy_process_group()
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _gloo, devices=["cpu"])
    dist.init_process_group(NAME, store=dist.PrefixStore(NAME, store), rank=rank, world_size=size)


def _gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def main(folder: str) -> None:
    """One of four processes on one GPU, each of them a host of its own to NCCL."""
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(0)
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", device_id=device)
    found = everything(device, (0, 1, 2, 3))
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
