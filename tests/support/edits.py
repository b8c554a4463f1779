"""Changes of parameters in place, each with what plain PyTorch makes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import SGD

import shardwell
from shardwell.utils import safe_get_full_fp32_param
from tests.support.changing_models import Net, tokens
from tests.support.models import whole_parameters, zero

OPTIONS = {"lr": 0.02, "momentum": 0.9}


@torch.no_grad()
def assign(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.flip(0) * 0.75


@torch.no_grad()
def copy_into_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data.flip(0) * 0.75)


@torch.no_grad()
def clamp(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.clamp_(-0.125, 0.125)


def from_vector(model: nn.Module) -> None:
    with torch.no_grad():
        vector_to_parameters(parameters_to_vector(model.parameters()).flip(0), model.parameters())


def there_and_back(model: nn.Module) -> None:
    dtype = next(model.parameters()).dtype
    model.double().to(dtype)
    with torch.no_grad():
        model.head.weight.mul_(0.5)  # type: ignore[union-attr, operator]


def initialise_again(model: nn.Module) -> None:
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.0625)
    nn.init.eye_(model.head.weight)  # type: ignore[union-attr, arg-type]


def load(model: nn.Module) -> None:
    state = {name: value.flip(0).clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state)


@torch.no_grad()
def swap(model: nn.Module) -> None:
    first, second = (block.up.weight for block in list(model.blocks)[:2])  # type: ignore[arg-type, union-attr]
    first.data, second.data = second.data, first.data


@torch.no_grad()
def zero_some(model: nn.Module) -> None:
    """A pruned weight."""
    for parameter in model.parameters():
        parameter.data[::2] = 0


EDITS: dict[str, Callable[[nn.Module], None]] = {
    edit.__name__: edit
    for edit in (
        *(assign, copy_into_data, clamp, from_vector, there_and_back, initialise_again, load, swap, zero_some),
    )
}


def config(stage: int, precision: str, offload: str, folder: str) -> dict[str, Any]:
    made = zero(stage, bf16={"enabled": precision == "bf16"}, fp16={"enabled": precision == "fp16", "loss_scale": 8.0})
    if offload:
        made["zero_optimization"]["offload_optimizer"] = {"device": offload, "nvme_path": folder}
        made["shardwell"] = {"commit": "after_norm"}
    return made


def made(precision: str) -> Net:
    torch.manual_seed(0)
    return Net().double() if precision == "fp64" else Net()


SCENES = [(how, when) for how in EDITS for when in ("forward", "step")]


def every_edit(stage: int, precision: str, offload: str, folder: str = "") -> list[dict[str, Tensor]]:
    """The masters after each of some steps, with one edit for each, before its forward or before its update."""
    model = made(precision)
    engine, *_ = shardwell.initialize(
        model=model,
        optimizer=SGD(model.parameters(), **OPTIONS),
        config=config(stage, precision, offload, folder),
    )
    found = []
    for step, (how, when) in enumerate(SCENES):
        if when == "forward":
            EDITS[how](model)
        engine.backward(engine(tokens(step, engine.world_size)[engine.global_rank]))
        if when == "step":
            EDITS[how](model)
        engine.step()
        found.append({name: safe_get_full_fp32_param(p).clone() for name, p in model.named_parameters()})
        seen = whole_parameters(model)
        for name, value in found[-1].items():  # one is the rounding of the other
            assert torch.allclose(seen[name].to(value), value, rtol=2**-8, atol=1e-6), f"{how}, {when}: {name}"
    engine.destroy(whole=False)
    return found


def plain_run(num_ranks: int) -> list[dict[str, Tensor]]:
    model = made("fp64")
    optimizer = SGD(model.parameters(), **OPTIONS)
    found = []
    for step, (how, when) in enumerate(SCENES):
        if when == "forward":
            EDITS[how](model)
        (sum(model(batch) for batch in tokens(step, num_ranks)) / num_ranks).backward()
        if when == "step":
            EDITS[how](model)
        optimizer.step()
        optimizer.zero_grad()
        found.append({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
    return found


def check(found: list[dict[str, Any]], num_ranks: int, most: float) -> None:
    for (how, when), values, expected in zip(SCENES, found, plain_run(num_ranks), strict=True):
        for name, value in values.items():
            error = float((torch.as_tensor(value).cpu().double() - expected[name]).abs().max())
            assert error < most, f"{how} before a {when}: {name} is off by {error}"
