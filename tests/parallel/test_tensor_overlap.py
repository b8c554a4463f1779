"""`tp_overlap_comm`: sums of input gradients in flight beside products of weight gradients, with the same bits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardwell
from shardwell.parallel import Work
from tests.support.models import batches, zero
from tests.support.pairwise import covering
from tests.support.ranks import Ranks
from tests.support.tensor_models import PLAN, ROWS, TensorCase, on_grid, started


@dataclass(frozen=True)
class Choice:
    """What a case is made of."""

    split: bool
    model: str
    precision: str


CHOICES = covering(
    [
        Choice(*one)
        for one in product((False, True), ("", "recompute", "frozen", "tied"), ("float32", "bf16", "torch_autocast"))
    ]
)
BLOCKS = {"bf16": {"enabled": True}, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
CASES = [
    TensorCase(
        steps=2,
        tensor={"sequence_parallel": one.split},
        model={one.model: True} if one.model else {},
        config={one.precision: BLOCKS[one.precision]} if one.precision in BLOCKS else {},
        dtype=torch.float32,
    )
    for one in CHOICES
]


def overlapped(case: TensorCase) -> TensorCase:
    return replace(case, tensor={**case.tensor, "tp_overlap_comm": True})


def both_ways(stage: int, mine: list[TensorCase]) -> list[list[dict[str, Tensor]]]:
    return [on_grid(cases, stage) for cases in (mine, [overlapped(case) for case in mine])]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_the_bits_are_those_of_sums_that_are_waited_for(ranks: Ranks, stage: int) -> None:
    mine = CASES[stage // 2 :: 2]
    for plainly, beside in ranks.run(2, both_ways, stage, mine):
        for case, before, after in zip(mine, plainly, beside, strict=True):
            for name, value in before.items():
                assert (torch.as_tensor(value) == torch.as_tensor(after[name])).all(), (case, name)


# ------------------------------------------------------------------------------------------------- what is in flight


@dataclass
class Watch(TorchDispatchMode):
    """Notes collectives and products of weight gradients as torch runs them, and where collectives are waited for."""

    weights: set[tuple[int, ...]]
    events: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self.events.append("sum")
        elif func is torch.ops.aten.mm.default and tuple(found.shape) in self.weights:
            self.events.append("product")
        return found


@contextlib.contextmanager
def waits_noted(events: list[str]) -> Iterator[None]:
    wait = Work.wait

    def noted(work: Work) -> None:
        if not work.is_done:
            events.append("wait")
        wait(work)

    Work.wait = noted  # type: ignore[method-assign]
    try:
        yield
    finally:
        Work.wait = wait  # type: ignore[method-assign]


def flights(overlaps: bool, split: bool) -> list[int]:
    """Return the number of weight products between the start of each sum of a backward and the wait for it."""
    case = TensorCase(plan=PLAN, tensor={"sequence_parallel": split})
    engine, model = started(overlapped(case) if overlaps else case, 0)
    shapes = {tuple(one.shape) for name, one in model.named_parameters() if name.endswith(("q.weight", "up.weight"))}
    found = []
    for batch in batches(2, ROWS):
        loss = engine(batch)
        with Watch({*shapes, *(shape[::-1] for shape in shapes)}) as watch, waits_noted(watch.events):
            engine.backward(loss)
        engine.step()
        found = [span.count("product") for span in spans(watch.events)]
    engine.destroy(whole=False)
    return found


def spans(events: list[str]) -> list[list[str]]:
    """Return what is between the start of each sum that is in flight and the wait for it."""
    text = " ".join(events).replace("sum sum", "sum").replace("sum sum", "sum")
    return [part.partition(" wait")[0].split() for part in text.split("sum")[1:] if " wait" in part]


@pytest.mark.parametrize("split", [False, True])
def test_weight_products_run_while_the_sum_is_in_flight(ranks: Ranks, split: bool) -> None:
    """Of each block two sums have some: one of the MLP's first layer, and one of queries, keys and values."""
    for found in ranks.run(2, flights, True, split):
        assert [number for number in found if number] == [1, 3, 1, 3]
    for found in ranks.run(2, flights, False, split):
        assert not any(found)


# --------------------------------------------------------------------------------------------------------- odd uses


class Odd(nn.Module):
    """A layer that is used twice, one whose output no loss needs, one with a hook, and one after a detached input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.gate, self.unused, self.down = (
            nn.Linear(8, 16),
            nn.Linear(8, 16),
            nn.Linear(8, 16),
            nn.Linear(16, 8),
        )
        self.seen = 0
        self.gate.weight.register_hook(self.look)

    def look(self, grad: Tensor) -> Tensor:
        self.seen += 1
        return grad * 2

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        self.unused(hidden)
        inner = torch.tanh(self.up(hidden)) * self.gate(hidden) + self.up(hidden.detach())
        return (x + self.down(inner + self.up(hidden))).square().mean()


ODD_PLAN = {"up": "colwise", "gate": "colwise", "unused": "colwise", "down": "rowwise"}


def oddly(overlaps: bool, stage: int) -> tuple[dict[str, Tensor], int]:
    torch.manual_seed(0)
    model = Odd().double()
    block = {"autotp_size": 2, "plan": ODD_PLAN, "tp_overlap_comm": overlaps}
    config = zero(stage, train_micro_batch_size_per_gpu=1, tensor_parallel=block)
    engine = shardwell.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), config=config
    ).engine
    for step in range(3):
        x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        engine.backward(engine(x))
        engine.step()
    found = engine.state_dict()
    engine.destroy()
    assert "late_product" not in vars(model.up)
    return found, model.seen


@pytest.mark.parametrize("stage", [2, 3])
def test_odd_uses_of_layers_give_the_same_numbers(ranks: Ranks, stage: int) -> None:
    plainly, beside = (ranks.run(2, oddly, overlaps, stage)[0] for overlaps in (False, True))
    assert plainly[1] == beside[1] == 3
    for name, value in plainly[0].items():
        assert abs(value - beside[0][name]).max() < 1e-14, name
