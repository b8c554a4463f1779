"""The engines of the offload benchmark, and how each is set up.

All train the decoder of the other benchmarks from the same seed and on the same batches, with AdamW. A step of a
variant is a whole optimizer step, with all its micro-steps.
"""

from __future__ import annotations

import importlib
import logging
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.contenders import Workload, fused_adamw, seeded_model, shard_all_units, why_missing
from benchmarks.model import HUGE, LARGE, NARROW, TINY, XLARGE, Decoder, DecoderConfig

SOME = 1.0  # a usual norm to clip at
NEVER = 1e3  # no gradient of these models is that long
ALWAYS = 1e-2  # all are longer
WEIGHT_DECAY = 0.01  # what torch's AdamW has by itself
CPU: dict[str, Any] = {"device": "cpu", "pin_memory": True}
ALL = {**CPU, "ratio": 1.0}  # without a ratio, shardwell keeps the state of the first units on a GPU that has room
TILE = 100_000_000  # elements that DeepSpeed updates at once
AIO = {"block_size": 1 << 20, "queue_depth": 8, "overlap_events": True}  # what shardwell has by itself


@dataclass(frozen=True)
class Variant:
    """An engine with where optimizer state and parameters rest; ``own`` is the configuration's ``shardwell`` block."""

    engine: str
    stage: int = 2
    clip: float = 0.0
    offload: dict[str, Any] | None = field(default_factory=lambda: dict(CPU))
    parameters: dict[str, Any] | None = None  # as well
    accumulation: int = 1
    own: dict[str, Any] = field(default_factory=dict)
    born_sharded: bool = False  # built inside zero.Init, in bf16
    by_default: bool = True

    @property
    def commit(self) -> str:
        """When updates become the truth: decides which floor holds. A step that is redone is one after the norm."""
        if self.offload is None:
            return "on the device"
        if self.clip == 0 or (self.clip == NEVER and self.own.get("commit") != "after_norm"):
            return "at once"
        return "after the norm"

    def missing(self) -> str | None:
        """Why it cannot run here, or None."""
        return why_missing("torch" if self.engine == "fsdp2" else self.engine)


def _ours(commit: str = "auto", stage: int = 2, **kwargs: Any) -> Variant:
    own = {"commit": commit, **kwargs.pop("own", {})}
    kwargs.setdefault("offload", dict(ALL))
    if stage == 3 and not kwargs.get("born_sharded"):
        own["shard_at_world_one"] = True  # one rank alone would rest whole
    return Variant("shardwell", stage, own=own, **kwargs)


EIGHT_BIT: dict[str, Any] = {"moments": "8bit"}
IN_PART = {**CPU, "ratio": "auto"}
VARIANTS: dict[str, Variant] = {  # the first ones are what a run that ends early should have
    "shardwell2-device": Variant("shardwell", offload=None),
    "shardwell2:at-once": _ours("at_once"),
    "deepspeed2": Variant("deepspeed"),
    "fsdp2": Variant("fsdp2", 3),
    "shardwell2-device:clip": Variant("shardwell", offload=None, clip=SOME),
    "shardwell2:after-norm:clip": _ours("after_norm", clip=SOME),
    "shardwell2:shadow:never-clips": _ours("shadow", clip=NEVER),
    "deepspeed2:clip": Variant("deepspeed", clip=SOME),
    "fsdp2:clip": Variant("fsdp2", 3, clip=SOME),
    "shardwell2:shadow:always-clips": _ours("shadow", clip=ALWAYS),
    "shardwell2:auto:always-clips": _ours("auto", clip=ALWAYS),
    "shardwell3:at-once": _ours("at_once", 3),
    "shardwell3:parameters": _ours("at_once", 3, parameters=CPU),
    "deepspeed3:parameters": Variant("deepspeed", 3, parameters=CPU),
    "shardwell2:at-once:ratio-auto": _ours("at_once", offload=IN_PART),
    "shardwell2:at-once:accumulate4": _ours("at_once", accumulation=4),
    "shardwell2:auto": _ours("auto", by_default=False),
    "shardwell2:auto:never-clips": _ours("auto", clip=NEVER, by_default=False),
    "shardwell2:default": _ours(offload=CPU, by_default=False),
    "shardwell2:default:clip": _ours(offload=CPU, clip=SOME, by_default=False),
    "shardwell2:default:never-clips": _ours(offload=CPU, clip=NEVER, by_default=False),
    "shardwell2:after-norm:ratio-auto:clip": _ours("after_norm", clip=SOME, offload=IN_PART, by_default=False),
    "shardwell2:at-once:8bit": _ours("at_once", own=EIGHT_BIT, by_default=False),
    "deepspeed2:accumulate4": Variant("deepspeed", accumulation=4, by_default=False),
    "deepspeed3:parameters:clip": Variant("deepspeed", 3, parameters=CPU, clip=SOME, by_default=False),
    "shardwell3:born-sharded": _ours("at_once", 3, born_sharded=True, by_default=False),
    "shardwell3:born-sharded:8bit": _ours("at_once", 3, own=EIGHT_BIT, born_sharded=True, by_default=False),
}
ESSENTIAL = tuple(VARIANTS)[:9]


