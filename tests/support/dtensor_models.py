"""The decoder of `tensor_models.py`, cut by torch's `parallelize_module` before it is handed over."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import shardwell
from tests.support.models import batches
from tests.support.tensor_models import ROWS, TensorCase, grid_config


def line_of_ranks(size: int = 2) -> DeviceMesh:
    """Return this rank's tensor axis, of neighbours, among all ranks."""
    grid = init_device_mesh("cpu", (dist.get_world_size() // size, size), mesh_dim_names=("dp", "tp"))
    return grid["tp"]


def parallelized(model: Any, mesh: DeviceMesh, kind: str) -> None:
    """Cut a decoder as `kind` says: "plain", "sequence" or "loss"."""
    splits = kind == "sequence"
    inside = Shard(1) if splits else Replicate()
    outer: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    if kind == "loss":
        outer["head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh, outer)
    for block in model.blocks:
        layers: dict[str, Any] = {
            **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
            "attention.out": RowwiseParallel(output_layouts=inside),
            "up": ColwiseParallel(input_layouts=inside),
            "down": RowwiseParallel(output_layouts=inside),
        }
        if splits:
            layers |= {
                "norm1": SequenceParallel(use_local_output=True),
                "norm2": SequenceParallel(use_local_output=True),
                "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            }
        parallelize_module(block, mesh, layers)


class SplitDecoder(nn.Module):
    """Splits hidden states along the sequence between the blocks."""

    def __init__(self, inner: Any, mesh: DeviceMesh, kind: str) -> None:
        super().__init__()
        self.inner, self.mesh, self.kind = inner, mesh, kind

    def forward(self, tokens: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        inner, mesh = self.inner, self.mesh
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = inner.embed(inputs) + inner.position[: inputs.shape[1]]
        if self.kind == "sequence":
            x = DTensor.from_local(x, mesh, [Replicate()]).redistribute(placements=[Shard(1)]).to_local()
        for block in inner.blocks:
            x = block(x)
        if self.kind == "sequence":
            x = DTensor.from_local(x, mesh, [Shard(1)]).redistribute(placements=[Replicate()]).to_local()
        logits = inner.head(inner.norm(x))
        loss: Tensor = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return loss


def cut_by_torch(case: TensorCase, kind: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = case.build()
    mesh = line_of_ranks()
    parallelized(model, mesh, kind)
    return SplitDecoder(model, mesh, kind)


def engine_over(model: nn.Module, case: TensorCase, stage: int) -> shardwell.Engine:
    config = grid_config(case, stage)
    del config["tensor_parallel"]
    return shardwell.initialize(model=model, optimizer=case.make_optimizer(model), config=config).engine


def train_cut(engine: shardwell.Engine, case: TensorCase) -> None:
    for batch in batches(case.steps, ROWS * case.accumulation):
        for micro in batch.chunk(case.accumulation):
            with loss_parallel():
                loss = engine(micro.chunk(engine.data_size)[engine.data_rank])
                engine.backward(loss)
            engine.step()


def dtensors_follow(case: TensorCase, kinds: list[str], stage: int) -> list[dict[str, Tensor]]:
    """Train a model that comes as DTensors in each way, and return the whole models."""
    found = []
    for kind in kinds:
        model = cut_by_torch(case, kind)
        before = {name: id(parameter) for name, parameter in model.named_parameters()}
        engine = engine_over(model, case, stage)
        train_cut(engine, case)
        found.append({name.removeprefix("inner."): value for name, value in engine.state_dict().items()})
        assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
        engine.destroy()
        kept = {name: value.detach() for name, value in model.named_parameters()}
        for name, value in kept.items():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            assert torch.equal(whole, found[-1][name.removeprefix("inner.")]), name
    return found
