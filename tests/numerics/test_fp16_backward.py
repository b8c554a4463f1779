"""Gradients under a loss scale: of any loss, by whichever backward, and where they leave the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwell
from shardwell.utils import safe_get_full_grad
from tests.support.mixed_precision import STAGES, WIDTH, Net, build, initialize, loss_of, rows
from tests.support.ranks import Ranks
from tests.support.training import distance

# ------------------------------------------------------------------------------------------------ plain backward


class Pair(NamedTuple):
    loss: Tensor
    logits: Tensor


@dataclasses.dataclass
class Answer:
    loss: Tensor
    rest: dict[str, Any]
    nothing: None = None


class Own:
    """A class of the user's."""

    def __init__(self, loss: Tensor, logits: Tensor) -> None:
        self.loss, self.logits = loss, logits


class Losing(Net):
    """Returns its loss, and the logits that the loss is made of."""

    def __init__(self, kind: str, blocks: int = 2) -> None:
        super().__init__(blocks)
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        logits = super().forward(x)
        loss = loss_of(logits)
        return {
            "dict": lambda: {"loss": loss, "logits": logits, "nothing": None},
            "dataclass": lambda: Answer(loss, {"deep": [(logits, 3)]}),
            "named tuple": lambda: Pair(loss, logits),
            "list": lambda: [loss, [logits]],
            "read-only dict": lambda: MappingProxyType({"loss": loss, "logits": logits}),
            "namespace": lambda: SimpleNamespace(loss=loss, logits=logits),
            "own class": lambda: Own(loss, logits),
        }[self.kind]()

    def parts(self, answer: Any) -> tuple[Tensor, Tensor]:
        if self.kind == "dataclass":
            return answer.loss, answer.rest["deep"][0][0]
        if self.kind == "list":
            return answer[0], answer[1][0]
        if isinstance(answer, (dict, MappingProxyType)):
            return answer["loss"], answer["logits"]
        return answer.loss, answer.logits


USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "loss": lambda loss, logits: loss,
    "logits": lambda loss, logits: logits.float().sin().sum(),
    "both": lambda loss, logits: loss + logits.float().sin().sum(),
}
IN_PLACE = {"changed logits": lambda loss, logits: logits.add_(1.0).float().sin().sum() + loss}


def gradients_of_outputs(kind: str, stage: int, in_place: bool = False) -> dict[str, list[dict[str, Tensor]]]:
    """By plain backward, by engine.backward."""
    found: dict[str, list[dict[str, Tensor]]] = {}
    x = rows(1, dist.get_world_size())[0][0][dist.get_rank()]
    uses = IN_PLACE if in_place else USES if kind == "dict" else {"both": USES["both"]}
    for use, combine in uses.items():
        found[use] = []
        for plain_backward in (True, False):
            model = build(lambda: Losing(kind))
            engine = initialize(model, stage, fp16={"enabled": True, "loss_scale": 128.0})
            loss = combine(*model.parts(engine(x)))
            loss.backward() if plain_backward else engine.backward(loss)
            found[use].append({name: safe_get_full_grad(p) for name, p in model.named_parameters()})
    return found


def plain_gradients(kind: str, num_ranks: int) -> dict[str, dict[str, Tensor]]:
    found = {}
    for use, combine in {**USES, **IN_PLACE}.items():
        model = build(lambda: Losing(kind)).half()
        sums: dict[str, Tensor] = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
        for own in rows(1, num_ranks)[0][0]:
            model.zero_grad()
            (combine(*model.parts(model(own.half()))) * 128.0).backward()
            for name, parameter in model.named_parameters():
                sums[name] += parameter.grad.float() / num_ranks / 128.0
        found[use] = sums
    return found


@pytest.mark.parametrize(
    ("kind", "stage"), [("dict", 1), ("dict", 3), ("dataclass", 1), ("named tuple", 3), ("list", 2)]
)
def test_a_losses_own_backward_equals_the_engines(ranks: Ranks, kind: str, stage: int) -> None:
    check_both_ways(ranks.run(2, gradients_of_outputs, kind, stage)[0], plain_gradients(kind, 2), f"stage {stage}")


