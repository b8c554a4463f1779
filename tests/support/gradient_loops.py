"""Loops that people write around `p.grad` and optimizers of their own, on an engine and on plain PyTorch.

A loop is a function of a trainer: the plain one averages gradients over ranks by hand, as DDP does.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import shardwell
from tests.support.models import whole_parameters, zero


class Net(nn.Module):
    """Two blocks and a root, with odd sizes, so that shards cut through parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 11)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(11, 13), nn.Tanh(), nn.Linear(13, 11)) for _ in range(2)])
        self.last = nn.Linear(11, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        for block in self.blocks:
            x = x + block(x)
        return self.last(x).square().mean()


class Plain:
    """DDP by hand."""

    def __init__(self, optimizer: Callable[..., Any]) -> None:
        self.module = self.model = net()
        self.optimizer = optimizer(self.model.parameters())

    def forward(self, batch: Tensor) -> Tensor:
        return self.model(batch)

    def backward(self, batch: Tensor) -> None:
        before = [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]
        self.model.zero_grad()
        self.model(batch).backward()
        for p, old in zip(self.model.parameters(), before, strict=True):
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
            if old is not None:
                p.grad = old if p.grad is None else p.grad + old

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def values(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


class Sharded:
    """An engine, with the user's own optimizer object."""

    def __init__(self, optimizer: Callable[..., Any], config: dict[str, Any], given: str = "given") -> None:
        self.module = net()
        mine = optimizer(self.module.parameters())
        self.engine, made, *_ = shardwell.initialize(
            model=self.module, optimizer=mine if given == "given" else None, config=config
        )
        if given == "after":
            mine = optimizer(self.module.parameters())
        self.model, self.optimizer = self.engine, mine if given != "returned" else made

    def forward(self, batch: Tensor) -> Tensor:
        return self.engine(batch)

    def backward(self, batch: Tensor) -> None:
        self.model(batch).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def values(self) -> dict[str, Tensor]:
        return whole_parameters(self.module)


def net() -> Net:
    torch.manual_seed(3)
    return Net().double() if torch.get_default_dtype() is torch.float64 else Net()


def data(count: int) -> Iterable[Tensor]:
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    return [torch.randn(4, 7, generator=generator) for _ in range(count)]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, eps=1e-3, weight_decay=0.1)


# ------------------------------------------------------------------------------------------------------------- loops


def plain_loop(trainer: Any) -> list[float]:
    for batch in data(3):
        trainer.backward(batch)
        trainer.step()
    return []


def clip_norm(trainer: Any) -> list[float]:
    norms = []
    for batch in data(2):
        trainer.backward(batch)
        norms.append(float(clip_grad_norm_(trainer.model.parameters(), 0.05)))
        norms.append(float(clip_grad_norm_(trainer.model.parameters(), 0.02, norm_type=float("inf"))))
        norms.append(float(clip_grad_norm_(trainer.model.parameters(), 0.02, norm_type=1.0)))
        trainer.step()
    return norms


def clip_value(trainer: Any) -> list[float]:
    for batch in data(2):
        trainer.backward(batch)
        clip_grad_value_(trainer.module.parameters(), 0.003)
        trainer.step()
    return []


def scale_and_noise(trainer: Any) -> list[float]:
    for number, batch in enumerate(data(3)):
        trainer.backward(batch)
        for p in trainer.module.parameters():
            assert p.grad is not None
            p.grad.mul_(0.5)
            p.grad *= torch.tensor(3.0)
            p.grad.data.add_(torch.full_like(p.grad, 0.01 * number))
            p.grad.detach().clamp_(-0.05, 0.05)
            p.grad.nan_to_num_(0.0)
            p.grad.sub_(torch.arange(p.shape[-1]) * 1e-3)  # broadcast
        trainer.step()
    return []


def read(trainer: Any) -> list[float]:
    seen = []
    for batch in data(2):
        trainer.backward(batch)
        for p in trainer.module.parameters():
            seen += [float(p.grad.norm()), float(p.grad.abs().max()), float((p.grad**2).sum()), float(p.grad.mean())]
            seen += p.grad.flatten().tolist()[:3]
            seen.append(float(p.grad.clone().cpu().numpy().sum()))
            assert bool(torch.isfinite(p.grad).all())
            assert p.grad.shape == p.shape
        trainer.step()
        assert all(p.grad is None for p in trainer.module.parameters())
    return seen


def edit_views(trainer: Any) -> list[float]:
    for batch in data(2):
        trainer.backward(batch)
        for p in trainer.module.parameters():
            p.grad[0] = 0.25
            p.grad.view(-1)[1:3].mul_(3.0)
            p.grad.masked_fill_(p.grad > 0.2, 0.1)
            row = p.grad[-1]
            row += 0.01
            p.grad.mul_(0.9)
        trainer.step()
    return []


def set_to_none(trainer: Any) -> list[float]:
    for number, batch in enumerate(data(4)):
        trainer.backward(batch)
        if number % 2:
            trainer.module.last.weight.grad = None  # this one is left alone by the step, decay included
            trainer.module.blocks[0][0].bias.grad = None
        trainer.step()
    return []


def set_gradients(trainer: Any) -> list[float]:
    for batch in data(2):
        trainer.backward(batch)
        for p in trainer.module.blocks[1].parameters():
            p.grad = torch.ones_like(p) * 0.125
        trainer.module.first.bias.grad = torch.full((11,), 0.5)
        trainer.step()
    for p in trainer.module.parameters():  # without any backward
        p.grad = torch.full(p.shape, 0.25)
    trainer.step()
    return []


def drop_by_module(trainer: Any) -> list[float]:
    first, second, third, fourth = data(4)
    trainer.backward(first)
    trainer.module.zero_grad()
    trainer.backward(second)
    trainer.backward(third)
    trainer.step()
    trainer.backward(first)
    trainer.optimizer.zero_grad()
    trainer.backward(fourth)
    trainer.step()
    trainer.backward(first)
    for p in trainer.module.parameters():
        p.grad = None
    trainer.forward(second)
    trainer.backward(third)
    trainer.step()
    return []


def zero_in_place(trainer: Any) -> list[float]:
    first, second, third = data(3)
    trainer.backward(first)
    trainer.module.zero_grad(set_to_none=False)
    trainer.backward(second)
    trainer.step()
    trainer.backward(third)
    trainer.module.zero_grad(set_to_none=False)
    trainer.step()  # of zeros: momentum and decay go on
    trainer.backward(first)
    trainer.step()
    return []


def zero_in_place_by_optimizer(trainer: Any) -> list[float]:
    first, second = data(2)
    trainer.backward(first)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad(set_to_none=False)
    trainer.backward(second)
    trainer.optimizer.zero_grad(set_to_none=False)
    trainer.step()
    return []


def average_by_hand(trainer: Any) -> list[float]:
    """As people did before DDP: what is averaged already stays what it is."""
    for batch in data(2):
        trainer.backward(batch)
        for p in trainer.module.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
            p.grad = p.grad * 0.5
        trainer.step()
    return []


def accumulate_by_hand(trainer: Any) -> list[float]:
    norms = []
    for number, batch in enumerate(data(6)):
        trainer.backward(batch / 3)
        if number % 3 == 2:
            norms.append(float(clip_grad_norm_(trainer.module.parameters(), 0.05)))
            trainer.step()
        else:
            for p in trainer.module.parameters():
                p.grad.mul_(0.75)
    return norms


def closure(trainer: Any) -> list[float]:
    losses = []
    for batch in data(2):

        def run(batch: Tensor = batch) -> Tensor:
            trainer.backward(batch)
            return torch.tensor(2.0)

        losses.append(float(trainer.optimizer.step(run)))
        trainer.optimizer.zero_grad()
    return losses


LOOPS: dict[str, Callable[[Any], list[float]]] = {
    loop.__name__: loop
    for loop in (
        *(plain_loop, clip_norm, clip_value, scale_and_noise, read, edit_views, set_to_none, set_gradients),
        *(drop_by_module, zero_in_place, zero_in_place_by_optimizer, average_by_hand, accumulate_by_hand, closure),
    )
}


def differences(stage: int, names: list[str], given: str, extra: dict[str, Any]) -> dict[str, str]:
    """The loops in which an engine and plain PyTorch end with other numbers, and how far they are apart."""
    torch.set_default_dtype(torch.float32 if extra else torch.float64)  # kernels for what is offloaded know fp32
    found = {}
    try:
        for name in names:
            with tempfile.TemporaryDirectory() as folder:
                found[name] = _difference(name, stage, given, _with_folder(extra, folder))
    finally:
        torch.set_default_dtype(torch.float32)
    return {name: text for name, text in found.items() if text}


def _with_folder(extra: dict[str, Any], folder: str) -> dict[str, Any]:
    offload = extra.get("zero_optimization", {}).get("offload_optimizer", {})
    if offload.get("device") != "nvme":
        return extra
    return {**extra, "zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": folder}}}


