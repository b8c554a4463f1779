"""A model whose sharded state is read and changed, and a plain mixed-precision loop that has everything at hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import shardwell
from shardwell.kernels.rounding import narrow
from tests.support.models import zero

WIDTH, SCALE = 5, 256.0
STAGES = (0, 1, 2, 3)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BLOCKS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": SCALE}},
}


class Net(nn.Module):
    """Odd sizes: shards cut through parameters, and most ranks hold no part of the small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Parameter(torch.ones(1))
        self.turned = nn.Parameter(torch.randn(WIDTH, 7).t() / 3)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x @ self.turned.t() * self.single


def build() -> Net:
    torch.manual_seed(0)
    return Net()


def rows(step: int, num_ranks: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(20 + step)
    return list(torch.randn(num_ranks, 4, WIDTH, generator=generator))


def loss_of(output: Tensor) -> Tensor:
    return output.float().square().mean()


class Plain:
    """A mixed-precision loop in one process, with everything at hand."""

    def __init__(self, precision: str, num_ranks: int, accumulation: int = 1) -> None:
        self.masters = {name: nn.Parameter(p.detach().clone()) for name, p in build().named_parameters()}
        self.optimizer = torch.optim.AdamW(self.masters.values(), lr=1e-2, weight_decay=0.1)
        self.dtype, self.num_ranks, self.accumulation = DTYPES[precision], num_ranks, accumulation
        self.scale = SCALE if precision == "fp16" else 1.0
        self.model = build().to(self.dtype)

    def backward(self, step: int) -> None:
        """The average over ranks, a micro-step's share of it."""
        share = 1.0 / (self.num_ranks * self.accumulation)
        for name, parameter in self.model.named_parameters():
            flat = self.masters[name].detach().flatten()
            parameter.data.copy_(narrow(flat, torch.empty_like(flat, dtype=self.dtype)).view(parameter.shape))
        for own in rows(step, self.num_ranks):
            self.model.zero_grad()
            (loss_of(self.model(own.to(self.dtype))) * self.scale).backward()
            for name, parameter in self.model.named_parameters():
                master = self.masters[name]
                gradient = parameter.grad.float() * share / self.scale
                master.grad = gradient if master.grad is None else master.grad + gradient

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self, name: str, key: str) -> Tensor:
        return self.optimizer.state[self.masters[name]][key]


def initialize(stage: int, precision: str = "fp32", **config: Any) -> shardwell.Engine:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    return shardwell.initialize(model=model, optimizer=optimizer, config=zero(stage, **BLOCKS[precision], **config))[0]


def backward(engine: shardwell.Engine, step: int) -> None:
    engine.backward(loss_of(engine(rows(step, engine.world_size)[engine.global_rank])))


def read(engine: shardwell.Engine, ask: Callable[[nn.Parameter], Any]) -> dict[str, Any]:
    return {name: ask(parameter) for name, parameter in engine.module.named_parameters()}


# gradients are rounded to 16 bits before and after they are averaged
NEAR = {"fp32": (1e-5, 1e-7), "bf16": (2e-2, 1e-3), "fp16": (5e-3, 1e-4)}


def near(found: Any, wanted: Any, rtol: float, atol: float, what: str) -> None:
    assert (found is None) == (wanted is None), what
    if wanted is not None:
        found = torch.as_tensor(found, dtype=torch.float32)
        assert found.shape == wanted.shape, what
        torch.testing.assert_close(found, wanted.float(), rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}")


def in_memory_order(whole: Tensor, stride: tuple[int, ...]) -> Tensor:
    order = sorted(range(whole.ndim), key=lambda dim: -stride[dim])
    return whole.permute(order).flatten()
