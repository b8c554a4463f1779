"""The engines of the comparison, each behind the same two calls: ``build(workload)`` and ``step(tokens, targets)``.

An engine is imported only when it is built, so that one that is not installed costs nothing but its own row. All train
the same decoder from the same seed with fused AdamW; gradients are freed at the end of each step.
"""

from __future__ import annotations

import importlib.util
import logging
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.model import Decoder, DecoderConfig


@dataclass(frozen=True)
class Workload:
    """What is trained and how, the same for every contender of a run."""

    model: DecoderConfig
    batch: int
    device: str = "cpu"
    bf16: bool = False  # bf16 compute with fp32 truth, in each engine's own way
    fp16: bool = False  # the same in fp16, with a dynamic loss scale; FSDP2 and shardwell only
    clip: float = 0.0
    checkpoint: bool = False
    learning_rate: float = 1e-3
    seed: int = 0


class Trainer(Protocol):
    """A model, an engine and an optimizer that are ready to train."""

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        """One whole training step: forward, backward, update; returns this rank's loss."""


@dataclass(frozen=True)
class Contender:
    """One row of the comparison; ``stage`` is the ZeRO stage whose memory it promises."""

    name: str
    stage: int
    build: Callable[[Workload], Trainer]
    requires: str = "torch"

    def missing(self) -> str | None:
        """Why this contender cannot run here, or None."""
        return why_missing(self.requires)


def why_missing(package: str) -> str | None:
    """Why a package cannot be used here, or None."""
    found = importlib.util.find_spec(package)
    if found is not None and found.origin is not None:  # an empty folder of that name is found too, without origin
        return None
    if package == "deepspeed":
        return "skipped: deepspeed is not installed (pip install -c constraints.txt '.[peers]')"
    return f"skipped: {package} is not importable (pip install -c constraints.txt .)"


def seeded_model(workload: Workload) -> Decoder:
    """The same initial parameters on every rank and for every contender."""
    torch.manual_seed(workload.seed)
    with torch.device(workload.device):
        return Decoder(workload.model, checkpoint=workload.checkpoint)


def fused_adamw(parameters: Any, workload: Workload) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=workload.learning_rate, fused=True)


@dataclass
class TorchTrainer:
    """The loop of plain PyTorch, which DDP, FSDP2 and ZeroRedundancyOptimizer share."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    workload: Workload
    autocast: bool = False
    scaler: torch.amp.GradScaler | None = None

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        with torch.autocast(self.workload.device, torch.bfloat16, enabled=self.autocast):
            loss = self.model(tokens, targets)
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if self.workload.clip > 0:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.workload.clip)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())


@dataclass
class EngineTrainer:
    """The loop of DeepSpeed's interface, which shardwell shares."""

    engine: Any

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        loss = self.engine(tokens, targets)
        self.engine.backward(loss)
        self.engine.step()
        return float(loss.detach())


@dataclass
class SavingTrainer(EngineTrainer):
    """A shardwell engine that saves to the folder of `tempfile` in the background, at each `every`-th step."""

    every: int
    num_steps: int = 0

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        loss = super().step(tokens, targets)
        self.num_steps += 1
        if self.num_steps % self.every == 0:
            folder = Path(tempfile.gettempdir(), "saves")
            self.engine.save_checkpoint(str(folder), tag="last", asynchronous=True)
        return loss


def build_plain(workload: Workload) -> Trainer:
    model = seeded_model(workload)
    return TorchTrainer(model, fused_adamw(model.parameters(), workload), workload, autocast=workload.bf16)


def build_plain_bf16(workload: Workload) -> Trainer:
    """Everything in bf16, also the state of the optimizer: no engine's numbers, but what the operations alone cost."""
    model = seeded_model(workload).bfloat16()
    return TorchTrainer(model, fused_adamw(model.parameters(), workload), workload)


def build_ddp(workload: Workload) -> Trainer:
    model = nn.parallel.DistributedDataParallel(seeded_model(workload), gradient_as_bucket_view=True)
    return TorchTrainer(model, fused_adamw(model.parameters(), workload), workload, autocast=workload.bf16)


