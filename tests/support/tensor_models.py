"""A small decoder that tensor ranks can share, and the same training in one process and on a grid of ranks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwell
from tests.support.models import batches, zero

ROWS = 8
WIDTH, HEADS, VOCABULARY = 16, 4, 29  # the vocabulary does not divide

PLAN = {
    "blocks.*.attention.q": "colwise",
    "blocks.*.attention.k": "colwise",
    "blocks.*.attention.v": "colwise",
    "blocks.*.attention.out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
}
HEAD = {"head": "colwise_gather_output"}
WORDS = {"embed": "embedding_rowwise"}


class Attention(nn.Module):
    """Attention whose number of heads follows from the projections."""

    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for one in (self.q, self.k, self.v))
        drop = self.drop if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=drop)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, drop)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.dropout = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Decoder(nn.Module):
    """Embedding, blocks, norm, head; returns the loss."""

    def __init__(
        self, tied: bool = False, recompute: bool = False, frozen: bool = False, drop: float = 0.0, blocks: int = 2
    ) -> None:
        super().__init__()
        self.recompute, self.parallel_loss = recompute, False
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(8, WIDTH) * 0.02)
        self.blocks = nn.ModuleList([Block(WIDTH, drop) for _ in range(blocks)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        if frozen:
            self.blocks[0].requires_grad_(False)

    def hidden(self, inputs: Tensor) -> Tensor:
        x = self.embed(inputs) + self.position[: inputs.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.norm(x)

    def forward(self, tokens: Tensor) -> Tensor:
        logits, targets = self.head(self.hidden(tokens[:, :-1])), tokens[:, 1:]
        if self.parallel_loss:
            from shardwell.tensor_parallel import vocab_parallel_cross_entropy

            return vocab_parallel_cross_entropy(logits, targets, self.head)
        wide = torch.promote_types(logits.dtype, torch.float32)
        return F.cross_entropy(logits.flatten(0, 1).to(wide), targets.flatten())


@dataclass(frozen=True)
class TensorCase:
    """One training run on a grid."""

    plan: dict[str, str] = field(default_factory=lambda: {**PLAN, **HEAD, **WORDS})
    model: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    tensor: dict[str, Any] = field(default_factory=dict)
    steps: int = 4  # as many as a case of `training.py` has, for its reasons
    accumulation: int = 1
    clip: float = 0.05
    size: int = 2
    loss_parallel: bool = False
    optimizer: str = "AdamW"
    born_sharded: bool = False
    dtype: torch.dtype = torch.float64

    def build(self) -> Decoder:
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            return Decoder(**self.model)
        finally:
            torch.set_default_dtype(before)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        trained = [p for p in model.parameters() if p.requires_grad]
        return getattr(torch.optim, self.optimizer)(trained, lr=1e-2)


_known: dict[str, dict[str, Tensor]] = {}


def plainly(case: TensorCase) -> dict[str, Tensor]:
    """Plain PyTorch in one process."""
    key = repr(replace(case, plan={}, config={}, tensor={}, size=1, loss_parallel=False, born_sharded=False))
    if key not in _known:
        torch.manual_seed(0)
        model = case.build()
        optimizer = case.make_optimizer(model)
        for batch in batches(case.steps, ROWS * case.accumulation):
            optimizer.zero_grad()
            for micro in batch.chunk(case.accumulation):
                (model(micro) / case.accumulation).backward()
            nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], case.clip)
            optimizer.step()
        _known[key] = {name: value.detach() for name, value in model.state_dict().items()}
    return {name: value.clone() for name, value in _known[key].items()}


def grid_config(case: TensorCase, stage: int) -> dict[str, Any]:
    return zero(
        stage,
        train_micro_batch_size_per_gpu=1,
        gradient_accumulation_steps=case.accumulation,
        gradient_clipping=case.clip,
        tensor_parallel={"autotp_size": case.size, "plan": case.plan, **case.tensor},
        **case.config,
    )


def started(case: TensorCase, stage: int) -> tuple[shardwell.Engine, Decoder]:
    """Build an engine; ranks but the first begin with other values, which do not count."""
    torch.manual_seed(dist.get_rank())
    config = grid_config(case, stage)
    with shardwell.zero.Init(config_dict_or_path=config, enabled=case.born_sharded):
        model = case.build()
    model.parallel_loss = case.loss_parallel
    engine = shardwell.initialize(model=model, optimizer=case.make_optimizer(model), config=config).engine
    return engine, model


def train(engine: shardwell.Engine, case: TensorCase, first: int = 0, last: int | None = None) -> list[float]:
    """Train some of the steps, and return the norms."""
    norms = []
    for batch in batches(case.steps, ROWS * case.accumulation)[first:last]:
        for micro in batch.chunk(case.accumulation):
            loss = engine(micro.chunk(engine.data_size)[engine.data_rank])
            engine.backward(loss)
            engine.step()
        norms.append(engine.get_global_grad_norm())
    return norms


def on_grid(cases: list[TensorCase], stage: int) -> list[dict[str, Tensor]]:
    """Train each case, and return the whole model at its end."""
    found = []
    for case in cases:
        engine, _ = started(case, stage)
        train(engine, case)
        found.append(engine.state_dict())
        engine.destroy(whole=False)
    return found
