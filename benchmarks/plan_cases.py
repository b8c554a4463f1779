"""The steps that ``benchmarks.plan_gpu`` trains and plans: the same model and configuration for both.

The list is fixed, and calibration sees none of it. Half of the cases peak in the backward or the step: blocks that are
kept with a small vocabulary, adapters beside frozen weights, optimizer states on the host.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.model import BASE, LARGE, SEVEN, XLARGE, Decoder, DecoderConfig
from benchmarks.overheads_worker import add_adapters
from shardwell.plan import BlockModel

CPU = {"device": "cpu", "pin_memory": True, "ratio": 1.0}  # all of it: without a ratio the first units stay above
SOME, NEVER = 1.0, 1e3  # norms to clip at: a usual one, and one that no gradient reaches
SMALL_VOCABULARY = 2048
LORA_RANK = 16
_TINY = DecoderConfig(vocab=512, width=64, blocks=12, heads=4, mlp=176, seq=32)  # for trials without a GPU


@dataclass(frozen=True)
class PlanCase:
    """One step: a decoder, a micro-batch of each rank, a stage, and what else a configuration has."""

    model: DecoderConfig
    batch: int
    stage: int
    checkpoint: bool = True
    clip: float = 0.0
    accumulation: int = 1
    lora: bool = False  # adapters are trained, frozen weights are bf16
    zero: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)  # the configuration's block "shardwell"
    limit: float = 60.0  # seconds of a process

    def config(self) -> dict[str, Any]:
        """Return the configuration."""
        threshold = {} if self.lora else {"stage3_param_persistence_threshold": 0}
        return {
            "train_micro_batch_size_per_gpu": self.batch,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clip,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": self.stage, **threshold, **self.zero},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
            "shardwell": self.own,
        }

    def build(self, blocks: int | None = None, device: str = "meta") -> Decoder:
        """Return the decoder on a device, with all blocks or with some."""
        sizes = self.model if blocks is None else replace(self.model, blocks=blocks)
        torch.manual_seed(0)
        with torch.device(device):
            model = Decoder(sizes, checkpoint=self.checkpoint)
        if self.lora:
            add_adapters(model, LORA_RANK)
            for parameter in model.parameters():
                if not parameter.requires_grad:
                    parameter.data = parameter.data.to(torch.bfloat16)
        return model

    def tokens(self, device: str = "meta") -> Tensor:
        """Return the tokens of one micro-batch."""
        if device == "meta":
            return torch.empty(self.batch, self.model.seq, dtype=torch.long, device=device)
        drawn = torch.randint(0, self.model.vocab, (self.batch, self.model.seq), generator=torch.Generator())
        return drawn.to(device)

    def block_model(self) -> BlockModel:
        """Return what a plan takes: few blocks of it are simulated."""

        def build(blocks: int) -> nn.Module:
            return self.build(blocks)

        return BlockModel("decoder", self.model.blocks, build, (self.tokens(), self.tokens()))

    def tiny(self) -> PlanCase:
        """Return the same with sizes for a CPU."""
        return replace(self, model=_TINY, batch=2)


def _host(commit: str, **more: Any) -> dict[str, Any]:
    return {"zero": {"offload_optimizer": CPU}, "own": {"commit": commit, **more}}


CASES: dict[str, PlanCase] = {
    "1.3B stage 2": PlanCase(LARGE, 8, 2, clip=SOME),
    "1.3B host, at once": PlanCase(LARGE, 8, 2, **_host("at_once")),
    "1.3B host, after the norm": PlanCase(LARGE, 8, 2, clip=SOME, **_host("after_norm")),
    "1.3B host, speculative": PlanCase(LARGE, 8, 2, clip=NEVER, **_host("shadow")),
    "350M stage 0": PlanCase(BASE, 16, 0, clip=SOME),
    "1.3B kept blocks, small vocabulary": PlanCase(
        replace(LARGE, vocab=SMALL_VOCABULARY), 4, 3, checkpoint=False, clip=SOME, own={"shard_at_world_one": True}
    ),
    "7B adapters": PlanCase(SEVEN, 8, 2, lora=True, clip=SOME),
    "3B stage 3, sharded": PlanCase(XLARGE, 8, 3, clip=SOME, own={"shard_at_world_one": True}),
    "7B stage 0": PlanCase(SEVEN, 8, 0, clip=SOME),
    "7B host, 8-bit moments": PlanCase(SEVEN, 8, 2, limit=90, **_host("at_once", moments="8bit")),
    "3B host, at once, 4 micro-steps": PlanCase(XLARGE, 4, 2, accumulation=4, limit=90, **_host("at_once")),
    "350M kept blocks": PlanCase(BASE, 8, 1, checkpoint=False, clip=SOME),
}
RANK_CASES: dict[str, PlanCase] = {  # on several ranks that share a GPU
    "350M stage 2": PlanCase(BASE, 4, 2, clip=SOME),
    "350M stage 3": PlanCase(BASE, 4, 3, clip=SOME),
    "350M stage 3, host": PlanCase(BASE, 4, 3, **_host("at_once")),
}
ORDERS = (  # the faster first
    ("1.3B stage 2", "1.3B host, at once", "1.3B host, speculative", "1.3B host, after the norm"),
    ("7B adapters", "7B stage 0", "7B host, 8-bit moments"),
)
