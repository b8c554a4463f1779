"""Configurations of offloading, to the host and to NVMe, and what their results are compared by."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwell
from shardwell.offload.disk import DiskExtent, DiskTier, DiskTransfer
from shardwell.optim.lion import Lion
from shardwell.utils import (
    safe_get_full_fp32_param,
    safe_get_local_fp32_param,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from tests.support.checkpoint_legs import Leg, everything, run_leg
from tests.support.internals import host_updates_of, updates_if_any
from tests.support.models import Gpt, zero
from tests.support.training import Case, all_sharded

HOST = {"offload_optimizer": {"device": "cpu", "ratio": 1.0}}  # all of it: a GPU would keep that of the first units
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
}


def host_case(commit: str, precision: str = "bf16", moments: str = "fp32", **kwargs: Any) -> Case:
    config = {
        "zero_optimization": HOST,
        "shardwell": {"shard_at_world_one": True, "commit": commit, "moments": moments},
        **PRECISIONS[precision],
    }
    return Case(dtype=torch.float32, config=config, **{"steps": 4, **kwargs})


OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1, fused=True),
    "Lion": lambda p: Lion(p, lr=1e-3, weight_decay=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),  # no kernel: torch's own steps it, in line
}


def check_equal(found: dict[str, Any], expected: dict[str, Any], case: str = "") -> None:
    """Check that all values are the same bits; `case` is told where they are not."""
    assert found.keys() == expected.keys(), case
    for name, value in expected.items():
        assert np.array_equal(_for_numpy(found[name]), _for_numpy(value)), f"{case} {name}"


def _for_numpy(value: Any) -> Any:
    """NumPy has no bf16: fp32 has all its values."""
    return value.float() if isinstance(value, torch.Tensor) and value.dtype is torch.bfloat16 else value


AIO = {"block_size": 8192, "queue_depth": 4}


def on_disk(*paths: Path, **others: Any) -> dict[str, Any]:
    for path in paths:
        path.mkdir(exist_ok=True)
    return {"offload_optimizer": {"device": "nvme", "nvme_path": ", ".join(map(str, paths)), **others}}


def disk_case(case: Case, *paths: Path) -> Case:
    return replace(case, config={**case.config, "zero_optimization": on_disk(*paths), "aio": AIO})


def run_all(cases: list[Case], stage: int) -> list[dict[str, Tensor]]:
    quickly()
    return all_sharded(cases, stage)


def quickly() -> None:
    os.environ["SHARDWELL_IO"] = "threads"  # without measuring which engine is the fastest


def engine_with(
    block: dict[str, Any], optimizer: Callable[[Any], torch.optim.Optimizer] | None = None, stage: int = 3, **own: Any
) -> shardwell.Engine:
    torch.manual_seed(0)
    model = Gpt()
    make = optimizer or (lambda p: torch.optim.AdamW(p, lr=1e-2))
    config = zero(
        stage, zero_optimization=block, bf16={"enabled": True}, shardwell={"shard_at_world_one": True, **own}, aio=AIO
    )
    return shardwell.initialize(model=model, optimizer=make(model.parameters()), config=config, device="cpu").engine


class Fork(nn.Module):
    """Two layers, of which one may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(9, 9), nn.Linear(9, 9)

    def forward(self, x: Tensor, short: bool) -> Tensor:
        x = torch.tanh(self.first(x))
        return x if short else x + self.second(x)


class Forked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Fork() for _ in range(3)])
        self.head = nn.Linear(9, 5)

    def forward(self, x: Tensor, short: bool) -> Tensor:
        for block in self.blocks:
            x = block(x, short)
        return self.head(x).float().square().mean()


def story(block: dict[str, Any], stage: int, moments: str) -> dict[str, Any]:
    """All that can happen to masters and state between steps."""
    quickly()
    torch.manual_seed(0)
    model = Forked()
    own = {"moments": moments, "commit": "after_norm", "shard_at_world_one": True}
    config = zero(stage, zero_optimization=block, bf16={"enabled": True}, shardwell=own)
    engine, optimizer, *_ = shardwell.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), config=config
    )
    generator = torch.Generator().manual_seed(dist.get_rank())

    def step(short: bool = False) -> None:
        engine.backward(engine(torch.randn(4, 9, generator=generator), short))
        engine.step()

    step()
    before = copy.deepcopy(optimizer.state_dict())
    step(short=True)  # cuts what is stepped as one
    weight, other = model.blocks[1].first.weight, model.blocks[2].second.weight
    safe_set_full_fp32_param(weight, safe_get_full_fp32_param(weight) * 1.5)
    safe_set_full_optimizer_state(weight, torch.full((9, 9), 0.25), "exp_avg")
    if stage == 3:
        part = safe_get_local_fp32_param(other)
        if part is not None:
            safe_set_local_fp32_param(other, part + 1.0)
            state = safe_get_local_optimizer_state(other, "exp_avg_sq")
            safe_set_local_optimizer_state(other, torch.full_like(state, 0.5), "exp_avg_sq")
    with shardwell.zero.GatheredParameters([weight, other], modifier_rank=0), torch.no_grad():
        other[0].fill_(0.125)
    step()
    found = {f"middle {name}": value for name, value in everything(engine).items()}
    engine.load_state_dict({name: value * 0.5 for name, value in engine.state_dict().items()})
    model.head = nn.Linear(9, 7)  # fitted at the next forward
    with shardwell.zero.GatheredParameters(model.blocks[0].first.bias, modifier_rank=0), torch.no_grad():
        model.blocks[0].first.bias.data = torch.full((9,), 0.0625)
    step(short=True)
    step()
    optimizer.load_state_dict(optimizer.state_dict())
    step()
    for number, state in before["state"].items():
        found |= {f"dict {number} {key}": value[:] if value.ndim else float(value) for key, value in state.items()}
    return {**found, **everything(engine)}


def run_quickly(leg: Leg, root: str) -> dict[str, Any]:
    quickly()
    return run_leg(leg, root)


def blocks(parameters: str, optimizer: str, path: Path | str, **others: Any) -> dict[str, Any]:
    """The part of a configuration that says where states rest."""
    named = {"nvme_path": str(path)}
    return {
        "offload_param": {"device": parameters, **(named if parameters == "nvme" else {}), "max_in_cpu": 0, **others},
        "offload_optimizer": {"device": optimizer, "ratio": 1.0, **(named if optimizer == "nvme" else {})},
    }


def wait_for_the_reader(engine: shardwell.Engine) -> None:
    """Until it has brought what the next step will update first."""
    if updates_if_any(engine) is not None:
        host_updates_of(engine).bytes_in_advance()


class counted:  # noqa: N801
    """Counts the bytes that the disk tiers of this process move."""

    def __init__(self, moved: dict[str, int]) -> None:
        self._moved = moved

    def __enter__(self) -> None:
        self._begin = DiskTier._begin
        begin, moved = self._begin, self._moved

        def count(
            tier: DiskTier, is_write: bool, extent: DiskExtent, start: int, memory: Tensor, *rest: bool
        ) -> DiskTransfer:
            if moved:
                moved["written" if is_write else "read"] += memory.numel() * memory.element_size()
            return begin(tier, is_write, extent, start, memory, *rest)

        DiskTier._begin = count  # type: ignore[method-assign]

    def __exit__(self, *_: Any) -> None:
        DiskTier._begin = self._begin  # type: ignore[method-assign]


def waiting_on(tier: str, case: Case) -> Case:
    return replace(case, config={**case.config, "shardwell": {**case.config["shardwell"], "gradients": tier}})
