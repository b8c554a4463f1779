"""Adapters around frozen weights that are stored as codes: the model, its engine, its codes, and what is done to it."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwell
from shardwell.kernels.quantize import Codec
from shardwell.kernels.quantize_stably import quantize_stably
from shardwell.memory import StateKind
from shardwell.parallel import TrafficKind
from shardwell.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from shardwell.zero import GatheredParameters
from tests.support.internals import groups_of
from tests.support.models import whole_parameters, zero
from tests.support.offload_cases import AIO, blocks, quickly
from tests.support.wire_counter import WireCounter

WIDTH, ROWS = 44, 8  # of a width that blocks of 256 do not divide
ON = {"zero_quantized_nontrainable_weights": True}


class Adapted(nn.Module):
    """Frozen matrices with a small detour that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.base.requires_grad_(False)
        self.out.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(torch.tanh(self.base(x) + self.up(self.down(x))))


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Adapted() for _ in range(3)])


def start(
    model: nn.Module | None = None, *, kind: str = "int8", block: dict[str, Any] | None = None, **others: Any
) -> shardwell.Engine:
    model = model or build()
    own = {"codecs": {"frozen": kind}, "keep_frozen": 0, **others.pop("shardwell", {})}
    config = zero(3, zero_optimization={**ON, **(block or {})}, shardwell=own, **others)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return shardwell.initialize(model=model, optimizer=optimizer, config=config).engine


def rows(step: int, rank: int, num_ranks: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step)).chunk(num_ranks)[rank]


def step(engine: shardwell.Engine, number: int) -> Tensor:
    output = engine(rows(number, dist.get_rank(), dist.get_world_size()).to(engine.device))
    engine.backward(output.float().square().mean())
    engine.step()
    return output.detach()


def groups(engine: shardwell.Engine, frozen: bool) -> list[Any]:
    return [group for group in groups_of(engine) if group.trainable is not frozen]


def all_codes(engine: shardwell.Engine) -> list[Tensor]:
    return [group.storage.parameters.clone() for group in groups(engine, frozen=True)]


def coded(engine: shardwell.Engine, original: nn.Module, kind: str) -> nn.Module:
    """A plain model whose frozen weights went through the codec, shard by shard."""
    model, codec, values = copy.deepcopy(original), Codec(kind), dict(original.named_parameters())
    plain = dict(model.named_parameters())
    for group in groups(engine, frozen=True):
        layout = group.layout
        flat = torch.zeros(layout.padded)
        for slot in layout.slots:
            flat[slot.offset : slot.end] = values[slot.name].detach().flatten()
        for shard in flat.chunk(layout.num_shards):
            codes = torch.empty(codec.num_bytes(shard.numel()), dtype=torch.uint8)
            quantize_stably(codec, shard.clone(), codes)
            codec.decode(codes, shard)
        for slot in layout.slots:
            plain[slot.name].data.copy_(flat[slot.offset : slot.end].view(slot.shape))
    return model