def test_outputs_may_be_changed_in_place(ranks: Ranks) -> None:
    for stage in (1, 3):
        found = ranks.run(2, gradients_of_outputs, "dict", stage, in_place=True)[0]
        check_both_ways(found, plain_gradients("dict", 2), f"stage {stage}")


def check_both_ways(found: dict[str, Any], expected: dict[str, dict[str, Tensor]], where: str) -> None:
    for use, (plainly, by_engine) in found.items():
        for name in expected[use]:
            assert (plainly[name] == by_engine[name]).all(), f"{use} at {where}: {name}"
        difference, name = distance(plainly, expected[use])
        assert difference < 1e-3, f"{use} at {where}: {name} differs by {difference}"


@pytest.mark.parametrize("kind", ["read-only dict", "namespace", "own class"])
def test_losses_in_unknown_containers_get_right_gradients_or_an_error(ranks: Ranks, kind: str) -> None:
    """Gradients without the scale would be divided by it all the same, and nobody would notice."""
    expected = plain_gradients(kind, 2)["loss"]
    for answer in ranks.run(2, gradients_of_a_container, kind):
        if isinstance(answer, str):
            assert answer == "BackwardError"
        else:
            assert distance(answer, expected)[0] < 1e-3


def gradients_of_a_container(kind: str) -> Any:
    model = build(lambda: Losing(kind))
    engine = initialize(model, 1, fp16={"enabled": True, "loss_scale": 128.0})
    loss, _ = model.parts(engine(rows(1, dist.get_world_size())[0][0][dist.get_rank()]))
    try:
        loss.backward()
        return {name: safe_get_full_grad(p) for name, p in model.named_parameters()}
    except shardwell.ShardwellError as error:
        return type(error).__name__


def use_outside(stage: int) -> dict[str, Tensor]:
    model = build()
    engine = initialize(model, stage, fp16={"enabled": True, "loss_scale": 128.0})
    x = rows(1, dist.get_world_size())[0][0][dist.get_rank()]
    engine.backward(loss_of(engine(x)) + model.blocks[0].up.weight.float().square().sum())
    return {name: safe_get_full_grad(p) for name, p in model.named_parameters()}


def test_a_penalty_on_weights_in_the_loss_has_its_true_weight(ranks: Ranks) -> None:
    """By engine.backward: a penalty is no output of the model, so that its own backward would not scale it."""
    model = build().half()
    for own in rows(1, 2)[0][0]:
        ((loss_of(model(own.half())) + model.blocks[0].up.weight.float().square().sum()) / 2).backward()
    expected = {name: p.grad.float() for name, p in model.named_parameters()}
    for stage in (1, 3):
        difference, name = distance(ranks.run(2, use_outside, stage)[0], expected)
        assert difference < 2e-3, f"stage {stage}: {name} differs by {difference}"


def penalised(stage: int) -> dict[str, Tensor]:
    model = build()
    engine = initialize(model, stage, fp16={"enabled": True, "loss_scale": 128.0})
    engine.backward(penalty(engine, rows(1, dist.get_world_size())[0][0][dist.get_rank()]))
    return {name: safe_get_full_grad(p) for name, p in model.named_parameters()}


