"""Whatever is done to parameters while a model is built in `zero.Init`, it is the model that plain PyTorch builds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardwell
from tests.support.init_models import BUILDERS, Net, train
from tests.support.models import whole_parameters, zero
from tests.support.ranks import Ranks


def build(name: str) -> Net:
    torch.manual_seed(0)
    with in_double():
        return BUILDERS[name]()


def plain(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    model = build(name)
    with in_double():
        model.after()
    born = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    with in_double():
        train(model, step, 0, 1)
    return born, {key: p.detach() for key, p in model.named_parameters()}, dict(model.named_buffers())


@contextlib.contextmanager
def in_double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def born(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    with shardwell.zero.Init(config=zero(3)):
        model = build(name)
    with in_double():
        model.after()
    values = whole_parameters(model)
    engine, *_ = shardwell.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=zero(3)
    )

    def step(loss: Tensor) -> None:
        engine.backward(loss)
        engine.step()

    with in_double():
        train(engine, step, dist.get_rank(), dist.get_world_size())
    return values, whole_parameters(model), dict(model.named_buffers())


@pytest.mark.parametrize("name", BUILDERS)
def test_a_model_is_built_as_in_plain_pytorch(ranks: Ranks, name: str) -> None:
    expected = plain(name)
    for found in ranks.run(2, born, name):
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.keys() == theirs.keys()
            for key, values in theirs.items():
                there = torch.as_tensor(mine[key]).double()
                assert there.shape == values.shape, key
                assert torch.allclose(there, values.double(), rtol=1e-9, atol=1e-12), key