def same_tensors(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def run(kind: str, bf16: bool, quantized: bool) -> dict[str, Any]:
    """One forward and ten steps beside a plain model, and the bytes of the last step."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    engine = start(kind=kind, bf16={"enabled": bf16}, block={"zero_quantized_weights": quantized})
    rest = engine.memory().total()
    plain = coded(engine, build(), kind).to(engine.device, torch.bfloat16 if bf16 else torch.float32)
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2)
    with torch.no_grad():
        batch = rows(0, rank, num_ranks).to(engine.device)
        same = torch.equal(engine(batch), plain(batch.bfloat16() if bf16 else batch))
    for number in range(10):
        with WireCounter(rank, num_ranks) as counter:
            step(engine, number)
        if not bf16:
            optimizer.zero_grad()
            for other in range(num_ranks):
                (plain(rows(number, other, num_ranks).to(engine.device)).square().mean() / num_ranks).backward()
            optimizer.step()
    report = engine.traffic()
    return {
        "same": same or (quantized and num_ranks > 1),  # adapters that travel in codes are not those of the plain model
        "rest": rest,
        "frozen": [group.layout.shard_numel for group in groups(engine, frozen=True)],
        "trained": [group.layout.shard_numel for group in groups(engine, frozen=False)],
        "gathered": report.total(TrafficKind.ALL_GATHER),
        "counted": sum(counter.received.values()) - report.total() - report.total(TrafficKind.CONTROL),
        "off": max(
            float((p - q).abs().max() / q.abs().max())
            for p, q in zip(whole_parameters(engine.module).values(), plain.parameters(), strict=True)
        ),
    }


def below(tier: str, path: str, kind: str) -> dict[str, Any]:
    quickly()
    above = start(kind=kind, bf16={"enabled": True})
    outputs = [step(above, number) for number in range(3)]
    optimizer = "cpu" if tier == "nvme" else "none"
    engine = start(kind=kind, bf16={"enabled": True}, block=blocks(tier, optimizer, path), aio=AIO)
    first = [step(engine, 0)]
    return {
        "same": torch.equal(first[0], outputs[0]),
        "rest": engine.memory().total(StateKind.PARAMETERS),
        "tier": {place for state, _, place in engine.memory().now if state is StateKind.PARAMETERS},
        "codes": [len(codes) for codes in all_codes(above)],
        "trained": sum(group.layout.shard_numel for group in groups(engine, frozen=False)),
        "masters": {n: safe_get_full_fp32_param(p) for n, p in engine.module.named_parameters() if not p.requires_grad},
        "expected": {n: safe_get_full_fp32_param(p) for n, p in above.module.named_parameters() if not p.requires_grad},
    }


HALF_A_STEP = 0.5 / 126  # of int8, at most, against the greatest number of a block


def looked_at() -> dict[str, Any]:
    engine = start(bf16={"enabled": True})
    model, plain = engine.module, coded(engine, build(), "int8").to(engine.device)
    expected = dict(plain.named_parameters())
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    rest, codes, state = engine.memory().now, all_codes(engine), engine.state_dict()
    seen, full = whole_parameters(model), {n: safe_get_full_fp32_param(p) for n, p in model.named_parameters()}
    with GatheredParameters(model.parameters(), modifier_rank=0):
        pass
    unchanged = same_tensors(all_codes(engine), codes)
    with GatheredParameters(model[0].base.weight, modifier_rank=0), torch.no_grad():
        model[0].base.weight[0].fill_(0.25 if dist.get_rank() == 0 else 9.0)
        with GatheredParameters(model[0].out.weight):
            pass
    after = whole_parameters(model)
    safe_set_full_fp32_param(model[1].base.weight, torch.full((WIDTH, WIDTH), 0.5))
    set_one = whole_parameters(model)
    return {
        "seen": all(torch.equal(seen[n], expected[n].bfloat16()) for n in frozen),
        "state": all(torch.equal(state[n], seen[n].cpu()) for n in frozen),
        "full": all(torch.equal(full[n], expected[n]) for n in frozen),
        "unchanged": unchanged,
        "written": (after["0.base.weight"][0].float() - 0.25).abs().max() <= 0.25 * (HALF_A_STEP + 2**-9),
        "others": all(torch.equal(after[n], seen[n]) for n in frozen if not n.startswith("0.")),
        "set": (set_one["1.base.weight"].float() - 0.5).abs().max() <= 0.5 * (HALF_A_STEP + 2**-9),
        "rest": engine.memory().now == rest,
    }


def saved(folder: str, kind: str, bf16: bool) -> dict[str, Any]:
    engine = start(kind=kind, bf16={"enabled": bf16})
    step(engine, 0)
    engine.save_checkpoint(folder)
    codes, goes_on = all_codes(engine), step(engine, 1)
    torch.manual_seed(7)
    other = start(nn.Sequential(*[Adapted() for _ in range(3)]), kind=kind, bf16={"enabled": bf16})
    differs = not same_tensors(all_codes(other), codes)
    other.load_checkpoint(folder)
    same = same_tensors(all_codes(other), codes)
    return {"differs": differs, "same": same, "goes on": torch.equal(goes_on, step(other, 1))}
