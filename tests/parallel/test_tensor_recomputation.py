"""Blocks that are cut over a tensor axis and recomputed: the recomputation stops inside of the cut region."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwell
from tests.support.ranks import Ranks

PLAN = {"blocks.*.gate": "colwise", "blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


class Block(nn.Module):
    """Its last operation that keeps tensors is the product that ends the cut region."""

    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate, self.up = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width)
        self.drop, self.down = nn.Dropout(p), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return x + self.down(self.drop(F.silu(self.gate(normed)) * self.up(normed)))


class Net(nn.Module):
    def __init__(self, p: float, recomputes: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.blocks = nn.ModuleList(Block(16, p) for _ in range(3))
        self.recomputes = recomputes

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def train(p: float, recomputes: bool) -> tuple[list[float], dict[str, Tensor], int, list[str]]:
    """Return the losses, the whole model, the bytes of parameters between steps, and what was warned of."""
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "tensor_parallel": {"autotp_size": 2, "plan": PLAN},
    }
    engine = shardwell.initialize(model=Net(p, recomputes).double(), config=config).engine
    torch.manual_seed(1)
    tokens = torch.randint(32, (2, 8))
    losses = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            loss = engine(tokens)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    rest = sum(size for (state, _, _), size in engine.memory().now.items() if state.value == "parameters")
    weights = engine.state_dict()
    engine.destroy(whole=False)
    return losses, weights, rest, [str(one.message) for one in said if "view" in str(one.message)]


def both(p: float) -> list[tuple[list[float], dict[str, Tensor], int, list[str]]]:
    return [train(p, recomputes) for recomputes in (False, True)]


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_recomputed_blocks_draw_the_same_numbers_and_keep_nothing(ranks: Ranks, p: float) -> None:
    for (losses, weights, rest, _), (again, weights_again, rest_again, said) in ranks.run(2, both, p):
        assert again == losses
        assert all((weights[name] == value).all() for name, value in weights_again.items())
        assert rest_again == rest
        assert said == []