@dataclass(frozen=True)
class Size:
    """A decoder, the batch that it is trained with, and what runs unless variants are named."""

    model: DecoderConfig
    batch: int
    variants: tuple[str, ...] = tuple(name for name, variant in VARIANTS.items() if variant.by_default)
    warm_up: int = 3
    steps: int = 8
    limit: float = 180.0  # seconds of a process
    most_gib: float | None = None  # of GPU memory


SIZES = {
    "tiny": Size(TINY, 2),
    "narrow": Size(NARROW, 4, ESSENTIAL),  # 200 small blocks
    "1b": Size(LARGE, 8),
    "1b-4": Size(LARGE, 4, ESSENTIAL),
    "3b": Size(XLARGE, 8, ESSENTIAL, limit=240),
    "3b-4": Size(XLARGE, 4, ESSENTIAL, limit=240),
    "13b": Size(HUGE, 4, ("shardwell3:born-sharded:8bit",), warm_up=1, steps=4, limit=420, most_gib=32),
}


def workload_of(size: Size, variant: Variant, device: str) -> Workload:
    return Workload(size.model, size.batch, device, bf16=True, clip=variant.clip, checkpoint=True, learning_rate=1e-4)


# ------------------------------------------------------------------------------------------------------- trainers


class EngineSteps:
    """The loop of DeepSpeed's interface, which shardwell shares."""

    def __init__(self, engine: Any, variant: Variant, note: str | None = None) -> None:
        self.engine, self.note, self.norms = engine, note, list[Tensor | float]()
        self._variant = variant

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        for _ in range(self._variant.accumulation):
            loss = self.engine(tokens, targets)
            self.engine.backward(loss)
            self.engine.step()
        if self._variant.clip > 0:
            self.norms.append(self.engine.get_global_grad_norm())
        return loss.detach()


