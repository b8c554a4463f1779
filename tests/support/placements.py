"""Models that a plan spreads over device, host and disk, and their training."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwell
from shardwell.memory import StateKind, Tier
from shardwell.sharding import released
from tests.support.checkpoint_legs import everything
from tests.support.internals import units_of
from tests.support.live_bytes import PeakWatch
from tests.support.models import zero
from tests.support.offload_cases import quickly

DEVICE, HOST, DISK = Tier.DEVICE, Tier.HOST, Tier.DISK


class Layer(nn.Module):
    """Of whole registers: torch's optimizers round the ends of other tensors in their own way."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


class Stack(nn.Module):
    """Units of one size."""

    def __init__(self, layers: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


SHARE = 64 * 64 // 2  # parameters of a layer on each of 2 ranks
BELOW = {"offload_optimizer": {"device": "cpu", "ratio": 1.0}}  # all of it: a GPU would keep that of the first units


def auto(device: int, host: int, **others: Any) -> dict[str, Any]:
    """Budgets of each of 2 ranks, in bytes a parameter of one layer."""
    return {"placement": "auto", "memory": {"device": device * SHARE, "host": 2 * host * SHARE}, **others}


def configured(block: dict[str, Any], own: dict[str, Any], stage: int = 3, **others: Any) -> dict[str, Any]:
    """Plans that need no memory for gradients that wait, where nothing makes them wait."""
    quickly()
    if "gradient_clipping" not in others:
        own = {"commit": "at_once", **own}
    adam = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
    return zero(stage, zero_optimization=block, shardwell=own, optimizer=adam, bf16={"enabled": True}, **others)


def trained(block: dict[str, Any], own: dict[str, Any], stage: int = 3, **others: Any) -> dict[str, Any]:
    config = configured(block, own, stage, train_micro_batch_size_per_gpu=4, **others)
    torch.manual_seed(0)
    engine = shardwell.initialize(model=Stack(), config=config).engine
    for step in range(4 * engine.gradient_accumulation_steps()):
        torch.manual_seed(10 * step + dist.get_rank())
        engine.backward(engine(torch.randn(4, 64)))
        engine.step()
    values = everything(engine)
    held: Counter[Tier] = Counter()
    for (state, _, tier), size in engine.memory().now.items():
        held[tier] += size if state in (StateKind.PARAMETERS, StateKind.OPTIMIZER) else 0
    rows = [unit.groups[0].spec for unit in units_of(engine)]
    return {
        "values": values,
        "rows": [(row.parameters.tier, row.optimizer.tier) for row in rows],
        "gradients": [row.gradients.tier for row in rows],
        "held": +held,
        "planned": engine.offload.stored_bytes(),
        "text": str(engine.offload),
        "executor": type(engine.optimizer.executor).__name__,
    }


CLIPPED = {"gradient_clipping": 0.05, "gradient_accumulation_steps": 2}
BORN = {"cpu": HOST, "nvme": DISK}


def born(path: str, remote: str) -> dict[str, Any]:
    """A model whose shards wait elsewhere: what it is, where its bytes are, how many were in memory at once."""
    block = {"offload_param": {"device": "cpu", "nvme_path": path}, "offload_optimizer": {"device": "cpu"}}
    config = configured(block, {}, aio={"block_size": 8192})
    Path(path).mkdir(exist_ok=True)
    with PeakWatch() as watch, shardwell.zero.Init(config=config, remote_device=remote):
        torch.manual_seed(0)
        model = Stack()
        model.empty = nn.Parameter(torch.empty(0, 4))
        nn.init.constant_(model.layers[3].inner.weight, 0.5)  # comes back to a shard that has left
        with torch.no_grad():
            model.layers[5].inner.weight.mul_(2.0)
    peak = watch.peak - watch.start
    owners = [released.owner_of(parameter) for parameter in model.parameters()]
    at_rest = [owner.tier_and_bytes for owner in owners]
    disk = owners[0]._registry.context.disk
    reserved = 0 if disk is None else disk.num_bytes
    books = owners[0]._registry.context.memory_stats.report().now
    with shardwell.zero.GatheredParameters(model.parameters()):
        values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    engine = shardwell.initialize(model=model, config=config).engine
    left = None if disk is None else disk.num_bytes
    engine.backward(engine(torch.ones(4, 64)))
    engine.step()
    return {
        "at rest": at_rest,
        "by books": {tier: sum(size for (_, _, t), size in books.items() if t is tier) for tier in Tier},
        "peak": peak,
        "reserved": reserved,
        "left": left,
        "values": values,
        "stepped": everything(engine),
    }
