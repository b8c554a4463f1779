"""Models whose units run in another order, or not at all, from one step to the next."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn

import shardwell
from shardwell.memory.device import Device
from shardwell.offload.param_swap import SwappedShard
from shardwell.offload.storage import TieredStorage
from tests.support.internals import units_of
from tests.support.models import whole_parameters, zero
from tests.support.offload_cases import AIO, quickly


class Choosing(nn.Module):
    """Blocks of which each batch uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(6)])
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor, used: tuple[int, ...]) -> Tensor:
        for number in used:
            x = x + self.blocks[number](x)
        return self.head(x).square().mean()


PLACES = [("cpu", "none"), ("cpu", "cpu"), ("nvme", "cpu"), ("nvme", "nvme")]


@contextlib.contextmanager
def lifting(lifts: bool = True) -> Iterator[list[str]]:
    """Shards are copied ahead of their gathers, or not; yields the names of those that were."""
    lifted: list[str] = []
    lift, expect = TieredStorage.prefetch_to_device, SwappedShard.expect

    def noted(shard: TieredStorage) -> bool:
        is_lifted = lifts and lift(shard)
        lifted.extend([shard._name] * is_lifted)
        return is_lifted

    def at_once(page: SwappedShard) -> bool:
        is_asked = expect(page)
        for transfer in page._coming[1] if page._coming is not None else ():
            transfer.wait()  # or it would be a matter of luck which pages have come in time
        return is_asked

    with pytest.MonkeyPatch.context() as patch:
        if lifts:  # also on a CPU, whose host memory then takes the device's place
            patch.setattr(Device, "has_device_memory", True)
        patch.setattr(TieredStorage, "prefetch_to_device", noted)
        patch.setattr(SwappedShard, "expect", at_once)
        yield lifted


class Ring(nn.Module):
    """Blocks that run in any order, also more than once."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(6))

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for index in order:
            x = self.blocks[index](x) + x
        return x


IN_ORDER = list(range(6))
ORDERS = [IN_ORDER] * 3 + [[4, 2, 0, 1, 5, 3], [0, 1, 2], [2, 1, 2, 3, 2, 4], [3, 4, 0, 0, 1], IN_ORDER]


def ring(
    block: dict[str, Any], orders: list[list[int]], width: int = 16, num_frozen: int = 0, **others: Any
) -> tuple[shardwell.Engine, list[Any]]:
    """Train, but for the first blocks; returns the engine and the trace of the last step."""
    quickly()
    torch.manual_seed(0)
    model = Ring(width)
    model.blocks[:num_frozen].requires_grad_(False)
    config = zero(
        3,
        zero_optimization={**block, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0},
        aio=AIO,
        bf16={"enabled": True},
        **others,
    )
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    engine, *_ = shardwell.initialize(model=model, optimizer=optimizer, config=config)
    for step, order in enumerate(orders):
        generator = torch.Generator().manual_seed(7 * step + dist.get_rank())
        x = torch.randn(2, width, generator=generator).bfloat16().to(engine.device).requires_grad_()
        with engine.record() as trace:
            engine.backward(engine(x, order).float().square().mean())
            engine.step()
            for unit in units_of(engine):
                unit.wait()
    return engine, list(trace)


def in_any_order(block: dict[str, Any], commit: str, *, lifts: bool, width: int = 16) -> tuple[dict[str, Tensor], int]:
    """The parameters that were learned, and how many shards were lifted."""
    others = {"shardwell": {"commit": commit}, "gradient_clipping": 0.5 if commit == "after_norm" else 0.0}
    with lifting(lifts) as lifted:
        engine, _ = ring(block, ORDERS, width, **others)
        return whole_parameters(engine.module), len(lifted)
