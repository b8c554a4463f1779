"""Small decoders whose sequences ranks can share, and the same training in one process and on a sequence axis."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwell
from shardwell import sequence_parallel
from tests.support.models import zero

ROWS, TOKENS, VOCABULARY, WIDTH, HEADS = 4, 12, 29, 16, 4
PLAN = {
    "blocks.*.q": "colwise",
    "blocks.*.k": "colwise",
    "blocks.*.v": "colwise",
    "blocks.*.out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
}


class Block(nn.Module):
    """Attention with groups of heads, and an MLP."""

    def __init__(self, kv_heads: int, drop: float, module: bool) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.q, self.k, self.v = (nn.Linear(WIDTH, size * heads) for heads in (HEADS, kv_heads, kv_heads))
        self.out, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.attend = sequence_parallel.DistributedAttention() if module else None
        self.drop = drop

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for one in (self.q, self.k, self.v))
        options = {"is_causal": mask is None, "dropout_p": self.drop if self.training else 0.0}
        if self.attend is not None:
            mixed = self.attend(q, k, v, mask, **options)
        else:
            mixed = sequence_parallel.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True, **options)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), self.drop, self.training)
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Decoder(nn.Module):
    """Embedding, blocks, head; returns logits."""

    def __init__(self, kv_heads: int = 4, recompute: bool = False, drop: float = 0.0, module: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.embed, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList([Block(kv_heads, drop, module) for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor, mask: Any = None) -> Tensor:
        x = self.embed(input_ids) + self.position(position_ids)
        for block in self.blocks:
            x = checkpoint(block, x, mask, use_reentrant=False) if self.recompute else block(x, mask)
        return self.head(x)


@dataclass(frozen=True)
class SequenceCase:
    """One training run on a sequence axis."""

    model: dict[str, Any] = field(default_factory=dict)
    family: str = ""  # of Transformers; empty: the decoder of this module
    data: str = ""  # "packed", "padded" or "sparse" (most labels do not count, unevenly)
    config: dict[str, Any] = field(default_factory=dict)
    tensor: int = 1
    size: int = 2
    steps: int = 4  # as many as a case of `training.py` has, for its reasons
    accumulation: int = 1
    clip: float = 0.05
    dtype: torch.dtype = torch.float64
    rows: int = ROWS

    def build(self) -> nn.Module:
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            return Decoder(**self.model) if not self.family else pretrained(self.family, **self.model)
        finally:
            torch.set_default_dtype(before)


def pretrained(family: str, **options: Any) -> nn.Module:
    """A tiny model of Transformers that attends by SDPA."""
    with torch.random.fork_rng():  # modules that are imported first may draw numbers
        import transformers

        kinds = getattr(transformers, f"{family}Config"), getattr(transformers, f"{family}ForCausalLM")
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "use_cache": False,
        "attn_implementation": "sdpa",
    }
    return kinds[1](kinds[0](**{**sizes, **options}))


def micro_batches(case: SequenceCase) -> list[list[dict[str, Tensor]]]:
    """The whole batches of each step, as micro-batches of whole rows of all ranks."""
    generator = torch.Generator().manual_seed(3)
    steps = []
    for _ in range(case.steps):
        micro = []
        for _ in range(case.accumulation):
            ids = torch.randint(VOCABULARY, (case.rows, TOKENS), generator=generator)
            batch = {"input_ids": ids, "labels": ids.clone()}
            if case.data == "packed":
                batch["position_ids"] = torch.cat([torch.arange(n) for n in (5, 4, 3)]).expand(case.rows, -1)
            if case.data == "padded":
                lengths = torch.randint(4, TOKENS + 1, (case.rows, 1), generator=generator)
                batch["attention_mask"] = (torch.arange(TOKENS) < lengths).long()
                batch["labels"] = ids.masked_fill(batch["attention_mask"] == 0, -100)
            if case.data == "sparse":
                keep = torch.rand(ids.shape, generator=generator) < 0.3
                keep[:, : TOKENS // 2] = False  # the first ranks have no label at all
                keep[0, -1] = True
                batch["labels"] = ids.masked_fill(~keep, -100)
            micro.append(batch)
        steps.append(micro)
    return steps


def square_mask(batch: dict[str, Tensor]) -> Tensor | None:
    """The mask of whole sequences, made without the library."""
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()[None, None]
    if "position_ids" in batch:
        documents = (batch["position_ids"] == 0).cumsum(-1)
        return mask & (documents[:, None, :, None] == documents[:, None, None, :])
    if "attention_mask" in batch:
        return mask & batch["attention_mask"].bool()[:, None, None, :]
    return None


_known: dict[str, dict[str, Tensor]] = {}


def plainly(case: SequenceCase) -> dict[str, Tensor]:
    """Plain PyTorch in one process: the mean over all tokens of each micro-batch."""
    key = repr(replace(case, config={}, tensor=1, size=1))
    if key not in _known:
        torch.manual_seed(0)
        model = case.build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in micro_batches(case):
            optimizer.zero_grad()
            for batch in step:
                logits = plain_logits(model, batch, case)
                loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
                (loss / case.accumulation).backward()
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
            optimizer.step()
        _known[key] = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return {name: value.clone() for name, value in _known[key].items()}


def plain_logits(model: nn.Module, batch: dict[str, Tensor], case: SequenceCase) -> Tensor:
    if case.family:
        return model(**{key: value for key, value in batch.items() if key != "labels"}).logits
    positions = batch.get("position_ids", torch.arange(TOKENS)[None])
    return model(batch["input_ids"], positions, square_mask(batch))


def started(case: SequenceCase, stage: int, **given: Any) -> shardwell.Engine:
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
        config["sequence_parallel_size"] = case.size
    if case.tensor > 1:
        config["tensor_parallel"] = {"autotp_size": case.tensor, "plan": "auto" if case.family else PLAN}
    model = case.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return shardwell.initialize(model=model, optimizer=optimizer, config=config, **given).engine


def loss_of(engine: shardwell.Engine, batch: dict[str, Tensor], case: SequenceCase) -> Tensor:
    """Cut a batch of all rows, run the model on this rank's part, and return this rank's share of the loss."""
    rows = {key: value.chunk(engine.data_size)[engine.data_rank] for key, value in batch.items()}
    part = sequence_parallel.shard_batch(rows, engine)
    if case.family:
        taken = ("input_ids", "attention_mask", "position_ids")
        logits = engine(**{key: part[key] for key in taken if key in part}).logits
    else:
        asked = {key: part[key] for key in ("attention_mask", "position_ids") if key in batch}
        mask = sequence_parallel.whole_attention_mask(engine, **asked)
        logits = engine(part["input_ids"], part["position_ids"], mask)
    return sequence_parallel.cross_entropy(logits, part["shift_labels"], part["num_items_in_batch"])


def train(engine: shardwell.Engine, case: SequenceCase, first: int = 0, last: int | None = None) -> None:
    for step in micro_batches(case)[first:last]:
        for batch in step:
            engine.backward(loss_of(engine, batch, case))
            engine.step()


def on_axis(cases: list[SequenceCase], stage: int) -> list[dict[str, Tensor]]:
    """Train each case, and return the whole model at its end."""
    found = []
    for case in cases:
        engine = started(case, stage)
        train(engine, case)
        found.append(engine.state_dict())
        engine.destroy(whole=False)
    return found
