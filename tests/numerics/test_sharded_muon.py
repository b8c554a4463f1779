"""Muon over shards does what it does over whole matrices, and shares the work."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import lr_scheduler as torchs

import shardwell
from shardwell.memory import StateKind
from shardwell.optim import muon as muon_module
from shardwell.optim.muon import Muon, muon_groups
from shardwell.parallel import TrafficKind
from tests.support.internals import groups_of
from tests.support.models import whole_parameters, zero
from tests.support.optimizer_models import STAGES, STEPS, build, train, train_plainly
from tests.support.ranks import Ranks

MUON = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}
MUON_NAMES = {f"blocks.{n}.{name}" for n in range(2) for name in ("up.weight", "stack")}


def muon_parameters(model: nn.Module) -> list[dict[str, Any]]:
    return muon_groups(model.named_parameters(), model, muon_lr=0.02, adam_lr=1e-2)


def make_muon(way: str, model: nn.Module) -> dict[str, Any]:
    if way == "by config":
        return {"config": {"optimizer": {"type": "muon", "params": {**MUON, "muon_lr": 0.02, "adam_lr": 1e-2}}}}
    if way == "by class":
        return {"optimizer": Muon, "model_parameters": [{**MUON, **group} for group in muon_parameters(model)]}
    return {"optimizer": Muon(muon_parameters(model), **MUON)}


def train_muon(way: str, stage: int, dtype: torch.dtype, **config: Any) -> tuple[dict[str, Tensor], shardwell.Engine]:
    model = build(dtype)
    arguments = make_muon(way, model)
    config = zero(stage, **arguments.pop("config", {}), **config)
    engine = shardwell.initialize(model=model, config=config, **arguments).engine
    train(engine, dtype=dtype)
    return whole_parameters(model), engine


def train_muons() -> dict[str, Any]:
    ways = {0: "by class", 1: "by config", 2: "by class", 3: "by object"}
    found = {(way, stage): train_muon(way, stage, torch.float64)[0] for stage, way in ways.items()}
    alone = {"shard_at_world_one": True}
    if dist.get_world_size() == 1:
        found |= {
            ("sharded alone", stage): train_muon("by object", stage, torch.float64, shardwell=alone)[0]
            for stage in STAGES
        }
    return {f"{way} at stage {stage}": whole for (way, stage), whole in found.items()}


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_muon_over_shards_follows_muon(ranks: Ranks, num_ranks: int) -> None:
    """On one rank bit for bit.

    On several the averaged gradients differ in their last bits. So now and then the momentum is rounded to another
    bf16 number, by one part in 256, and Newton-Schulz carries that into a direction whose elements are below 1.
    """
    model = build()
    expected = train_plainly(model, Muon(muon_parameters(model), **MUON))
    for what, found in ranks.run(num_ranks, train_muons)[0].items():
        for name, wanted in expected.items():
            difference = float((torch.as_tensor(found[name]) - wanted).abs().max())
            limit = STEPS * 0.02 * math.sqrt(13 / 6) / 64 if name in MUON_NAMES else 1e-3
            assert difference <= (0.0 if num_ranks == 1 else limit), f"{what}: {name} differs by {difference}"


SHAPES = [[(16, 24), (24, 10), (5, 9), (3, 8, 12)], [(7, 7), (40, 6), (2, 12, 8), (10, 24)]]


class Given(nn.Module):
    """The gradient of its loss is whatever it is called with."""

    def __init__(self, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        drawn = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        self.inner = nn.ParameterList([nn.Parameter(value) for value in drawn])

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return sum((weight * gradient).sum() for weight, gradient in zip(self.inner, gradients, strict=True))


class Holder(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Given(shapes, dtype) for shapes in SHAPES])

    def forward(self, gradients: list[list[Tensor]]) -> Tensor:
        return sum(block(part) for block, part in zip(self.blocks, gradients, strict=True))


def given(model: Holder, step: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(50 + step)
    return [[torch.randn(p.shape, generator=generator).to(p.dtype) for p in block.inner] for block in model.blocks]


def given_to_shards(dtype: torch.dtype) -> list[dict[str, Any]]:
    """All ranks have the same gradients, whose average over 2 or 4 ranks is exact."""
    answers = []
    for stage in STAGES:
        model = Holder(dtype)
        engine, *_ = shardwell.initialize(model=model, optimizer=Muon(model.parameters(), **MUON), config=zero(stage))
        with counting() as calls:
            for step in range(3):
                engine.backward(engine(given(model, step)))
                engine.step()
        runs = [run for group in groups_of(engine) for run in group.spans]
        answers.append(
            {
                "parameters": whole_parameters(model),
                "calls": calls,
                "held": {piece.slot.shape: piece.numel for run in runs for piece in run.pieces},
                "exchanged": engine.traffic().total(TrafficKind.OPTIMIZER),
                "optimizer": engine.memory().total(StateKind.OPTIMIZER),
            }
        )
    return answers


@contextlib.contextmanager
def counting() -> Iterator[list[tuple[int, ...]]]:
    """The shapes of what this rank orthogonalises, in order."""
    before, calls = muon_module.newton_schulz, []

    def counted(matrices: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(tuple(matrices.shape))
        return before(matrices, *args, **kwargs)

    muon_module.newton_schulz = counted
    try:
        yield calls
    finally:
        muon_module.newton_schulz = before


@pytest.mark.parametrize(("num_ranks", "dtype"), [(2, torch.float64), (4, torch.float32)])
def test_muon_is_exact_and_shares_the_work(ranks: Ranks, num_ranks: int, dtype: torch.dtype) -> None:
    model = Holder(dtype)
    optimizer = Muon(model.parameters(), **MUON)
    for step in range(3):
        optimizer.zero_grad()
        model(given(model, step)).backward()
        optimizer.step()
    shapes = [shape for block in SHAPES for shape in block]
    answers = ranks.run(num_ranks, given_to_shards, dtype)
    for stage in STAGES:
        by_rank = [answer[stage] for answer in answers]
        for answer in by_rank:
            for name, parameter in model.named_parameters():
                assert (answer["parameters"][name] == parameter.detach().numpy()).all(), f"stage {stage}: {name}"
            assert answer["optimizer"] == dtype.itemsize * sum(answer["held"].values())  # the momentum alone
        if stage == 0:  # nothing is split: each rank steps everything
            assert all(sorted(answer["calls"]) == sorted(3 * shapes) for answer in by_rank)
            assert all(answer["exchanged"] == 0 for answer in by_rank)
            continue
        assert sorted(call for answer in by_rank for call in answer["calls"]) == sorted(3 * shapes)
        assert all(answer["calls"] for answer in by_rank), "a rank without work"
        for answer in by_rank:
            held, mine = answer["held"], set(answer["calls"])
            # in bf16: the rest of the matrices that are this rank's work, and its parts of the others back
            received = sum(math.prod(s) - held.get(s, 0) if s in mine else held.get(s, 0) for s in shapes)
            assert answer["exchanged"] == 2 * received


def torchs_own(way: str, stage: int) -> dict[str, Any]:
    """torch.optim.Muon over the matrices; a scheduler holds the object already."""
    model = build(torch.float32)
    matrices = [model.blocks[0].up.weight, model.blocks[1].up.weight, model.head.weight]
    options: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "adjust_lr_fn": "match_rms_adamw"}
    if way == "object":
        optimizer = torch.optim.Muon(matrices, **options)
        arguments: dict[str, Any] = {"optimizer": optimizer, "lr_scheduler": torchs.StepLR(optimizer, 1, 0.5)}
    else:
        arguments = {
            "optimizer": torch.optim.Muon,
            "model_parameters": [{"params": matrices, **options}],
            "lr_scheduler": lambda sharded: torchs.StepLR(sharded, 1, 0.5),
        }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = shardwell.initialize(model=model, config=zero(stage), **arguments).engine
        rates = []
        for step in range(STEPS):
            rates += engine.get_lr()
            train(engine, range(step, step + 1), torch.float32)
    said = [str(warning.message) for warning in caught if "lr_scheduler" in str(warning.message)]
    return {"rates": rates, "parameters": whole_parameters(model), "said": said}


def torchs_own_all(way: str) -> list[dict[str, Any]]:
    return [torchs_own(way, stage) for stage in STAGES]


@pytest.mark.parametrize("way", ["object", "class"])
def test_torchs_own_muon_is_taken_with_its_scheduler(ranks: Ranks, way: str) -> None:
    model = build(torch.float32)
    matrices = [model.blocks[0].up.weight, model.blocks[1].up.weight, model.head.weight]
    optimizer = torch.optim.Muon(matrices, lr=0.05, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    schedule = torchs.StepLR(optimizer, 1, 0.5)
    for step in range(STEPS):
        train_plainly(model, optimizer, range(step, step + 1))
        schedule.step()
    for num_ranks in (1, 2):
        for stage, answer in zip(STAGES, ranks.run(num_ranks, torchs_own_all, way)[0], strict=True):
            assert answer["rates"] == [0.05, 0.025, 0.0125]
            for name, parameter in model.named_parameters():
                difference = float((torch.as_tensor(answer["parameters"][name]) - parameter.detach()).abs().max())
                limit = 0.05 * 2 * 0.2 * math.sqrt(13) / 64  # as above
                assert difference <= (0.0 if num_ranks == 1 else limit), f"stage {stage}: {name}"
            assert not answer["said"]


# ------------------------------------------------------------------------------------------------ matrices that come


def later_matrices(stage: int, frozen: bool) -> dict[str, Tensor]:
    model = Holder(torch.float32)
    late = [model.blocks[0].inner[1], model.blocks[1].inner[2]]
    first = [p for p in model.parameters() if all(p is not other for other in late)]
    for parameter in late:
        parameter.requires_grad_(not frozen)
    engine = shardwell.initialize(model=model, optimizer=Muon(first, **MUON), config=zero(stage)).engine
    for step in range(4):
        if step == 2:
            engine.optimizer.add_param_group({"params": late, "lr": 0.05})
            for parameter in late:
                parameter.requires_grad_(True)
        engine.backward(engine(given(model, step)))
        engine.step()
    return whole_parameters(model)


def later_matrices_all(frozen: bool) -> list[dict[str, Tensor]]:
    return [later_matrices(stage, frozen) for stage in STAGES]


@pytest.mark.parametrize("frozen", [False, True])
def test_matrices_for_muon_can_come_later(ranks: Ranks, frozen: bool) -> None:
    model = Holder(torch.float32)
    late = [model.blocks[0].inner[1], model.blocks[1].inner[2]]
    optimizer = Muon([p for p in model.parameters() if all(p is not other for other in late)], **MUON)
    for step in range(4):
        if step == 2:
            optimizer.add_param_group({"params": late, "lr": 0.05})
        model.zero_grad()
        model(given(model, step)).backward()
        optimizer.step()
    for stage, found in zip(STAGES, ranks.run(2, later_matrices_all, frozen)[0], strict=True):
        for name, parameter in model.named_parameters():
            assert (found[name] == parameter.detach().numpy()).all(), f"stage {stage}: {name}"
