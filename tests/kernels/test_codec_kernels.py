"""The compiled codecs give the bits of the reference, for any numbers, types, lengths, places and threads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwell.kernels import quantize_host, quantize_reference
from shardwell.kernels.quantize import Codec, Kind
from tests.support.codec_cases import LENGTHS, MAKERS, TYPES, laid_out, likely, same
from tests.support.kernel_cases import isas, library

pytestmark = [
    pytest.mark.skipif(not isas(), reason="the native library was not built"),
    pytest.mark.parametrize("isa", isas()),
    pytest.mark.parametrize("kind", quantize_host.KINDS),
]
LEADING = st.sampled_from([(), (1,), (3,), (2, 3), (2, 1, 3), (2, 3, 2, 2)])
WAYS = st.sampled_from(["dense", "gaps", "swapped"])
NUMELS = st.sampled_from(LENGTHS) | st.integers(0, 700)


def rows(numel: int, leading: tuple[int, ...], way: str, maker: str, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return laid_out(MAKERS[maker](numel * torch.Size(leading).numel(), dtype, seed), leading or (1,), way)


@settings(max_examples=60, deadline=None)
@given(
    numel=NUMELS,
    leading=LEADING,
    way=WAYS,
    maker=st.sampled_from(list(MAKERS)),
    dtype=st.sampled_from(TYPES),
    seed=st.integers(0, 2**20),
    threads=st.sampled_from([1, 2, 5]),
)
def test_encoding(
    isa: str,
    kind: Kind,
    numel: int,
    leading: tuple[int, ...],
    way: str,
    maker: str,
    dtype: torch.dtype,
    seed: int,
    threads: int,
) -> None:
    source = rows(numel, leading, way, maker, dtype, seed)
    ours = torch.full((*source.shape[:-1], Codec(kind).num_bytes(numel)), 0x55, dtype=torch.uint8)
    theirs = torch.full_like(ours, 0xAA)
    if numel:
        quantize_host.run("encode", kind, source, ours, library=library(isa), threads=threads)
        quantize_reference.encode(kind, source, theirs)
    assert torch.equal(ours, theirs)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    numel=NUMELS.filter(bool),
    leading=LEADING,
    ways=st.tuples(WAYS, WAYS),
    dtype=st.sampled_from(TYPES),
    seed=st.integers(0, 2**20),
    num_messages=st.integers(1, 4),
    factor=st.sampled_from([1.0, 0.25, 0.1]),
    add=st.booleans(),
    is_real=st.booleans(),
)
def test_decoding(
    isa: str,
    kind: Kind,
    numel: int,
    leading: tuple[int, ...],
    ways: tuple[str, str],
    dtype: torch.dtype,
    seed: int,
    num_messages: int,
    factor: float,
    add: bool,
    is_real: bool,
) -> None:
    """Also of bytes that no encoder wrote."""
    size, count = Codec(kind).num_bytes(numel), torch.Size(leading).numel()
    data = torch.randint(256, (num_messages, count, size), generator=torch.Generator().manual_seed(seed)).byte()
    if is_real:
        quantize_reference.encode(
            kind, likely(data[..., 0].numel() * numel, dtype, seed).view(num_messages, count, numel), data
        )
    data = data.view(num_messages, *(leading or (1,)), size)
    if ways[0] == "gaps":
        data = torch.cat([data, data], -1)[..., 1 : size + 1]  # at an odd address, too
    out = rows(numel, leading, ways[1], "likely", dtype, seed)
    if ways[1] == "swapped":
        data = data.transpose(1, max(1, len(leading)))
    expected = out.clone()
    quantize_host.run("decode", kind, out, data[0], library=library(isa), threads=2)
    quantize_reference.decode(kind, data[0], expected)
    assert same(out, expected)
    total = rows(numel, leading, ways[1], "likely", torch.float32, seed)
    expected = total.clone()
    messages = num_messages, data.stride(0)
    quantize_host.run(
        "decode_sum", kind, total, data[0], messages=messages, factor=factor, add=add, library=library(isa)
    )
    quantize_reference.decode_sum(kind, data, expected, factor, add)
    assert same(total, expected)


def test_many_blocks_in_threads(isa: str, kind: Kind) -> None:
    source = likely(3 * 200_001, torch.bfloat16, 1).view(3, -1)
    outs = [torch.zeros(3, Codec(kind).num_bytes(200_001), dtype=torch.uint8) for _ in range(3)]
    for out, threads in zip(outs[:2], (1, 5), strict=True):
        quantize_host.run("encode", kind, source, out, library=library(isa), threads=threads)
    quantize_reference.encode(kind, source, outs[2])
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
    totals = [torch.zeros(200_001) for _ in range(3)]
    for total, threads in zip(totals[:2], (1, 5), strict=True):
        messages = 3, outs[0].stride(0)
        quantize_host.run(
            "decode_sum", kind, total, outs[0][0], messages=messages, factor=0.1, library=library(isa), threads=threads
        )
    quantize_reference.decode_sum(kind, outs[0], totals[2], 0.1, False)
    assert same(totals[0], totals[1])
    assert same(totals[0], totals[2])


def test_nothing_beside_the_rows_is_touched(isa: str, kind: Kind) -> None:
    for numel in (1, 255, 256, 300):
        room = torch.full((4, numel + 9), 7.0)
        size = Codec(kind).num_bytes(numel)
        data = torch.full((2 * size + 70,), 7, dtype=torch.uint8)
        inner = data[33 : 33 + 2 * size].view(2, size)
        quantize_host.run("encode", kind, torch.full((2, numel), -1.0), inner, library=library(isa))
        assert (data[:33] == 7).all()
        assert (data[33 + 2 * size :] == 7).all()
        rows_inside = room[1:3, 5 : 5 + numel]
        quantize_host.run("decode", kind, rows_inside, inner, library=library(isa))
        assert (rows_inside.sub(-1).abs() < 0.01).all()
        quantize_host.run("decode_sum", kind, rows_inside, inner, library=library(isa), add=True)
        assert (rows_inside.sub(-2).abs() < 0.01).all()
        rows_inside.fill_(7)
        assert (room == 7).all()


def test_every_code_is_read_as_torch_reads_it(isa: str, kind: Kind) -> None:
    codes = torch.arange(256).byte()
    numel = 512 if kind == "int4" else 256
    scales = torch.ones(numel // 256, dtype=torch.bfloat16).view(torch.uint8)
    out = torch.zeros(numel)
    quantize_host.run("decode", kind, out, torch.cat([codes, scales]), library=library(isa))
    if kind == "fp8":
        expected = codes.view(torch.float8_e4m3fn).float()
    elif kind == "int8":
        expected = codes.view(torch.int8).float()
    else:
        nibbles = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1]).float()
        expected = torch.stack([nibbles.repeat(16), nibbles.repeat_interleave(16)], -1).flatten()
    assert same(out, expected)
