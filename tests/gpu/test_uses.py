"""On CUDA: any use of a model, fp16, compiling, Muon, and frozen weights that stay."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

import shardwell
from shardwell.engine import TraceAction
from tests.support.gpu import nccl_engine, on_the_gpu
from tests.support.internals import groups_of
from tests.support.models import Gpt, batches, whole_parameters, zero
from tests.support.ranks import Ranks
from tests.support.scenes import (
    Experts,
    FrozenAndThawed,
    GatedPerStep,
    GradientPenalty,
    Scene,
    SometimesUsed,
    UsedOutside,
    UsedOutsideRecomputed,
    play_all,
    play_plainly,
)
from tests.support.training import Case, distance

pytestmark = pytest.mark.gpu

KINDS = [Experts, FrozenAndThawed, GatedPerStep, GradientPenalty, SometimesUsed, UsedOutside, UsedOutsideRecomputed]


def play_on_the_gpu(scene: Scene, stages: tuple[int, ...]) -> list[dict[str, Any]]:
    os.environ["SHARDWELL_DEVICE"] = "cuda:0"
    return play_all(scene, stages)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_parameters_follow_plain_pytorch_on_the_gpu(ranks: Ranks, kind: type[Scene]) -> None:
    expected = play_plainly(kind(), 2)
    for stage, found in zip((1, 3), ranks.run(2, play_on_the_gpu, kind(), (1, 3))[0], strict=True):
        difference, name = distance(found, expected)
        assert difference < 1e-9, f"stage {stage}: {name} differs by {difference}"


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_fp16_stages_agree_bit_for_bit_on_the_gpu(ranks: Ranks, num_ranks: int) -> None:
    case = Case(dtype=torch.float32, steps=6, clip=0.5, config={"fp16": {"enabled": True, "initial_scale_power": 10}})
    one, two, three = (ranks.run(num_ranks, on_the_gpu, [case], stage)[0][0] for stage in (1, 2, 3))
    for name in one:
        assert (one[name] == two[name]).all(), name
        assert (one[name] == three[name]).all(), name


def fp16_overflows() -> dict[str, Any]:
    engine, data = nccl_engine(3, fp16={"enabled": True, "initial_scale_power": 24, "hysteresis": 1})
    losses = []
    for _ in range(5):
        for batch in data:
            loss = engine(batch)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
    return {"skipped": engine.skipped_steps, "scale": engine.loss_scale, "first": losses[0], "last": losses[-1]}


def test_an_fp16_scale_that_is_too_large_comes_down_and_training_goes_on(ranks: Ranks) -> None:
    answer = ranks.run(1, fp16_overflows)[0]
    assert answer["skipped"] > 0
    assert answer["scale"] == 2.0 ** (24 - answer["skipped"])
    assert answer["last"] < answer["first"] - 0.5


def compiled_losses(stage: int, bf16: bool) -> tuple[list[float], list[float], dict[str, int]]:
    answers = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        os.environ["SHARDWELL_DEVICE"] = "cuda:0"
        torch.manual_seed(0)
        model = Gpt(width=64, blocks=4, vocab=160)
        config = zero(stage, bf16={"enabled": bf16}, shardwell={"shard_at_world_one": True})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        engine = shardwell.initialize(model=model, optimizer=optimizer, config=config).engine
        if compiled:
            engine.compile()
        losses = []
        for batch in batches(6, 4, 160):
            loss = engine(batch)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        answers.append(losses)
    counters = torch._dynamo.utils.counters
    return (*answers, {"graphs": counters["stats"]["unique_graphs"], "breaks": sum(counters["graph_break"].values())})  # type: ignore[return-value]


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 3])
def test_compiled_units_agree_with_eager_ones(ranks: Ranks, stage: int, bf16: bool) -> None:
    eager, compiled, counters = ranks.run(1, compiled_losses, stage, bf16)[0]
    assert compiled == pytest.approx(eager, rel=2e-2 if bf16 else 1e-4)
    assert counters == {"graphs": 2, "breaks": 0}  # the embedding's and the blocks'


def muon_on_the_gpu(stage: int) -> dict[str, Any]:
    os.environ["SHARDWELL_DEVICE"] = "cuda:0"
    torch.manual_seed(0)
    model = Gpt(width=32, blocks=3)
    config = zero(stage, optimizer={"type": "Muon", "params": {"lr": 1e-2}})
    engine = shardwell.initialize(model=model, config=config).engine
    for batch in batches(4, 8):
        engine.backward(engine(batch))  # every rank the same rows
        engine.step()
    return whole_parameters(model)


def test_muon_over_shards_equals_muon_over_whole_matrices_on_the_gpu(ranks: Ranks) -> None:
    whole = ranks.run(1, muon_on_the_gpu, 0)[0]
    for num_ranks in (2, 4):
        found = ranks.run(num_ranks, muon_on_the_gpu, 3)[0]
        difference, name = distance(found, {key: torch.as_tensor(value) for key, value in whole.items()})
        assert difference < 2e-3, f"{name} differs by {difference}"  # its Newton-Schulz runs in bf16


def gathers_of_frozen_weights(keep: Any) -> list[int]:
    os.environ["SHARDWELL_DEVICE"] = "cuda:0"
    torch.manual_seed(0)
    model = Gpt(width=64, blocks=4, vocab=160)
    for block in model.blocks:
        for linear in (block.qkv, block.out, block.up, block.down):
            linear.requires_grad_(False)
    model.adapter = nn.Parameter(torch.zeros(()))
    config = zero(3, shardwell={"shard_at_world_one": True, "keep_frozen": keep})
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    engine = shardwell.initialize(model=model, optimizer=optimizer, config=config).engine
    bytes_whole = []
    for batch in batches(4, 4, 160):
        with engine.record() as trace:
            engine.backward(engine(batch))
            engine.step()
        frozen = [g for g in groups_of(engine) if not g.trainable]
        assert trace.count(TraceAction.ALL_GATHER) > 0
        bytes_whole.append(sum(group.flat.present for group in frozen))
    return bytes_whole


def test_frozen_weights_stay_where_the_gpu_has_room(ranks: Ranks) -> None:
    assert ranks.run(1, gathers_of_frozen_weights, "auto")[0] == [0, 4, 4, 4]
    assert ranks.run(1, gathers_of_frozen_weights, 0)[0] == [0, 0, 0, 0]


def thawed_with_a_fused_optimizer(stage: int, bf16: bool) -> dict[str, Any]:
    """A unit is rebuilt after two steps; the counts of its other parameters lie on the device for the fused kernel."""
    engine, data = nccl_engine(stage, bf16={"enabled": bf16})
    late = engine.module.blocks[1].up.bias
    late.requires_grad_(False)
    for number, batch in enumerate(data):
        late.requires_grad_(number >= 2)
        engine.backward(engine(batch))
        engine.step()
    return whole_parameters(engine.module)


def thawed_plainly() -> dict[str, Any]:
    torch.manual_seed(0)
    model = Gpt(width=64, blocks=4, vocab=160).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for number, batch in enumerate(batches(6, 4, 160)):
        model.blocks[1].up.bias.requires_grad_(number >= 2)
        optimizer.zero_grad()
        model(batch.cuda()).backward()
        optimizer.step()
    return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


def test_thawing_goes_with_fused_optimizers(ranks: Ranks) -> None:
    expected = thawed_plainly()
    for stage in (1, 3):
        difference, name = distance(ranks.run(1, thawed_with_a_fused_optimizer, stage, False)[0], expected)
        assert difference < 1e-4, f"stage {stage}: {name} differs by {difference}"
    one, three = (ranks.run(1, thawed_with_a_fused_optimizer, stage, True)[0] for stage in (1, 3))
    assert all((one[name] == three[name]).all() for name in one)
