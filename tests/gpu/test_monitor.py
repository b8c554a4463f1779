"""Watching a run on a GPU: nothing waits for the device between lines, and a timeline has the device's own times."""

from __future__ import annotations

import contextlib
import io
import os
from typing import Any

import pytest
import torch
from torch import nn

import shardwell
from tests.support.ranks import Ranks

pytestmark = pytest.mark.gpu


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Tokens(nn.Module):
    """Looks tokens up, and returns a loss."""

    def __init__(self, width: int = 1024, blocks: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 1000)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), tokens.flatten())


def engine_with(**more: Any) -> Any:
    """An engine of one rank, whose parameters are sharded all the same."""
    os.environ["SHARDWELL_DEVICE"] = "cuda:0"
    config = {
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3},
        "shardwell": {"shard_at_world_one": True},
        **more,
    }
    torch.manual_seed(0)
    return shardwell.initialize(model=Tokens(), config=config).engine


def steps(engine: Any, number: int, tokens: torch.Tensor) -> None:
    for _ in range(number):
        engine.backward(engine(tokens))
        engine.step()


def printed_lines() -> str:
    """What rank 0 prints in eight steps. In those between two lines, any wait for the device is an error."""
    written = io.StringIO()
    with contextlib.redirect_stdout(written):
        engine = engine_with(steps_per_print=4, wall_clock_breakdown=True, comms_logger={"enabled": True})
        tokens = torch.randint(1000, (8, 512), device="cuda")
        steps(engine, 4, tokens)
        torch.cuda.set_sync_debug_mode("error")
        try:
            steps(engine, 3, tokens)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        steps(engine, 1, tokens)
        engine.destroy()
    return written.getvalue()


def test_nothing_waits_for_the_device_between_two_lines(ranks: Ranks) -> None:
    (out,) = ranks.run(1, printed_lines)
    assert "step 8  loss" in out
    assert "TFLOP/s" in out
    assert "(peak " in out
    assert "time of a step: forward" in out


def timeline_with_offload() -> tuple[int, float, list[tuple[str, float, float]]]:
    """Two steps with states on the host: the number of steps, their seconds, and the spans."""
    deeper = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    engine = engine_with(zero_optimization=deeper)
    tokens = torch.randint(1000, (8, 512), device="cuda")
    steps(engine, 3, tokens)
    with engine.record(timing=True) as trace:
        steps(engine, 2, tokens)
    engine.destroy()
    line = trace.timeline
    return line.steps, line.seconds, [(span.row, span.begin, span.end) for span in line.spans]


def test_a_timeline_on_the_device_adds_up_and_has_copies(ranks: Ranks) -> None:
    ((number, seconds, spans),) = ranks.run(1, timeline_with_offload)
    assert number == 2
    rows = {row for row, *_ in spans}
    assert {"compute", "all-gather", "copy up", "copy down", "host update"} <= rows
    together = sum(end - begin for row, begin, end in spans if row in ("compute", "wait"))
    assert together == pytest.approx(seconds, rel=0.02)
    assert all(0 <= begin <= end <= seconds + 1e-6 for _, begin, end in spans)
