"""Heads on a tensor axis: what divides them as if they were whole is refused; heads that all ranks share are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwell
from shardwell.errors import ShardwellError
from tests.support.models import zero
from tests.support.ranks import Ranks
from tests.support.training import distance

WIDTH, HEADS = 16, 4
SIZE = WIDTH // HEADS
STEPS = 4
SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "number": lambda x: x.view(*x.shape[:2], HEADS, -1),
    "computed size": lambda x: x.reshape(*x.shape[:2], HEADS, x.shape[-1] // HEADS),
    "unflatten": lambda x: x.unflatten(-1, (HEADS, -1)),
    "after a product": lambda x: (x * SIZE**-0.5).view(*x.shape[:2], HEADS, -1),
    "open length": lambda x: x.view(x.shape[0], -1, HEADS, SIZE),
    "open rows": lambda x: x.view(-1, HEADS, SIZE).view(*x.shape[:2], -1, SIZE),
    "whole": lambda x: x.view(*x.shape[:2], HEADS, SIZE),
}
RIGHT: dict[str, Callable[[Tensor], Tensor]] = {
    "size": lambda x: x.view(*x.shape[:2], -1, SIZE),
    "one's own number": lambda x: x.view(*x.shape[:2], x.shape[-1] // SIZE, SIZE),
}


class Attention(nn.Module):
    """Attention that divides its projections in a way of its own."""

    def __init__(self, heads: Callable[[Tensor], Tensor], shared: bool = False, packed: str = "") -> None:
        super().__init__()
        self.num_heads = HEADS
        kept = SIZE if shared else WIDTH
        if packed:
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        else:
            self.q, self.k, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, kept), nn.Linear(WIDTH, kept)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.heads, self.shared, self.packed = heads, shared, packed

    def forward(self, x: Tensor) -> Tensor:
        if self.packed:
            projections = self.qkv(x).chunk(3, -1) if self.packed == "chunk" else self.qkv(x).split(WIDTH, -1)
        else:
            projections = self.q(x), self.k(x), self.v(x)
        q, k, v = (self.heads(one).transpose(1, 2) for one in projections)
        if self.shared:
            k, v = (one.expand(-1, q.shape[1], -1, -1) for one in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.norm, self.blocks = nn.LayerNorm(WIDTH), nn.ModuleList(Attention(**how) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def rows(step: int) -> Tensor:
    return torch.randn(4, 2, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def started(plan: dict[str, str], stage: int = 1, *, split: bool = False, size: int = 2, **how: Any) -> Any:
    torch.manual_seed(0)
    model = Model(**how).double()
    plan = {f"blocks.*.{name}": style for name, style in plan.items()} | {"blocks.*.out": "rowwise"}
    tensor = {"autotp_size": size, "plan": plan, "sequence_parallel": split}
    config = zero(stage, tensor_parallel=tensor, train_micro_batch_size_per_gpu=1, gradient_clipping=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return shardwell.initialize(model=model, optimizer=optimizer, config=config).engine


def told(work: Callable[[], Any], engine: Any) -> str:
    try:
        return f"{work()}"
    except ShardwellError as error:
        return str(error)
    finally:
        engine.destroy(whole=False)


def losses_or_words() -> list[str]:
    """Run a forward with each way to divide, and with packed projections."""
    found = []
    cut, packed = dict.fromkeys("qkv", "colwise"), {"qkv": "packed_colwise:3"}
    for heads in (*SHAPES.values(), *RIGHT.values()):
        engine = started(cut, heads=heads)
        found.append(told(lambda: float(engine(rows(0)).detach()), engine))  # noqa: B023
    for name, divides in (("number", "chunk"), ("size", "split"), ("size", "chunk")):
        heads = {**SHAPES, **RIGHT}[name]
        engine = started(packed, heads=heads, packed=divides)
        found.append(told(lambda: float(engine(rows(0)).detach()), engine))  # noqa: B023
    return found


@pytest.mark.slow
def test_outputs_of_cut_layers_are_not_divided_into_the_heads_of_whole_ones(ranks: Ranks) -> None:
    plain = {}
    for packed in ("", "chunk"):
        torch.manual_seed(0)
        plain[packed] = float(Model(heads=RIGHT["size"], packed=packed).double()(rows(0)).detach())
    first, second = ranks.run(2, losses_or_words)
    assert first == second
    *wrong, size, own, wrong_packed, wrong_split, right_packed = first
    for name, words in zip(SHAPES, wrong, strict=True):
        assert "'blocks.0.q.weight'" in words, name
        assert f"with {HEADS} heads" in words
        assert f"view(..., -1, {SIZE})" in words
    assert f"with {HEADS} heads" in wrong_packed
    assert f"divided by split into blocks of {WIDTH} as if it were whole" in wrong_split
    for loss, packed in ((size, ""), (own, ""), (right_packed, "chunk")):
        assert abs(float(loss) - plain[packed]) < 1e-12


def shared_heads(size: int) -> list[Any]:
    """Train with one head of keys and values: left out of the plan, cut, and as what all heads share."""

    def train(engine: Any) -> dict[str, Tensor]:
        for step in range(STEPS):
            share = rows(step).chunk(engine.data_size)[engine.data_rank]
            engine.backward(engine(share))
            engine.step()
        values = engine.state_dict()
        engine.destroy(whole=False)
        return values

    how: dict[str, Any] = {"heads": RIGHT["size"], "shared": True, "size": size}
    engine = started({"q": "colwise"}, **how)
    found: list[Any] = [told(lambda: train(engine), engine)]
    engine = started(dict.fromkeys("qkv", "colwise"), **how)
    found.append(told(lambda: engine(rows(0)), engine))
    style = "replicated_with_grad_allreduce"
    for stage, split in ((1, False), (3, False), (2, True)):
        found.append(train(started({"q": "colwise", "k": style, "v": style}, stage, split=split, **how)))
    return found


@pytest.mark.slow
def test_heads_of_keys_that_all_ranks_share_are_right_or_refused(ranks: Ranks) -> None:
    torch.manual_seed(0)
    model = Model(heads=RIGHT["size"], shared=True).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(rows(step)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    noise = {f"blocks.{number}.k.bias" for number in range(2)}
    for left_out, cut, *trained in ranks.run(4, shared_heads, 2):
        assert "computed different gradients for" in left_out
        assert "replicated_with_grad_allreduce" in left_out
        assert f"pieces (heads) of {SIZE}, of which it has 1: 2 ranks cannot share them" in cut
        for values in trained:
            assert distance(values, model.state_dict(), noise)[0] < 1e-10
