"""Moments in 8 bits: the same bits everywhere, bounded errors, right on average, and training that does not notice."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from shardwell import kernels
from shardwell.kernels import AdamRule, Moments8bitArgs, UpdateArgs, moments8
from tests.support.kernel_cases import (
    REFERENCE,
    any_bits,
    copied,
    differing,
    isas,
    library,
    likely,
    out_of_place,
    stretch,
)

NUMEL = 1000
WHOLE = slice(0, NUMEL)


def stored(first: Tensor, second: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    """What comes back of two moments."""
    moments = Moments8bitArgs.zeros(NUMEL)
    moments8.encode(moments, WHOLE, first, second, seed)
    return moments8.decode(moments, WHOLE)


def greatest(values: Tensor) -> Tensor:
    """For each element the greatest magnitude in its block."""
    padded = nn.functional.pad(values.abs(), (0, -values.numel() % kernels.BLOCK)).view(-1, kernels.BLOCK)
    return padded.amax(1).repeat_interleave(kernels.BLOCK)[: values.numel()]


@pytest.mark.slow
@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("make", [likely, any_bits])
def test_kernels_give_the_bits_of_the_reference(isa: str, make: object) -> None:
    assert callable(make)
    for numel, threads, decoupled in itertools.product((0, 1, 255, 256, 257, 70_000), (1, 2), (True, False)):
        state = Moments8bitArgs.zeros(numel)
        ours = UpdateArgs(likely(numel, torch.bfloat16, 0), likely(numel, torch.float32, 1), state, out=None)
        theirs = copied(ours)
        for step in range(1, 4):
            gradient = make(numel, torch.bfloat16, step)
            rule = AdamRule(1e-3, step, weight_decay=0.1, decoupled=decoupled)
            ours = UpdateArgs(gradient, ours.master, ours.state, 0.5, seed=step * 2**31 + 7)
            theirs = UpdateArgs(gradient, theirs.master, theirs.state, 0.5, seed=step * 2**31 + 7)
            library(isa).update(rule, ours, threads)
            REFERENCE.update(rule, theirs, threads)
            assert differing(ours, theirs) == {}


@pytest.mark.parametrize("backend", [REFERENCE, *map(library, isas())], ids=lambda backend: backend.isa)
def test_out_of_place_gives_the_bits_of_in_place(backend: kernels.Backend) -> None:
    for numel, halves in itertools.product((0, 1, 256, 70_001), (False, True)):
        given = stretch(numel, 2, halves=halves, make=likely)
        moments = Moments8bitArgs.zeros(numel)
        moments8.encode(moments, slice(0, numel), *(value for value in given.state if isinstance(value, Tensor)), 5)
        before = replace(given, state=moments, seed=9)
        inside = copied(before)
        ours, there = out_of_place(before)
        backend.update(AdamRule(1e-3, 2), ours, 2)
        assert differing(before, inside) == {}
        backend.update(AdamRule(1e-3, 2), inside, 2)
        assert differing(there, inside) == {}


def test_a_parameter_takes_six_bytes_and_a_block_two_more() -> None:
    moments = Moments8bitArgs.zeros(512)
    assert 4 * 512 + sum(t.nbytes for t in (*moments.codes, *moments.exponents)) == 6 * 512 + 2 * 2


@pytest.mark.parametrize("size", [1e-30, 1e-15, 1.0, 1e30])
def test_errors_are_within_their_bounds(size: float) -> None:
    first, second = likely(NUMEL, torch.float32, 1) * size, likely(NUMEL, torch.float32, 2).square() * size
    for seed in range(20):
        m, v = stored(first, second, seed)
        assert ((m - first).abs() <= first.abs() / 8 + greatest(first) / 2**17).all()
        assert ((v - second).abs() <= (second / 8).maximum(greatest(second) / 2**30)).all()


def test_rounding_is_right_on_average() -> None:
    first, second = likely(NUMEL, torch.float32, 1), likely(NUMEL, torch.float32, 2).square()
    rounds = [stored(first, second, seed * 1_000_003) for seed in range(400)]
    m, v = (torch.stack(values).double().mean(0) for values in zip(*rounds, strict=True))
    in_range = second > greatest(second) / 2**30
    assert ((m - first).abs() <= first.abs() * 0.04 + greatest(first) / 2**18).all()  # 0.0625 / sqrt(400) * 10
    assert ((v - second).abs() <= second * 0.04)[in_range].all()


def test_zeros_and_powers_of_two_stay_what_they_are() -> None:
    first = torch.zeros(NUMEL)
    first[0] = -1.0
    m, v = stored(first, first.square())
    assert (m[1:] == 0).all()
    assert (m[0], v[0]) == (-1 + 2**-15, 1)
    assert stored(torch.zeros(NUMEL), torch.zeros(NUMEL))[1].eq(0).all()


def test_infinities_and_nan_come_through() -> None:
    for bad in (torch.inf, torch.nan):
        first, second = torch.ones(NUMEL), torch.ones(NUMEL)
        first[300], second[300] = bad, bad
        m, v = stored(first, second)
        assert torch.equal(m[300], torch.tensor(bad)) or (m[300].isnan() and bad != bad)
        assert not v[300].isfinite()
        assert v[512:].isfinite().all()


def test_small_changes_are_not_lost() -> None:
    """The second moment moves by a thousandth a step, a hundredth of what a code can say."""
    master, moments = torch.zeros(10_240), Moments8bitArgs.zeros(10_240)
    gradient = torch.randn(10_240, generator=torch.Generator().manual_seed(0)).abs() + 0.5
    for step in range(1, 1501):
        kernels.update(AdamRule(0.0, step), UpdateArgs(gradient, master, moments, seed=step))
    expected = gradient.square() * (1 - 0.999**1500)
    ratio = moments8.decode(moments, slice(0, 10_240))[1] / expected
    assert abs(float(ratio.mean()) - 1) < 0.02
    assert float(ratio.std()) < 0.3


def test_a_small_gradient_beside_a_large_one_makes_no_large_step() -> None:
    gradient = torch.full((256,), 1e-9)
    gradient[0] = 1.0
    master, moments = torch.zeros(256), Moments8bitArgs.zeros(256)
    for step in range(1, 30):
        kernels.update(AdamRule(1e-3, step, eps=0.0), UpdateArgs(gradient * (step % 3 > 0), master, moments, seed=step))
    assert master.abs().max() < 30 * 1e-3 * 1.5


def test_training_with_8_bit_moments_follows_training_with_fp32_moments() -> None:
    first, second = train(eight=False), train(eight=True)
    assert first[-1] < first[0] / 4
    assert max(abs(a - b) / a for a, b in zip(first, second, strict=True)) < 0.05


def train(eight: bool, steps: int = 600) -> list[float]:
    """Losses, averaged over 100 steps each, of a small network that learns another one from new inputs."""
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
    master = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    state = Moments8bitArgs.zeros(master.numel()) if eight else (torch.zeros_like(master), torch.zeros_like(master))
    losses = []
    for step in range(1, steps + 1):
        nn.utils.vector_to_parameters(master.clone(), model.parameters())
        inputs = torch.randn(64, 16)
        loss = nn.functional.mse_loss(model(inputs), teacher(inputs).detach() * 3)
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
        rule = AdamRule(3e-3, step, weight_decay=0.01, decoupled=True)
        kernels.update(rule, UpdateArgs(gradient, master, state, seed=step))
        losses.append(float(loss.detach()))
    return [sum(losses[i : i + 100]) / 100 for i in range(0, steps, 100)]
