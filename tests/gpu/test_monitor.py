"""Watching a run on a GPU: nothing waits for the device between lines, and a timeline has the device's own times."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardwell

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
    config = {
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3},
        "shardwell": {"shard_at_world_one": True},
        **more,
    }
    return shardwell.initialize(model=Tokens(), config=config, device="cuda").engine


def steps(engine: Any, number: int, tokens: torch.Tensor) -> None:
    for _ in range(number):
        engine.backward(engine(tokens))
        engine.step()


def test_nothing_waits_for_the_device_between_two_lines(capsys: pytest.CaptureFixture[str]) -> None:
    engine = engine_with(steps_per_print=4, wall_clock_breakdown=True, comms_logger={"enabled": True})
    tokens = torch.randint(1000, (8, 512), device="cuda")
    steps(engine, 4, tokens)
    torch.cuda.set_sync_debug_mode("error")
    try:
        steps(engine, 3, tokens)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    steps(engine, 1, tokens)
    out = capsys.readouterr().out
    assert "step 8  loss" in out
    assert "TFLOP/s" in out
    assert "(peak " in out
    assert "time of a step: forward" in out


def test_a_timeline_on_the_device_adds_up_and_has_copies() -> None:
    engine = engine_with(
        zero_optimization={"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    )
    tokens = torch.randint(1000, (8, 512), device="cuda")
    steps(engine, 3, tokens)
    with engine.record(timing=True) as trace:
        steps(engine, 2, tokens)
    line = trace.timeline
    assert line.steps == 2
    for row in ("compute", "all-gather", "reduce-scatter", "copy up", "copy down", "host update"):
        assert line.of(row), row
    together = sum(span.seconds for row in ("compute", "wait") for span in line.of(row))
    assert together == pytest.approx(line.seconds, rel=0.02)
    assert all(0 <= span.begin <= span.end <= line.seconds + 1e-6 for span in line.spans)
