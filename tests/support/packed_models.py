"""A decoder with packed projections, trained in any layout of ranks, and checkpoints that go from one to another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardwell
from shardwell.checkpoint.export import to_dcp, to_deepspeed, to_safetensors
from shardwell.checkpoint.sources import open_source

WIDTH, HEAD, VOCABULARY, ROWS, LENGTH = 16, 4, 24, 2, 6
QKV = (16, 8, 8)  # sizes of queries, keys and values, packed in one matrix
NUM_BATCHES = 4  # micro-batches of a step, over all ranks
PLAN = {
    "blocks.*.qkv": f"packed_colwise:{','.join(map(str, QKV))}",
    "blocks.*.out": "rowwise",
    "blocks.*.gate_up": "packed_colwise",
    "blocks.*.down": "rowwise",
}


class Block(nn.Module):
    """Grouped-query attention and a gated layer, both with packed projections."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, sum(QKV)), nn.Linear(WIDTH, WIDTH)
        self.gate_up, self.down = nn.Linear(WIDTH, 48, bias=False), nn.Linear(24, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        packed = self.qkv(self.norm1(x))
        unit = packed.shape[-1] // sum(QKV[index] // 8 for index in range(3))
        q, k, v = packed.split([unit * size // 8 for size in QKV], -1)
        q, k, v = (one.unflatten(-1, (-1, HEAD)).transpose(1, 2) for one in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        output: Tensor = x + self.down(F.silu(gate) * up)
        return output


class PackedDecoder(nn.Module):
    """A language model with a list of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.tokens(ids)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def built(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return PackedDecoder().double()


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def micro_batches(step: int) -> list[tuple[Tensor, Tensor]]:
    ids = torch.randint(0, VOCABULARY, (NUM_BATCHES, ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return [(one[:, :-1], one[:, 1:]) for one in ids]


@dataclass(frozen=True)
class Leg:
    """Some steps in one layout, and the format in which its checkpoint goes to the next one."""

    stages: int = 1
    tensor: int = 1
    zero: int = 1
    hands_on: str = "own"  # "own", "hf", "dcp", "deepspeed"
    plan: Mapping[str, str] = field(default_factory=lambda: PLAN)
    schedule: str = "1f1b"
    states: Mapping[str, Any] = field(default_factory=dict)  # more keys of zero_optimization
    more: Mapping[str, Any] = field(default_factory=dict)  # more keys of the configuration
    dtype: torch.dtype = torch.float64


class Plain:
    """Plain PyTorch in one process, with an optimizer that may begin again."""

    def __init__(self) -> None:
        self.model = built(0)
        self.begin_again()

    def begin_again(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, weight_decay=0.1)

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        for ids, labels in micro_batches(number):
            (loss_of(self.model(ids), labels) / NUM_BATCHES).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()


def engine_of(leg: Leg, model: nn.Module) -> Any:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": NUM_BATCHES * leg.stages * leg.tensor // dist.get_world_size(),
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": {"stage": leg.zero, "stage3_param_persistence_threshold": 0, **leg.states},
        **leg.more,
    }
    if leg.tensor > 1:
        config["tensor_parallel"] = {"autotp_size": leg.tensor, "plan": leg.plan}
    whole: Any = model
    if leg.stages > 1:
        config["pipeline"] = {"stages": leg.stages, "schedule": leg.schedule}
        whole = shardwell.pipeline.split(model, loss_fn=loss_of)
    return shardwell.initialize(model=whole, config=config).engine


def train_step(engine: Any, leg: Leg, number: int) -> None:
    mine = micro_batches(number)[engine.data_rank :: engine.data_size]
    if leg.stages > 1:
        engine.train_batch(iter(mine))
        return
    for ids, labels in mine:
        engine.backward(loss_of(engine(ids), labels))
        engine.step()


CONVERSIONS: dict[str, Callable[[Any, str], Any]] = {
    "hf": to_safetensors,
    "dcp": to_dcp,
    "deepspeed": lambda source, path: to_deepspeed(source, path, ranks=2, stage=2),
}


def handed_on(folder: str, kind: str) -> str:
    """Return where the checkpoint is, in the format that was asked for. All ranks must call it."""
    if kind == "own":
        return folder
    path = f"{folder}-{kind}"
    if dist.get_rank() == 0:
        source = open_source(folder)
        CONVERSIONS[kind](source, path)
        source.close()
    dist.barrier()
    return path


def run_chain(legs: list[Leg], folder: str, steps: int) -> dict[str, Any]:
    """Train some steps in each layout after the other; return what this rank holds at the end."""
    at, kind = "", "own"
    for number, leg in enumerate(legs):
        engine = engine_of(leg, built(number))
        if at and kind == "hf":
            engine.load_model(at)
        elif at:
            engine.load_checkpoint(at, strict=True)
        for step in range(number * steps, (number + 1) * steps):
            train_step(engine, leg, step)
        at, kind = str(Path(folder) / f"{number}"), leg.hands_on
        engine.save_checkpoint(at)
        engine.finish_saving()
        dist.barrier()
        if number + 1 < len(legs):
            engine.destroy(whole=False)
            at = handed_on(at, kind)
    found = dict(engine.state_dict())
    engine.destroy(whole=False)
    return found


def trained(leg: Leg, steps: int) -> dict[str, Any]:
    """Train in one layout; return what this rank holds at the end."""
    engine = engine_of(leg, built(0).to(leg.dtype))
    for step in range(steps):
        train_step(engine, leg, step)
    found = engine.state_dict()
    engine.destroy(whole=False)
    return dict(found)


def alone(legs: list[Leg], steps: int) -> dict[str, Tensor]:
    """Return what plain PyTorch makes of the same steps."""
    plain = Plain()
    for number in range(len(legs)):
        for step in range(number * steps, (number + 1) * steps):
            plain.step(step)
        if legs[number].hands_on == "hf":
            plain.begin_again()
    return {name: value.detach() for name, value in plain.model.state_dict().items()}
