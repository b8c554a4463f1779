"""fp16 with fp32 masters and a loss scale, and torch.autocast, against plain loops."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwell
from shardwell.memory import State
from shardwell.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_local_fp32_param,
    safe_get_local_optimizer_state,
)
from tests.memory.live import live_bytes
from tests.models import whole_parameters, zero
from tests.ranks import Ranks

WIDTH, STEPS = 7, 3
STAGES = (0, 1, 2, 3)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks, each of them a unit; `recompute` checkpoints them."""

    def __init__(self, blocks: int = 3, recompute: str = "", width: int = WIDTH) -> None:
        super().__init__()
        self.recompute = recompute
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant") if self.recompute else block(x)
        return x


def build(kind: Callable[..., nn.Module] = Net, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return kind(**options)


def rows(steps: int, num_ranks: int, accumulation: int = 1) -> list[list[list[Tensor]]]:
    """[step][micro-step][rank]; sizes are such that gradients are far from fp16's smallest numbers."""
    generator = torch.Generator().manual_seed(3)
    every = [torch.randn(accumulation, num_ranks, 4, WIDTH, generator=generator) for _ in range(steps)]
    return [[list(micro) for micro in step] for step in every]


def loss_of(output: Tensor) -> Tensor:
    return output.float().square().sum()


def initialize(model: nn.Module, stage: int, **config: Any) -> shardwell.Engine:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    return shardwell.initialize(model=model, optimizer=optimizer, config=zero(stage, **config)).engine


def distance(found: dict[str, Any], expected: dict[str, Tensor]) -> tuple[float, str]:
    """The largest relative difference of any tensor, by norm; infinite where something is not finite."""
    worst = (0.0, "")
    for name, reference in expected.items():
        difference = float((torch.as_tensor(found[name]).double() - reference).norm() / reference.double().norm())
        worst = max(worst, (difference if math.isfinite(difference) else math.inf, name))
    return worst


# ---------------------------------------------------------------------------------------------------- the plain loop


@dataclasses.dataclass(frozen=True)
class Case:
    accumulation: int = 1
    clip: float = 0.0
    scale: float = 128.0

    @property
    def config(self) -> dict[str, Any]:
        return {
            "fp16": {"enabled": True, "loss_scale": self.scale},
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clip,
        }


CASES = [Case(), Case(clip=0.5), Case(accumulation=2), Case(scale=1.0)]


def plain_mixed_precision(case: Case, num_ranks: int) -> tuple[dict[str, Tensor], list[float]]:
    """fp16 model, fp32 masters; fp16 gradients are averaged in fp32 (and, without accumulation, rounded)."""
    masters = {name: nn.Parameter(p.detach().clone()) for name, p in build().named_parameters()}
    optimizer = torch.optim.AdamW(masters.values(), lr=1e-2, weight_decay=0.1)
    model = build().half()
    norms = []
    for step in rows(STEPS, num_ranks, case.accumulation):
        for name, parameter in model.named_parameters():
            parameter.data.copy_(masters[name].detach())
        sums = {name: torch.zeros_like(master) for name, master in masters.items()}
        for own in (own for micro in step for own in micro):
            model.zero_grad()
            (loss_of(model(own.half())) * case.scale).backward()
            for name, parameter in model.named_parameters():
                sums[name] += parameter.grad.float()
        for name, master in masters.items():
            mean = sums[name] / (num_ranks * case.accumulation)
            master.grad = (mean if case.accumulation > 1 else mean.half().float()) / case.scale
        norms.append(float(torch.linalg.vector_norm(torch.cat([m.grad.flatten() for m in masters.values()]))))
        if case.clip:
            nn.utils.clip_grad_norm_(masters.values(), case.clip)
        optimizer.step()
    return {name: master.detach() for name, master in masters.items()}, norms


def train(case: Case, stage: int, plain_backward: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    model = build()
    engine = initialize(model, stage, **case.config)
    norms = []
    for step in rows(STEPS, dist.get_world_size(), case.accumulation):
        for micro in step:
            output = engine(micro[dist.get_rank()])
            assert output.dtype == torch.float16
            loss = loss_of(output)
            loss.backward() if plain_backward else engine.backward(loss)
            engine.step()
        norms.append(engine.get_global_grad_norm())
    whole = whole_parameters(model)
    assert all(parameter.dtype == torch.float16 for parameter in whole.values())
    return {name: safe_get_full_fp32_param(p) for name, p in model.named_parameters()}, whole, norms


def train_all() -> list[list[list[Any]]]:
    return [
        [[train(case, stage, plain) for plain in {False, stage == 1 and case == CASES[0]}] for stage in STAGES]
        for case in CASES
    ]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_training_follows_the_plain_loop(ranks: Ranks, num_ranks: int) -> None:
    answers = ranks.run(num_ranks, train_all)[0]
    for case, by_stage in zip(CASES, answers, strict=True):
        expected, norms = plain_mixed_precision(case, num_ranks)
        for stage, ways in zip(STAGES, by_stage, strict=True):
            for masters, whole, found_norms in ways:
                difference, name = distance(masters, expected)
                # with accumulation or clipping, sums run in another order: rarely an fp16 weight lands one step apart
                assert difference < 1e-4, f"{case} at stage {stage}: {name} differs by {difference}"
                if case.accumulation == 1 and not case.clip:
                    assert difference == 0.0, f"{case} at stage {stage}: {name} differs by {difference}"
                assert found_norms == pytest.approx(norms, rel=1e-4)
                assert all((whole[n] == torch.as_tensor(masters[n]).half().numpy()).all() for n in whole)
        if case.accumulation == 1:
            first, second, third = (by_stage[stage] for stage in (1, 2, 3))
            for name in expected:
                assert (first[0][0][name] == second[0][0][name]).all(), f"{case}: {name}"
                assert (first[0][0][name] == third[0][0][name]).all(), f"{case}: {name}"
                assert (first[0][0][name] == first[-1][0][name]).all(), f"{case}: {name} by plain backward"


# ------------------------------------------------------------------------------------------------- the loss scale


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Loss-scale settings, and at which steps a rank overflows."""

    overflows: str  # one letter a step: "x" overflows, "." does not
    power: int = 4
    loss_scale: float = 0.0
    window: int = 1000
    hysteresis: int = 2
    consecutive: bool = False
    smallest: float = 1.0
    warns: bool = False  # once, that the smallest scale is still too large

    @property
    def config(self) -> dict[str, Any]:
        return {
            "enabled": True,
            "loss_scale": self.loss_scale,
            "initial_scale_power": self.power,
            "loss_scale_window": self.window,
            "hysteresis": self.hysteresis,
            "consecutive_hysteresis": self.consecutive,
            "min_loss_scale": self.smallest,
        }

    def scales(self) -> list[float]:
        """The scale after each step, from the rules as the documentation words them."""
        if self.loss_scale:
            return [self.loss_scale] * len(self.overflows)
        exponent, tolerance, found = self.power, self.hysteresis, []
        since = 0  # steps since the last overflow or doubling
        for letter in self.overflows:
            if letter == "x":
                since = 0
                exponent -= tolerance == 1
                tolerance = max(tolerance - 1, 1)
            else:
                since += 1
                if since == self.window:
                    since, exponent, tolerance = 0, exponent + 1, self.hysteresis
                elif self.consecutive:
                    tolerance = self.hysteresis
            if 2.0**exponent < self.smallest:
                exponent += 1
            found.append(2.0**exponent)
        return found


SCALINGS = [
    Scaling("..x.x.x.....x"),
    Scaling("...........", power=7, window=3),
    Scaling("....x...x....", window=4, hysteresis=1),
    Scaling("xx.xx.x.x", hysteresis=3),
    Scaling("xx.xx.x.xxxx", hysteresis=3, consecutive=True),
    Scaling("x.x.x.x.x.", consecutive=True),
    Scaling("xxxxxxx..xx..", power=2, hysteresis=1, window=2, warns=True),
    Scaling("xxxxx.", power=5, hysteresis=1, smallest=8.0, warns=True),
    Scaling("x..xx.", loss_scale=64.0),
    Scaling("..", power=0),
]


def shards_of(engine: shardwell.Engine) -> dict[str, Tensor]:
    """Everything that a skipped step must not touch, on this rank."""
    held: dict[str, Any] = {}
    for name, parameter in engine.module.named_parameters():
        held[f"{name} master"] = safe_get_local_fp32_param(parameter)
        if engine.zero_optimization_stage() < 3:
            held[f"{name} itself"] = parameter.detach()
        for key in ("exp_avg", "exp_avg_sq", "step"):
            held[f"{name} {key}"] = safe_get_local_optimizer_state(parameter, key)
    return {key: value.clone() for key, value in held.items() if value is not None}


def same(before: dict[str, Tensor], after: dict[str, Tensor]) -> bool:
    return before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


def follow_scale(scaling: Scaling, stage: int) -> dict[str, Any]:
    model = build(blocks=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = shardwell.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=lambda sharded: torch.optim.lr_scheduler.LambdaLR(sharded, lambda step: 1.0 / (1 + step)),
        config=zero(stage, fp16=scaling.config),
    ).engine
    x = rows(1, dist.get_world_size())[0][0][dist.get_rank()]
    start, found = engine.loss_scale, []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for letter in scaling.overflows:
            before = shards_of(engine)
            spoil = float("inf") if letter == "x" and dist.get_rank() == dist.get_world_size() - 1 else 1.0
            engine.backward(loss_of(engine(x)) * spoil)
            engine.step()
            untouched = same(before, shards_of(engine))
            found.append(
                (engine.loss_scale, engine.skipped_steps, engine.optimizer.overflow, untouched, engine.get_lr()[0])
            )
    warned = [str(w.message) for w in caught if "smallest loss scale" in str(w.message)]
    return {"start": start, "steps": found, "warned": len(warned), "taken": engine.global_steps}


def stages_of(number: int) -> tuple[int, ...]:
    """The rules are the same at all stages; what finds an overflow is not."""
    return STAGES if number == 0 else (number % 4,)


def follow_scales() -> list[list[dict[str, Any]]]:
    return [[follow_scale(scaling, s) for s in stages_of(number)] for number, scaling in enumerate(SCALINGS)]


def test_the_scale_follows_its_rules_and_a_skipped_step_changes_nothing(ranks: Ranks) -> None:
    for answers in ranks.run(2, follow_scales):
        for number, (scaling, by_stage) in enumerate(zip(SCALINGS, answers, strict=True)):
            for stage, answer in zip(stages_of(number), by_stage, strict=True):
                what = f"{scaling} at stage {stage}"
                columns = zip(*answer["steps"], strict=True)
                scales, skipped, overflow, untouched, rates = (list(column) for column in columns)
                assert answer["start"] == (scaling.loss_scale or 2.0**scaling.power), what
                assert scales == scaling.scales(), what
                assert overflow == [letter == "x" for letter in scaling.overflows], what
                assert untouched == overflow, what
                assert skipped == [scaling.overflows[: n + 1].count("x") for n in range(len(skipped))], what
                steps_taken = [scaling.overflows[: n + 1].count(".") for n in range(len(skipped))]
                assert rates == pytest.approx([1e-2 / (1 + taken) for taken in steps_taken]), what
                assert answer["taken"] == len(scaling.overflows), what

                assert answer["warned"] == int(scaling.warns), what


def scale_within_boundaries(stage: int) -> list[float]:
    engine = initialize(
        build(blocks=2), stage, gradient_accumulation_steps=3, fp16={"enabled": True, "loss_scale_window": 1}
    )
    x, scales = rows(1, dist.get_world_size())[0][0][dist.get_rank()], []
    for _ in range(9):
        loss = loss_of(engine(x)) * 1e-9
        scales.append(engine.loss_scale)
        engine.backward(loss)
        scales.append(engine.loss_scale)
        engine.step()
    return scales


@pytest.mark.parametrize("stage", [1, 3])
def test_the_scale_is_constant_within_a_boundary(ranks: Ranks, stage: int) -> None:
    assert ranks.run(2, scale_within_boundaries, stage)[0] == [2.0**16] * 6 + [2.0**17] * 6 + [2.0**18] * 6


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
    for use, combine in (IN_PLACE if in_place else USES).items():
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


def inputs_seen(auto_cast: bool) -> list[str]:
    seen = []
    model = build()
    model.blocks[0].register_forward_pre_hook(lambda module, args: seen.append(str(args[0].dtype)))
    engine = initialize(model, 0, fp16={"enabled": True, "auto_cast": auto_cast})
    engine(torch.ones(2, WIDTH))
    engine(torch.ones(2, WIDTH, dtype=torch.float64))
    return seen


@pytest.mark.parametrize("auto_cast", [True, False])
def test_inputs_are_cast_to_fp16(ranks: Ranks, auto_cast: bool) -> None:
    assert ranks.run(1, inputs_seen, auto_cast)[0] == ["torch.float16", "torch.float16"]


def batch_normed(block: str) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1))
    scale = {"loss_scale": 8.0} if block == "fp16" else {}
    engine = initialize(model, 1, **{block: {"enabled": True, **scale}})
    losses = []
    for _ in range(5):
        loss = loss_of(engine(rows(1, 1)[0][0][0]))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("block", ["bf16", "fp16"])
def test_batch_norms_train_in_16_bits(ranks: Ranks, block: str) -> None:
    """As they do after `model.half()`."""
    losses = ranks.run(1, batch_normed, block)[0]
    assert losses[-1] < losses[0]


# ------------------------------------------------------------------------------------------------------------ memory


def books(stage: int) -> dict[str, int]:
    counts = stage in (1, 3)  # looking at everything alive takes its time
    before = live_bytes() if counts else 0
    engine = initialize(build(width=64), stage, fp16={"enabled": True})
    x = torch.randn(4, 64)
    for last in (False, True):
        engine.backward(loss_of(engine(x)) * 1e-3)
        if not last:
            engine.step()
            rest, live = engine.memory(), live_bytes() - before if counts else engine.memory().total()
    engine._flow.finish()
    for unit in engine._flow.units:
        for group in unit.trainable:
            group.gradients.settle()
    groups = [group for unit in engine._flow.units for group in unit.groups]
    return {
        "padded": sum(group.layout.padded for group in groups),
        "parameters": rest.total(State.PARAMETERS),
        "optimizer": rest.total(State.OPTIMIZER),
        "live": live,
        "all": rest.total(),
        "gradients": engine.memory().total(State.GRADIENTS),
    }


def all_books() -> list[dict[str, int]]:
    return [books(stage) for stage in STAGES]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_bytes_of_fp16(ranks: Ranks, num_ranks: int) -> None:
    """2 bytes a whole parameter; the fp32 masters lie apart, except at stage 3, where they are the parameters."""
    for by_stage in ranks.run(num_ranks, all_books):
        for stage, answer in zip(STAGES, by_stage, strict=True):
            psi, share = answer["padded"], answer["padded"] / (num_ranks if stage else 1)
            rests_whole = stage < 3 or num_ranks == 1
            assert answer["parameters"] == (2 * psi if rests_whole else 4 * share)
            assert answer["optimizer"] == pytest.approx((12 if rests_whole else 8) * share, rel=0.01)
            assert answer["gradients"] == pytest.approx(2 * share)
            assert answer["live"] == pytest.approx(answer["all"], rel=0.01)


# ---------------------------------------------------------------------------------------------------------- autocast

LOWER = {"bf16": torch.bfloat16, "fp16": torch.float16}
RECOMPUTE = ["", "non-reentrant", "reentrant"]


def autocast_plainly(dtype: str, num_ranks: int, recompute: str) -> tuple[dict[str, Tensor], str]:
    """The user's own context around a plain model; with fp16, the loss scale is 128."""
    scale = 128.0 if dtype == "fp16" else 1.0
    model = build(recompute=recompute)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for (micro,) in rows(STEPS, num_ranks):
        optimizer.zero_grad()
        for own in micro:
            with torch.autocast("cpu", LOWER[dtype], cache_enabled=False):
                output = model(own.clone().requires_grad_())
            (loss_of(output) * scale / num_ranks).backward()
        for parameter in model.parameters():
            parameter.grad /= scale
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}, str(output.dtype)


def autocast_sharded(dtype: str, recompute: str, by_user: bool, stage: int) -> tuple[dict[str, Tensor], str, set[str]]:
    """By the configuration, or by the user around the engine (torch's cache of casts is on then)."""
    block = {"torch_autocast": {"enabled": True, "dtype": dtype}, "fp16": {"loss_scale": 128.0}}
    model = build(recompute=recompute)
    engine = initialize(model, stage, **({} if by_user else block))
    for (micro,) in rows(STEPS, dist.get_world_size()):
        context = torch.autocast("cpu", LOWER[dtype]) if by_user else contextlib.nullcontext()
        with context:
            output = engine(micro[dist.get_rank()].clone().requires_grad_())
        engine.backward(loss_of(output))
        engine.step()
    whole = whole_parameters(model)
    return whole, str(output.dtype), {str(p.dtype) for p in whole.values()}


def autocast_all(dtype: str, by_user: bool) -> list[Any]:
    return [autocast_sharded(dtype, how, by_user, stage) for how in RECOMPUTE for stage in STAGES]


@pytest.mark.parametrize("by_user", [False, True], ids=["by the configuration", "by the user"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_autocast_is_the_users_own_autocast(ranks: Ranks, dtype: str, by_user: bool) -> None:
    expected = {how: autocast_plainly(dtype, 2, how) for how in RECOMPUTE}
    answers = iter(ranks.run(2, autocast_all, dtype, by_user)[0])
    for how in RECOMPUTE:
        for stage in STAGES:
            found, output, weights = next(answers)
            difference, name = distance(found, expected[how][0])
            # the user's context has no loss scale: in fp16, gradients are rounded elsewhere
            limit = 1e-2 if by_user and dtype == "fp16" else 1e-5
            assert difference < limit, f"{how} at stage {stage}: {name} differs by {difference}"
            assert output == expected[how][1]
            assert weights == {"torch.float32"}
