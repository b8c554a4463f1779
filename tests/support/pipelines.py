"""Small models for pipelines, and what one process of plain PyTorch makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, WIDTH = 24, 8
NUM_MICRO_BATCHES, ROWS, LENGTH = 4, 2, 5


CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1}  # of each rank, by schedule


def pipeline_config(stage: int, schedule: str, stages: int = 2, **extra: Any) -> dict[str, Any]:
    """Return a configuration of a pipeline, as `plain` trains."""
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": NUM_MICRO_BATCHES,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "pipeline": {"stages": stages, "schedule": schedule, "chunks": CHUNKS[schedule]},
        **extra,
    }


class Block(nn.Module):
    """A residual block with a norm."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = hidden + self.down(torch.tanh(self.up(self.norm(hidden))))
        return output


class Decoder(nn.Module):
    """A language model with a list of blocks, whose forward takes ids."""

    def __init__(self, num_blocks: int = 4, *, tied: bool = False) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def chain(num_blocks: int = 4) -> nn.Sequential:
    """Return a language model that is an nn.Sequential."""
    return nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH),
        *(Block() for _ in range(num_blocks)),
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, VOCABULARY),
    )


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of the cross entropy."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def micro_batches(step: int, data_rank: int, number: int = NUM_MICRO_BATCHES) -> list[tuple[Tensor, Tensor]]:
    """Return the micro-batches of one step on the ranks that train on these rows."""
    generator = torch.Generator().manual_seed(1000 * step + data_rank)
    ids = torch.randint(0, VOCABULARY, (number, ROWS, LENGTH + 1), generator=generator)
    return [(one[:, :-1], one[:, 1:]) for one in ids]


def stream(steps: int, data_rank: int, number: int = NUM_MICRO_BATCHES) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the micro-batches of several steps."""
    for step in range(steps):
        yield from micro_batches(step, data_rank, number)


def plain(model: nn.Module, steps: int, data_size: int, clip: float = 0.5, lr: float = 1e-2) -> dict[str, Any]:
    """Train in one process with plain PyTorch; return the parameters, the losses and the norms."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses, norms = [], []
    for step in range(steps):
        batches = [batch for rank in range(data_size) for batch in micro_batches(step, rank)]
        total = 0.0
        for ids, labels in batches:
            loss = next_token_loss(model(ids), labels) / len(batches)
            loss.backward()
            total += float(loss.detach())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return {"parameters": {n: p.detach() for n, p in model.named_parameters()}, "losses": losses, "norms": norms}