class TorchSteps:
    """The loop of plain PyTorch."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, variant: Variant) -> None:
        self.note, self.norms = None, list[Tensor | float]()
        self._model, self._optimizer, self._clip = model, optimizer, variant.clip

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self._model(tokens, targets)
        loss.backward()
        if self._clip > 0:
            norm: Any = nn.utils.clip_grad_norm_(self._model.parameters(), self._clip)
            self.norms.append(norm.full_tensor())
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def clip_rate(trainer: EngineSteps | TorchSteps, variant: Variant) -> float | None:
    """The share of steps whose gradients were longer than allowed; None without clipping."""
    return sum(float(norm) > variant.clip for norm in trainer.norms) / len(trainer.norms) if trainer.norms else None


# ------------------------------------------------------------------------------------------------------- builders


def shardwell_config(variant: Variant, workload: Workload) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": variant.stage, "stage3_param_persistence_threshold": 0}
    if variant.offload is not None:
        zero["offload_optimizer"] = variant.offload
    if variant.parameters is not None:
        zero["offload_param"] = variant.parameters
    return {
        "train_micro_batch_size_per_gpu": workload.batch,
        "gradient_accumulation_steps": variant.accumulation,
        "gradient_clipping": variant.clip,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": workload.learning_rate, "weight_decay": WEIGHT_DECAY}},
        "shardwell": variant.own,
    }


def born_sharded(workload: Workload, config: dict[str, Any]) -> Decoder:
    """Parameters are split as they are made; bf16 halves what the GPU holds of them until ``initialize``."""
    import shardwell

    torch.manual_seed(workload.seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with shardwell.zero.Init(config=config):
            return Decoder(workload.model, checkpoint=workload.checkpoint)
    finally:
        torch.set_default_dtype(before)


def build_shardwell(variant: Variant, workload: Workload) -> EngineSteps:
    import shardwell

    config = shardwell_config(variant, workload)
    model = born_sharded(workload, config) if variant.born_sharded else seeded_model(workload)
    engine, *_ = shardwell.initialize(model=model, config=config)
    kept = engine.offload.kept
    return EngineSteps(engine, variant, f"the state of {len(kept)} units stays on the device" if kept else None)


def cpu_adam(model: nn.Module, workload: Workload) -> tuple[Any, str | None]:
    """DeepSpeed's own; where that cannot be compiled, torch's fused one and the reason."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    try:
        return DeepSpeedCPUAdam(model.parameters(), lr=workload.learning_rate, weight_decay=WEIGHT_DECAY), None
    except Exception as error:
        reason = " ".join(str(error).split())[:160]
        return fused_adamw(model.parameters(), workload), f"torch's fused AdamW, for DeepSpeedCPUAdam failed: {reason}"


def build_deepspeed(variant: Variant, workload: Workload) -> EngineSteps:
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or it compiles what training never calls
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    backend = "gloo" if workload.device == "cpu" else "nccl"
    deepspeed.init_distributed(dist_backend=backend, dist_init_required=False, verbose=False)
    model = seeded_model(workload)
    optimizer, note = cpu_adam(model, workload)
    zero = {"stage": variant.stage, "offload_optimizer": variant.offload}
    if variant.offload is not None and variant.offload["device"] == "nvme":
        zero["sub_group_size"] = TILE  # of which there are several in host memory at once
    if variant.parameters is not None:
        zero["offload_param"] = variant.parameters
    config = {
        "aio": AIO,
        "train_micro_batch_size_per_gpu": workload.batch,
        "gradient_accumulation_steps": variant.accumulation,
        "gradient_clipping": variant.clip,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": note is None,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    return EngineSteps(engine, variant, note)


def build_fsdp2(variant: Variant, workload: Workload) -> TorchSteps:
    """Shards, gradients and state rest in host memory."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    model = seeded_model(workload)
    shard_all_units(model, workload, offload_policy=CPUOffloadPolicy(pin_memory=workload.device == "cuda"))
    return TorchSteps(model, fused_adamw(model.parameters(), workload), variant)


def prepare(variant: Variant) -> None:
    """Import the engine, and have compiled what it compiles at its first use."""
    if variant.engine != "fsdp2":
        importlib.import_module(variant.engine)
    if variant.engine == "deepspeed":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        with suppress(Exception):  # it will fail again, and say why, when it is needed
            DeepSpeedCPUAdam([nn.Parameter(torch.zeros(1))])


def build(variant: Variant, workload: Workload) -> EngineSteps | TorchSteps:
    if variant.engine == "fsdp2":
        return build_fsdp2(variant, workload)
    return (build_deepspeed if variant.engine == "deepspeed" else build_shardwell)(variant, workload)
