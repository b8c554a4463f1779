"""In which dtype gradients add up and travel: values against sums written by hand, bytes against the formula."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwell
from shardwell.parallel import TrafficKind
from shardwell.utils import safe_get_full_grad
from tests.support.internals import groups_of
from tests.support.models import zero
from tests.support.ranks import Ranks

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ULP = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
STAGES = (0, 1, 2, 3)
SHAPES = [(5, 7), (3,), (16, 8), (1,)]


class Given(nn.Module):
    """The gradient of its loss is whatever it is called with."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(shape)) for shape in shapes])

    def forward(self, gradients: list[Tensor]) -> Tensor:
        products = [weight * gradient for weight, gradient in zip(self.weights, gradients, strict=True)]
        return torch.stack([product.float().sum() for product in products]).sum()


class Model(nn.Module):
    """Two units, one of them with a single parameter that needs no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Given(SHAPES), Given([(16, 12)])])

    def forward(self, gradients: list[list[Tensor]]) -> Tensor:
        return sum(block(own) for block, own in zip(self.blocks, gradients, strict=True))


def draw(case: Case, micro: int, rank: int) -> list[list[Tensor]]:
    """Gradients with all the bits of the model's dtype, between nothing and 4 times `size`."""
    generator = torch.Generator().manual_seed(100 * micro + rank)
    shapes = [SHAPES, [(16, 12)]]
    numbers = [[torch.rand(s, generator=generator) * 2.0 ** torch.randint(-3, 3, s, generator=generator) for s in group]
               for group in shapes]  # fmt: skip
    size = case.size / 100 if case.lopsided and rank else case.size
    return [[(n * size).to(DTYPES["bf16" if case.bf16 else "fp32"]) for n in group] for group in numbers]


@dataclasses.dataclass(frozen=True)
class Case:
    bf16: bool = False
    accumulation: int = 1
    accumulate: str | None = None
    wire: str | None = None
    prescale: bool = False
    predivide: float = 1.0
    size: float = 1.0
    lopsided: bool = False  # gradients are large on one rank only, so that their average is half of them

    @property
    def config(self) -> dict[str, Any]:
        return {
            "bf16": {"enabled": self.bf16},
            "gradient_accumulation_steps": self.accumulation,
            "data_types": {"grad_accum_dtype": self.accumulate},
            "communication_data_type": self.wire,
            "prescale_gradients": self.prescale,
            "gradient_predivide_factor": self.predivide,
            "shardwell": {"nonfinite": "skip"},
        }

    def wire_dtype(self, stage: int) -> torch.dtype:
        """What crosses the wire: what was asked for, else what the gradients are in when they set out."""
        if self.wire is not None:
            return DTYPES[self.wire]
        added_up = stage < 2 and self.accumulation > 1
        return self.sum_dtype if added_up else DTYPES["bf16" if self.bf16 else "fp32"]

    @property
    def sum_dtype(self) -> torch.dtype:
        return DTYPES[self.accumulate or "fp32"]


def reference(case: Case, stage: int, num_ranks: int) -> list[Tensor]:
    """fp64; rounded where the documentation says that something is kept or sent in a narrow dtype, and nowhere else."""

    def kept(value: Tensor, dtype: torch.dtype) -> Tensor:
        return value.to(dtype).double()

    factor = float(num_ranks) if case.prescale else case.predivide
    own = DTYPES["bf16" if case.bf16 else "fp32"]
    wire = case.wire_dtype(stage)
    result_dtype = wire if stage == 0 else torch.promote_types(own, wire)
    share = 1.0 / (num_ranks * case.accumulation)
    drawn = [
        [[g for group in draw(case, micro, rank) for g in group] for rank in range(num_ranks)]
        for micro in range(case.accumulation)
    ]
    found = []
    for index in range(len(drawn[0][0])):
        gradients = [[micro[rank][index].double() for rank in range(num_ranks)] for micro in drawn]
        if case.accumulation == 1:
            sent = [kept(g / factor, wire) for g in gradients[0]]
            found.append(kept(sum(sent) * factor * share, result_dtype))
        elif stage < 2:  # each rank adds up, then they reduce once
            sums = gradients[0]
            sums = [kept(s * 1.0, case.sum_dtype) for s in sums]
            for micro in gradients[1:]:
                sums = [kept(s + g, case.sum_dtype) for s, g in zip(sums, micro, strict=True)]
            found.append(kept(sum(kept(s / factor, wire) for s in sums) * factor * share, result_dtype))
        else:  # they reduce in each micro-step, and each rank adds up its shard
            total = None
            for micro in gradients:
                parts = [kept(g / factor, wire) * factor * share for g in micro]
                total = kept(sum(parts) if total is None else total + sum(parts), case.sum_dtype)
            found.append(total)
    return found


