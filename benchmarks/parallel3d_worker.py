"""One layout of one engine on several ranks: what ``benchmarks.parallel3d`` starts, and nobody calls by hand."""

from __future__ import annotations

import ctypes
import faulthandler
import hashlib
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

Step = Callable[[int], float]  # trains one step, and returns its loss
Whole = Callable[[], dict[str, Tensor]]  # returns the parameters that this rank knows whole
Run = tuple[Step, Whole, Callable[[], object]]  # and what ends the engine
SIZES: dict[str, dict[str, int]] = {
    "tiny": {"width": 32, "head": 8, "blocks": 4, "vocab": 64, "seq": 16, "rows": 2},
    "small": {"width": 256, "head": 64, "blocks": 4, "vocab": 1024, "seq": 128, "rows": 2},
    "base": {"width": 1024, "head": 64, "blocks": 8, "vocab": 8192, "seq": 512, "rows": 4},
}
PLAN = {
    **{f"*.attention.{name}": "colwise" for name in "qkv"},
    "*.attention.out": "rowwise",
    "*.up": "colwise",
    "*.down": "rowwise",
}
LR, DECAY, CLIP = 1e-3, 0.01, 1.0


class Attention(nn.Module):
    """Causal attention whose number of heads follows from the projections."""

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """Return what the heads attend to."""
        q, k, v = (one(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for one in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        found: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return found


class Block(nn.Module):
    """A pre-norm block."""

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, head)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the hidden states behind the block."""
        x = x + self.attention(self.norm1(x))
        found: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return found


def layers(spec: dict[str, Any]) -> list[nn.Module]:
    """Return the layers of the decoder, from the same seed on all ranks."""
    size = SIZES[spec["size"]]
    torch.manual_seed(0)
    blocks = [Block(size["width"], size["head"]) for _ in range(size["blocks"])]
    head = nn.Sequential(nn.LayerNorm(size["width"]), nn.Linear(size["width"], size["vocab"], bias=False))
    return [nn.Embedding(size["vocab"], size["width"]), *blocks, head]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy, in fp32 at least."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.flatten(0, 1).to(wide), targets.flatten())


def micro_batches(spec: dict[str, Any], step: int, data_rank: int) -> list[tuple[Tensor, Tensor]]:
    """Return what ranks with this share of the rows train on in a step."""
    size = SIZES[spec["size"]]
    generator = torch.Generator().manual_seed(1000 * (step % 2) + data_rank)
    shape = (spec["micro_batches"], size["rows"], size["seq"] + 1)
    tokens = torch.randint(0, size["vocab"], shape, generator=generator).to(spec["device"])
    return [(one[:, :-1].contiguous(), one[:, 1:].contiguous()) for one in tokens]


def by_shardwell(spec: dict[str, Any]) -> Run:
    """Return a step of this project's engine."""
    import shardwell

    model: Any = nn.Sequential(*layers(spec))
    if spec["precision"] == "fp64":
        model = model.double()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SIZES[spec["size"]]["rows"],
        "gradient_accumulation_steps": spec["micro_batches"],
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY}},
        "zero_optimization": {"stage": spec["stage"]},
    }
    if spec["precision"] == "fp64":  # tiny parameters travel, too; timed cases have what is the default
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    if "wire" in spec:
        config["communication_data_type"] = spec["wire"]
    if "own" in spec:
        config["shardwell"] = spec["own"]
    if spec.get("cut") == "torch":  # the engine finds the tensor axis by the parameters
        mesh = torch_mesh(spec)["tp"]
        model = model.to(spec["device"])
        for layer in model:
            if isinstance(layer, Block):
                cut_by_torch(layer, mesh)
    elif spec["tp"] > 1:
        config["tensor_parallel"] = {"autotp_size": spec["tp"], "plan": PLAN}
    if spec["precision"] == "bf16":
        config["bf16"] = {"enabled": True}
    if spec["pp"] > 1:
        config["pipeline"] = {"stages": spec["pp"], "schedule": spec.get("schedule", "1f1b")}
        model = shardwell.pipeline.split(model, loss_fn=loss_of)
    engine: Any = shardwell.initialize(model=model, config=config).engine

    def step(number: int) -> float:
        batches = micro_batches(spec, number, engine.data_rank)
        if spec["pp"] > 1:
            return float(engine.train_batch(iter(batches)))
        total = 0.0
        for tokens, targets in batches:
            loss = loss_of(engine(tokens), targets)
            engine.backward(loss)
            engine.step()
            total += float(loss.detach()) / len(batches)
        return total

    return step, lambda: dict(engine.state_dict()), engine.destroy


