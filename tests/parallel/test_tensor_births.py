"""Models that are built in `zero.Init` and cut over a tensor axis are never whole on a rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwell
from tests.support.live_bytes import PeakWatch
from tests.support.models import zero
from tests.support.ranks import Ranks

WIDTH, BLOCKS = 64, 8
PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
WHOLE = BLOCKS * 2 * 4 * WIDTH * WIDTH * 4  # bytes of the weights in fp32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def peaks() -> dict[str, float]:
    """Build a model and its engine; return the bytes at the peak, and at the end, in parts of the whole model."""
    found = {}
    for name, born in (("whole", False), ("sharded", True)):
        config: dict[str, Any] = zero(
            3,
            train_micro_batch_size_per_gpu=1,
            tensor_parallel={"autotp_size": 2, "plan": PLAN},
            optimizer={"type": "SGD", "params": {"lr": 0.1}},
        )
        with PeakWatch() as watch:
            with shardwell.zero.Init(config_dict_or_path=config, enabled=born):
                model = Stack()
            engine = shardwell.initialize(model=model, config=config).engine
        found[name] = (watch.peak - watch.start) / WHOLE
        found[f"{name} at the end"] = (watch.now() - watch.start) / WHOLE
        engine.backward(engine(torch.ones(1, WIDTH)))
        engine.step()
        engine.destroy(whole=False)
        del model, engine
    return found


@pytest.mark.slow
def test_a_model_that_is_born_sharded_and_cut_is_never_whole(ranks: Ranks) -> None:
    one = 1 / (2 * BLOCKS)  # parameter
    for found in ranks.run(4, peaks):
        assert found["whole"] >= 1  # the counter sees a model that is whole
        # This rank's share, over tensor and data axes, beside one parameter that is whole, and a copy or part of it.
        assert found["sharded"] < 1 / 4 + 2 * one + 0.01
        assert found["sharded at the end"] < 1 / 4 + one
