"""The error of an encoded reduce is what its hops may lose, element by element, whatever the numbers are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwell.kernels.quantize import BLOCK, Codec
from tests.support.coded_collectives import as_nodes, engine_with
from tests.support.internals import collectives_of
from tests.support.ranks import Ranks

LEVELS = {"int8": 127, "int4": 7}
UP = 1 + 2**-7  # scales are in bf16, rounded up


def numbers(numel: int, rank: int, seed: int, spread: float) -> Tensor:
    """Of many magnitudes: `spread` is how many powers of ten they lie apart."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(numel, generator=generator) * 10 ** (spread * torch.rand(numel, generator=generator))


def reduced(of: int, kinds: tuple[str, str], cases: list[tuple[int, int, float]]) -> list[dict[str, Any]]:
    """This rank's shard of the sum over ranks, of each case (elements of a shard, seed, spread)."""
    as_nodes(of)
    world, codecs = collectives_of(engine_with({})), (Codec(kinds[0]), Codec(kinds[1]))
    found = []
    for shard, seed, spread in cases:
        flat = numbers(shard * dist.get_world_size(), dist.get_rank(), seed, spread)
        into = torch.zeros(shard)
        world.reduce_scatter(flat, into, 1.0, False, "A", codecs).wait()
        found.append({"place": world.shard_index, "into": into})
    return found


def half_steps(greatest: Tensor, kind: str) -> Tensor:
    """What codes of rows (2D) may be off by, where no number of a row is greater in magnitude than `greatest`."""
    blocks = F.pad(greatest, (0, -greatest.shape[1] % BLOCK)).view(len(greatest), -1, BLOCK)
    most = blocks.amax(-1, keepdim=True).expand_as(blocks).reshape(len(greatest), -1)
    return most[:, : greatest.shape[1]] * (UP / (2 * LEVELS[kind]))


@pytest.mark.slow
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cases=st.lists(st.tuples(st.integers(1, 700), st.integers(0, 99), st.sampled_from([0.0, 2.0, 9.0])), min_size=5),
    kinds=st.sampled_from([("int8", "int4"), ("int4", "int8"), ("int4", "int4")]),
)
def test_every_element_of_two_hops_is_within_its_bound(
    ranks: Ranks, cases: list[tuple[int, int, float]], kinds: tuple[str, str]
) -> None:
    num_ranks, of = 4, 2
    answers = ranks.run(num_ranks, reduced, of, kinds, cases)
    for index, (shard, seed, spread) in enumerate(cases):
        values = [numbers(shard * num_ranks, rank, seed, spread) for rank in range(num_ranks)]
        exact = torch.stack(values).double().sum(0)
        bound = torch.zeros_like(exact)
        for node in range(0, num_ranks, of):
            here = torch.stack(values[node : node + of]).double()
            inside = torch.stack([half_steps(value.abs().view(of, -1), kinds[0]).flatten() for value in here]).sum(0)
            part = (here.sum(0).abs() + inside).view(num_ranks, shard)
            bound += inside + half_steps(part, kinds[1]).flatten()
        for answer in answers:
            place, into = answer[index]["place"], torch.as_tensor(answer[index]["into"]).double()
            mine = slice(place * shard, (place + 1) * shard)
            off = (into - exact[mine]).abs()
            assert bool((off <= bound[mine] * (1 + 1e-4) + 1e-6 * exact[mine].abs()).all())
            assert shard < BLOCK or bool((off > 0.02 * bound[mine]).any())  # the bound is not far above