@cache
def _plainly(name: str, num_ranks: int, dtype: torch.dtype) -> tuple[list[float], dict[str, Tensor]]:
    """What a loop returns and ends with in plain PyTorch: the same whatever engine it is compared with."""
    plain = Plain(adamw)
    return LOOPS[name](plain), plain.values()


def _difference(name: str, stage: int, given: str, extra: dict[str, Any]) -> str:
    config = zero(stage, **extra)
    config.setdefault("shardwell", {})["shard_at_world_one"] = True
    if given == "returned":
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.02, "eps": 1e-3, "weight_decay": 0.1}}
    sharded = Sharded(adamw, config, given)
    expected, theirs = _plainly(name, dist.get_world_size(), torch.get_default_dtype())
    actual = LOOPS[name](sharded)
    if not torch.allclose(torch.tensor(expected), torch.tensor(actual), rtol=1e-4, atol=1e-6):
        return f"seen {actual} for {expected}"
    mine = sharded.values()
    sharded.engine.destroy(whole=False)
    far = {key: float((theirs[key] - mine[key]).abs().max()) for key in theirs}
    worst = max(far, key=lambda key: far[key])
    limit = 1e-4 if extra else 1e-9
    return f"{worst} is off by {far[worst]}" if not far[worst] < limit else ""
