"""Models whose units have several groups of parameters: frozen and trainable ones, of several dtypes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardwell
from shardwell.parallel.traffic import TrafficKind
from tests.support.internals import collect_apart, roles_of
from tests.support.models import whole_parameters, zero
from tests.support.wire_counter import WireCounter

WIDTH, BLOCKS, STEPS = 24, 3, 2


class Several(nn.Module):
    """A block of bf16 weights, which may be frozen, with a router and an adapter in fp32."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH + 1, dtype=torch.bfloat16).requires_grad_(kind != "lora")
        self.down = nn.Linear(WIDTH + 1, 3, bias=False)
        self.up = nn.Linear(3, WIDTH)
        if kind == "three":
            self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.up(torch.tanh(self.down(self.base(x.bfloat16()).float())))
        return x * self.scale.float() if hasattr(self, "scale") else x


class Blocks(nn.Module):
    """Blocks with several groups each; "lora" has frozen ones, "mixed" two dtypes that train, "three" all of these."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Several(kind) for _ in range(BLOCKS)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def make(kind: str, stage: int, *, apart: bool, **block: Any) -> shardwell.Engine:
    """An engine over such a model, whose groups have a collective each if they are `apart`."""
    torch.manual_seed(0)
    engine = engine_of(Blocks(kind), stage, **block)
    if apart:
        collect_apart(engine)
    return engine


def engine_of(model: nn.Module, stage: int, *, steps: int = 1, replicas: int = 1, **block: Any) -> shardwell.Engine:
    """An engine with a unit for each block, which accumulates `steps` micro-steps."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    own = {"bundle_size": 0, "divergence_timeout": 10.0}
    config = zero(stage, zero_optimization=block, shardwell=own, gradient_accumulation_steps=steps)
    mesh = None if replicas == 1 else init_device_mesh("cpu", (replicas, dist.get_world_size() // replicas))
    engine: shardwell.Engine = shardwell.initialize(model=model, optimizer=optimizer, config=config, mesh=mesh).engine
    return engine


def rows(step: int) -> Tensor:
    """This rank's rows of a step."""
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(4, WIDTH, generator=generator)


def train(kind: str, stage: int, *, apart: bool, **block: Any) -> dict[str, Any]:
    """What was trained, and the collectives of the last step: by the engine, by its agreement and by torch."""
    engine = make(kind, stage, apart=apart, **block)
    counter = WireCounter(dist.get_rank(), dist.get_world_size())
    tokens, device = roles_of(engine).agreement.tokens, next(engine.module.parameters()).device
    for step in range(STEPS):
        before = tokens.num_announced
        with engine.record() as trace, counter:
            if step == STEPS - 1:
                counter.calls.clear()
                counter.received.clear()
            for micro in range(engine.gradient_accumulation_steps()):
                engine.backward(engine(rows(step + 100 * micro).to(device)))
                engine.step()
    announced, report = tokens.num_announced - before, engine.traffic()
    values = {name: tensor.double().cpu() for name, tensor in whole_parameters(engine.module).items()}
    found = {
        "values": values,
        "announced": announced,
        "calls": {kind.name: report.calls.get(kind, 0) for kind in TrafficKind if kind is not TrafficKind.CONTROL},
        "received": {f"{kind.name} {hop}": size for (kind, hop), size in report.received.items()},
        "ops": dict(counter.calls),
        "wire": sum(counter.received.values()),
        "trace": str(trace).split("\n")[0],
    }
    engine.destroy(whole=False)
    return found
