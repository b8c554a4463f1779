"""Every optimizer over shards does what it does over whole parameters, however it is handed over."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import shardwell
from shardwell.optim.lamb import Lamb
from shardwell.optim.lion import Lion
from tests.support.models import whole_parameters, zero
from tests.support.optimizer_models import STAGES, build, groups_of, train, train_plainly
from tests.support.ranks import Ranks


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
    "AdamW, fused": (torch.optim.AdamW, {**ADAM, "fused": True}),
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
    """All optimizers at stage 3 and one other, on three ranks every other one; the ways of handing over take turns."""
    found = {}
    for number, kind in enumerate(KINDS):
        for stage in (number % 3, 3) if dist.get_world_size() == 2 else (1 + number % 3,) * (number % 2):
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


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_optimizers_step_shards_as_they_step_parameters(ranks: Ranks, num_ranks: int) -> None:
    answers = ranks.run(num_ranks, step_all, num_ranks)[0]
    assert num_ranks == 3 or len(answers) == 2 * len(KINDS)
    for what, found in answers.items():
        check(found, plain(what.rsplit(" at stage", 1)[0]), 1e-9, what)


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
    optimizer = factory(first, **options)
    if stage == 2:  # an engine without an optimizer takes one later
        engine = shardwell.initialize(model=model, config=zero(stage)).engine
        engine.adopt(optimizer, steps=False)
    else:
        engine = shardwell.initialize(model=model, optimizer=optimizer, config=zero(stage)).engine
    train(engine, range(2))
    (optimizer if frozen else engine.optimizer).add_param_group({"params": late, **options, "lr": 0.03})
    for parameter in late:
        parameter.requires_grad_(True)
    train(engine, range(2, 4))
    return whole_parameters(model)


def later_groups(kinds: list[str]) -> dict[str, dict[str, Tensor]]:
    return {
        f"{kind} at stage {stage}{', frozen' if frozen else ''}": later_group(kind, stage, frozen)
        for number, kind in enumerate(kinds)
        for stage in STAGES
        for frozen in ((number + stage) % 2 == 1,)
    }


LATER = ["AdamW", "SGD, momentum", "Lamb"]


@pytest.mark.slow
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
        expected = train_plainly(model, optimizer, range(2, 4))
        for what, found in answers.items():
            if what.startswith(f"{kind} at stage"):
                check(found, expected, 1e-9, what)


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
    train(engine, range(2))
    model.blocks[0].up.bias.requires_grad_(True)
    train(engine, range(2, 4))
    return whole_parameters(model)


REBUILT = {
    "Adam, amsgrad": (1, 3), "Rprop": (1,), "Adagrad, started": (3,), "Lamb": (1, 3), "NAdam": (3,), "RAdam": (1,),
    "ASGD": (3,),
}  # fmt: skip  # with the stages


def thaw_all() -> dict[str, list[dict[str, Tensor]]]:
    return {kind: [thaw_in_between(kind, stage) for stage in stages] for kind, stages in REBUILT.items()}


@pytest.mark.slow
def test_state_of_any_optimizer_survives_a_rebuilt_unit(ranks: Ranks) -> None:
    for kind, answers in ranks.run(2, thaw_all)[0].items():
        model = build()
        model.blocks[0].up.bias.requires_grad_(False)
        optimizer = make(kind, model)
        train_plainly(model, optimizer, range(2))
        model.blocks[0].up.bias.requires_grad_(True)
        expected = train_plainly(model, optimizer, range(2, 4))
        for stage, found in zip(REBUILT[kind], answers, strict=True):
            check(found, expected, 1e-9, f"{kind} at stage {stage}")