def penalty(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The gradient of the output by the input is part of the loss."""
    x = x.clone().requires_grad_()
    output = model(x)
    (gradient,) = torch.autograd.grad(output.float().sin().sum(), x, create_graph=True)
    return loss_of(output) + gradient.square().sum()


def test_gradient_penalties_have_their_true_weight(ranks: Ranks) -> None:
    """By engine.backward, for the same reason."""
    model = build()
    for own in rows(1, 2)[0][0]:
        (penalty(model, own) / 2).backward()
    for stage in (1, 3):
        difference, name = distance(ranks.run(2, penalised, stage)[0], {n: p.grad for n, p in model.named_parameters()})
        assert difference < 1e-2, f"stage {stage}: {name} differs by {difference}"


class Halves(nn.Module):
    """A unit that recomputes its halves one by one: each of them runs a backward of its own inside the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.recompute = True

    def forward(self, x: Tensor) -> Tensor:
        for half in (self.first, self.second):
            x = checkpoint(half, x, use_reentrant=True) if self.recompute else half(x)
        return x


def halves(recompute: bool) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(Halves(), Halves())
    for block in model:
        block.recompute = recompute
    return model


def recomputed_halves() -> dict[str, dict[str, Tensor]]:
    found = {}
    for stage in STAGES:
        for plain_backward in (False, True):
            model = halves(True)
            engine = initialize(model, stage, fp16={"enabled": True, "loss_scale": 8.0})
            loss = loss_of(engine(rows(1, dist.get_world_size())[0][0][dist.get_rank()].clone().requires_grad_()))
            loss.backward() if plain_backward else engine.backward(loss)
            way = "loss.backward" if plain_backward else "engine.backward"
            found[f"stage {stage}, {way}"] = {n: safe_get_full_grad(p) for n, p in model.named_parameters()}
    return found


def test_units_may_recompute_parts_of_themselves(ranks: Ranks) -> None:
    model = halves(False)
    for own in rows(1, 2)[0][0]:
        (loss_of(model(own)) / 2).backward()
    for what, found in ranks.run(2, recomputed_halves)[0].items():
        difference, name = distance(found, {n: p.grad for n, p in model.named_parameters()})
        assert difference < 1e-2, f"{what}: {name} differs by {difference}"


# --------------------------------------------------------------------------------------- gradients that leave a model


def gradients_of_inputs(plain_backward: bool, small: float) -> list[Any]:
    found = []
    for stage in STAGES:
        engine = initialize(build(), stage, fp16={"enabled": True, "loss_scale": 512.0})
        x = rows(1, dist.get_world_size())[0][0][dist.get_rank()].clone().requires_grad_()
        loss = loss_of(engine(x)) * small
        loss.backward() if plain_backward else engine.backward(loss)
        found.append(x.grad)
        engine.step()
    return found


@pytest.mark.parametrize(
    ("plain_backward", "small"),
    [(True, 1.0), (False, 1.0), (False, 1e-6)],
    ids=["loss.backward", "engine.backward", "too small for fp16"],
)
def test_gradients_of_inputs_come_out_unscaled(ranks: Ranks, plain_backward: bool, small: float) -> None:
    """Small ones too: the input is fp32, and inside the model the scale lifts what would vanish."""
    model = build()
    x = rows(1, 2)[0][0][0].clone().requires_grad_()
    (loss_of(model(x)) * small).backward()
    for stage, found in zip(STAGES, ranks.run(2, gradients_of_inputs, plain_backward, small)[0], strict=True):
        difference, _ = distance({"x": found}, {"x": x.grad})
        assert difference < 2e-2, f"stage {stage}: differs by {difference}"


def gradients_of_a_chain(how: str, stage: int) -> list[dict[str, Tensor]]:
    """A generator and a discriminator, each with an engine and a scale of its own."""
    torch.manual_seed(5)
    models = [Net(2), Net(2)]
    scales = [{"fp16": {"enabled": True, "loss_scale": scale}} for scale in (512.0, 128.0)]
    generator, critic = (initialize(model, stage, **scale) for model, scale in zip(models, scales, strict=True))
    loss = loss_of(critic(generator(rows(1, dist.get_world_size())[0][0][dist.get_rank()])))
    {"loss": Tensor.backward, "generator": generator.backward, "critic": critic.backward}[how](loss)
    return [{name: safe_get_full_grad(p) for name, p in model.named_parameters()} for model in models]


@pytest.mark.parametrize("how", ["loss", "generator", "critic"])
def test_gradients_through_two_engines_are_right_for_both(ranks: Ranks, how: str) -> None:
    torch.manual_seed(5)
    models = [Net(2), Net(2)]
    for own in rows(1, 2)[0][0]:
        (loss_of(models[1](models[0](own))) / 2).backward()
    for stage in (1, 3):
        for model, found in zip(models, ranks.run(2, gradients_of_a_chain, how, stage)[0], strict=True):
            difference, name = distance(found, {n: p.grad for n, p in model.named_parameters()})
            assert difference < 2e-2, f"stage {stage}: {name} differs by {difference}"
