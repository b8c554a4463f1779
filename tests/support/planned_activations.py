"""Peaks of device memory with activations: what a plan says, beside the live tensors of a real rank."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import shardwell
from shardwell.plan import SimulatedMachine, SimulatedRanks, estimate
from shardwell.plan.decoder import Decoder, DecoderSizes
from tests.support.live_bytes import PeakWatch
from tests.support.plan_matrix import SmallNet

MOMENTS = ("forward", "backward", "step")


@dataclass(frozen=True)
class ActivationCase:
    kind: str  # "decoder", or what of a small net is trained: "all" or "lora"
    stage: int
    recomputes: bool = False
    accumulation: int = 1

    def build(self, device: str) -> nn.Module:
        torch.manual_seed(0)
        with torch.device(device):
            if self.kind == "decoder":
                # without gates its norms are layer norms, which a CPU computes as a GPU does
                return Decoder(DecoderSizes(4, 256, 4, 1024, mlp=512), recomputes=self.recomputes)
            return SmallNet(self.kind, recomputes=self.recomputes, width=256)

    @property
    def config(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": self.accumulation,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": self.stage, "stage3_param_persistence_threshold": 0},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "fused": True}},
        }


def planned(case: ActivationCase, size: int) -> int:
    """Return the highest peak of a step on the GPU of rank 0, in bytes, as planned."""
    machine = SimulatedMachine(ranks=SimulatedRanks(0, size, size, "gloo"))
    plan = estimate(case.build("meta"), case.config, machine, {"tokens": _tokens("meta")}).costs
    return max(plan.peaks[f"{moment} device"] for moment in MOMENTS)


def counted(case: ActivationCase) -> int:
    """Return the largest sum of live tensors of this rank in a step, in bytes."""
    watch, tokens = PeakWatch(), _tokens("cpu")
    with watch:
        engine = shardwell.initialize(model=case.build("cpu"), config=case.config).engine
        for _ in range(2):  # in the first step there is no optimizer state at first
            watch.peak = watch.now()
            for _ in range(case.accumulation):
                loss: Tensor = engine(tokens)
                engine.backward(loss)
                del loss
                engine.step()
    engine.destroy(whole=False)
    return watch.peak - watch.start


def _tokens(device: str) -> Tensor:
    return torch.zeros(4, 128, dtype=torch.long, device=device)


def pairs_on_rank_0(cases: list[ActivationCase]) -> list[tuple[int, int]]:
    """Return both peaks of each case; on other ranks than the first only the second one is taken."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return [(planned(case, size) if rank == 0 else 0, counted(case)) for case in cases]
