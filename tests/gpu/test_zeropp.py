"""ZeRO++ on CUDA: what travels between ranks on one GPU are the bits that travel between ranks on CPUs."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from shardwell.kernels.quantize import Codec
from shardwell.parallel import quantized
from tests.support.coded_collectives import moved
from tests.support.gpu import nccl_engine
from tests.support.internals import collectives_of, temporary_buffers_of
from tests.support.ranks import Ranks
from tests.support.zeropp import ALL, trained
from tests.support.zeropp_auto import AUTO, ON, trained_if

pytestmark = pytest.mark.gpu

SHAPES = [(2, 2), (2, 1), (4, 2)]  # ranks, and ranks of a node


def on_the_gpu(function: str, *args: Any) -> Any:
    os.environ["SHARDWELL_DEVICE"] = "cuda:0"
    torch.backends.cuda.matmul.allow_tf32 = False
    return {"moved": moved, "trained": trained, "trained_if": trained_if}[function](*args)


@pytest.mark.parametrize(("num_ranks", "of"), SHAPES)
@pytest.mark.parametrize("kinds", [("int8", "int8", "int4"), ("fp8", "fp8", "int8"), ("int4", "int4", "fp8")])
def test_gathers_and_reduces_give_the_same_bits(
    ranks: Ranks, num_ranks: int, of: int, kinds: tuple[str, str, str]
) -> None:
    for shard in (1, 333, 5000):
        here = ranks.run(num_ranks, moved, of, kinds, shard)
        there = ranks.run(num_ranks, on_the_gpu, "moved", of, kinds, shard)
        for one, other in zip(here, there, strict=True):
            for name in ("flat", "into", "twice"):
                assert (one[name] == other[name]).all(), (shard, name)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_training_moves_the_same_bytes_and_learns_the_same(ranks: Ranks, num_ranks: int, accumulation: int) -> None:
    here = ranks.run(num_ranks, trained, ALL, accumulation)
    there = ranks.run(num_ranks, on_the_gpu, "trained", ALL, accumulation)
    for one, other in zip(here, there, strict=True):
        assert other["gathered"] == one["gathered"]
        assert other["reduced"] == one["reduced"]
        assert other["off"] <= 2**-8
        assert other["losses"] == pytest.approx(one["losses"], rel=0.01)  # codes of close numbers may be neighbours
    for other in there[1:]:
        for name, value in there[0]["whole"].items():
            assert (other["whole"][name] == value).all(), name


def test_what_is_tried_on_the_gpu_is_in_force_there(ranks: Ranks) -> None:
    here = ranks.run(4, trained_if, float("inf"), AUTO)
    there = ranks.run(4, on_the_gpu, "trained_if", float("inf"), AUTO)
    for one, other in zip(here, there, strict=True):
        assert one["chosen"] == other["chosen"] == ON
        assert (other["step"], other["staging"]) == (one["step"], 0)


def on_lanes() -> list[bool]:
    """One rank of NCCL: nobody waits on the host between encoding, moving, decoding and what reads that."""
    engine, _ = nccl_engine(3)
    world, buffers, codec = collectives_of(engine), temporary_buffers_of(engine), Codec("int8")
    same = []
    for seed in range(20):
        torch.manual_seed(seed)
        values = torch.randn(3_000_001, device="cuda")
        flat, into, received = values.clone(), torch.zeros_like(values), torch.empty_like(values)
        quantized.all_gather(world, flat, codec, buffers).wait()
        quantized.reduce_scatter([(world, codec)], values.clone(), into, 0.5, False, buffers).wait()
        codes = torch.empty(codec.num_bytes(len(values)), dtype=torch.uint8, device="cuda")
        codec.encode(values, codes)
        codec.decode(codes, received)
        same += [torch.equal(flat, received), torch.equal(into, received * 0.5)]
    return same


def test_codes_on_lanes_that_nobody_waits_for(ranks: Ranks) -> None:
    assert ranks.run(1, on_lanes)[0] == [True] * 40
