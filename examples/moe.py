"""Train a mixture of experts at ZeRO stage 3:  shardwell run -n 2 examples/moe.py

Each token goes to one of four experts, so ranks use different experts. A layer of experts is one unit
(`leaf_module`): all ranks gather it together, whichever of its experts they use.
"""

import sys

import torch
from torch import Tensor, nn

import shardwell

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 40
WIDTH, WORDS, LENGTH = 32, 64, 16


class Experts(nn.Module):
    """A router, and experts of which each token uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        best = weights.argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            chosen = best == number
            if chosen.any():
                out[chosen] = expert(x[chosen]) * weights[chosen][:, number, None]
        return x + out


class Model(nn.Module):
    """Tokens in, the next tokens out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Experts() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


config = {
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    "zero_optimization": {"stage": 3, "leaf_module": {"classes": ["Experts"]}, "stage3_param_persistence_threshold": 0},
    "steps_per_print": 10,
}
with shardwell.zero.Init(config=config):
    torch.manual_seed(0)
    model = Model()
engine, *_ = shardwell.initialize(model=model, config=config)

torch.manual_seed(engine.global_rank)
for _ in range(STEPS):
    first = torch.randint(WORDS, (8, 1))
    tokens = (first + 3 * torch.arange(LENGTH)) % WORDS  # each token is three more than the one before
    loss = engine(tokens)
    engine.backward(loss)
    engine.step()
if engine.global_rank == 0:
    print(f"loss {loss.item():.3f}")
