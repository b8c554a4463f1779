"""What a pipeline reports: bytes between stages by the formula, the trace with micro-batches, the measured bubble."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwell
from shardwell.parallel import TrafficKind
from shardwell.pipeline import make_schedule
from tests.support.pipelines import (
    CHUNKS,
    LENGTH,
    NUM_MICRO_BATCHES,
    ROWS,
    WIDTH,
    Decoder,
    next_token_loss,
    pipeline_config,
    stream,
)
from tests.support.ranks import Ranks
from tests.support.wire_counter import WireCounter


def observe(schedule: str, stage: int) -> dict[str, Any]:
    """Return the bytes between stages in the second step, and the trace of the third."""
    model = shardwell.pipeline.split(Decoder(), loss_fn=next_token_loss)
    engine, *_ = shardwell.initialize(model=model, config=pipeline_config(stage, schedule))
    batches = stream(3, engine.data_rank)
    engine.train_batch(batches)
    engine.train_batch(batches)
    traffic = engine.traffic()
    with engine.record() as trace:
        engine.train_batch(batches)
    unit_bytes = {kind.value: traffic.total(kind) for kind in TrafficKind}
    numel = sum(parameter.numel() for parameter in engine.module.parameters())
    engine.destroy(whole=False)
    return {"bytes": unit_bytes, "axes": traffic.by_axis(), "trace": str(trace).splitlines()[0].split(), "numel": numel}


def observe_all() -> dict[str, dict[str, Any]]:
    return {schedule: observe(schedule, 1) for schedule in CHUNKS} | {"stage 3": observe("1f1b", 3)}


@pytest.mark.slow
def test_bytes_and_trace_are_those_of_the_schedule(ranks: Ranks) -> None:
    found = ranks.run(4, observe_all)
    message = ROWS * LENGTH * WIDTH * 4
    for name, chunks in CHUNKS.items():
        schedule = make_schedule(name, 2, NUM_MICRO_BATCHES, chunks)
        for rank, one in enumerate(found):
            # Each border between stages brings a hidden state forward and its gradient back: to one of its sides each.
            borders = schedule.num_stages - 1
            place = rank // 2
            num_in = sum(stage % 2 == place for stage in range(1, borders + 1))
            num_back = sum(stage % 2 == place for stage in range(borders))
            assert one[name]["axes"]["pipe"] == NUM_MICRO_BATCHES * (num_in + num_back) * message
            operations = [token for token in one[name]["trace"] if token[0].isdigit()]
            assert operations == [str(operation) for operation in schedule.ranks[place]]
    for one in found:
        # One reduce-scatter and one publication: at the boundary, whatever the number of micro-batches.
        assert one["1f1b"]["bytes"]["reduce"] == pytest.approx(one["1f1b"]["numel"] * 4 / 2, rel=0.02)
        assert one["1f1b"]["bytes"]["publish"] == pytest.approx(one["1f1b"]["numel"] * 4 / 2, rel=0.02)
        # At stage 3 each micro-batch gathers twice and reduces once.
        whole = NUM_MICRO_BATCHES * one["stage 3"]["numel"] * 4 / 2
        assert one["stage 3"]["bytes"]["reduce"] == pytest.approx(whole, rel=0.05)
        assert one["stage 3"]["bytes"]["gather"] <= 2.05 * whole


def counted(schedule: str) -> tuple[int, int]:
    """Return the bytes that this rank of two stages received in a step, by torch's calls and by the engine."""
    model = shardwell.pipeline.split(Decoder(), loss_fn=next_token_loss)
    engine: Any = shardwell.initialize(model=model, config=pipeline_config(1, schedule)).engine
    batches = stream(2, engine.data_rank)
    engine.train_batch(batches)  # describes the tensors
    with WireCounter(dist.get_rank(), 2) as wire:
        engine.train_batch(batches)
    said = engine.traffic().by_axis()["pipe"]
    engine.destroy(whole=False)
    return wire.received["recv_"], said


def counted_all() -> list[tuple[int, int]]:
    return [counted(schedule) for schedule in CHUNKS]


