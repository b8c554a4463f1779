"""Models that are built in `zero.Init` and cut over a tensor or an expert axis are never whole on a rank."""

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
WHOLE = BLOCKS * 2 * 4 * WIDTH * WIDTH * 4  # bytes of the weights in fp32, of either model


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


class Experts(nn.Module):
    """Four experts, packed, as large as a block's two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(4, WIDTH, WIDTH) * 0.1) for _ in range(2))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        found = torch.zeros_like(hidden_states)
        for expert in range(len(self.up)):
            token, place = (top_k_index == expert).nonzero(as_tuple=True)
            inner = torch.tanh(hidden_states[token] @ self.up[expert]) @ self.down[expert]
            found = found.index_add(0, token, inner * top_k_weights[token, place, None])
        return found


class MixtureBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        weights, index = x[:, :4].softmax(-1).topk(2)
        return x + self.experts(x, index, weights)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MixtureBlock() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


# Whole parameters at the peak: one that is gathered and a copy or part of it; packed experts are made in pairs.
AXES: dict[str, tuple[type[nn.Module], dict[str, Any], int]] = {
    "tensor": (Stack, {"tensor_parallel": {"autotp_size": 2, "plan": PLAN}}, 2),
    "expert": (Mixture, {"shardwell": {"expert_parallel_size": 2}}, 4),
}


def peaks(axis: str) -> dict[str, float]:
    """Build a model and its engine; return the bytes at the peak, and at the end, in parts of the whole model."""
    build, axes, _ = AXES[axis]
    found = {}
    for name, born in (("whole", False), ("sharded", True)):
        config: dict[str, Any] = zero(
            3, train_micro_batch_size_per_gpu=1, optimizer={"type": "SGD", "params": {"lr": 0.1}}, **axes
        )
        with PeakWatch() as watch:
            with shardwell.zero.Init(config_dict_or_path=config, enabled=born):
                model = build()
            engine = shardwell.initialize(model=model, config=config).engine
        found[name] = (watch.peak - watch.start) / WHOLE
        found[f"{name} at the end"] = (watch.now() - watch.start) / WHOLE
        engine.backward(engine(torch.ones(1, WIDTH)))
        engine.step()
        engine.destroy(whole=False)
        del model, engine
    return found


@pytest.mark.parametrize("axis", AXES)
def test_a_model_that_is_born_sharded_and_cut_is_never_whole(ranks: Ranks, axis: str) -> None:
    one = 1 / (2 * BLOCKS)  # parameter
    for found in ranks.run(4, peaks, axis):
        assert found["whole"] >= 1  # the counter sees a model that is whole
        # This rank's share, over tensor or expert ranks and data ranks, beside a few parameters that are whole.
        assert found["sharded"] < 1 / 4 + AXES[axis][2] * one + 0.01
        assert found["sharded at the end"] < 1 / 4 + one
