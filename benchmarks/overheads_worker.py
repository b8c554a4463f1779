"""One variant in one process: what ``benchmarks.overheads`` starts, and nobody calls by hand.

A variant is an engine with the features that it is measured with: LoRA, compilation, fp16. All train the decoder of the
other benchmarks from the same seed, with fused AdamW and clipping at 1.0.

What each LoRA variant holds of a frozen weight between its uses: shardwell a shard in bf16, whatever dtype the model
came in; FSDP2 a shard in the dtype that the model came in, so it is measured with both. ``bf16`` gets frozen weights in
bf16 and adapters in fp32, exactly as shardwell does; ``fp32`` gets all in fp32. All compute in bf16 and step fp32
adapters, which FSDP2 shards with their block and shardwell, by its default threshold, leaves whole.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.contenders import (
    EngineTrainer,
    TorchTrainer,
    Trainer,
    Workload,
    fused_adamw,
    seeded_model,
    shard_all_units,
)
from benchmarks.gpu_worker import batches, synchronise, timing_pass
from benchmarks.launch import without_folders
from benchmarks.model import PRESETS, Decoder

RANK = 16
LORA_SCALE = 2.0
INITIAL_SCALE_POWER = 12  # of fp16's loss scale: low enough that no timed step is skipped


@dataclass(frozen=True)
class Variant:
    """An engine and the features that it is measured with; ``own`` is the configuration's ``shardwell`` block."""

    engine: str
    stage: int = 3
    precision: str = "bf16"
    lora: bool = False
    checkpoint: bool = True
    compiled: bool = False
    fp32_frozen: bool = False
    own: dict[str, Any] = field(default_factory=dict)


GATHERING: dict[str, Any] = {"shard_at_world_one": True}  # one rank alone would rest whole


def _lora_variants() -> dict[str, Variant]:
    variants: dict[str, Variant] = {}
    for checkpoint in (True, False):
        shared: dict[str, Any] = {"lora": True, "checkpoint": checkpoint}
        suffix = ":checkpointed" if checkpoint else ""
        variants |= {
            f"lora:fsdp2-fp32{suffix}": Variant("fsdp2", fp32_frozen=True, **shared),
            f"lora:fsdp2-bf16{suffix}": Variant("fsdp2", **shared),
            f"lora:shardwell3-gathered{suffix}": Variant("shardwell", own={**GATHERING, "keep_frozen": 0}, **shared),
            f"lora:shardwell3-kept{suffix}": Variant("shardwell", own={**GATHERING, "keep_frozen": "auto"}, **shared),
            f"lora:shardwell3{suffix}": Variant("shardwell", **shared),
        }
    return variants


VARIANTS: dict[str, Variant] = {
    **_lora_variants(),
    "bf16:fsdp2": Variant("fsdp2"),
    "bf16:shardwell1": Variant("shardwell", 1),
    "bf16:shardwell2": Variant("shardwell", 2),
    "bf16:shardwell3": Variant("shardwell", own=GATHERING),
    "bf16:fsdp2:compiled": Variant("fsdp2", compiled=True),
    "bf16:shardwell1:compiled": Variant("shardwell", 1, compiled=True),
    "bf16:shardwell3:compiled": Variant("shardwell", own=GATHERING, compiled=True),
    "fp16:fsdp2": Variant("fsdp2", precision="fp16"),
    "fp16:shardwell2": Variant("shardwell", 2, precision="fp16"),
    "fp16:shardwell3": Variant("shardwell", precision="fp16", own=GATHERING),
}


