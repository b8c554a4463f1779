"""Every compiled kernel gives the bits of the torch reference, whatever the numbers, types, lengths and places."""

from __future__ import annotations

import itertools

import pytest
import torch

from shardwell import kernels
from tests.support.kernel_cases import (
    REFERENCE,
    RULES,
    any_bits,
    bits,
    copied,
    differing,
    isas,
    library,
    likely,
    out_of_place,
    stretch,
)

ISAS = pytest.mark.parametrize("isa", isas())
pytestmark = pytest.mark.skipif(not isas(), reason="the native library was not built")
TYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.slow
@ISAS
@pytest.mark.parametrize("name", RULES)
def test_all_types_give_the_bits_of_the_reference(isa: str, name: str) -> None:
    rule = RULES[name]
    makers = (any_bits, likely)
    for gradient, halves, out, factor, make in itertools.product(
        TYPES, (False, True), (None, *TYPES[1:]), (1.0, 1e-4), makers
    ):
        ours = stretch(777, rule.num_states, gradient, halves, out, factor, make)
        theirs = copied(ours)
        library(isa).update(rule, ours, 1)
        REFERENCE.update(rule, theirs, 1)
        assert differing(ours, theirs) == {}, (gradient, halves, out, factor, make)


@ISAS
@pytest.mark.parametrize("name", ["adamw", "sgd", "adagrad", "lion"])
def test_any_length_and_place(isa: str, name: str) -> None:
    rule = RULES[name]
    for numel, offset in itertools.product((0, 1, 15, 16, 17, 31, 33, 255, 256, 257, 600), (0, 1, 3, 7)):
        ours = stretch(numel, rule.num_states, make=likely, offset=offset)
        theirs = copied(ours)
        library(isa).update(rule, ours, 1)
        REFERENCE.update(rule, theirs, 1)
        assert differing(ours, theirs) == {}, (numel, offset)


@pytest.mark.slow
@pytest.mark.parametrize("backend", [REFERENCE, *map(library, isas())], ids=lambda backend: backend.isa)
@pytest.mark.parametrize("name", RULES)
def test_out_of_place_gives_the_bits_of_in_place(backend: kernels.Backend, name: str) -> None:
    rule = RULES[name]
    for numel, offset, halves, out in itertools.product(
        (0, 1, 31, 257, 900), (0, 3), (False, True), (None, *TYPES[1:])
    ):
        inside = stretch(numel, rule.num_states, halves=halves, out=out, factor=0.01, offset=offset)
        before = copied(inside)
        ours, there = out_of_place(before)
        backend.update(rule, ours, 1)
        assert differing(before, inside) == {}, (numel, offset, halves, out)
        backend.update(rule, inside, 1)
        assert differing(there, inside) == {}, (numel, offset, halves, out)


@ISAS
def test_nothing_beside_a_stretch_is_touched(isa: str) -> None:
    rooms = [torch.full((300,), 7.0) for _ in range(3)]
    out = torch.full((300,), 7.0, dtype=torch.bfloat16)
    inner = slice(5, 298)
    master, first, second = (room[inner] for room in rooms)
    gradient = torch.ones(293, dtype=torch.bfloat16)
    library(isa).update(
        kernels.AdamRule(1.0, 1), kernels.UpdateArgs(gradient, master, (first, second), out=out[inner]), 2
    )
    others = [torch.full((300,), 7.0) for _ in range(3)]
    there = kernels.OutOfPlaceState(others[0][inner], (others[1][inner], others[2][inner]))
    library(isa).update(kernels.AdamRule(1.0, 1), kernels.UpdateArgs(gradient, master, (first, second), new=there), 2)
    for room in (*rooms, *others, out):
        assert (room[:5] == 7).all()
        assert (room[298:] == 7).all()
        assert (room[inner] != 7).all()


@ISAS
@pytest.mark.parametrize("threads", [2, 5])
def test_threads_change_no_bit(isa: str, threads: int) -> None:
    rule = RULES["adamw"]
    alone = stretch(200_001, 2, make=likely, offset=1)
    together = copied(alone)
    library(isa).update(rule, alone, 1)
    apart, there = out_of_place(copied(together))
    library(isa).update(rule, together, threads)
    library(isa).update(rule, apart, threads)
    assert differing(alone, together) == {}
    assert differing(alone, there) == {}
    sums = {library(isa).sum_of_squares(alone.gradient, number) for number in (1, threads)}
    assert len(sums) == 1


@ISAS
def test_every_fp16_and_bf16_number_is_read_exactly(isa: str) -> None:
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        gradient, master = patterns.view(dtype), torch.zeros(2**16)
        library(isa).update(kernels.SgdRule(-1.0), kernels.UpdateArgs(gradient, master), 1)
        wide = gradient.float()
        same = (master == wide) | (master.isnan() & wide.isnan())
        assert same.all()


@ISAS
def test_fp16_is_written_as_torch_rounds(isa: str) -> None:
    ties = torch.arange(2**17).to(torch.int32).mul_(2**12).add_(0x33000000)  # halfway cases, also of subnormals
    for master in (
        any_bits(50_000, torch.float32, 1),
        ties.view(torch.float32),
        likely(50_000, torch.float32, 2) * 1e5,
    ):
        ours = kernels.UpdateArgs(torch.zeros_like(master), master, out=torch.zeros(len(master), dtype=torch.float16))
        library(isa).update(kernels.SgdRule(0.0), ours, 1)
        assert ours.out is not None
        rounded = master.half()
        unlike = (bits(ours.out) != bits(rounded)) & ~(ours.out.isnan() & rounded.isnan())
        assert int(unlike.sum()) == 0
