"""Ranks of tensor, pipeline, sequence and expert axes count in a simulation what they count in real processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwell
from benchmarks.case_studies import PLAN, CaseStudy, built, loss_of
from shardwell.memory import StateKind, Tier
from shardwell.memory.machine import SimulatedMachine, SimulatedRanks, simulated
from shardwell.plan.decoder import Decoder as PlannedDecoder
from shardwell.plan.decoder import DecoderSizes
from tests.support.expert_models import NUM_EXPERTS, WIDTH, ListedExperts
from tests.support.internals import memory_stats_of
from tests.support.ranks import Ranks
from tests.support.sequence_models import TOKENS, VOCABULARY, Decoder

pytestmark = pytest.mark.slow

SMALL = CaseStudy("small", 2, 32, 4, 48, 8, 2, 2, 2, 1, 1, 1, 0, "")
MIXTURE = DecoderSizes(2, WIDTH, 2, VOCABULARY, mlp=24, gated=True, experts=NUM_EXPERTS, experts_of_token=2)
TENSOR = {"tensor_parallel": {"autotp_size": 2, "plan": {**PLAN, "3.1": "colwise_gather_output"}}}
PIPE = {"pipeline": {"stages": 2, "partition": "uniform"}}
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {  # ranks, stage, axes
    "tp2": (2, 0, TENSOR),
    "pp2": (2, 0, PIPE),
    "tp2 x ZeRO 3": (4, 3, TENSOR),
    "2 replicas": (4, 3, {}),
    "pp2 x ZeRO 1": (4, 1, PIPE),
    "tp2 x pp2": (4, 0, {**TENSOR, **PIPE}),
    "Ulysses 2 x ZeRO 2": (4, 2, {"sequence_parallel_size": 2}),
    "experts 2": (2, 3, {"shardwell": {"expert_parallel_size": 2}}),
    "experts 2 x ZeRO 3": (4, 3, {"shardwell": {"expert_parallel_size": 2}}),
    "experts 2 x ZeRO 2, listed": (4, 2, {"shardwell": {"expert_parallel_size": 2}}),
    "experts 2 x Ulysses 2": (4, 3, {"shardwell": {"expert_parallel_size": 2}, "sequence_parallel_size": 2}),
}


class InTurns(nn.Linear):
    """A router that sends tokens to experts in turns, so that each expert gets as many as any other."""

    def forward(self, rows: Tensor) -> Tensor:
        each = MIXTURE.experts_of_token
        first = torch.arange(len(rows), device=rows.device).unsqueeze(1) * each
        turns = torch.zeros(len(rows), NUM_EXPERTS, dtype=rows.dtype, device=rows.device)
        turns = turns.scatter(1, (first + torch.arange(each, device=rows.device)) % NUM_EXPERTS, 1.0)
        return turns + 1e-3 * super().forward(rows).tanh()


def counted(name: str, device: str, plans: bool = False) -> dict[str, Any]:
    """What a rank holds after each step and at its peak, and what it received in the last one, by axis."""
    _, stage, axes = CASES[name]
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **axes,
    }
    model: Any = _model(name, device)
    engine: Any = shardwell.initialize(model=model, config=config, device=device, mesh=_mesh(name)).engine
    if "pipeline" in axes:
        engine.expect_hidden(torch.empty(2, SMALL.sequence, SMALL.width, dtype=torch.bfloat16, device=device))
    rest, peaks = [], []
    for _ in range(3):
        memory_stats_of(engine).reset_peak()
        _step(name, engine, device)
        report = engine.memory()
        rest.append({f"{s.value} {u} {t.value}": size for (s, u, t), size in report.now.items() if size})
        peaks.append({state.value: report.total(state, tier=Tier.DEVICE, at_peak=True) for state in StateKind})
    traffic = engine.traffic()
    received = {f"{kind.value} {hop}": size for (kind, hop), size in traffic.received.items() if size}
    found: dict[str, Any] = {
        "rest": rest,
        "peaks": peaks,
        "traffic": received,
        "by axis": {str(axis): int(size) for axis, size in traffic.by_axis().items()},
    }
    if device != "meta" and "pipeline" not in axes:
        inputs, loss = _inputs(name, device), _loss(name, _inputs(name, "meta"))
        if plans:
            found["plan"] = engine.plan(inputs, loss).as_dict()
        _step(name, engine, device)  # the job goes on after it was planned
    engine.destroy(whole=False)
    return found


def _model(name: str, device: str) -> Any:
    if name.startswith("Ulysses"):
        with torch.device(device):
            return Decoder()
    if name.startswith("experts"):
        return _mixture(name, device)
    model: nn.Module = built(SMALL)
    if device != "meta":
        model = model.to_empty(device=device)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.02)
        model[-1][1].weight = model[0].weight
    return shardwell.pipeline.split(model, loss_fn=loss_of) if "pp2" in name else model


def _mixture(name: str, device: str) -> nn.Module:
    """Return a decoder of plans whose tokens go to the experts in turns, so that each gets as many."""
    with torch.device(device):
        model = PlannedDecoder(MIXTURE)
        for block in model.blocks:
            mixture: Any = block.mixture
            mixture.router = InTurns(WIDTH, NUM_EXPERTS, bias=False)
            if "listed" in name:
                mixture.experts = ListedExperts()
    for parameter in model.parameters():
        if device != "meta":
            nn.init.normal_(parameter, std=0.02)
    return model


def _mesh(name: str) -> DeviceMesh | None:
    """Return the mesh of a case whose axes are not in its configuration."""
    if "replicas" not in name:
        return None
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))


def _inputs(name: str, device: str) -> tuple[Tensor, ...]:
    """Return the inputs of a micro-step on this rank."""
    if name.startswith("Ulysses"):
        ids, places = (torch.zeros(2, TOKENS // 2, dtype=torch.long, device=device) for _ in range(2))
        if device != "meta":
            places += torch.arange(TOKENS // 2) + dist.get_rank() % 2 * (TOKENS // 2)
        return ids, places
    length = TOKENS // 2 if name.startswith("experts") else SMALL.sequence
    return (torch.zeros(2, length, dtype=torch.long, device=device),)


def _loss(name: str, inputs: tuple[Tensor, ...]) -> Callable[[Tensor], Tensor]:
    """Return the loss of what the model gives of inputs."""
    if name.startswith("experts"):
        return lambda loss: loss
    if name.startswith("Ulysses"):
        return lambda logits: F.cross_entropy(logits.view(-1, VOCABULARY).float(), inputs[0].view(-1))
    return lambda output: loss_of(output, inputs[0])


def _step(name: str, engine: Any, device: str) -> None:
    inputs = _inputs(name, device)
    if "pp2" in name:
        engine.train_batch(iter([(*inputs, *inputs)] * 2))
        return
    for _ in range(2):
        engine.backward(_loss(name, inputs)(engine(*inputs)))
        engine.step()


def on_rank(names: list[str]) -> list[Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ.update(LOCAL_WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    found = []
    for number, name in enumerate(names):
        # Without a pipeline, the first and the last rank are both places of both axes. A mesh is made by all ranks.
        is_simulated = "pp2" in name or "replicas" in name or rank in (0, size - 1)
        real = counted(name, "cpu", plans=rank == (size - 1) * (number % 2))  # they take turns to plan in a running job
        with simulated(SimulatedMachine(has_gpus=False, ranks=SimulatedRanks(rank, size, size, "gloo"))):
            found.append((real, counted(name, "meta") if is_simulated else None))
    return found


def _check_comparison(where: str, found: dict[str, Any]) -> None:
    """What `engine.plan()` predicts in a running job with axes is what that counted."""
    device = next(one for one in found["tiers"] if one["tier"] == "device")
    assert device["rest"] == device["counted_rest"], where
    assert device["peak"] == device["counted_peak"], where
    assert device["allocated"] >= device["peak"], where
    assert found["traffic"], where
    assert all(pair["predicted"] == pair["counted"] for pair in found["traffic"].values()), (where, found["traffic"])


@pytest.mark.parametrize("size", [2, 4])
def test_a_simulated_rank_of_an_axis_counts_what_a_real_one_counts(size: int, ranks: Ranks) -> None:
    names = [name for name, (number, _, _) in CASES.items() if number == size]
    answers = ranks.run(size, on_rank, names)
    for rank, pairs in enumerate(answers):
        for name, (real, plan) in zip(names, pairs, strict=True):
            if plan is None:
                continue
            for what in ("traffic", "by axis", "rest", "peaks"):
                assert plan[what] == real[what], f"{name}, rank {rank}: {what}"
            assert plan["rest"][-1] == plan["rest"][-2]
            if "plan" in real:
                _check_comparison(f"{name}, rank {rank}", real["plan"])
            if name.startswith("experts"):
                # each layer and micro-step: four all-to-alls of a token's rows, half of them to the other rank, in bf16
                rows = 2 * (TOKENS // 2) * MIXTURE.experts_of_token
                assert plan["by axis"]["expert"] == 2 * 2 * 4 * (rows // 2) * WIDTH * 2