class Adapted(nn.Module):
    """A frozen linear layer and a trainable product of two small matrices beside it, zero at the start."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear = linear
        device = linear.weight.device
        self.down = nn.Parameter(torch.randn(rank, linear.in_features, device=device) / linear.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + F.linear(F.linear(x, self.down) * LORA_SCALE, self.up)


def add_adapters(model: Decoder, rank: int) -> None:
    """Freeze the model and put an adapter at every linear layer of its blocks."""
    model.requires_grad_(False)
    for block in model.blocks:
        for parent in list(block.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, Adapted(child, rank))


def build_model(variant: Variant, workload: Workload) -> Decoder:
    """The decoder in fp32; with LoRA, frozen weights in bf16 unless the variant wants them as they are."""
    model = seeded_model(workload)
    if variant.lora:
        add_adapters(model, RANK)
        for parameter in model.parameters():
            if not parameter.requires_grad and not variant.fp32_frozen:
                parameter.data = parameter.data.to(torch.bfloat16)
    return model


def build_fsdp2(variant: Variant, workload: Workload, backend: str) -> TorchTrainer:
    """Blocks, embedding, head and root are units, released after forward; compilation is per block, inside the hooks.

    With one rank the plain GradScaler is enough for fp16; it understands sharded gradients.
    """
    model = build_model(variant, workload)
    if variant.compiled:
        for block in model.blocks:
            block.forward = torch.compile(block.forward, backend=backend)
    shard_all_units(model, workload)
    optimizer = fused_adamw([p for p in model.parameters() if p.requires_grad], workload)
    scaler = torch.amp.GradScaler(workload.device, 2.0**INITIAL_SCALE_POWER) if workload.fp16 else None
    return TorchTrainer(model, optimizer, workload, scaler=scaler)


def build_shardwell(variant: Variant, workload: Workload, backend: str) -> EngineTrainer:
    """Without LoRA every parameter is split at stage 3, as in FSDP2; with it the default threshold holds."""
    import shardwell

    model = build_model(variant, workload)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": workload.batch,
        "gradient_clipping": workload.clip,
        "zero_optimization": {"stage": variant.stage},
        variant.precision: {"enabled": True},
        "shardwell": variant.own,
    }
    if not variant.lora:
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    if workload.fp16:
        config["fp16"]["initial_scale_power"] = INITIAL_SCALE_POWER
    optimizer = fused_adamw([p for p in model.parameters() if p.requires_grad], workload)
    engine, *_ = shardwell.initialize(model=model, optimizer=optimizer, config=config)
    if variant.compiled:
        engine.compile(backend)
    return EngineTrainer(engine)


def loss_scale(trainer: Trainer, steps: int) -> dict[str, Any]:
    """The loss scale at the end, and how many of the steps an overflow cost."""
    if isinstance(trainer, EngineTrainer):
        return {"loss_scale": trainer.engine.loss_scale, "skipped_steps": trainer.engine.skipped_steps}
    assert isinstance(trainer, TorchTrainer)
    assert trainer.scaler is not None
    states = [state for state in trainer.optimizer.state.values() if "step" in state]
    taken = int(max(float(state["step"]) for state in states)) if states else 0
    return {"loss_scale": trainer.scaler.get_scale(), "skipped_steps": steps - taken}


def compile_counters() -> dict[str, Any]:
    """What torch.compile did in this process: graphs, breaks, recompilations and their reasons, cache hits."""
    from torch._dynamo.utils import counters, get_compilation_metrics

    reasons = [str(one.recompile_reason) for one in get_compilation_metrics() if one.recompile_reason]
    return {
        "graphs": counters["stats"]["unique_graphs"],
        "frames": dict(counters["frames"]),
        "graph_breaks": sum(counters["graph_break"].values()),
        "graph_break_reasons": {without_folders(str(why)): count for why, count in counters["graph_break"].items()},
        "recompiles": len(reasons),
        "recompile_reasons": [without_folders(reason) for reason in reasons],
        "joint_graphs": counters["aot_autograd"]["total"],
        "cache_hits": counters["inductor"]["fxgraph_cache_hit"],
        "cache_misses": counters["inductor"]["fxgraph_cache_miss"],
    }


def measure(variant: Variant, workload: Workload, steps: int, backend: str) -> dict[str, Any]:
    """Build, take the first step by the clock, then time the others.

    The allocator's cache is emptied after the build, so that what it reserves is what training needs.
    """
    begin = time.perf_counter()
    trainer = (build_fsdp2 if variant.engine == "fsdp2" else build_shardwell)(variant, workload, backend)
    on_gpu = workload.device == "cuda"
    data = batches(workload)[0]
    gc.collect()
    synchronise(workload.device)
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    built = time.perf_counter()
    first_loss = trainer.step(*data)
    synchronise(workload.device)
    first_step = time.perf_counter() - built
    first_peak = torch.cuda.max_memory_allocated() if on_gpu else None
    figures = timing_pass(trainer, workload, steps)
    figures["losses"] = [first_loss, *figures["losses"]]
    figures |= {"build_seconds": built - begin, "first_step_seconds": first_step, "first_step_peak": first_peak}
    if variant.lora:
        figures["tflops"] *= 4 / 6  # frozen weights have no gradients
    if variant.compiled:
        figures["compile"] = compile_counters()
    if workload.fp16:
        figures |= loss_scale(trainer, len(figures["losses"]))
    return figures


def stand_by(signal: Path) -> None:
    """Wait until the file ``signal`` says go; end if it says stop, or if nobody is left to say anything."""
    parent = os.getppid()
    while not signal.exists() or not signal.read_text():
        if os.getppid() != parent:
            raise SystemExit("the benchmark is gone")
        time.sleep(0.02)
    if signal.read_text() != "go":
        raise SystemExit("not needed")


def main() -> None:
    """Import, wait for the turn, measure the variant that the JSON in argv[1] names."""
    spec = json.loads(sys.argv[1])
    variant = VARIANTS[spec["variant"]]
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = spec["cache"]
    engine = {"shardwell": "shardwell", "fsdp2": "torch.distributed.fsdp"}[variant.engine]
    compiler = ["torch._inductor.compile_fx"] if variant.compiled and spec["backend"] == "inductor" else []
    for module in (engine, "torch._dynamo", *compiler):  # every optimizer imports the second
        importlib.import_module(module)
    stand_by(Path(spec["signal"]))
    begin = time.perf_counter()
    device = spec["device"]
    if device == "cuda":
        torch.cuda.set_device(0)
        dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    else:
        os.environ["SHARDWELL_DEVICE"] = "cpu"
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    workload = Workload(
        PRESETS[spec["size"]],
        spec["batch"],
        device,
        bf16=variant.precision == "bf16",
        fp16=variant.precision == "fp16",
        clip=1.0,
        checkpoint=variant.checkpoint,
        learning_rate=1e-3 if variant.lora else 1e-4,
    )
    figures = measure(variant, workload, spec["steps"], spec["backend"])
    figures["turn_seconds"] = time.perf_counter() - begin
    Path(spec["folder"], f"{dist.get_rank()}.json").write_text(json.dumps(figures))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