def one_process(spec: dict[str, Any], steps: int) -> dict[str, Tensor]:
    """Return the parameters that plain PyTorch trains on the rows of all ranks."""
    model = nn.Sequential(*layers(spec)).to(spec["device"]).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY)
    ranks = dist.get_world_size() // (spec["tp"] * spec["pp"])
    for step in range(steps):
        batches = [one for rank in range(ranks) for one in micro_batches(spec, step, rank)]
        for tokens, targets in batches:
            (loss_of(model(tokens), targets) / len(batches)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in model.state_dict().items()}


def torch_mesh(spec: dict[str, Any]) -> Any:
    """Return a mesh of the layout, with the tensor axis innermost."""
    from torch.distributed.device_mesh import init_device_mesh

    rest = dist.get_world_size() // (spec["pp"] * spec["tp"])
    return init_device_mesh(spec["device"], (spec["pp"], rest, spec["tp"]), mesh_dim_names=("pp", "dp", "tp"))


def cut_by_torch(block: nn.Module, mesh: Any) -> None:
    """Cut a block over a tensor axis with torch's own styles."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    styles = {**{f"attention.{name}": ColwiseParallel() for name in "qkv"}, "attention.out": RowwiseParallel()}
    parallelize_module(block, mesh, {**styles, "up": ColwiseParallel(), "down": RowwiseParallel()})


def by_torch(spec: dict[str, Any]) -> Run:
    """Return a step of FSDP2 with torch's tensor parallelism and pipelining, as torchtitan composes them."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = torch_mesh(spec)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if spec["precision"] == "bf16" else None
    options: dict[str, Any] = {"mesh": mesh["dp"], "reshard_after_forward": spec["stage"] == 3}
    if policy is not None:
        options["mp_policy"] = policy
    parts = layers(spec)
    stage, stages = mesh.get_local_rank("pp"), spec["pp"]
    share = -(-len(parts) // stages)
    model = nn.Sequential(*parts[stage * share : (stage + 1) * share]).to(spec["device"])
    for layer in model:
        if spec["tp"] > 1 and isinstance(layer, Block):
            cut_by_torch(layer, mesh["tp"])
        fully_shard(layer, **options)
    fully_shard(model, **options)
    kinds: dict[Any, list[nn.Parameter]] = {}  # torch's kernels take DTensors of one mesh at a time
    for parameter in model.parameters():
        kinds.setdefault(parameter.device_mesh, []).append(parameter)  # type: ignore[attr-defined]
    optimizers = [
        torch.optim.AdamW(kind, lr=LR, weight_decay=DECAY, fused=spec["device"] == "cuda") for kind in kinds.values()
    ]
    run = _torch_pipeline(spec, model, mesh) if stages > 1 else _torch_loop(spec, model)
    rank = mesh.get_local_rank("dp")

    def step(number: int) -> float:
        loss = run(micro_batches(spec, number, rank))
        _clip_by_torch(list(kinds.values()), mesh)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return step, dict, list


def _clip_by_torch(kinds: list[list[nn.Parameter]], mesh: Any) -> None:
    """Clip by the norm of the whole model, over all meshes and pipeline stages."""
    total = torch.zeros((), device=mesh.device_type)
    for kind in kinds:
        norm: Any = nn.utils.get_total_norm([one.grad for one in kind if one.grad is not None])
        total += norm.full_tensor() ** 2
    if mesh["pp"].size() > 1:
        dist.all_reduce(total, group=mesh.get_group("pp"))
    for kind in kinds:
        nn.utils.clip_grads_with_norm_(kind, CLIP, total.sqrt())


def _torch_loop(spec: dict[str, Any], model: nn.Module) -> Callable[[list[tuple[Tensor, Tensor]]], float]:
    def run(batches: list[tuple[Tensor, Tensor]]) -> float:
        total = 0.0
        for number, (tokens, targets) in enumerate(batches):
            sharded: Any = model
            sharded.set_requires_gradient_sync(number == len(batches) - 1 or spec["stage"] == 3)
            loss = loss_of(model(tokens), targets) / len(batches)
            loss.backward()
            total += float(loss.detach())
        return total

    return run


def _torch_pipeline(
    spec: dict[str, Any], model: nn.Module, mesh: Any
) -> Callable[[list[tuple[Tensor, Tensor]]], float]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, stages = mesh.get_local_rank("pp"), spec["pp"]
    stage = PipelineStage(model, rank, stages, torch.device(spec["device"]), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(stage, spec["micro_batches"], loss_fn=loss_of)

    def run(batches: list[tuple[Tensor, Tensor]]) -> float:
        tokens, targets = torch.cat([one for one, _ in batches]), torch.cat([one for _, one in batches])
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(tokens)
        elif rank == stages - 1:
            schedule.step(target=targets, losses=losses)
        else:
            schedule.step()
        return float(torch.stack(losses).mean()) if losses else 0.0

    return run


def by_deepspeed(spec: dict[str, Any]) -> Run:
    """Return a step of DeepSpeed's `PipelineModule`."""
    import deepspeed

    if "shardwell" in str(getattr(deepspeed, "__file__", "")):
        raise ImportError("deepspeed here is this project's own names")
    deepspeed.init_distributed(auto_mpi_discovery=False)
    model = deepspeed.pipe.PipelineModule(
        layers=layers(spec), num_stages=spec["pp"], loss_fn=loss_of, partition_method="uniform"
    )
    config = {
        "train_micro_batch_size_per_gpu": SIZES[spec["size"]]["rows"],
        "gradient_accumulation_steps": spec["micro_batches"],
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY, "torch_adam": True}},
        "zero_optimization": {"stage": spec["stage"]},
        "bf16": {"enabled": spec["precision"] == "bf16"},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    rank = engine.grid.get_data_parallel_rank()

    def step(number: int) -> float:
        def rows() -> Iterator[tuple[Tensor, Tensor]]:
            yield from micro_batches(spec, number, rank)

        return float(engine.train_batch(rows()))

    return step, dict, list


ENGINES = {"shardwell": by_shardwell, "torch": by_torch, "deepspeed": by_deepspeed}


def digest(value: Tensor) -> str:
    """Return a name for the bits of a tensor."""
    plain = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.blake2b(plain.numpy().tobytes(), digest_size=8).hexdigest()


def timed(spec: dict[str, Any], step: Step, first: int) -> dict[str, Any]:
    """Return the seconds of each step, and the memory at the peak of them."""
    is_cuda = spec["device"] == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds, losses = [], []
    for number in range(first, first + spec["steps"]):
        dist.barrier()
        begin = time.perf_counter()
        losses.append(step(number))
        if is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return {
        "seconds": statistics.median(seconds),
        "all_seconds": seconds,
        "peak_allocated": torch.cuda.max_memory_allocated() if is_cuda else 0,
        "rest_allocated": torch.cuda.memory_allocated() if is_cuda else 0,
        "losses": losses,
    }


def compared(spec: dict[str, Any], step: Step, whole: Whole) -> dict[str, Any]:
    """Train in fp64; return the distance to one process of plain PyTorch, and the bits."""
    losses = [step(number) for number in range(spec["steps"])]
    found = whole()
    plain = one_process(spec, spec["steps"])
    far = max(float((value.double().cpu() - plain[name].cpu()).abs().max()) for name, value in found.items())
    return {"distance": far, "digests": {name: digest(value) for name, value in found.items()}, "losses": losses}


def main() -> None:
    """Run the cases that the JSON in argv[1] describes, one after the other."""
    spec = json.loads(sys.argv[1])
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a rank ends with whoever started it
    faulthandler.dump_traceback_later(spec["patience"], exit=False)  # where it waits, if it does
    # A receive that waits must not share a hardware queue with the collective that its sender waits for.
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = str(spec["queues"])
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # matrix products give the same bits in each run
    os.environ["SHARDWELL_DEVICE"] = "cuda:0" if spec["device"] == "cuda" else "cpu"
    if spec["device"] == "cuda":
        torch.cuda.set_device(0)
    else:
        torch.set_num_threads(1)
    # Without `device_id`: communicators are made when they are first used, and most lines of a grid never are.
    dist.init_process_group(spec["backend"])
    found = []
    for one in spec["cases"]:
        case = {**spec, **one}
        begin = time.perf_counter()
        step, whole, end = ENGINES[case["engine"]](case)
        if case["precision"] == "fp64":
            torch.use_deterministic_algorithms(True, warn_only=True)  # bits are compared with those of another run
            figures = compared(case, step, whole)
        else:
            for number in range(case["warm_up"]):
                step(number)
            figures = timed(case, step, case["warm_up"])
        found.append({**figures, "total_seconds": time.perf_counter() - begin})
        print(f"case {len(found)} of {len(spec['cases'])}: {found[-1]['total_seconds']:.1f} s", flush=True)
        end()
        del step, whole, end
    Path(spec["folder"], f"{dist.get_rank()}.json").write_text(json.dumps({"cases": found}))
    dist.barrier()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
