"""Training loops that do something between a backward and its step, in plain PyTorch and with an engine."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwell
from shardwell.utils import safe_get_full_grad
from tests.support.models import whole_parameters, zero

WIDTH = 13


class Net(nn.Module):
    """Three units, and shards that cut through their parameters."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def rows(number: int) -> Tensor:
    """A global batch."""
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


class Plain:
    """A model in plain PyTorch, on the global batch."""

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model
        self.optimizer: Any = sgd(model.parameters())
        self.seen: list[Tensor] = []

    def part(self, batch: Tensor) -> Tensor:
        return batch

    def __call__(self, batch: Tensor) -> Tensor:
        out: Tensor = self.model(batch)
        return out

    def loss(self, number: int) -> Tensor:
        return self(self.part(rows(number))).square().mean()

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def look(self) -> None:
        """Evaluate the model as it is."""
        with torch.no_grad():
            self.seen.append(self.mean(self.loss(100)))

    def mean(self, value: Tensor) -> Tensor:
        return value.detach().clone()

    def gradients(self) -> list[Tensor]:
        return [parameter.grad.clone() for parameter in self.model.parameters()]

    def shift(self, by: list[Tensor]) -> None:
        with torch.no_grad():
            for parameter, shift in zip(self.model.parameters(), by, strict=True):
                parameter.add_(shift)

    def values(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}


class Sharded(Plain):
    """The same with an engine, on this rank's share of the batch."""

    def __init__(self, model: nn.Module, config: dict[str, Any]) -> None:
        started = shardwell.initialize(model=model, optimizer=sgd(model.parameters()), config=config, device="cpu")
        self.model = self.engine = started.engine
        self.optimizer, self.seen = started.optimizer, []

    def part(self, batch: Tensor) -> Tensor:
        return batch.chunk(dist.get_world_size())[dist.get_rank()]

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        self.engine.backward(loss, **kwargs)

    def step(self) -> None:
        self.engine.step()

    def zero_grad(self) -> None:
        self.engine.zero_grad()

    def mean(self, value: Tensor) -> Tensor:
        value = value.detach().clone()
        dist.all_reduce(value)
        return value / dist.get_world_size()

    def gradients(self) -> list[Tensor]:
        return [safe_get_full_grad(parameter) for parameter in self.engine.module.parameters()]

    def shift(self, by: list[Tensor]) -> None:
        parameters = list(self.engine.module.parameters())
        with shardwell.zero.GatheredParameters(parameters, modifier_rank=0), torch.no_grad():
            for parameter, shift in zip(parameters, by, strict=True):
                parameter.add_(shift)

    def values(self) -> dict[str, Tensor]:
        return whole_parameters(self.engine.module)


Step = Callable[[Plain, int], None]


def plain(on: Plain, number: int) -> None:
    on.backward(on.loss(number))
    on.step()


def evaluated_before_the_step(on: Plain, number: int) -> None:
    on.backward(on.loss(number))
    on.look()
    on.step()


def read_before_the_step(on: Plain, number: int) -> None:
    on.backward(on.loss(number))
    on.seen += list(on.values().values())
    on.step()


def state_saved_before_the_step(on: Plain, number: int) -> None:
    on.backward(on.loss(number))
    on.seen += [value.clone() for value in on.model.state_dict().values()]
    on.step()


def gradients_read_before_the_step(on: Plain, number: int) -> None:
    on.backward(on.loss(number))
    on.seen += on.gradients()
    on.step()


def left_out(on: Plain, number: int) -> None:
    on.backward(on.loss(number))
    on.zero_grad()


def sharpness_aware(on: Plain, number: int) -> None:
    on.backward(on.loss(number))
    gradients = on.gradients()
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    ascent = [0.05 * gradient / norm for gradient in gradients]
    on.shift(ascent)
    on.zero_grad()
    on.backward(on.loss(number))
    on.shift([-shift for shift in ascent])
    on.step()


def gradients_cached(on: Plain, number: int) -> None:
    """Representations without a graph, the gradient of a loss over all of them, then part by part."""
    parts = on.part(rows(number)).chunk(2)
    with torch.no_grad():
        found = torch.cat([on(part) for part in parts])
    found.requires_grad_()
    found.square().mean().backward()  # type: ignore[no-untyped-call]
    for part, gradient in zip(parts, found.grad.chunk(2), strict=True):  # type: ignore[union-attr]
        on.backward((on(part) * gradient).sum())
    on.step()


def two_losses(on: Plain, number: int) -> None:
    first, second = on.loss(number), on.loss(number + 50)
    on.backward(first)
    on.backward(0.5 * second)
    on.step()


def one_graph_twice(on: Plain, number: int) -> None:
    loss = on.loss(number)
    on.backward(loss, retain_graph=True)
    on.backward(loss)
    on.step()


def input_gradients_after_backward(on: Plain, number: int) -> None:
    x = on.part(rows(number)).requires_grad_()
    loss = on(x).square().mean()
    on.backward(loss, retain_graph=True)
    (gradient,) = torch.autograd.grad(loss, x)
    on.seen.append(on.mean(gradient.square().sum()) / len(x))
    on.step()


def another_rate_before_the_step(on: Plain, number: int) -> None:
    on.backward(on.loss(number))
    for group in on.optimizer.param_groups:
        group["lr"] = 0.1 + 0.01 * number
    on.step()


def dropped_by_the_module(on: Plain, number: int) -> None:
    on.backward(on.loss(number))
    (on.model.module if isinstance(on, Sharded) else on.model).zero_grad()
    on.step()


def clipped_by_torch(on: Plain, number: int) -> None:
    on.backward(on.loss(number))
    torch.nn.utils.clip_grad_norm_(on.model.parameters(), 0.01)
    on.step()


ODD: list[Step] = [
    evaluated_before_the_step,
    read_before_the_step,
    state_saved_before_the_step,
    gradients_read_before_the_step,
    left_out,
    sharpness_aware,
    gradients_cached,
    two_losses,
    one_graph_twice,
    another_rate_before_the_step,
    dropped_by_the_module,
    clipped_by_torch,
]


def config_for(stage: int, tier: str, path: str, **own: Any) -> dict[str, Any]:
    block = {} if tier == "none" else {"offload_optimizer": {"device": tier, "nvme_path": path}}
    own = {"shard_at_world_one": True, "divergence_timeout": 10, **own}
    return zero(stage, zero_optimization=block, aio={"block_size": 8192, "queue_depth": 4}, shardwell=own)


def played(on: Plain, steps: Iterator[Step]) -> Plain:
    for number, step in enumerate(steps):
        step(on, number)
    return on


def model() -> Net:
    return copy.deepcopy(Net())


def check_alike(expected: Plain, found: Plain) -> None:
    for one, other in zip(expected.seen, found.seen, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)
    theirs = found.values()
    for name, value in expected.values().items():
        torch.testing.assert_close(theirs[name], value, rtol=1e-4, atol=1e-6)
