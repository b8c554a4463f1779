"""Every optimizer over shards does what it does over whole parameters, however it is handed over."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import lr_scheduler as torchs

import shardwell
from shardwell.comm import Kind
from shardwell.config import SCHEDULERS, SchedulerConfig
from shardwell.memory import State
from shardwell.optim import muon as muon_module
from shardwell.optim.lamb import Lamb
from shardwell.optim.lion import Lion
from shardwell.optim.muon import Muon, muon_groups
from shardwell.optim.schedules import by_name
from tests.models import whole_parameters, zero
from tests.ranks import Ranks

WIDTH, STEPS = 6, 3
STAGES = (0, 1, 2, 3)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.stack = nn.Parameter(torch.randn(3, 2 * WIDTH + 1, WIDTH) / 4)
        self.unused = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return x + (torch.tanh(self.up(self.norm(x))) @ self.stack).sum(0)


class Net(nn.Module):
    """Two blocks and a head; odd sizes, so that shards cut through parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def build(dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def rows(step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(11 + step)
    return torch.randn(12, WIDTH, generator=generator, dtype=torch.float64).to(dtype)  # divides by 1, 2 and 3 ranks


def own(step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return rows(step, dtype).chunk(dist.get_world_size())[dist.get_rank()]


def train(engine: shardwell.Engine, steps: range = range(STEPS), dtype: torch.dtype = torch.float64) -> None:
    for step in steps:
        engine.backward(engine(own(step, dtype)))
        engine.step()


def train_plainly(model: nn.Module, optimizer: Optimizer, steps: range = range(STEPS)) -> dict[str, Tensor]:
    for step in steps:
        optimizer.zero_grad()
        model(rows(step, next(model.parameters()).dtype)).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def check(found: dict[str, Any], expected: dict[str, Tensor], limit: float, what: str) -> None:
    """Relative to each tensor's norm; what is not finite is never near."""
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        difference = float((torch.as_tensor(found[name]).double() - wanted.double()).norm() / wanted.double().norm())
        assert difference <= limit, f"{what}: {name} differs by {difference}"


# ------------------------------------------------------------------------------------------ optimizers and their ways

ADAM = {"lr": 1e-2, "betas": (0.8, 0.95), "weight_decay": 0.1}
KINDS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.5, "weight_decay": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2, "lr_decay": 0.1}),
    "Adagrad, started": (torch.optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.1}),
    "Adam": (torch.optim.Adam, ADAM),
    "Adam, amsgrad": (torch.optim.Adam, {**ADAM, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, ADAM),
    "Adamax": (torch.optim.Adamax, ADAM),
    "ASGD": (torch.optim.ASGD, {"lr": 1e-2, "t0": 2.0, "weight_decay": 0.1}),
    "NAdam": (torch.optim.NAdam, ADAM),
    "RAdam": (torch.optim.RAdam, ADAM),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.9, "centered": True}),
    "Rprop": (torch.optim.Rprop, {"lr": 1e-2}),
    "SGD": (torch.optim.SGD, {"lr": 1e-2}),
    "SGD, momentum": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}),
    "SGD, nesterov": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    "Lion": (Lion, {"lr": 1e-3, "weight_decay": 0.1}),
    "Lamb": (Lamb, {"lr": 1e-2, "weight_decay": 0.1}),
}


