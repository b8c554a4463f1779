"""Small models with experts, and the same training in one process and on an expert axis."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardwell
from tests.support.models import batches, zero
from tests.support.sequence_models import pretrained

ROWS, WIDTH, NUM_EXPERTS, VOCABULARY = 8, 12, 4, 29


class PackedExperts(nn.Module):
    """Experts in tensors of three dimensions, as Transformers has them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = NUM_EXPERTS
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, 2 * WIDTH, WIDTH) * 0.2)
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, 2 * WIDTH) * 0.2)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        found = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, place = (top_k_index == expert).nonzero(as_tuple=True)
            if len(token):
                inner = F.gelu(F.linear(hidden_states[token], self.up[expert]))
                found = found.index_add(
                    0, token, F.linear(inner, self.down[expert]) * top_k_weights[token, place, None]
                )
        return found


class ListedExperts(nn.ModuleList):
    """Experts as modules."""

    def __init__(self) -> None:
        both = [(nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(NUM_EXPERTS)]
        super().__init__([nn.Sequential(up, nn.GELU(), down) for up, down in both])

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        found = torch.zeros_like(hidden_states)
        for number, expert in enumerate(self):
            token, place = (top_k_index == number).nonzero(as_tuple=True)
            if len(token):
                found = found.index_add(0, token, expert(hidden_states[token]) * top_k_weights[token, place, None])
        return found


class Block(nn.Module):
    """A router and experts."""

    def __init__(self, listed: bool, skew: float) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, NUM_EXPERTS)
        self.experts = ListedExperts() if listed else PackedExperts()
        self.register_buffer("skew", torch.tensor([skew, skew, 0.0, 0.0]))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x).flatten(0, 1)
        weights, index = (self.router(hidden) + self.skew).softmax(-1).topk(2)
        return x + self.experts(hidden, index, weights).view_as(x)


class Router(nn.Module):
    """Embedding, blocks with experts, head; returns the loss."""

    def __init__(self, listed: bool = False, skew: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(listed, skew) for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        wide = torch.promote_types(logits.dtype, torch.float32)
        return F.cross_entropy(logits.flatten(0, 1).to(wide), tokens[:, 1:].flatten())


class Mixture(nn.Module):
    """A model of Transformers that returns the loss in the dtype of its logits."""

    def __init__(self, family: str, **options: Any) -> None:
        super().__init__()
        self.inner = pretrained(family, **options)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.inner(tokens[:, :-1]).logits
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@dataclass(frozen=True)
class ExpertCase:
    """One training run on an expert axis."""

    model: dict[str, Any] = field(default_factory=dict)
    family: str = ""  # of Transformers; empty: the model of this module
    config: dict[str, Any] = field(default_factory=dict)
    size: int = 2
    steps: int = 4  # as many as a case of `training.py` has, for its reasons
    accumulation: int = 1
    clip: float = 0.05
    born_sharded: bool = False
    dtype: torch.dtype = torch.float64

    def build(self) -> nn.Module:
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            return Mixture(self.family, **self.model) if self.family else Router(**self.model)
        finally:
            torch.set_default_dtype(before)


_known: dict[str, dict[str, Tensor]] = {}


def plainly(case: ExpertCase) -> dict[str, Tensor]:
    """Plain PyTorch in one process."""
    key = repr(replace(case, config={}, size=1, born_sharded=False))
    if key not in _known:
        torch.manual_seed(0)
        model = case.build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for batch in batches(case.steps, ROWS * case.accumulation):
            optimizer.zero_grad()
            for micro in batch.chunk(case.accumulation):
                (model(micro) / case.accumulation).backward()
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
            optimizer.step()
        _known[key] = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return {name: value.clone() for name, value in _known[key].items()}


def started(case: ExpertCase, stage: int, **given: Any) -> shardwell.Engine:
    """Build an engine; ranks but the first begin with other values, which do not count."""
    torch.manual_seed(dist.get_rank())
    config = zero(
        stage,
        train_micro_batch_size_per_gpu=1,
        gradient_accumulation_steps=case.accumulation,
        gradient_clipping=case.clip,
        **case.config,
    )
    if not given:
        config["shardwell"] = {**config.get("shardwell", {}), "expert_parallel_size": case.size}
    with shardwell.zero.Init(config_dict_or_path=config, enabled=case.born_sharded):
        model = case.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return shardwell.initialize(model=model, optimizer=optimizer, config=config, **given).engine


def train(engine: shardwell.Engine, case: ExpertCase, first: int = 0, last: int | None = None) -> list[float]:
    """Train some of the steps, and return the norms."""
    norms = []
    for batch in batches(case.steps, ROWS * case.accumulation)[first:last]:
        for micro in batch.chunk(case.accumulation):
            engine.backward(engine(micro.chunk(engine.data_size)[engine.data_rank]))
            engine.step()
        norms.append(engine.get_global_grad_norm())
    return norms


def on_axis(cases: list[ExpertCase], stage: int) -> list[dict[str, Tensor]]:
    """Train each case, and return the whole model at its end."""
    found = []
    for case in cases:
        engine = started(case, stage)
        train(engine, case)
        found.append(engine.state_dict())
        engine.destroy(whole=False)
    return found
