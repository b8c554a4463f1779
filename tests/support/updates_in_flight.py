"""Engines whose updates take long, and models to catch them in flight."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwell
from shardwell.offload.host_updates import HostUpdateQueue
from tests.support.models import batches, share


@contextlib.contextmanager
def slowly() -> Iterator[None]:
    """The reader and the worker take their time."""

    def slow(of: Callable[..., None]) -> Callable[..., None]:
        def work(*args: Any) -> None:
            time.sleep(0.03)
            of(*args)

        return work

    before = HostUpdateQueue._fetch, HostUpdateQueue._work
    HostUpdateQueue._fetch, HostUpdateQueue._work = map(slow, before)  # type: ignore[method-assign]
    try:
        yield
    finally:
        HostUpdateQueue._fetch, HostUpdateQueue._work = before  # type: ignore[method-assign]


def backward(engine: shardwell.Engine, number: int = 0) -> None:
    rows = batches(number + 1, 4)[number]
    engine.backward(engine(share(rows, dist.get_rank(), dist.get_world_size())))


def train(engine: shardwell.Engine, num_steps: int = 2) -> None:
    for number in range(num_steps):
        backward(engine, number)
        engine.step()


def copied(values: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.as_tensor(value).clone() for name, value in values.items()}


class Fork(nn.Module):
    """A branch that is used in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor, short: bool) -> Tensor:
        x = torch.tanh(self.always(x))
        return x if short else x + self.sometimes(x)


class Forks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Fork(), Fork()])

    def forward(self, x: Tensor, short: bool, leave_out: int = -1) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = x if index == leave_out else block(x, short)
        return x.square().mean()