def test_an_independent_count_of_the_pipe_axis_equals_the_formula(ranks: Ranks) -> None:
    message = ROWS * LENGTH * WIDTH * 4
    for place, found in enumerate(ranks.run(2, counted_all)):
        for chunks, (on_wire, said) in zip(CHUNKS.values(), found, strict=True):
            borders = range(1, 2 * chunks)  # by the stage after each: it receives forward, the one before backward
            num_in = sum(stage % 2 == place for stage in borders) + sum((stage - 1) % 2 == place for stage in borders)
            assert on_wire == said == NUM_MICRO_BATCHES * num_in * message


def late_gradients() -> tuple[list[str], bool]:
    """Return the trace of zb-h1 from the last input gradient on, and whether nothing is reduced before its end."""
    model = shardwell.pipeline.split(Decoder(), loss_fn=next_token_loss)
    engine, *_ = shardwell.initialize(model=model, config=pipeline_config(1, "zb-h1"))
    batches = stream(2, engine.data_rank)
    engine.train_batch(batches)
    with engine.record() as trace:
        engine.train_batch(batches)
    tokens = str(trace).splitlines()[0].split()
    last_input = max(index for index, token in enumerate(tokens) if "I" in token)
    last_weight = max(index for index, token in enumerate(tokens) if "W" in token)
    reduces = [index for index, token in enumerate(tokens) if token.startswith("R")]
    return tokens[last_input:], min(reduces) > last_weight > last_input


def test_weight_gradients_come_after_the_last_input_gradient(ranks: Ranks) -> None:
    for tokens, is_late in ranks.run(4, late_gradients):
        assert is_late, tokens


SLEEPS = (0.1, 0.2, 0.4, 0.8, 1.6)  # seconds of a forward and of each half of a backward, until it is near
NEAR = 0.01


class _Sleep(torch.autograd.Function):
    """Takes time in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grad, None


class Sleeper(nn.Module):
    """A layer that sleeps."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.seconds = 0.0

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = _Sleep.apply(hidden * self.weight, self.seconds)  # type: ignore[no-untyped-call]
        return output


def measure(schedule: str, chunks: int, number: int) -> list[float]:
    """Return the bubbles of a pipeline of sleepers, one for each step, until all ranks have the theory's.

    On a machine that is busy with other tests, messages come late by some milliseconds: a step's bubble looks larger,
    the more so the shorter the stages are. Stages that sleep longer tell such a delay from a wrong count, which stays.
    """
    model = nn.Sequential(*(Sleeper() for _ in range(2 * chunks)))
    config = pipeline_config(0, schedule, gradient_accumulation_steps=number, gradient_clipping=0.0)
    config["pipeline"]["partition"] = "uniform"
    split = shardwell.pipeline.split(model, loss_fn=lambda output, labels: (output - labels).square().mean())
    engine, *_ = shardwell.initialize(model=split, config=config)
    rows = [(torch.ones(2, WIDTH), torch.zeros(2, WIDTH))] * number
    assert engine.bubble() is None
    found = []
    for seconds in SLEEPS:
        for sleeper in model:
            sleeper.seconds = seconds
        engine.train_batch(iter(rows))
        engine.eval_batch(iter(rows))  # of which nothing is measured
        found.append(engine.bubble())
        is_far = torch.tensor(float(abs(found[-1] - 1 / (chunks * number + 1)) > NEAR))
        dist.all_reduce(is_far)
        if not is_far:
            break
    engine.destroy(whole=False)
    return found


def measure_all(cases: list[tuple[str, int, int]]) -> list[list[float]]:
    return [measure(*case) for case in cases]


@pytest.mark.slow
def test_measured_bubbles_are_those_of_the_simulation(ranks: Ranks) -> None:
    cases = [("gpipe", 1, 4), ("1f1b", 1, 4), ("interleaved", 2, 4), ("zb-h1", 1, 4)]  # no W in these layers
    expected = [1 / (chunks * number + 1) for _, chunks, number in cases]
    for found in ranks.run(2, measure_all, cases):
        for steps, want in zip(found, expected, strict=True):
            assert abs(steps[-1] - want) <= NEAR, (found, expected)
