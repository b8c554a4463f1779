"""Bytes at rest and on the tensor axis are the formulas' on grids of ranks, by counters that do not ask the engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwell
from shardwell.sharding.tensor_part import part_of
from tests.support.internals import groups_of
from tests.support.live_bytes import live_bytes
from tests.support.models import batches
from tests.support.ranks import Ranks
from tests.support.tensor_models import PLAN, ROWS, WIDTH, TensorCase, started, train
from tests.support.wire_counter import WireCounter

SIZE, BLOCKS = 64, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(SIZE, 3 * SIZE), nn.Linear(3 * SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def at_rest(axis: str, stage: int, bf16: bool) -> dict[str, float]:
    """Train a step on a grid; return the bytes that live between steps, and what the formula is made of."""
    before = live_bytes()
    model: Any = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1 if axis == "tensor" else 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": bf16},
    }
    if axis == "pipe":
        config["pipeline"] = {"stages": 2}
        model = shardwell.pipeline.split(model, loss_fn=nn.functional.mse_loss)
    elif axis == "pipeline module":
        model = shardwell.pipeline.PipelineModule([*model], num_stages=2, loss_fn=nn.functional.mse_loss)
    else:
        config["tensor_parallel"] = {"autotp_size": 2, "plan": {"*.up": "colwise", "*.down": "rowwise"}}
    engine: Any = shardwell.initialize(model=model, config=config).engine
    del model
    rows = torch.ones(1, SIZE)
    for _ in range(2):
        if axis != "tensor":
            engine.train_batch(iter([(rows, rows)] * 2))
        else:
            engine.backward(engine(rows).square().mean())
            engine.step()
    cut = sum(p.numel() for p in engine.module.parameters() if part_of(p) is not None)
    pads = sum(group.layout.padded - group.layout.numel for group in groups_of(engine))
    return {
        "rest": live_bytes() - before,
        "books": engine.memory().total(),
        "cut": cut,
        "whole": sum(p.numel() for p in engine.module.parameters()) - cut,
        "pads": 16 * pads,
    }


def formula(numel: int, size: int, stage: int, bf16: bool) -> float:
    """Return the bytes of so many parameters, whose states are sharded over `size` ranks."""
    if stage == 3:
        return 12 * numel / size
    return 2 * numel + 10 * numel / size if bf16 else 4 * numel + 8 * numel / size


@pytest.mark.parametrize(
    ("axis", "stage", "bf16"),
    [
        ("tensor", 1, False),
        ("tensor", 2, True),
        ("tensor", 3, True),
        ("pipe", 1, True),
        ("pipe", 3, False),
        ("pipeline module", 2, False),
    ],
)
def test_bytes_at_rest_are_those_of_the_formula(ranks: Ranks, axis: str, stage: int, bf16: bool) -> None:
    for found in ranks.run(4, at_rest, axis, stage, bf16):
        # what all tensor ranks hold alike has its states sharded over them, too
        expected = formula(found["cut"], 2, stage, bf16)
        expected += formula(found["whole"], 4 if axis == "tensor" else 2, stage, bf16)
        assert found["rest"] == pytest.approx(expected, rel=0.01, abs=found["pads"])
        assert found["books"] == pytest.approx(found["rest"], rel=0.01)


class Payload(WireCounter):
    """Counts sums of tensors as the ring does that moves them, and leaves out those of a few numbers."""

    def _received(self, name: str, size: int) -> int:
        if name != "allreduce_":
            return super()._received(name, size)
        return 2 * size * (self.num_ranks - 1) // self.num_ranks if size > 1024 else 0


def on_tensor_axis(sequence: bool, overlaps: bool) -> tuple[int, int, int]:
    tensor = {"sequence_parallel": sequence, "tp_overlap_comm": overlaps}
    case = TensorCase(plan=PLAN, tensor=tensor, steps=3)
    engine, _ = started(case, 0)
    train(engine, case, 0, 2)
    with Payload(dist.get_rank(), dist.get_world_size()) as wire:
        loss = engine(batches(3, ROWS)[2])
        engine.backward(loss)
    on_wire = dict(wire.received)
    engine.step()
    said = engine.traffic().by_axis()["tensor"]
    engine.destroy(whole=False)
    return on_wire["allreduce_"], sum(on_wire.values()), said


@pytest.mark.parametrize("overlaps", [False, True])
def test_an_independent_count_of_the_tensor_axis_equals_the_formula(ranks: Ranks, overlaps: bool) -> None:
    layers, rows, length, size = 2, ROWS, 8, 2
    bytes_of_a_step = 4 * layers * 2 * (size - 1) // size * rows * length * WIDTH * 8
    for by_sums, _, said in ranks.run(2, on_tensor_axis, False, overlaps):
        assert by_sums == said == bytes_of_a_step