def build_zero_redundancy(workload: Workload) -> Trainer:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(seeded_model(workload), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        optimizer_class=torch.optim.AdamW,
        parameters_as_bucket_view=True,
        lr=workload.learning_rate,
        fused=True,
    )
    return TorchTrainer(model, optimizer, workload, autocast=workload.bf16)


def _fsdp_arguments(workload: Workload) -> dict[str, Any]:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    mesh = init_device_mesh(workload.device, (dist.get_world_size(),))
    if not workload.bf16 and not workload.fp16:
        return {"mesh": mesh}
    compute = torch.float16 if workload.fp16 else torch.bfloat16
    return {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)}


def shard_all_units(model: Decoder, workload: Workload, **more: Any) -> None:
    """Everything is a unit and everything is released after forward: the least memory that FSDP2 offers."""
    from torch.distributed.fsdp import fully_shard

    arguments = {**_fsdp_arguments(workload), **more}
    for module in (*model.blocks, model.embedding, model.head, model):
        fully_shard(module, reshard_after_forward=True, **arguments)


def build_fsdp2(workload: Workload) -> Trainer:
    model = seeded_model(workload)
    shard_all_units(model, workload)
    return TorchTrainer(model, fused_adamw(model.parameters(), workload), workload)


def build_fsdp2_narrow(workload: Workload) -> Trainer:
    """FSDP2 with gradients reduced in bf16, as shardwell sends them, and two units gathered ahead."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    model = seeded_model(workload)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    shard_all_units(model, workload, mp_policy=precision)
    blocks: list[Any] = list(model.blocks)
    for number, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[number + 1 : number + 3])
        block.set_modules_to_backward_prefetch(blocks[max(number - 2, 0) : number][::-1])
    return TorchTrainer(model, fused_adamw(model.parameters(), workload), workload)


def build_fsdp2_default_root(workload: Workload) -> Trainer:
    """The common recipe: blocks are units, the root keeps embedding and head whole from forward to backward."""
    from torch.distributed.fsdp import fully_shard

    model = seeded_model(workload)
    arguments = _fsdp_arguments(workload)
    for module in (*model.blocks, model):
        fully_shard(module, **arguments)
    return TorchTrainer(model, fused_adamw(model.parameters(), workload), workload)


def _deepspeed_buckets(model: DecoderConfig) -> dict[str, Any]:
    """Bucket sizes (in elements) that a patient user would set by hand: about one block each."""
    block = 4 * model.width**2 + 3 * model.width * model.mlp + 2 * model.width
    largest = max(block, model.vocab * model.width)
    return {
        "reduce_bucket_size": largest,
        "stage3_prefetch_bucket_size": block,
        "stage3_max_live_parameters": 2 * largest,
        "stage3_max_reuse_distance": 0,
        "stage3_param_persistence_threshold": 10 * model.width,
        "sub_group_size": largest,
    }


def build_deepspeed(
    workload: Workload, stage: int, tuned: bool = False, zero: Mapping[str, Any] | None = None
) -> Trainer:
    """`zero` holds more keys of the block `zero_optimization`."""
    import deepspeed

    # Gloo does all the work here; without this DeepSpeed compiles a shared-memory extension that training never calls.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed(
        dist_backend="gloo" if workload.device == "cpu" else "nccl", dist_init_required=False, verbose=False
    )
    model = seeded_model(workload)
    config = {
        "train_micro_batch_size_per_gpu": workload.batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": workload.clip,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": workload.bf16},
        "zero_optimization": {
            "stage": stage,
            **(_deepspeed_buckets(workload.model) if tuned else {}),
            **(zero or {}),
        },
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=fused_adamw(model.parameters(), workload), config=config, dist_init_required=False
    )
    return EngineTrainer(engine)


def build_shardwell(
    workload: Workload,
    stage: int,
    shard_at_world_one: bool = False,
    accumulation: int = 1,
    zero: Mapping[str, Any] | None = None,
    own: Mapping[str, Any] | None = None,
) -> Trainer:
    """`zero` holds more keys of the block `zero_optimization`, `own` those of the block `shardwell`."""
    import shardwell

    model = seeded_model(workload)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": workload.batch,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **(zero or {})},
    }
    if workload.bf16:
        config["bf16"] = {"enabled": True}
    if workload.clip > 0:
        config["gradient_clipping"] = workload.clip
    if shard_at_world_one or own:
        config["shardwell"] = {**({"shard_at_world_one": True} if shard_at_world_one else {}), **(own or {})}
    engine, *_ = shardwell.initialize(model=model, optimizer=fused_adamw(model.parameters(), workload), config=config)
    return EngineTrainer(engine)


def build_saving(workload: Workload) -> Trainer:
    """Stage 3 that saves at each fourth step."""
    trainer = build_shardwell(workload, 3)
    assert isinstance(trainer, EngineTrainer)
    return SavingTrainer(trainer.engine, every=4)


def _quantized() -> dict[str, bool]:
    """The keys of ZeRO++ that need no nodes."""
    return {"zero_quantized_weights": True, "zero_quantized_gradients": True}


def _deepspeed(stage: int, tuned: bool = False) -> Contender:
    name = f"deepspeed{stage}-tuned" if tuned else f"deepspeed{stage}"
    return Contender(name, stage, lambda workload: build_deepspeed(workload, stage, tuned), "deepspeed")


def _in_turns(stage: int) -> Contender:
    own = {"gathers_take_turns": True}
    return Contender(
        f"shardwell{stage}-turns", stage, lambda workload: build_shardwell(workload, stage, own=own), "shardwell"
    )


def _shardwell(stage: int) -> Contender:
    return Contender(f"shardwell{stage}", stage, lambda workload: build_shardwell(workload, stage), "shardwell")


PEER_CONTENDERS = (
    Contender("ddp", 0, build_ddp),
    Contender("ddp+zero", 1, build_zero_redundancy),
    Contender("fsdp2", 3, build_fsdp2),
    Contender("fsdp2-default", 3, build_fsdp2_default_root),
    *(_deepspeed(stage) for stage in range(4)),
    _deepspeed(3, tuned=True),
    *(_shardwell(stage) for stage in range(4)),
)

GPU_CONTENDERS = (
    Contender("pytorch", 0, build_plain),
    Contender("pytorch-bf16", 0, build_plain_bf16),
    Contender("fsdp2", 3, build_fsdp2),
    _deepspeed(1),
    _deepspeed(3),
    _shardwell(1),
    _shardwell(2),
    _shardwell(3),
    Contender("shardwell3-sharded", 3, lambda workload: build_shardwell(workload, 3, True), "shardwell"),
)

RANK_CONTENDERS = (  # the nearest to each other first, so that a run which is cut off has them
    _shardwell(3),
    Contender("fsdp2-bf16", 3, build_fsdp2_narrow),
    _deepspeed(3),
    _shardwell(2),
    _deepspeed(2),
    _shardwell(1),
    _deepspeed(1),
    Contender("shardwell3-zeropp", 3, lambda workload: build_shardwell(workload, 3, zero=_quantized()), "shardwell"),
    Contender("fsdp2", 3, build_fsdp2),
    # What DeepSpeed 3 does by default: parameters that are used again within a billion elements stay unsharded.
    Contender(
        "shardwell3-reusing",
        3,
        lambda workload: build_shardwell(workload, 3, zero={"stage3_max_reuse_distance": 10**9}),
        "shardwell",
    ),
    *(_in_turns(stage) for stage in (3, 2, 1)),
)

ONLY_BY_NAME = (
    # the same steps with a checkpoint saved in the background at each fourth of them
    Contender("shardwell3-saving", 3, build_saving, "shardwell"),
    # on a GPU it had no result within 110 s, and would take the time of all others
    Contender("deepspeed3-zeropp", 3, lambda workload: build_deepspeed(workload, 3, zero=_quantized()), "deepspeed"),
)

# One rank alone has nothing to reduce unless it accumulates: the profile runs two micro-steps, so that both lanes work.
PROFILED = Contender("shardwell3-profiled", 3, lambda workload: build_shardwell(workload, 3, True, 2), "shardwell")


def by_name(contenders: tuple[Contender, ...], name: str) -> Contender:
    """The contender called ``name``; the error lists those that exist."""
    for contender in contenders:
        if contender.name == name:
            return contender
    known = ", ".join(contender.name for contender in contenders)
    raise SystemExit(f"unknown contender {name!r}; choose from: {known}")
