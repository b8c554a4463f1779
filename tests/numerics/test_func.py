"""Calls in the style of torch.func on a sharded model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import shardwell
from tests.support.models import zero
from tests.support.scenes import Stack

WIDTH = 6


def engine_at(stage: int) -> shardwell.Engine:
    torch.manual_seed(0)
    model = Stack().double()
    config = zero(stage, shardwell={"shard_at_world_one": True})
    return shardwell.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config, device="cpu"
    ).engine


def plain() -> nn.Module:
    torch.manual_seed(0)
    return Stack().double()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_model_runs_with_other_tensors_in_place_of_its_parameters(stage: int) -> None:
    engine, model = engine_at(stage), plain()
    others = {name: torch.randn_like(p, requires_grad=True) for name, p in model.named_parameters()}
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    found = functional_call(engine.module, others, (x,))
    expected = functional_call(model, others, (x,))
    assert torch.equal(found, expected)
    first = torch.autograd.grad(found.square().sum(), list(others.values()))
    second = torch.autograd.grad(expected.square().sum(), list(others.values()))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    engine.backward(engine(x).square().mean())  # and the engine trains on as if nothing had happened
    engine.step()
    loss = model(x).square().mean()
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for name, value in engine.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_of_each_row_are_computed_inside_gathered_parameters(stage: int) -> None:
    engine, model = engine_at(stage), plain()
    x = torch.randn(4, WIDTH, dtype=torch.float64)

    def of_each_row(module: nn.Module) -> dict[str, Tensor]:
        parameters = {name: p.detach() for name, p in module.named_parameters()}

        def loss(values: dict[str, Tensor], row: Tensor) -> Tensor:
            return functional_call(module, values, (row[None],)).square().sum()

        found: dict[str, Tensor] = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
        return found

    with shardwell.zero.GatheredParameters(engine.module.parameters()):
        found = of_each_row(engine.module)
    for name, value in of_each_row(model).items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)


def test_gradients_of_each_row_go_through_the_engine_in_fp16() -> None:
    torch.manual_seed(0)
    model = Stack()
    block = {"enabled": True, "loss_scale": 64.0}
    config = zero(3, fp16=block, shardwell={"shard_at_world_one": True})
    engine, *_ = shardwell.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config, device="cpu"
    )
    x = torch.randn(4, WIDTH)

    def loss(row: Tensor) -> Tensor:
        output: Tensor = engine(row[None])
        return output.float().square().sum()

    with shardwell.zero.GatheredParameters(model.parameters()):
        found = vmap(grad(loss))(x)
    expected = [torch.autograd.grad(loss(row), row)[0] for row in x.clone().requires_grad_().unbind()]
    assert found.isfinite().all()
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_of_each_row_go_through_the_engine_with_nothing_gathered(stage: int) -> None:
    engine, model = engine_at(stage), plain()
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    found = vmap(grad(lambda row: engine(row[None]).square().sum()))(x)
    expected = vmap(grad(lambda row: model(row[None]).square().sum()))(x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_block_that_uses_torch_func_itself_is_refused_with_the_way_out() -> None:
    class Force(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, 1))

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = vmap(grad(lambda row: self.inner(row).sum()))(x)
            return found

    model = nn.Sequential(Force(), Force()).double()
    config = zero(3, shardwell={"shard_at_world_one": True})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=config, device="cpu").engine
    with pytest.raises(shardwell.ShardwellError, match="in its own forward"):
        engine(torch.randn(4, WIDTH, dtype=torch.float64))
