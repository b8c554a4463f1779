"""fp16 with fp32 masters and a loss scale, against a plain loop."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwell
from shardwell.memory import StateKind
from shardwell.utils import safe_get_full_fp32_param, safe_get_local_fp32_param, safe_get_local_optimizer_state
from tests.support.internals import finish_backward, groups_of, units_of
from tests.support.live_bytes import live_bytes
from tests.support.mixed_precision import STAGES, STEPS, WIDTH, build, initialize, loss_of, rows
from tests.support.models import whole_parameters, zero
from tests.support.ranks import Ranks
from tests.support.training import distance

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


def train_all(cases: list[Case]) -> list[list[list[Any]]]:
    return [
        [[train(case, stage, plain) for plain in {False, stage == 1 and case == CASES[0]}] for stage in STAGES]
        for case in cases
    ]


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_training_follows_the_plain_loop(ranks: Ranks, num_ranks: int) -> None:
    cases = CASES if num_ranks == 2 else CASES[1:3]
    answers = ranks.run(num_ranks, train_all, cases)[0]
    for case, by_stage in zip(cases, answers, strict=True):
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
        before = shards_of(engine)
        for letter in scaling.overflows:
            spoil = float("inf") if letter == "x" and dist.get_rank() == dist.get_world_size() - 1 else 1.0
            engine.backward(loss_of(engine(x)) * spoil)
            engine.step()
            after = shards_of(engine)
            untouched, before = same(before, after), after
            found.append(
                (engine.loss_scale, engine.skipped_steps, engine.optimizer.overflow, untouched, engine.get_lr()[0])
            )
    warned = [str(w.message) for w in caught if "smallest loss scale" in str(w.message)]
    return {"start": start, "steps": found, "warned": len(warned), "taken": engine.global_steps}


def stages_of(number: int) -> tuple[int, ...]:
    """The rules are the same at all stages; what finds an overflow is not."""
    return (number % 4,)


def follow_scales() -> list[list[dict[str, Any]]]:
    return [[follow_scale(scaling, s) for s in stages_of(number)] for number, scaling in enumerate(SCALINGS)]


@pytest.mark.slow
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


# --------------------------------------------------------------------------------------------------- inputs and norms


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
    finish_backward(engine)
    for unit in units_of(engine):
        for group in unit.trainable:
            group.gradients.wait()
    groups = groups_of(engine)
    return {
        "padded": sum(group.layout.padded for group in groups),
        "parameters": rest.total(StateKind.PARAMETERS),
        "optimizer": rest.total(StateKind.OPTIMIZER),
        "live": live,
        "all": rest.total(),
        "gradients": engine.memory().total(StateKind.GRADIENTS),
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