def run(case: Case, stage: int) -> dict[str, Any]:
    model = Model()
    engine, *_ = shardwell.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), config=zero(stage, **case.config)
    )
    for micro in range(case.accumulation):
        engine.backward(engine(draw(case, micro, dist.get_rank())))
        if micro == case.accumulation - 1:
            found = [safe_get_full_grad(parameter) for parameter in model.parameters()]
        engine.step()
    answer = {
        "gradients": found,
        "reduced": engine.traffic().total(TrafficKind.REDUCE_SCATTER),
        "padded": sum(group.layout.padded for group in groups_of(engine)),
        "units": len(engine.units),
        "overflow": engine.optimizer.overflow,
    }
    engine.destroy(whole=False)
    return answer


def run_all(cases: list[Case], stages: list[tuple[int, ...]] | None = None) -> list[list[dict[str, Any]]]:
    """All cases at all stages, or each at its own."""
    stages = stages or [STAGES] * len(cases)
    return [[run(case, stage) for stage in own] for case, own in zip(cases, stages, strict=True)]


def check(ranks: Ranks, num_ranks: int, cases: list[Case], stages: list[tuple[int, ...]] | None = None) -> None:
    stages = stages or [STAGES] * len(cases)
    for answers in ranks.run(num_ranks, run_all, cases, stages):
        for case, own, by_stage in zip(cases, stages, answers, strict=True):
            for stage, answer in zip(own, by_stage, strict=True):
                what = f"{case} at stage {stage} on {num_ranks} ranks"
                check_values(answer["gradients"], reference(case, stage, num_ranks), tolerance(case, stage), what)
                reduces = case.accumulation if stage >= 2 else 1
                expected = reduces * answer["padded"] * case.wire_dtype(stage).itemsize * (num_ranks - 1) // num_ranks
                assert answer["reduced"] == expected, what
                assert answer["units"] == 2, what
                assert not answer["overflow"], what


def check_values(found: list[Any], expected: list[Tensor], limit: float, what: str) -> None:
    for values, wanted in zip(found, expected, strict=True):
        difference = (torch.as_tensor(values).double() - wanted).abs() / wanted.abs()
        assert float(difference.max()) <= limit, what


def tolerance(case: Case, stage: int) -> float:
    """Sums in fp32 may run in another order; a narrow sum then sometimes falls to the other side of a rounding."""
    narrow = [d for d in (case.sum_dtype, case.wire_dtype(stage)) if d.itemsize == 2]
    adds = case.accumulation > 1 and case.sum_dtype.itemsize == 2
    if adds and stage >= 2:  # the parts of the ranks are added one by one, each with a rounding
        return 2 * ULP[case.sum_dtype]
    if _ends_narrow(case, stage) or (case.prescale and narrow):  # by 3: no fp32 number is a third
        return max([2 * ULP[d] for d in narrow], default=1e-6)
    return 1e-6


def _ends_narrow(case: Case, stage: int) -> bool:
    """Whether the last thing that happens is a rounding to 16 bits."""
    if case.accumulation > 1 and stage >= 2:
        return case.sum_dtype.itemsize == 2
    wire = case.wire_dtype(stage)
    return wire.itemsize == 2 and (stage == 0 or case.bf16)


NAMES = ["fp32", "bf16", "fp16"]
HALVES = [(0, 2), (1, 3)]  # of the stages; where cases take turns with them, every two choices still meet


@pytest.mark.slow
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32 model", "bf16 model"])
def test_gradients_travel_in_the_dtype_that_was_asked_for(ranks: Ranks, bf16: bool) -> None:
    cases = [Case(bf16=bf16, wire=wire, accumulation=g) for wire in [None, *NAMES] for g in (1, 3)]
    check(ranks, 2, cases, [*HALVES, *HALVES[::-1]] * 2)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_so_they_do_on_other_numbers_of_ranks(ranks: Ranks, num_ranks: int) -> None:
    check(ranks, num_ranks, [Case(wire="fp16"), Case(bf16=True, accumulation=2)])


@pytest.mark.slow
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32 model", "bf16 model"])
def test_gradients_add_up_in_the_dtype_that_was_asked_for(ranks: Ranks, bf16: bool) -> None:
    cases = [Case(bf16=bf16, accumulate=name, accumulation=g) for name in NAMES for g in (1, 4)]
    check(ranks, 2, cases, [*HALVES, *HALVES[::-1], *HALVES])


