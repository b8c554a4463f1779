"""Pain: several forwards or losses in one step fail with "the gradient was computed twice", or count wrongly."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwell
from tests.support.internals import finish_backward, trainable_groups_of
from tests.support.models import whole_parameters, zero
from tests.support.ranks import Ranks
from tests.support.scenes import WIDTH, Scene
from tests.support.training import distance

Backward = Callable[..., Any]


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, recompute: bool = False) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if recompute else block(x))
        return self.head(x), x


def two_forwards_one_backward(model: Any, x: Tensor, backward: Backward) -> None:
    backward((model(x)[0] * model(x.flip(0))[0]).mean())


def two_of_each_in_order(model: Any, x: Tensor, backward: Backward) -> None:
    first, second = model(x)[0].square().mean(), model(-x)[0].sin().mean()
    backward(first)
    backward(second)


def two_of_each_in_reverse(model: Any, x: Tensor, backward: Backward) -> None:
    first, second = model(x)[0].square().mean(), model(-x)[0].sin().mean()
    backward(second)
    backward(first)


def one_after_the_other(model: Any, x: Tensor, backward: Backward) -> None:
    for rows in x.chunk(2):
        backward(model(rows)[0].square().mean())


def two_losses_of_one_forward(model: Any, x: Tensor, backward: Backward) -> None:
    out, inner = model(x)
    backward(out.square().mean(), retain_graph=True)
    backward(inner.sin().mean())


def one_loss_twice(model: Any, x: Tensor, backward: Backward) -> None:
    loss = model(x)[0].square().mean()
    backward(loss, retain_graph=True)
    backward(loss)


def two_losses_recomputed(model: Any, x: Tensor, backward: Backward) -> None:
    out, inner = model(x.clone().requires_grad_(), recompute=True)
    backward(out.square().mean(), retain_graph=True)
    backward(inner.sin().mean())


def gradient_of_the_input_first(model: Any, x: Tensor, backward: Backward) -> None:
    """Which must leave nothing in the parameters' gradients."""
    x = x.clone().requires_grad_()
    loss = model(x)[0].square().mean()
    (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
    backward(loss + (model(x.detach() + grad)[0]).mean())


def part_of_the_model(model: Any, x: Tensor, backward: Backward) -> None:
    """The second loss does not reach the head."""
    backward(model(x)[0].square().mean())
    backward(model(x)[1].square().mean())


WAYS = [
    two_forwards_one_backward, two_of_each_in_order, two_of_each_in_reverse, one_after_the_other,
    two_losses_of_one_forward, one_loss_twice, two_losses_recomputed, gradient_of_the_input_first, part_of_the_model,
]  # fmt: skip


class Loop(Scene):
    steps = 3

    def build(self) -> nn.Module:
        return Stack()


def plain(way: Callable[..., None], num_ranks: int) -> dict[str, Tensor]:
    scene = Loop()
    model = scene.make()
    optimizer = scene.optimizer(model)

    def backward(loss: Tensor, retain_graph: bool = False) -> None:
        (loss / num_ranks).backward(retain_graph=retain_graph)

    for rows in scene.rows(num_ranks):
        optimizer.zero_grad()
        for own in rows:
            way(model, own, backward)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def sharded(way: Callable[..., None], stage: int, by_engine: bool) -> dict[str, Tensor]:
    scene = Loop()
    model = scene.make()
    engine, *_ = shardwell.initialize(model=model, optimizer=scene.optimizer(model), config=zero(stage))
    for rows in scene.rows(engine.world_size):
        way(engine, rows[engine.global_rank], engine.backward if by_engine else Tensor.backward)
        engine.step()
    return whole_parameters(model)


def is_by_engine(way: Callable[..., None], stage: int) -> bool:
    """Whether a way goes by `engine.backward`, or by the loss's own: each does both, one of them at stage 3."""
    return (WAYS.index(way) + (stage == 3)) % 2 == 0


def ways_at(stage: int) -> list[Callable[..., None]]:
    """Return all ways for stage 3, where units are resharded; the others share them."""
    return WAYS if stage == 3 else WAYS[stage::3]


def some_ways(stage: int) -> dict[str, dict[str, Tensor]]:
    return {way.__name__: sharded(way, stage, is_by_engine(way, stage)) for way in ways_at(stage)}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_several_forwards_and_backwards_add_up_as_they_do_plainly(ranks: Ranks, stage: int) -> None:
    """A gradient that arrives after its bucket was reduced is an error; here it is reduced again and added."""
    answers = ranks.run(2, some_ways, stage)[0]
    for way in ways_at(stage):
        expected = plain(way, 2)
        difference, name = distance(answers[way.__name__], expected)
        assert difference < 1e-10, f"{way.__name__} {is_by_engine(way, stage)}: {name} differs by {difference}"


class Twice(nn.Module):
    """Is reduced twice in one backward: each use of it is a graph of its own, with other parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.other, checkpoint(self.one, x, use_reentrant=True), use_reentrant=True)


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(8, 8), nn.ModuleList([Twice() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def reduced_twice(stage: int, block: dict[str, Any]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Halves()
    config = zero(stage, zero_optimization=block, gradient_accumulation_steps=2, shardwell={"shard_at_world_one": True})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=config, device="cpu").engine
    for micro in range(4):
        engine.backward(engine(torch.full((4, 8), 0.1 + micro)).square().mean())
        engine.step()
    return whole_parameters(model)


@pytest.mark.parametrize(("stage", "num_ranks"), [(2, 2), (3, 1), (3, 2)])
def test_gradients_that_come_in_two_parts_are_both_added(ranks: Ranks, stage: int, num_ranks: int) -> None:
    below = {"offload_optimizer": {"device": "cpu"}}
    above = ranks.run(num_ranks, reduced_twice, stage, {})
    for one, other in zip(above, ranks.run(num_ranks, reduced_twice, stage, below), strict=True):
        for name, value in one.items():
            torch.testing.assert_close(torch.as_tensor(other[name]), torch.as_tensor(value), rtol=1e-5, atol=1e-6)


class Around(nn.Module):
    """Goes through all blocks twice, each time with another part of them if they have two."""

    def __init__(self, has_parts: bool) -> None:
        super().__init__()
        self.has_parts = has_parts
        self.blocks = nn.ModuleList([Part() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for turn in range(2):
            for block in self.blocks:
                x = x + block(x, turn if self.has_parts else -1)
        return x


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, which: int) -> Tensor:
        return torch.tanh((self.one, self.other)[which](x) if which >= 0 else self.other(self.one(x)))


def called_twice(stage: int, block: dict[str, Any], has_parts: bool, kept: int) -> dict[str, Tensor]:
    """`kept`: the micro-step that is not synchronised."""
    torch.manual_seed(0)
    model = Around(has_parts)
    own = {"shard_at_world_one": True, "commit": "at_once" if block else "auto"}
    config = zero(stage, zero_optimization=block, gradient_accumulation_steps=2, shardwell=own)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=config, device="cpu").engine
    for micro in range(4):
        with engine.no_sync() if micro == kept else contextlib.nullcontext():
            engine.backward(engine(torch.full((4, 8), 0.1 + micro)).square().mean())
        engine.step()
    return whole_parameters(model)


@pytest.mark.parametrize("has_parts", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_block_that_is_called_twice_is_updated_once(ranks: Ranks, stage: int, has_parts: bool) -> None:
    below, kept = {"offload_optimizer": {"device": "cpu"}}, (-1, 2)[(stage + has_parts) % 2]
    above = ranks.run(2, called_twice, stage, {}, has_parts, kept)
    for one, other in zip(above, ranks.run(2, called_twice, stage, below, has_parts, kept), strict=True):
        for name, value in one.items():
            torch.testing.assert_close(torch.as_tensor(other[name]), torch.as_tensor(value), rtol=1e-5, atol=1e-6)


class WithMethod(Stack):
    """Whose loss is a method of its own."""

    def loss(self, x: Tensor) -> Tensor:
        return self(x)[0].square().mean()


def by_method(stage: int, block: dict[str, Any], how: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = WithMethod()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    config = zero(stage, zero_optimization=block, gradient_accumulation_steps=2)
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=config, device="cpu").engine
    for micro in range(6):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(micro))
        loss = {"engine": lambda x: engine(x)[0].square().mean(), "method": engine.loss, "module": model.loss}[how](x)
        engine.backward(loss)
        engine.step()
    return whole_parameters(model)


@pytest.mark.parametrize(("stage", "how"), [(1, "module"), (3, "method")])
def test_a_loss_may_come_from_elsewhere_than_forward(ranks: Ranks, stage: int, how: str) -> None:
    below = {"offload_optimizer": {"device": "cpu"}}
    expected = ranks.run(2, by_method, stage, {}, "engine")[0]
    for block in ({}, below):
        for name, value in ranks.run(2, by_method, stage, block, how)[0].items():
            torch.testing.assert_close(torch.as_tensor(value), torch.as_tensor(expected[name]), rtol=1e-5, atol=1e-6)


class Tied(nn.Module):
    """The head borrows the embedding's weight until the step."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)])

    def forward(self, rows: Tensor) -> Tensor:
        x = self.embed(rows)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(F.linear(x, self.embed.weight).flatten(0, 1), rows.flatten())


def zeroed_between(has_optimizer: bool) -> dict[str, Tensor]:
    """`zero_grad` before a forward's backward, and once instead of a step."""
    torch.manual_seed(0)
    model, rows = Tied(), torch.arange(12).view(2, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0) if has_optimizer else None
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=zero(3), device="cpu").engine
    engine.backward(engine(rows))
    engine.zero_grad()
    for _ in range(2):
        loss = engine(rows)
        engine.zero_grad()
        engine.backward(loss)
        if has_optimizer:
            engine.step()
    if has_optimizer:
        return whole_parameters(model)
    finish_backward(engine)
    groups = trainable_groups_of(engine)
    return {g.name: g.gradients.result[: max(0, g.layout.numel - g.local_range[0])] for g in groups}  # without padding


def test_gradients_may_be_zeroed_between_forward_and_backward(ranks: Ranks) -> None:
    torch.manual_seed(0)
    model, rows = Tied(), torch.arange(12).view(2, 6)
    for _ in range(2):
        loss = model(rows)
        model.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            parameter.data -= parameter.grad
    for found in ranks.run(2, zeroed_between, True):
        difference, name = distance(found, {key: value.detach() for key, value in model.named_parameters()})
        assert difference < 1e-5, f"{name} differs by {difference}"


def test_an_engine_without_an_optimizer_forgets_gradients_too(ranks: Ranks) -> None:
    torch.manual_seed(0)
    model, rows = Tied(), torch.arange(12).view(2, 6)
    model(rows).backward()
    expected = sum(float(p.grad.abs().sum()) for p in model.parameters() if p.grad is not None)
    found = ranks.run(2, zeroed_between, False)
    total = sum(float(torch.as_tensor(value).abs().sum()) for answer in found for value in answer.values())
    assert total == pytest.approx(expected, rel=1e-4)
