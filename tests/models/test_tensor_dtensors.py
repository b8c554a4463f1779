"""Models that Transformers has cut (DTensors) follow the same model in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import shardwell
from tests.support.models import zero
from tests.support.ranks import Ranks
from tests.support.training import distance
from tests.support.zoo import ADAMW, CLIP, STEPS, batches, build, disturb, share, train_plainly

tensor_parallel = pytest.importorskip("transformers.distributed.tensor_parallel")
NAMES = ["qwen3", "phi3", "qwen3-moe"]  # and llama below


def cut_here(name: str) -> Any:
    """Cut a model over neighbours, as `from_pretrained` does where tensor ranks are all ranks."""
    model = disturb(build(name))
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    tensor_parallel.apply_tensor_parallelism(model, mesh)
    model.tie_weights()  # which cutting has undone, as `from_pretrained` does
    return model


def trained(model: Any, name: str, stage: int) -> dict[str, torch.Tensor]:
    config = zero(stage, gradient_clipping=CLIP, optimizer={"type": "AdamW", "params": ADAMW})
    engine = shardwell.initialize(model=model, config=config).engine
    for batch in batches(name, STEPS):
        engine.backward(engine(**share(batch, engine.data_rank, engine.data_size)).loss)
        engine.step()
    with torch.no_grad():  # Transformers' layers take local tensors here
        engine(**share(batches(name, 1)[0], engine.data_rank, engine.data_size))
    found = engine.state_dict()
    engine.destroy(whole=False)
    return found


def all_trained(names: list[str], stage: int) -> list[dict[str, torch.Tensor]]:
    return [trained(cut_here(name), name, stage) for name in names]


def loaded_and_trained(folder: str, name: str, stage: int) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    model = AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=DistributedConfig(tp_size=2), dtype=torch.float64
    )
    return trained(model.train(), name, stage)


def of_one_process(name: str) -> dict[str, torch.Tensor]:
    return train_plainly(disturb(build(name)), name)[2]


@pytest.mark.slow
def test_models_cut_by_transformers_follow_one_process(ranks: Ranks) -> None:
    answers = ranks.run(4, all_trained, NAMES, 3)[0]
    for name, values in zip(NAMES, answers, strict=True):
        difference, where = distance(values, of_one_process(name))
        assert difference < 1e-10, f"{name}: {where} differs by {difference}"


@pytest.mark.slow
def test_from_pretrained_with_a_tensor_plan_trains(ranks: Ranks, tmp_path: Path) -> None:
    disturb(build("llama")).save_pretrained(tmp_path)
    for values in ranks.run(2, loaded_and_trained, str(tmp_path), "llama", 1):
        difference, where = distance(values, of_one_process("llama"))
        assert difference < 1e-10, f"{where} differs by {difference}"
