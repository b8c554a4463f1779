"""Encoded gathers and reduces: every rank has the same numbers, errors are bounded, bytes are those of the formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardwell
from shardwell.config import load
from shardwell.kernels.quantize import Codec
from shardwell.memory import StateKind
from shardwell.parallel.traffic import BETWEEN, INSIDE, TrafficKind
from shardwell.utils import safe_get_full_fp32_param
from tests.support.coded_collectives import as_nodes, engine_with, moved, noise
from tests.support.internals import collectives_of, groups_of
from tests.support.models import batches, share, whole_parameters
from tests.support.ranks import Ranks
from tests.support.wire_counter import WireCounter

WEIGHTS, GRADIENTS, COPIES = "zero_quantized_weights", "zero_quantized_gradients", "zero_hpz_partition_size"
ON = {WEIGHTS: True, GRADIENTS: True}
STEPS = 8


def train(engine: shardwell.Engine, num_steps: int) -> list[float]:
    losses = []
    for batch in batches(num_steps, 12):
        loss = engine(share(batch, dist.get_rank(), dist.get_world_size()))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return losses


# --------------------------------------------------------------------------------------------------------- the moves


EIGHTS, FLOATS, FOURS = ("int8", "int8", "int4"), ("fp8", "fp8", "int8"), ("int4", "int4", "int4")


@pytest.mark.parametrize(
    ("num_ranks", "of", "kinds"),
    [(2, 2, EIGHTS), (2, 2, FLOATS), (3, 3, FOURS), (4, 2, EIGHTS), (4, 2, FLOATS), (4, 2, FOURS), (6, 3, EIGHTS),
     (2, 1, FOURS)],
)  # fmt: skip
def test_every_rank_has_what_was_encoded(ranks: Ranks, num_ranks: int, of: int, kinds: tuple[str, str, str]) -> None:
    shard = 333
    found = ranks.run(num_ranks, moved, of, kinds, shard)
    shards = [
        torch.randn(num_ranks * shard, generator=torch.Generator().manual_seed(r))[:shard] for r in range(num_ranks)
    ]
    expected = torch.zeros(num_ranks, shard)
    for rank, answer in enumerate(found):
        expected[answer["place"]] = through(Codec(kinds[0]), shards[rank])
    coarsest = {"int8": 1 / 127, "int4": 1 / 7, "fp8": 1 / 16}
    for answer in found:
        assert torch.equal(torch.as_tensor(answer["flat"]), expected.view(-1))
        error = (torch.as_tensor(answer["into"]) - torch.as_tensor(answer["exact"])).abs().max()
        # Each message is off by half a step of a block whose greatest number is below 5, or 5 for each that was summed.
        most = 5 * 0.5 * num_ranks * sum(0.51 * coarsest[kind] for kind in kinds[1:])
        assert 0 < error < most
        assert torch.equal(torch.as_tensor(answer["twice"]), 2 * torch.as_tensor(answer["into"]))


def through(codec: Codec, values: Tensor) -> Tensor:
    codes = torch.empty(codec.num_bytes(values.numel()), dtype=torch.uint8)
    codec.encode(values, codes)
    out = torch.empty_like(values)
    codec.decode(codes, out)
    return out


def fed(of: int, kind: str, feedback: bool) -> dict[str, Any]:
    """The same numbers again and again, and how far the mean of what comes is from their sum."""
    as_nodes(of)
    world = collectives_of(engine_with({}))
    rank, size, shard, times = dist.get_rank(), dist.get_world_size(), 333, 60
    codecs = Codec("int8"), Codec(kind)
    values = [noise(size * shard, r) for r in range(size)]
    lost = torch.zeros(world.residual_numel(size * shard, codecs)) if feedback else None
    total = torch.zeros(shard)
    for _ in range(times):
        world.reduce_scatter(values[rank].clone(), total, 1.0, True, "A", codecs, residual=lost).wait()
    exact = torch.stack(values).sum(0).chunk(size)[world.shard_index]
    return {"off": float((total / times - exact).abs().max()), "lost": 0 if lost is None else lost.numel()}


@pytest.mark.parametrize(("num_ranks", "of"), [(2, 1), (4, 2), (3, 3)])
def test_what_codes_lose_is_said_later(ranks: Ranks, num_ranks: int, of: int) -> None:
    without, with_it = (ranks.run(num_ranks, fed, of, "int4", feedback) for feedback in (False, True))
    for before, after in zip(without, with_it, strict=True):
        assert after["lost"] == 333 * num_ranks // (of if of < num_ranks else 1)
        if of < num_ranks:  # int4; in the first hop int8 loses as much as ever
            assert after["off"] < (0.03 if of == 1 else 0.3) * before["off"]
        else:
            assert after["off"] < 0.05 * before["off"]


def spoiled() -> list[bool]:
    """What is not finite spoils one reduce, and not those after it."""
    world, codecs = collectives_of(engine_with({})), (Codec("int8"), Codec("int4"))
    lost, into, found = torch.zeros(2 * 300), torch.zeros(300), []
    for number in (1.0, float("nan"), float("inf"), 1.0):
        world.reduce_scatter(torch.full((600,), number), into, 1.0, False, "A", codecs, residual=lost).wait()
        found.append(bool(into.isfinite().all()) and bool(lost.isfinite().all()))
    return found


def test_feedback_forgets_what_is_not_finite(ranks: Ranks) -> None:
    assert ranks.run(2, spoiled) == [[True, False, False, True]] * 2


# -------------------------------------------------------------------------------------------------------- the engine


def traffic(of: int, block: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    as_nodes(of)
    engine = engine_with({**block, "stage3_param_persistence_threshold": 0}, **others)
    train(engine, 1)
    with WireCounter(dist.get_rank(), dist.get_world_size()) as counter:
        train(engine, 1)
    assert sum(counter.received.values()) == engine.traffic().total(*TrafficKind)
    received = engine.traffic().received
    shards = [g.layout.shard_numel for g in groups_of(engine)]
    kinds, hops = (TrafficKind.ALL_GATHER, TrafficKind.REDUCE_SCATTER), (INSIDE, BETWEEN)
    found = {f"{kind.value} {hop}": received.get((kind, hop), 0) for kind in kinds for hop in hops}
    return {**found, "shards": shards}


@pytest.mark.parametrize(
    ("on", "copies"),
    [((), False), ((WEIGHTS,), False), ((WEIGHTS,), True), ((GRADIENTS,), True), ((WEIGHTS, GRADIENTS), False)],
    ids=str,
)
def test_bytes_are_those_of_the_codes(ranks: Ranks, on: tuple[str, ...], copies: bool) -> None:
    eight, four = Codec("int8").num_bytes, Codec("int4").num_bytes
    block = {**dict.fromkeys(on, True), **({COPIES: 2} if copies else {})}
    for found in ranks.run(4, traffic, 2, block, {"bf16": True}):
        gathered = [eight(s) if WEIGHTS in on else 2 * s for s in found["shards"]]
        whole_in_the_node = sum(2 * 2 * s for s in found["shards"])  # a half of it, in 16 bits
        times = 1 if copies else 2  # for forward and backward, or for forward alone
        assert found["gather between"] == times * sum(gathered)
        assert found["gather inside"] == times * sum(2 * size for size in gathered) + copies * whole_in_the_node
        assert found["reduce inside"] == sum(eight(2 * s) if GRADIENTS in on else 4 * s for s in found["shards"])
        assert found["reduce between"] == sum(four(s) if GRADIENTS in on else 2 * s for s in found["shards"])


@pytest.mark.parametrize(
    ("precision", "wire"), [("fp32", "bf16"), ("fp32", "fp16"), ("bf16", "fp32"), ("bf16", "bf16"), ("fp16", "fp16")]
)
def test_codes_are_made_of_what_would_travel(ranks: Ranks, precision: str, wire: str) -> None:
    """`communication_data_type` is what gradients are rounded to before they are encoded."""
    others: dict[str, Any] = {"fp32": {}, "bf16": {"bf16": True}, "fp16": {"fp16": {"enabled": True}}}[precision]
    block = {**ON, COPIES: 2}
    eight, four = Codec("int8").num_bytes, Codec("int4").num_bytes
    for found in ranks.run(4, traffic, 2, block, {**others, "communication_data_type": wire}):
        assert found["reduce inside"] == sum(eight(2 * s) for s in found["shards"])
        assert found["reduce between"] == sum(four(s) for s in found["shards"])


def story(of: int, block: dict[str, Any], stage: int) -> dict[str, Any]:
    """Train; look at masters; change one; the others must keep every bit."""
    as_nodes(of)
    engine = engine_with(block, stage, bf16=True, gradient_clipping=1.0)
    losses = train(engine, STEPS)
    model = engine.module
    before = {name: safe_get_full_fp32_param(p).clone() for name, p in model.named_parameters()}
    with shardwell.zero.GatheredParameters(list(model.parameters()), modifier_rank=0), torch.no_grad():
        seen = {name: p.detach().float().clone() for name, p in model.named_parameters()}
        model.blocks[0].up.weight[0].fill_(0.5)
    after = {name: safe_get_full_fp32_param(p) for name, p in model.named_parameters()}
    return {"losses": losses, "before": before, "seen": seen, "after": after, "whole": whole_parameters(model)}


_plain: dict[int, list[dict[str, Any]]] = {}


def plain_story(ranks: Ranks, stage: int) -> list[dict[str, Any]]:
    """The story without codecs, which two tests compare with."""
    if stage not in _plain:
        _plain[stage] = ranks.run(4, story, 2, {}, stage)
    return _plain[stage]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_masters_keep_their_bits_and_training_follows(ranks: Ranks, stage: int) -> None:
    block = ON if stage == 3 else {"zero_quantized_gradients": True}
    plain = plain_story(ranks, stage)[0]
    found = ranks.run(4, story, 2, block, stage)
    for answer in found:
        for name, master in answer["before"].items():
            rounded = torch.as_tensor(master).bfloat16().float()
            assert (torch.as_tensor(answer["seen"][name]) - rounded).abs().max() <= rounded.abs().max() * 2**-8, name
            changed = torch.as_tensor(answer["after"][name]) != torch.as_tensor(master)
            assert int(changed.sum()) == (changed[0].numel() if name == "blocks.0.up.weight" else 0), name
    assert found[0]["losses"] != plain["losses"]
    assert found[0]["losses"][-1] == pytest.approx(plain["losses"][-1], rel=0.03)


def kept() -> dict[str, Any]:
    as_nodes(2)
    engine = engine_with(ON, 3, bf16=True, gradient_clipping=1.0, shardwell={"codecs": {"feedback": True}})
    losses = train(engine, STEPS)
    groups = [group for group in groups_of(engine) if group.gradients._residual is not None]
    held = sum(size for (state, _, _), size in engine.memory().now.items() if state is StateKind.GRADIENTS)
    return {"losses": losses, "held": held, "padded": sum(group.layout.padded for group in groups)}


@pytest.mark.slow
def test_an_engine_keeps_what_codes_lose(ranks: Ranks) -> None:
    plain = plain_story(ranks, 3)
    for before, answer in zip(plain, ranks.run(4, kept), strict=True):
        assert answer["held"] == 4 * answer["padded"] // 2 > 0
        assert answer["losses"] == pytest.approx(before["losses"], rel=0.01)


@pytest.mark.parametrize(("key", "stage"), [("zero_quantized_weights", 2), ("zero_quantized_gradients", 1)])
def test_stages_whose_shards_do_not_travel_are_refused(key: str, stage: int) -> None:
    with pytest.raises(shardwell.ConfigError, match=f"{key}: true contradicts zero_optimization.stage {stage}"):
        load({"train_batch_size": 1, "zero_optimization": {"stage": stage, key: True}})
