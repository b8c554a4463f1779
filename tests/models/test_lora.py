"""Adapters from peft: they train as they do plainly, and frozen weights cost neither gradients nor optimizer state."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwell
from shardwell.memory import MemoryReport, StateKind
from tests.support import zoo
from tests.support.internals import finish_reduces, groups_of, trainable_groups_of
from tests.support.models import whole_parameters, zero
from tests.support.ranks import Ranks
from tests.support.training import distance
from tests.support.zoo import Run

peft = pytest.importorskip("peft")

ADAPTERS = {
    "lora": lambda: peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"]),
    "lora and a whole head": lambda: peft.LoraConfig(r=3, target_modules="all-linear", modules_to_save=["lm_head"]),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "lora of t5": lambda: peft.LoraConfig(r=4, target_modules=["q", "v"], task_type="SEQ_2_SEQ_LM"),
}
WAYS = {  # others: regressions/test_adapters.py
    "lora": [(1, ""), (3, ""), (3, "non-reentrant"), (3, "reentrant")],
    "lora and a whole head": [(2, ""), (3, "reentrant")],
    "ia3": [(1, ""), (3, "non-reentrant")],
    "prompt": [(2, ""), (3, "reentrant")],
    "lora of t5": [(2, ""), (3, "non-reentrant")],
}


def base_of(kind: str) -> str:
    return "t5" if kind == "lora of t5" else "llama"


def adapted(kind: str) -> nn.Module:
    """A model with an adapter that already does something."""
    return zoo.disturb(with_adapter(zoo.build(base_of(kind)), kind))


def with_adapter(model: nn.Module, kind: str) -> nn.Module:
    torch.manual_seed(3)
    with zoo.default_dtype(torch.float64):
        return peft.get_peft_model(model, ADAPTERS[kind]()).train()


@cache
def plain(kind: str) -> Run:
    return zoo.train_plainly(adapted(kind), base_of(kind))


def all_ways(kind: str) -> dict[str, Run]:
    return {
        f"stage {stage} {how}": zoo.train_sharded(zoo.recompute(adapted(kind), how), base_of(kind), stage)
        for stage, how in WAYS[kind]
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_train_as_they_do_plainly(ranks: Ranks, kind: str) -> None:
    answers = ranks.run(2, all_ways, kind)
    model = adapted(kind)
    for how in answers[0]:
        runs = [answer[how] for answer in answers]
        zoo.check(runs, plain(kind), what=how)
        for _, _, parameters in runs:
            for key, before in model.named_parameters():
                moved = bool((torch.as_tensor(parameters[key]) != before).any())
                assert moved == before.requires_grad, f"{how}: {key}"


def below(kind: str, deeper: dict[str, Any]) -> tuple[Run, list[str]]:
    """Trained with parameters and state below the device; and where the frozen weights rest."""
    engine = zoo.make_engine(adapted(kind), 3, zero_optimization=deeper)
    frozen = [group for group in groups_of(engine) if not group.trainable]
    return zoo.train(engine, base_of(kind)), sorted({group.spec.parameters.tier.value for group in frozen})


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_adapters_train_with_frozen_weights_below_the_device(ranks: Ranks, tmp_path: Path, device: str) -> None:
    place = {"device": device, "nvme_path": str(tmp_path), "max_in_cpu": 0}
    state = {"device": "cpu"}  # on disk it is stepped by kernels, which know no fp64
    answers = ranks.run(2, below, "lora", {"offload_param": place, "offload_optimizer": state})
    zoo.check([run for run, _ in answers], plain("lora"))
    assert [tiers for _, tiers in answers] == [["host" if device == "cpu" else "disk"]] * 2


# -------------------------------------------------------------------------------------------------------- memory


def books(kind: str, stage: int) -> dict[str, Any]:
    """What a rank holds at the end of backward and after the step, and what trains."""
    engine = zoo.make_engine(adapted(kind), stage)
    batch = zoo.share(zoo.batches(base_of(kind), 1)[0], engine.global_rank, engine.world_size)
    engine.backward(engine(**batch).loss)
    finish_reduces(engine)  # the last one may still be on its way
    groups = trainable_groups_of(engine)
    for group in groups:
        group.gradients.wait()
    after_backward = engine.memory()
    assert all(parameter.grad is None for parameter in engine.module.parameters() if not parameter.requires_grad)
    engine.step()
    return {
        "elements": sum(group.layout.numel for group in groups),
        "with pads": sum(group.layout.padded for group in groups),
        "training units": {
            unit.name for unit in engine.units if any(p.requires_grad for p in unit.parameters.values())
        },
        "tensors": sum(len(group.parameters) for group in groups),
        "gradients": after_backward.total(StateKind.GRADIENTS),
        "optimizer": engine.memory().total(StateKind.OPTIMIZER),
        "owners": owners(after_backward) | owners(engine.memory()),
    }


def owners(report: MemoryReport) -> set[str]:
    """Units with gradients or optimizer state, now or at the peak."""
    return {
        unit for state, unit, _ in {**report.now, **report.peak} if state in (StateKind.GRADIENTS, StateKind.OPTIMIZER)
    }


@pytest.mark.parametrize(
    ("kind", "stage"),
    [("lora", 1), ("lora", 3), ("lora and a whole head", 2), ("lora and a whole head", 3), ("ia3", 1)],
)
def test_frozen_weights_have_no_gradients_and_no_optimizer_state(ranks: Ranks, kind: str, stage: int) -> None:
    """Eight bytes an element for the gradient, twice that for the two moments, and some step counts."""
    trained = sum(parameter.numel() for parameter in adapted(kind).parameters() if parameter.requires_grad)
    answers = ranks.run(2, books, kind, stage)
    for answer in answers:
        assert answer["elements"] == trained
        assert answer["gradients"] == 8 * answer["with pads"] // 2
        assert answer["owners"] <= answer["training units"]
    beside_moments = sum(answer["optimizer"] for answer in answers) - 16 * trained
    assert 0 <= beside_moments <= sum(8 * answer["tensors"] for answer in answers)


# ------------------------------------------------------------------------------------------------- sharded birth


def on_a_base_born_sharded(kind: str) -> tuple[dict[str, Tensor], Run]:
    with shardwell.zero.Init(config_dict_or_path=zero(3)):
        base = zoo.build(base_of(kind))
    model = with_adapter(base, kind)
    return whole_parameters(model), zoo.train_sharded(model, base_of(kind), 3)


@pytest.mark.parametrize("kind", ["lora and a whole head", "prompt", "lora of t5"])
def test_adapters_on_a_base_that_was_born_sharded(ranks: Ranks, kind: str) -> None:
    model = with_adapter(zoo.build(base_of(kind)), kind)
    start = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    answers = ranks.run(2, on_a_base_born_sharded, kind)
    for weights, _ in answers:
        assert weights.keys() == start.keys()
        for key, values in start.items():
            assert (torch.as_tensor(weights[key]) == values).all(), key
    zoo.check([run for _, run in answers], zoo.train_plainly(model, base_of(kind)))


# ----------------------------------------------------------------------------------- the base as its own reference


def anchored_loss(model: Any, adapted: Any, batch: dict[str, Tensor]) -> Tensor:
    """Stay near the model without its adapter, which switches off and freezes the adapter for a moment."""
    with adapted.disable_adapter(), torch.no_grad():
        before = model(**batch).logits.log_softmax(-1)
    now = model(**batch)
    return now.loss + (now.logits.log_softmax(-1) - before).square().mean()


def train_anchored(stage: int) -> dict[str, Tensor]:
    model = adapted("lora")
    engine = zoo.make_engine(model, stage)
    for batch in zoo.batches("llama", zoo.STEPS):
        rows = zoo.share(batch, engine.global_rank, engine.world_size)
        engine.backward(anchored_loss(engine, engine.module, rows))
        engine.step()
    return whole_parameters(model)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_without_its_adapter_is_its_own_reference(ranks: Ranks, stage: int) -> None:
    model = adapted("lora")
    optimizer = torch.optim.AdamW(model.parameters(), **zoo.ADAMW)
    for batch in zoo.batches("llama", zoo.STEPS):
        optimizer.zero_grad()
        anchored_loss(model, model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), zoo.CLIP)
        optimizer.step()
    for found in ranks.run(2, train_anchored, stage):
        difference, where = distance(found, {key: parameter.detach() for key, parameter in model.named_parameters()})
        assert difference < 1e-10, f"{where} differs by {difference}"