@pytest.mark.slow
def test_sums_and_wires_of_different_dtypes(ranks: Ranks) -> None:
    pairs = [(a, w) for a in NAMES for w in NAMES if a != w]
    check(ranks, 2, [Case(accumulate=a, wire=w, accumulation=3) for a, w in pairs], HALVES * 3)


# ------------------------------------------------------------------------------------------------------ predividing


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_predividing_changes_only_where_things_are_rounded(ranks: Ranks, num_ranks: int) -> None:
    ways: list[dict[str, Any]] = [{"prescale": True}, {"predivide": 4.0}]
    kinds: list[dict[str, Any]] = [{"wire": "fp16"}, {"bf16": True}, {"wire": "bf16", "accumulation": 2}]
    check(
        ranks,
        num_ranks,
        [Case(**way, **kind) for way in ways for kind in kinds],
        HALVES[:: 1 if num_ranks == 2 else -1] * 3,
    )


def test_sums_of_large_fp16_gradients_do_not_overflow(ranks: Ranks) -> None:
    """Sums run in fp32, so that it is enough that each rank's gradient fits (65504 is the most)."""
    check(ranks, 3, [Case(wire="fp16", size=16000.0, accumulation=1)])  # up to 64,000 each


@pytest.mark.parametrize(
    ("accumulation", "way"), [(1, {"prescale": True}), (1, {"predivide": 4.0}), (2, {"predivide": 8.0})]
)
def test_predividing_makes_room_for_gradients_beyond_fp16(ranks: Ranks, accumulation: int, way: dict[str, Any]) -> None:
    """Up to 120,000 on one rank in each micro-step."""
    large = Case(wire="fp16", size=30000.0, lopsided=True, accumulation=accumulation)
    for by_stage in ranks.run(2, run_all, [large])[0]:
        assert all(answer["overflow"] for answer in by_stage)
    check(ranks, 2, [dataclasses.replace(large, **way)])


def test_predividing_by_too_much_loses_small_gradients(ranks: Ranks) -> None:
    """fp16 ends at 6e-8: a tenth of 2e-7 is nothing."""
    small = Case(wire="fp16", size=1e-6)
    lost = dataclasses.replace(small, predivide=1e4)
    kept_, gone = ranks.run(2, run_all, [small, lost])[0]
    for stage in (1, 2, 3):
        assert all((gradient > 0).mean() > 0.9 for gradient in kept_[stage]["gradients"])
        assert all((gradient == 0).all() for gradient in gone[stage]["gradients"])


# --------------------------------------------------------------------------------- ranks that begin at different times


class Late(nn.Module):
    """The second unit is used when the caller says so. It has one parameter, and no padding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8, bias=False)) for _ in range(2)])

    def forward(self, x: Tensor, use: bool) -> Tensor:
        x = self.blocks[0](x)
        return self.blocks[1](x) if use else x


def uses(micro: int, rank: int) -> bool:
    return micro == 2 or rank == 0


def use_late(stage: int, bf16: bool, no_sync: bool) -> dict[str, Tensor]:
    """Three micro-steps; without accumulation in the configuration, `no_sync` keeps the first two."""
    model = Late()
    engine, *_ = shardwell.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        config=zero(stage, bf16={"enabled": bf16}, gradient_accumulation_steps=1 if no_sync else 3),
    )
    for micro in range(3):
        with engine.no_sync() if no_sync and micro < 2 else contextlib.nullcontext():
            engine.backward(engine(torch.ones(2, 8), uses(micro, dist.get_rank())).float().sum())
        if micro < 2 and not no_sync:
            engine.step()
    return {name: safe_get_full_grad(parameter) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("stage", "no_sync"), [(0, False), (1, False), (2, True)])
def test_a_unit_that_one_rank_uses_later(ranks: Ranks, stage: int, no_sync: bool, bf16: bool) -> None:
    """Nothing is gathered or reduced before the last micro-step, so that ranks may differ until then."""
    model = Late()
    for rank in range(2):
        for micro in range(3):
            (model(torch.ones(2, 8), uses(micro, rank)).sum() / (2 if no_sync else 6)).backward()
    near = {"rtol": 2e-2, "atol": 2e-2} if bf16 else {"rtol": 1e-5, "atol": 1e-6}
    for answer in ranks.run(2, use_late, stage, bf16, no_sync):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(torch.as_tensor(answer[name]), parameter.grad, **near)
