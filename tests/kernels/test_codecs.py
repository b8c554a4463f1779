"""What a codec promises: the form of what it writes, how far it is off, and what it refuses."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwell import kernels
from shardwell.config.field_types import CodecKind
from shardwell.errors import ShardwellError
from shardwell.kernels import quantize_host
from shardwell.kernels.quantize import BLOCK, Codec, Kind
from shardwell.kernels.quantized_format import PACKING, SHARE
from tests.support.codec_cases import KINDS, LARGEST, LENGTHS, MAKERS, TYPES, huge, likely, same

EACH = pytest.mark.parametrize("kind", KINDS)


def encoded(codec: Codec, source: torch.Tensor) -> torch.Tensor:
    out = torch.full((*source.shape[:-1], codec.num_bytes(source.shape[-1])), 0x55, dtype=torch.uint8)
    codec.encode(source, out)
    return out


def decoded(codec: Codec, data: torch.Tensor, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.full((*data.shape[:-1], numel), 7, dtype=dtype)
    codec.decode(data, out)
    return out


def test_sizes_are_exact() -> None:
    sizes = {kind: [Codec(kind).num_bytes(numel) for numel in (0, 1, 2, 3, 255, 256, 257, 1000)] for kind in KINDS}
    assert sizes["int8"] == sizes["fp8"] == [0, 32, 32, 32, 272, 272, 288, 1024]
    assert sizes["int4"] == [0, 32, 32, 32, 144, 144, 160, 528]
    assert Codec("int8").num_bytes(2**20) == 2**20 * (1 + 2 / 256)


def test_the_bytes_are_those_of_the_specification() -> None:
    """Scales: 127 / 127 = 1, 7 / 7 = 1, 448 / 448 = 1, each 0x3f80 in bf16."""
    one = [0x80, 0x3F, *[0] * 14]
    codes = [127, 0x81, 0, 2, 0xFE, *[0] * 11]
    assert encoded(Codec("int8"), torch.tensor([127.0, -127, 0.5, 1.5, -2.5])).tolist() == codes + one
    codes = [0x97, 0x2F, 0x01, *[0] * 13]
    assert encoded(Codec("int4"), torch.tensor([7.0, -7, -1, 2.5, 0.6])).tolist() == codes + one
    codes = [0x7E, 0xB8, 1, 0, 0x38, *[0] * 11]
    assert encoded(Codec("fp8"), torch.tensor([448.0, -1, 2**-9, 2**-10, 1.0625])).tolist() == codes + one


@EACH
def test_a_scale_is_the_least_bf16_number_that_is_not_too_small(kind: Kind) -> None:
    source = likely(1000, torch.float32, 5)[:, None]
    found = encoded(Codec(kind), source)[:, 16:18].contiguous().view(torch.bfloat16)[:, 0]
    wanted = (source[:, 0].abs() / torch.full((1000,), LARGEST[kind])).double()
    below = (found.view(torch.int16) - 1).view(torch.bfloat16)
    assert (found.double() >= wanted * (1 - 2**-22)).all()
    assert (below.double() < wanted).all()


@EACH
@settings(max_examples=100, deadline=None)
@given(
    numel=st.sampled_from(LENGTHS) | st.integers(1, 700),
    dtype=st.sampled_from(TYPES),
    maker=st.sampled_from(["likely", "tiny", "levels", "zeros"]),
    seed=st.integers(0, 2**20),
)
def test_what_is_decoded_is_near(kind: Kind, numel: int, dtype: torch.dtype, maker: str, seed: int) -> None:
    codec, source = Codec(kind), MAKERS[maker](numel, dtype, seed)
    distance = (source.double() - decoded(codec, encoded(codec, source), numel).double()).abs()
    bound = codec.error_bound(source)
    assert bound.dtype == torch.float32
    assert (distance <= bound.double()).all()


@EACH
def test_the_bound_is_not_idle(kind: Kind) -> None:
    """It follows from the greatest magnitude, and a sixth of it is exceeded."""
    codec, source = Codec(kind), torch.randn(BLOCK)
    source[0] = 10.0
    bound = codec.error_bound(source)
    ceiling = source.abs() / 16 + 10.1 / 448 / 1024 if kind == "fp8" else torch.full((BLOCK,), 10.1 / LARGEST[kind] / 2)
    assert (bound <= ceiling).all()
    assert ((source - decoded(codec, encoded(codec, source), BLOCK)).abs() > bound / 6).any()


@EACH
def test_what_codes_can_say_is_kept(kind: Kind) -> None:
    codes = torch.tensor([LARGEST[kind], -LARGEST[kind], -6, 5, 1, 0])
    values = codes * 2.0 ** torch.arange(-60, 60)[:, None]
    codec = Codec(kind)
    assert torch.equal(decoded(codec, encoded(codec, values), 6), values)


@EACH
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_spoil_their_block_and_no_other(kind: Kind, bad: float) -> None:
    codec, source = Codec(kind), torch.ones(2, 3 * BLOCK - 5)
    source[0, BLOCK + 3] = bad
    spoiled = decoded(codec, encoded(codec, source), 3 * BLOCK - 5).isnan()
    assert spoiled[0, BLOCK : 2 * BLOCK].all()
    assert int(spoiled.sum()) == BLOCK
    assert decoded(codec, encoded(codec, source), 3 * BLOCK - 5, torch.bfloat16).isnan().equal(spoiled)


@EACH
def test_numbers_that_are_too_small_are_zeros(kind: Kind) -> None:
    codec, largest = Codec(kind), LARGEST[kind]
    for size, is_kept in ((largest * 2.0**-116, True), (largest * 2.0**-117, False), (1e-45, False), (0.0, False)):
        source = torch.full((5,), size)
        assert torch.equal(decoded(codec, encoded(codec, source), 5), source if is_kept else torch.zeros(5)), size


@EACH
def test_huge_numbers_do_not_become_nan(kind: Kind) -> None:
    codec, source = Codec(kind), huge(600, torch.float32, 0) / 2
    distance = (source.double() - decoded(codec, encoded(codec, source), 600).double()).abs()
    assert (distance <= codec.error_bound(source).double()).all()
    source = huge(600, torch.float32, 0)
    assert not decoded(codec, encoded(codec, source), 600).isnan().any()


@EACH
@pytest.mark.parametrize("dtype", TYPES[1:])
def test_narrow_numbers_round_as_torch_does(kind: Kind, dtype: torch.dtype) -> None:
    codec, source = Codec(kind), likely(3000, torch.float32, 3) * 100
    data = encoded(codec, source)
    assert same(decoded(codec, data, 3000, dtype), decoded(codec, data, 3000).to(dtype))


@EACH
def test_a_transposed_view_is_encoded_in_its_order(kind: Kind) -> None:
    codec, source = Codec(kind), torch.randn(3, 5, 300)
    assert torch.equal(encoded(codec, source.transpose(0, 1)), encoded(codec, source).transpose(0, 1))
    deep = torch.randn(2, 3, 2, 3, 40)
    assert torch.equal(encoded(codec, deep.permute(3, 1, 0, 2, 4)), encoded(codec, deep).permute(3, 1, 0, 2, 4))


@EACH
@pytest.mark.parametrize("num_messages", [1, 2, 5])
@pytest.mark.parametrize(("factor", "add"), [(1.0, False), (1.0, True), (0.3, False), (0.3, True)])
def test_a_sum_is_that_of_what_is_decoded(kind: Kind, num_messages: int, factor: float, add: bool) -> None:
    codec = Codec(kind)
    for numel in LENGTHS:
        data = encoded(codec, likely(num_messages * 2 * numel, torch.float32, numel).view(num_messages, 2, numel))
        total = decoded(codec, data[0], numel)
        for message in data[1:]:
            total = total + decoded(codec, message, numel)
        before = torch.randn(2, numel)
        expected = before + total * factor if add else total * factor
        codec.decode_sum(data, before, factor, add=add)
        assert same(before, expected), numel


@EACH
def test_meta_tensors_are_only_checked(kind: Kind) -> None:
    codec, source = Codec(kind), torch.empty(3, 1000, device="meta")
    data = torch.empty(3, codec.num_bytes(1000), dtype=torch.uint8, device="meta")
    codec.encode(source, data)
    codec.decode(data, source)
    codec.decode_sum(data.expand(4, -1, -1), source, 0.25, add=True)
    assert codec.error_bound(source).shape == (3, 1000)
    with pytest.raises(ShardwellError, match=r"out: found shape \[3, 4\], expected"):
        codec.encode(source, data[:, :4])


def test_a_parameter_may_be_encoded() -> None:
    source = torch.nn.Parameter(torch.ones(300))
    assert decoded(Codec("int8"), encoded(Codec("int8"), source), 300).allclose(torch.ones(300), rtol=0.01)


BYTES = torch.zeros(2, 320, dtype=torch.uint8)  # of two rows of 298 elements in int8


@pytest.mark.parametrize(
    ("source", "out", "message"),
    [
        (torch.zeros(2, 298).double(), BYTES, "source: found float64, expected float32 or bfloat16 or float16"),
        (torch.zeros(2, 298), BYTES.char(), "out: found int8, expected uint8"),
        (torch.zeros(2, 298), BYTES[:, :-2], r"out: found shape \[2, 318\], expected \[2, 320\]"),
        (torch.zeros(3, 298), BYTES, r"out: found shape \[2, 320\], expected \[3, 320\]"),
        (torch.zeros(298), BYTES, r"out: found shape \[2, 320\], expected \[320\]"),
        (torch.zeros(298, 2).T, BYTES, r"source: found rows with gaps .*strides \[1, 2\].*pass a contiguous copy"),
        (torch.zeros(2, 298), torch.zeros(2, 400).byte()[:, :320], r"out: found strides \[400, 1\], expected contig"),
        (torch.zeros(2, 298, device="meta"), BYTES, "source: found a tensor on meta, expected one on cpu"),
        (torch.tensor(1.0), BYTES, "source: found a tensor without dimensions"),
    ],
)
def test_what_cannot_be_encoded_is_refused(source: torch.Tensor, out: torch.Tensor, message: str) -> None:
    with pytest.raises(ShardwellError, match=message):
        Codec("int8").encode(source, out)


def test_what_cannot_be_decoded_is_refused() -> None:
    codec = Codec("int8")
    with pytest.raises(ShardwellError, match=r"data: found shape \[2, 320\], expected \[2, 336\]"):
        codec.decode(BYTES, torch.zeros(2, 305))
    with pytest.raises(ShardwellError, match="out: found int64, expected float32 or"):
        codec.decode(BYTES, torch.zeros(2, 298).long())
    with pytest.raises(ShardwellError, match=r"out: found bfloat16, expected float32$"):
        codec.decode_sum(BYTES[None], torch.zeros(2, 298).bfloat16())
    with pytest.raises(ShardwellError, match=r"data: found shape \[0, 320\], expected one message or more"):
        codec.decode_sum(BYTES[:0], torch.zeros(298))
    odd = torch.zeros(700, dtype=torch.uint8)[1:641].view(2, 320)
    with pytest.raises(ShardwellError, match=r"data: found rows at address 1 modulo 16 .*pass a copy"):
        codec.decode(odd, torch.zeros(2, 298))
    with pytest.raises(
        ShardwellError, match=r"data: found rows at .* strides \[321, 320, 1\], expected rows that begin"
    ):
        codec.decode_sum(
            torch.zeros(963, dtype=torch.uint8).as_strided((2, 2, 320), (321, 320, 1)), torch.zeros(2, 298)
        )
    with pytest.raises(ShardwellError, match="codec: found 'int2', expected one of int8, int4, fp8"):
        Codec("int2")  # type: ignore[arg-type]


def test_without_the_library_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_chosen", lambda: kernels.choose("0", ""))
    monkeypatch.setattr(quantize_host, "run", None)
    codec, source = Codec("int4"), torch.tensor([7.0, -3.0])
    assert torch.equal(decoded(codec, encoded(codec, source), 2), source)


def test_the_configuration_knows_every_kind() -> None:
    assert get_args(CodecKind) == get_args(Kind) == tuple(PACKING) == tuple(SHARE)


def test_a_kind_without_a_kernel_is_done_by_torch_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    codec, values = Codec("int8"), torch.randn(1000)
    expected, found = (torch.empty(codec.num_bytes(1000), dtype=torch.uint8) for _ in range(2))
    codec.encode(values, expected)
    monkeypatch.setattr(quantize_host, "KINDS", ("int4", "fp8"))
    monkeypatch.setattr(quantize_host, "encode", None)
    codec.encode(values, found)
    assert torch.equal(found, expected)
