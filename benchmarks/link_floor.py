"""The floor of a stage-3 step over a link: plain collectives of the same sizes and order, without an engine or compute.

``benchmarks.ranks --floor`` starts it. Each block is all-gathered in the forward and in the backward, and its gradients
are exchanged, in bf16: by all-to-all, as the engine does. With two communicators the exchanges run beside the
all-gathers. As in the engine, few are in flight: an all-gather begins when the last but two is over.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.model import PRESETS, DecoderConfig

WARM_UP_STEPS = 2
MOST_AHEAD, MOST_REDUCING = 2, 1


def unit_sizes(model: DecoderConfig, ranks: int) -> list[int]:
    """The elements of the units in the order of the forward, padded as all-gathers of these ranks need them."""
    block = 4 * model.width**2 + 3 * model.width * model.mlp + 2 * model.width
    sizes = [model.vocab * model.width, *[block] * model.blocks, model.vocab * model.width]
    return [-(-size // (8 * ranks)) * 8 * ranks for size in sizes]


class Link:
    """The two kinds of collectives, each on a stream and a communicator, or both on one communicator."""

    def __init__(self, num_communicators: int, device: torch.device) -> None:
        groups = [dist.new_group() for _ in range(num_communicators)]
        self.groups, self.device, self.size = (groups[0], groups[-1]), device, dist.get_world_size()
        self.rank, self.waiting = dist.get_rank(), (deque[Any](), deque[Any]())

    def all_gather(self, flat: torch.Tensor) -> None:
        """Start an all-gather in place."""
        mine = flat.chunk(self.size)[self.rank]
        self._start(0, MOST_AHEAD, dist.all_gather_into_tensor, flat, mine.clone() if flat.is_cpu else mine)

    def exchange(self, sent: torch.Tensor, received: torch.Tensor) -> None:
        """Start an all-to-all."""
        self._start(1, MOST_REDUCING, dist.all_to_all_single, received, sent)

    def _start(self, which: int, most: int, collective: Any, *args: Any) -> None:
        if len(self.waiting[which]) > most:
            self.waiting[which].popleft().wait()
        self.waiting[which].append(collective(*args, group=self.groups[which], async_op=True))

    def finish(self) -> None:
        """Wait for everything."""
        for queue in self.waiting:
            while queue:
                queue.popleft().wait()


def step(link: Link, sizes: list[int], memory: list[torch.Tensor]) -> None:
    """One step's collectives: forward, then backward with the exchange of a unit behind the all-gather of the next."""
    flat, sent, received = memory
    for size in sizes:
        link.all_gather(flat[:size])
    for size in reversed(sizes):
        link.all_gather(flat[:size])
        link.exchange(sent[:size], received[:size])
    link.finish()


def main() -> None:
    """Measure what the JSON in argv[1] describes."""
    spec = json.loads(sys.argv[1])
    on_gpu = spec["device"] == "cuda"
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    sizes = unit_sizes(PRESETS[spec["size"]], dist.get_world_size())
    memory = [torch.zeros(max(sizes), dtype=torch.bfloat16, device=device) for _ in range(3)]
    result: dict[str, Any] = {"bytes": 3 * 2 * sum(sizes), "collectives": 3 * len(sizes)}
    for num_communicators in (1, 2):
        link, seconds = Link(num_communicators, device), []
        for number in range(WARM_UP_STEPS + spec["steps"]):
            begin = time.perf_counter()
            step(link, sizes, memory)
            if on_gpu:
                torch.cuda.synchronize()
            if number >= WARM_UP_STEPS:
                seconds.append(time.perf_counter() - begin)
        result[str(num_communicators)] = statistics.median(seconds)
    Path(spec["folder"], f"{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
