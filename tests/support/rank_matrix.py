"""Stages × tiers × codecs × precision: one small run of each combination, and how far it may be from plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.support.training import Case, plainly, sharded

STEPS = 4
TIERS: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"offload_optimizer": {"device": "cpu"}},
    "host, parameters too": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    "disk": {"offload_optimizer": {"device": "nvme"}},
}
CODECS: dict[str, dict[str, Any]] = {
    "exact": {},
    "qwZ": {"zero_quantized_weights": True},
    "qgZ": {"zero_quantized_gradients": True},
    "ZeRO++": {"zero_quantized_weights": True, "zero_quantized_gradients": True},
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 8.0}},
}
# How far the updates of all steps may be from those of plain PyTorch in fp32, relative to their size. Updates that have
# nothing to do with each other are 1.4 apart. Measured on CPU ranks: 8e-7, 0.19, 0.025; with
# codecs 0.06 to 0.2 inside a node, and 0.4 between nodes, where gradients have 4 bits.
LIMITS = {"fp32": 1e-4, "bf16": 0.3, "fp16": 0.05}
LIMIT_WITH_CODECS = 0.5


@dataclass(frozen=True)
class Combination:
    """One run of the matrix."""

    stage: int
    tier: str = "device"
    codec: str = "exact"
    precision: str = "fp32"
    clip: float = 0.0
    options: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-3})

    def __str__(self) -> str:
        return f"stage {self.stage}, {self.tier}, {self.codec}, {self.precision}, clip {self.clip:g}"

    @property
    def limit(self) -> float:
        """Return how far a parameter may be from plain PyTorch."""
        return LIMITS[self.precision] if self.codec == "exact" else LIMIT_WITH_CODECS

    def case(self, folder: str) -> Case:
        """Return the run; states on disk are in `folder`."""
        block = {key: dict(value) for key, value in TIERS[self.tier].items()}
        for one in block.values():
            if one["device"] == "nvme":
                one["nvme_path"] = folder
        config = {**PRECISIONS[self.precision], "zero_optimization": {**block, **CODECS[self.codec]}}
        return Case(STEPS, clip=self.clip, dtype=torch.float32, options=self.options, config=config)


def combinations(stage: int) -> Iterator[Combination]:
    """Yield the combinations that a stage has: all precisions, each tier in two of them, and each codec in one."""
    for precision in PRECISIONS:
        clip = 0.5 if precision == "bf16" else 0.0
        for tier in TIERS:
            least = 3 if "parameters" in tier else 1 if tier != "device" else 0
            if stage >= least and (precision != "fp16" or tier == "device"):
                yield Combination(stage, tier, precision=precision, clip=clip)
    for codec in CODECS:
        if codec != "exact" and stage >= (2 if codec == "qgZ" else 3):
            yield Combination(stage, codec=codec, precision="bf16")
    if stage == 3:
        yield Combination(3, "host, parameters too", "ZeRO++", "bf16")


def run_all(stage: int, folder: str) -> dict[str, dict[str, Any]]:
    """Run all combinations of a stage on this rank; return the parameters of each."""
    return {str(one): sharded(one.case(folder), stage) for one in combinations(stage)}


def complaints(stage: int, found: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield what is wrong with the answers of a rank."""
    for one in combinations(stage):
        far = distance_of_updates(one, found[str(one)])
        if not far <= one.limit:
            yield f"{one}: the updates differ by {far:.2g}, and may by {one.limit:g}"


def distance_of_updates(one: Combination, found: dict[str, Any]) -> float:
    """Return how far the updates of a run are from those of plain PyTorch, relative to their size."""
    case = Case(STEPS, clip=one.clip, dtype=torch.float32, options=one.options)
    begin = dict(case.build().named_parameters())
    expected, _ = plainly(case)
    apart = size = 0.0
    for name, after in expected.items():
        if not name.endswith("qkv.bias"):  # a key's bias has gradients of rounding noise
            update = (after - begin[name].detach()).double()
            difference = torch.as_tensor(found[name]).double() - after.double()
            apart, size = apart + float(difference.square().sum()), size + float(update.square().sum())
    return (apart / size) ** 0.5
