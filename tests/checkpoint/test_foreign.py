"""Engines that start from checkpoints of others: Hugging Face models, torch.distributed.checkpoint, DeepSpeed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import shardwell
from shardwell.checkpoint.reader import Reader
from shardwell.checkpoint.sources import SafetensorsSource
from shardwell.errors import CheckpointError
from shardwell.memory import Tier
from shardwell.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from tests.support.deepspeed_checkpoints import FOLDER
from tests.support.internals import groups_of
from tests.support.models import batches, whole_parameters, zero
from tests.support.ranks import Ranks
from tests.support.training import Case, distance

LLAMA = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
GPT2 = {"vocab_size": 31, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2}


def build(kind: str) -> nn.Module:
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**LLAMA))
    return GPT2LMHeadModel(GPT2Config(**GPT2))


def load_slices(
    kind: str, stage: int, path: str, config: dict[str, Any]
) -> tuple[dict[str, Any], int, int, dict[str, int]]:
    """Whole masters after loading; bytes that this rank read, elements that it holds, and bytes at rest by tier."""
    read: list[int] = []
    close = SafetensorsSource.close
    SafetensorsSource.close = lambda self: (read.append(self.bytes_read), close(self))[1]  # type: ignore[method-assign]
    try:
        torch.manual_seed(9)
        config = zero(stage, **config)
        with shardwell.zero.Init(config=config):
            model = build(kind)
        engine, *_ = shardwell.initialize(model=model, config=config)
        engine.load_model(path)
    finally:
        SafetensorsSource.close = close  # type: ignore[method-assign]
    groups = groups_of(engine)
    own = sum(piece.numel for group in groups for run in group.spans for piece in run.pieces)
    rest = {tier.value: sum(size for (_, _, t), size in engine.memory().now.items() if t is tier) for tier in Tier}
    masters = {name: safe_get_full_fp32_param(p).float() for name, p in model.named_parameters()}
    return masters, read[0], own, rest


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize(("stage", "config"), [(3, {}), (1, {"bf16": {"enabled": True}})], ids=["3", "1, bf16"])
def test_a_hugging_face_model_comes_straight_into_shards(
    ranks: Ranks, tmp_path: Path, kind: str, stage: int, config: dict[str, Any]
) -> None:
    torch.manual_seed(1)
    model = build(kind).to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    total = 0
    for masters, num_bytes, own, _ in ranks.run(2, load_slices, kind, stage, str(tmp_path), config):
        for name, parameter in model.named_parameters():
            assert torch.equal(torch.as_tensor(masters[name]), parameter.detach().float()), name
        assert num_bytes == 2 * own  # bf16 in the files
        total += own
    assert total == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_a_hugging_face_model_comes_straight_to_its_tier(ranks: Ranks, tmp_path: Path, device: str) -> None:
    torch.manual_seed(1)
    model = build("llama").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "drive").mkdir()
    place = {"device": device, "nvme_path": str(tmp_path / "drive")}
    block = {"offload_param": {**place, "max_in_cpu": 0}, "offload_optimizer": place}
    config = {"bf16": {"enabled": True}, "zero_optimization": block}
    for masters, num_bytes, own, rest in ranks.run(2, load_slices, "llama", 3, str(tmp_path / "model"), config):
        for name, parameter in model.named_parameters():
            assert torch.equal(torch.as_tensor(masters[name]), parameter.detach().float()), name
        assert num_bytes == 2 * own
        assert rest["device"] == 0
        assert rest["host" if device == "cpu" else "disk"] >= 2 * own


def test_what_was_trained_goes_back_to_transformers(tmp_path: Path) -> None:
    from shardwell.checkpoint.export import to_safetensors
    from shardwell.checkpoint.sources import open_source

    torch.manual_seed(1)
    model = build("gpt2")
    config = zero(3, bf16={"enabled": True}, shardwell={"shard_at_world_one": True})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = shardwell.initialize(model=model, optimizer=optimizer, config=config, device="cpu")
    tokens = torch.randint(31, (2, 8))
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    engine.save_checkpoint(tmp_path / "run")
    to_safetensors(open_source(tmp_path / "run"), tmp_path / "model", dtype=torch.float32)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    masters = {name: safe_get_full_fp32_param(p) for name, p in model.named_parameters()}
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter.detach().float(), masters[name]), name
    assert loaded.lm_head.weight is loaded.transformer.wte.weight


def test_a_model_of_another_shape_is_refused(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    model = build("gpt2")
    engine, *_ = shardwell.initialize(model=model, config=zero(3), device="cpu")
    with pytest.raises(CheckpointError, match="does not fit the model: it lacks 'transformer"):
        engine.load_model(tmp_path)


# ------------------------------------------------------------------------------------- torch.distributed.checkpoint

CASE = Case(groups=True)


def plain_steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for batch in batches(last, 12)[first:]:
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()


def go_on_from_torch(stage: int, root: str) -> dict[str, Any]:
    model = CASE.build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.1)
    engine, *_ = shardwell.initialize(model=model, optimizer=CASE.make_optimizer(model), config=zero(stage))
    path, client = engine.load_checkpoint(root)
    assert (path, client) == (root, {})
    for batch in batches(6, 12)[3:]:
        engine.backward(engine(batch.chunk(engine.world_size)[engine.global_rank]))
        engine.step()
    return whole_parameters(model)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_run_with_plain_torch_goes_on_sharded(ranks: Ranks, tmp_path: Path, stage: int) -> None:
    model = CASE.build()
    optimizer = CASE.make_optimizer(model)
    plain_steps(model, optimizer, 0, 3)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=str(tmp_path), no_dist=True)
    plain_steps(model, optimizer, 3, 6)
    expected = {name: parameter.detach() for name, parameter in model.named_parameters()}
    found = ranks.run(2, go_on_from_torch, stage, str(tmp_path))[0]
    difference, name = distance(found, expected)
    assert difference < 1e-10, f"{name} differs by {difference}"


# --------------------------------------------------------------------------------------------------------- DeepSpeed


def maker() -> ModuleType:
    """The script that made the checkpoints, for its model."""
    spec = importlib.util.spec_from_file_location("make", FOLDER / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def go_on_from_deepspeed(case: str, stage: int) -> dict[str, Any]:
    torch.manual_seed(5)
    model = maker().Model(maker().CASES[case].get("tied", False))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in trained if p.ndim > 1]}, {"params": [p for p in trained if p.ndim == 1]}], lr=0.5
    )
    config = zero(stage, bf16={"enabled": True})
    engine, *_ = shardwell.initialize(model=model, optimizer=optimizer, config=config)
    _, client = engine.load_checkpoint(FOLDER / case)
    found = {
        "steps": engine.global_steps,
        "client": client["epoch"],
        "decay": optimizer.param_groups[0]["weight_decay"],
    }
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found[name] = safe_get_full_fp32_param(parameter)
            for key in ("exp_avg", "exp_avg_sq", "step"):
                found[f"{name} {key}"] = safe_get_full_optimizer_state(parameter, key)
    engine.backward(engine(torch.randint(11, (2, 5))))
    engine.step()
    return found


@pytest.mark.parametrize(
    ("case", "num_ranks", "stage"),
    [("stage1-bf16", 1, 3), ("stage2-bf16", 3, 2), ("stage3-bf16", 2, 1), ("stage3-bf16-three-ranks", 2, 3)],
)
def test_a_run_with_deepspeed_goes_on_here(ranks: Ranks, case: str, num_ranks: int, stage: int) -> None:
    with Reader(FOLDER / case / "truth.safetensors") as reader:
        truth = {name: reader.read(name) for name in reader.entries}
    found = ranks.run(num_ranks, go_on_from_deepspeed, case, stage)[0]
    assert (found.pop("steps"), found.pop("client"), found.pop("decay")) == (3, 2, 0.1)
    compared = 0
    for name, value in found.items():
        if name.endswith(" step"):
            assert value == 3.0
            continue
        parameter, _, key = name.partition(" ")
        stored = truth.get(f"state/{parameter}/{key}" if key else f"model/{parameter}")
        assert stored is not None, (name, sorted(truth))
        assert torch.equal(torch.as_tensor(value), stored), name
        compared += 1
    assert compared >= 3 * 9