def groups_of(model: nn.Module, rate: float, **options: Any) -> list[dict[str, Any]]:
    """Two parameter groups with rates of their own."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": matrices, **options, "lr": rate}, {"params": rest, **options, "lr": rate / 2}]


def make(kind: str, model: nn.Module) -> Optimizer:
    factory, options = KINDS[kind]
    return factory(groups_of(model, options["lr"]), **options)


def by_object(kind: str, model: nn.Module) -> dict[str, Any]:
    return {"optimizer": make(kind, model)}


def by_class(kind: str, model: nn.Module) -> dict[str, Any]:
    """Options travel in the groups; Adagrad does not read the start of its sums there."""
    factory, options = KINDS[kind]
    if kind == "Adagrad, started":
        return by_factory(kind, model)
    return {"optimizer": factory, "model_parameters": groups_of(model, options["lr"], **options)}


def by_factory(kind: str, model: nn.Module) -> dict[str, Any]:
    factory, options = KINDS[kind]
    return {"optimizer": partial(factory, **options), "model_parameters": groups_of(model, options["lr"])}


def by_config(kind: str, model: nn.Module) -> dict[str, Any]:
    """In the file, "Adam" decouples its weight decay unless it is told not to."""
    factory, options = KINDS[kind]
    extra = {"adam_w_mode": False} if factory is torch.optim.Adam else {}
    options = {key: list(value) if isinstance(value, tuple) else value for key, value in options.items()}
    return {
        "config": {"optimizer": {"type": factory.__name__.lower(), "params": {**options, **extra}}},
        "model_parameters": groups_of(model, options["lr"]),
    }


WAYS: list[Callable[[str, nn.Module], dict[str, Any]]] = [by_object, by_class, by_factory, by_config]


def step_all(turn: int) -> dict[str, dict[str, Tensor]]:
    """All optimizers at all stages; the ways of handing over take turns."""
    found = {}
    for number, kind in enumerate(KINDS):
        for stage in STAGES if dist.get_world_size() == 2 else (1 + number % 3,):
            way = WAYS[(number + stage + turn) % len(WAYS)]
            model = build()
            arguments = way(kind, model)
            config = zero(stage, **arguments.pop("config", {}))
            engine = shardwell.initialize(model=model, config=config, **arguments).engine
            train(engine)
            found[f"{kind} at stage {stage}, {way.__name__}"] = whole_parameters(model)
    return found


@cache
def plain(kind: str) -> dict[str, Tensor]:
    model = build()
    return train_plainly(model, make(kind, model))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_optimizers_step_shards_as_they_step_parameters(ranks: Ranks, num_ranks: int) -> None:
    for what, found in ranks.run(num_ranks, step_all, num_ranks)[0].items():
        check(found, plain(what.rsplit(" at stage", 1)[0]), 1e-9, what)


# -------------------------------------------------------------------------------------------------------------- Muon

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
        runs = [run for unit in engine._flow.units for group in unit.groups for run, _ in group.runs]
        answers.append(
            {
                "parameters": whole_parameters(model),
                "calls": calls,
                "held": {piece.slot.shape: piece.numel for run in runs for piece in run.pieces},
                "exchanged": engine.traffic().total(Kind.STEP),
                "optimizer": engine.memory().total(State.OPTIMIZER),
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_ranks", [2, 4])
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


# -------------------------------------------------------------------------------------------------- groups that come


def names_to_come(model: nn.Module) -> list[nn.Parameter]:
    return [model.blocks[0].up.weight, model.blocks[1].stack, model.head.bias]


def later_group(kind: str, stage: int, frozen: bool) -> dict[str, Tensor]:
    model = build()
    late = names_to_come(model)
    for parameter in late:
        parameter.requires_grad_(not frozen)
    factory, options = KINDS[kind]
    first = [p for p in model.parameters() if all(p is not other for other in late)]
    engine = shardwell.initialize(model=model, optimizer=factory(first, **options), config=zero(stage)).engine
    train(engine, range(2))
    engine.optimizer.add_param_group({"params": late, **options, "lr": 0.03})
    for parameter in late:
        parameter.requires_grad_(True)
    train(engine, range(2, 5))
    return whole_parameters(model)


def later_groups(kinds: list[str]) -> dict[str, dict[str, Tensor]]:
    return {
        f"{kind} at stage {stage}{', frozen' if frozen else ''}": later_group(kind, stage, frozen)
        for kind in kinds
        for stage in STAGES
        for frozen in (False, True)
    }


LATER = ["AdamW", "SGD, momentum", "Lamb"]


def test_a_parameter_group_can_come_later(ranks: Ranks) -> None:
    """For parameters that were trainable without a group, and for frozen ones that are thawed."""
    answers = ranks.run(2, later_groups, LATER)[0]
    for kind in LATER:
        factory, options = KINDS[kind]
        model = build()
        late = names_to_come(model)
        optimizer = factory([p for p in model.parameters() if all(p is not other for other in late)], **options)
        train_plainly(model, optimizer, range(2))
        optimizer.add_param_group({"params": late, **options, "lr": 0.03})
        for parameter in late:
            parameter.grad = None
        expected = train_plainly(model, optimizer, range(2, 5))
        for what, found in answers.items():
            if what.startswith(f"{kind} at stage"):
                check(found, expected, 1e-9, what)


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


def test_a_group_of_parameters_that_have_one_is_refused() -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = shardwell.initialize(model=model, optimizer=optimizer, config=zero(1), device="cpu")
    with pytest.raises(ValueError, match="more than one parameter group"):
        engine.optimizer.add_param_group({"params": [model.head.weight]})


# --------------------------------------------------------------------------------------- state that is made of scalars


def thaw_in_between(kind: str, stage: int) -> dict[str, Tensor]:
    """Thawing rebuilds a unit: the state of its other parameters, scalars too, must come through."""
    model = build()
    model.blocks[0].up.bias.requires_grad_(False)
    engine, *_ = shardwell.initialize(model=model, optimizer=make(kind, model), config=zero(stage))
    train(engine, range(3))
    model.blocks[0].up.bias.requires_grad_(True)
    train(engine, range(3, 6))
    return whole_parameters(model)


def thaw_all(kinds: list[str]) -> dict[str, list[dict[str, Tensor]]]:
    return {kind: [thaw_in_between(kind, stage) for stage in (1, 3)] for kind in kinds}


@pytest.mark.parametrize(
    "kinds",
    [["Adam, amsgrad", "Rprop", "Adagrad, started", "Lamb"], ["NAdam", "RAdam"], ["ASGD"]],
    ids=lambda kinds: kinds[0],
)
def test_state_of_any_optimizer_survives_a_rebuilt_unit(ranks: Ranks, kinds: list[str]) -> None:
    for kind, answers in ranks.run(2, thaw_all, kinds)[0].items():
        model = build()
        model.blocks[0].up.bias.requires_grad_(False)
        optimizer = make(kind, model)
        train_plainly(model, optimizer, range(3))
        model.blocks[0].up.bias.requires_grad_(True)
        expected = train_plainly(model, optimizer, range(3, 6))
        for stage, found in zip((1, 3), answers, strict=True):
            check(found, expected, 1e-9, f"{kind} at stage {stage}")


# --------------------------------------------------------------------------------------------------------- schedules

SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "step": lambda optimizer: torchs.StepLR(optimizer, 2, 0.1),
    "cosine": lambda optimizer: torchs.CosineAnnealingLR(optimizer, 7),
    "one cycle": lambda optimizer: torchs.OneCycleLR(optimizer, [0.1, 0.2], total_steps=20),
    "lambda": lambda optimizer: torchs.LambdaLR(optimizer, [lambda n: 0.9**n, lambda n: 1 / (1 + n)]),
    "sequence": lambda optimizer: torchs.SequentialLR(
        optimizer, [torchs.ConstantLR(optimizer, 0.1), torchs.ExponentialLR(optimizer, 0.9)], [3]
    ),
}
BLOCKS: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_max_lr": [0.1, 0.2], "warmup_num_steps": 5},
    "WarmupDecayLR": {"warmup_num_steps": 3, "total_num_steps": 7},
    "WarmupCosineLR": {"warmup_num_steps": 3, "total_num_steps": 8, "warmup_type": "linear"},
    "OneCycle": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 3, "decay_step_size": 2,
                 "decay_lr_rate": 0.5},
    "LRRangeTest": {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 2},
}  # fmt: skip


def follow(engine: shardwell.Engine) -> list[tuple[Any, ...]]:
    found = []
    for _ in range(8):
        found.append(tuple((group["lr"], tuple(group["betas"])) for group in engine.optimizer.param_groups))
        train(engine, range(1), torch.float32)
    return found


def rates_by_engine(stage: int) -> dict[str, Any]:
    found = {}
    for name, make in SCHEDULES.items():
        for how in ("callable", "object", "on the engine's optimizer"):
            model = build(torch.float32)
            optimizer = torch.optim.AdamW(groups_of(model, 0.01))
            schedule = {"callable": lambda o, make=make: make(o), "object": None}.get(how)
            if how == "object":
                schedule = make(optimizer)
            engine = shardwell.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=zero(stage))[
                0
            ]
            if how == "on the engine's optimizer":
                engine.lr_scheduler = make(engine.optimizer)
            found[name, how] = follow(engine)
    for name, params in BLOCKS.items():
        model = build(torch.float32)
        config = zero(stage, scheduler={"type": name.lower(), "params": params})
        optimizer = torch.optim.AdamW(groups_of(model, 0.01))
        initialized = shardwell.initialize(model=model, optimizer=optimizer, config=config)
        assert initialized.lr_scheduler is initialized.engine.lr_scheduler
        found[name, "block"] = follow(initialized.engine)
    return {" ".join(key): value for key, value in found.items()}


def plain_rates(make: Callable[[Optimizer], Any]) -> list[tuple[Any, ...]]:
    model = build(torch.float32)
    optimizer = torch.optim.AdamW(groups_of(model, 0.01))
    schedule, found = make(optimizer), []
    for _ in range(8):
        found.append(tuple((group["lr"], tuple(group["betas"])) for group in optimizer.param_groups))
        train_plainly(model, optimizer, range(1))
        schedule.step()
    return found


def test_schedules_give_the_rates_that_they_give_a_plain_optimizer(ranks: Ranks) -> None:
    assert set(BLOCKS) == set(SCHEDULERS)
    expected = {name: plain_rates(make) for name, make in SCHEDULES.items()}
    for name, params in BLOCKS.items():
        expected[name] = plain_rates(partial(by_name, SchedulerConfig(type=name, params=params)))
    for answer in ranks.run(2, rates_by_engine, 1):
        assert len(answer) == 3 * len(SCHEDULES) + len(BLOCKS)
        for what, found in answer.items():
            name = next(name for name in expected if what.startswith(name))
            assert found == expected[name], what


def test_two_schedules_are_an_error() -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    config = zero(1, scheduler={"type": "WarmupLR", "params": {}})
    with pytest.raises(shardwell.ConfigError, match="two learning-rate schedules"):
        shardwell.initialize(
            model=model, optimizer=optimizer, lr_scheduler=torchs.StepLR(optimizer, 1), config=config, device="cpu"
        )


def test_a_schedule_without_an_optimizer_is_an_error() -> None:
    config = zero(1, scheduler={"type": "WarmupLR", "params": {}})
    with pytest.raises(shardwell.ConfigError, match="no optimizer"):
        shardwell.initialize(model=build(), config=config, device="cpu")
