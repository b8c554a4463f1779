"""Pain: torch.compile and stage 3 do not go together: graph breaks at every hook, or compiling again in every step."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwell
from tests.support.models import whole_parameters, zero
from tests.support.ranks import Ranks
from tests.support.training import distance

WIDTH, BLOCKS, STEPS = 8, 3, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH + 1), nn.Linear(3 * WIDTH + 1, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale  # so that every block gets an input that needs a gradient, and one graph serves all
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def train(stage: int, backend: str, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Train, compiled by `backend` if there is one, and count what the compiler did."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = Model().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = shardwell.initialize(model=model, optimizer=optimizer, config=zero(stage))
    if backend:
        engine.compile(backend=backend)
    graphs, losses = [], []
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        loss = engine(torch.randn(3, WIDTH, generator=generator, dtype=dtype))
        engine.backward(loss)
        engine.step()
        graphs.append(counters["stats"]["unique_graphs"])
        losses.append(loss.item())
    breaks = dict(counters["graph_break"])
    if backend != "inductor":  # which would call the C++ compiler once more
        with torch.no_grad():
            engine(torch.ones(3, WIDTH, dtype=dtype))
    is_compiled = engine.is_compiled
    found = whole_parameters(model)
    engine.destroy(whole=False)
    return {"graphs": graphs, "losses": losses, "breaks": breaks, "parameters": found, "compiled": is_compiled}


def train_both(stage: int, backend: str, dtype: torch.dtype = torch.float64) -> tuple[dict[str, Any], dict[str, Any]]:
    return train(stage, "", dtype), train(stage, backend, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_compiled_units_train_as_they_do_eagerly(ranks: Ranks, stage: int) -> None:
    """Gathers inside the graph break it; here they stay outside, and all blocks share one graph for good."""
    for eager, compiled in ranks.run(2, train_both, stage, "aot_eager"):
        assert compiled["compiled"]
        assert not eager["compiled"]
        assert compiled["breaks"] == {}
        assert compiled["graphs"] == [1] * STEPS
        assert compiled["losses"] == pytest.approx(eager["losses"], rel=1e-12)
        expected = {name: torch.as_tensor(values) for name, values in eager["parameters"].items()}
        difference, name = distance(compiled["parameters"], expected)
        assert difference < 1e-10, f"{name} differs by {difference}"


def train_by_inductor() -> tuple[dict[str, Any], dict[str, Any]]:
    """Train with and without inductor, which starts no processes and writes loops of single elements: it is faster."""
    import torch._inductor.config

    quickly = {"compile_threads": 1, "cpp.vec_isa_ok": True, "cpp.simdlen": 1, "cpp_cache_precompile_headers": False}
    with torch._inductor.config.patch(quickly):
        return train_both(3, "inductor", torch.float32)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_units_compiled_by_inductor_train_as_they_do_eagerly(ranks: Ranks) -> None:
    """Generated kernels keep pointers to weights that are gone; here they get the gathered ones in every call."""
    for eager, compiled in ranks.run(2, train_by_inductor):
        assert compiled["breaks"] == {}
        assert compiled["graphs"] == [1] * STEPS
        assert compiled["losses"] == pytest.approx(eager["losses"], rel=1e-4)


def train_compiled_by_the_user(stage: int, way: str) -> dict[str, Any]:
    """Accumulate two micro-batches of unequal size for each step, so that Dynamo compiles while gradients wait."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = Model().double()
    config = {**zero(stage), "gradient_accumulation_steps": 2}
    if way == "whole":
        model.compile(backend="eager", dynamic=False)
    elif way == "part":
        model = nn.Sequential(torch.compile(model, backend="eager", dynamic=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = shardwell.initialize(model=model, optimizer=optimizer, config=config)
    if way == "engine":
        engine.compile(backend="eager", dynamic=False)
    generator = torch.Generator().manual_seed(dist.get_rank())
    seen = []
    for rows in (3, 2, 3, 4):
        loss = engine(torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64))
        engine.backward(loss)
        seen.append(engine.is_gradient_accumulation_boundary() or next(model.parameters()).grad is not None)
        engine.step()
    assert all(seen), "what waits is in `p.grad` again after the forward"
    found = {name.removeprefix("0._orig_mod."): value for name, value in whole_parameters(model).items()}
    engine.destroy(whole=False)
    return found


def train_in_all_ways(stage: int) -> dict[str, dict[str, Any]]:
    ways = ("", "whole", "part", "engine") if stage == 3 else ("", "whole")
    return {way: train_compiled_by_the_user(stage, way) for way in ways}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_a_model_that_the_user_compiled_trains_and_compiles_while_gradients_wait(ranks: Ranks, stage: int) -> None:
    """Dynamo traced the engine's hooks, and described gradients that stand for others: internal errors of its own."""
    for found in ranks.run(2, train_in_all_ways, stage):
        expected = {name: torch.as_tensor(values) for name, values in found.pop("").items()}
        for way, parameters in found.items():
            difference, name = distance(parameters, expected)
            assert difference < 1e-10, f"{way}: {name} differs by {difference}"
