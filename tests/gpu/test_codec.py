"""The Triton codecs give the bits of the reference, for any numbers, types, lengths and places."""

from __future__ import annotations

import itertools

import pytest
import torch

from shardwell.kernels import quantize_reference
from shardwell.kernels.quantize import Codec, Kind
from tests.support.codec_cases import KINDS, LENGTHS, MAKERS, TYPES, laid_out, likely, same

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("kind", KINDS)]


@pytest.fixture(autouse=True)
def _has_a_kernel(kind: Kind) -> None:
    from shardwell.kernels import quantize_triton

    if kind not in quantize_triton.KINDS:
        pytest.skip(f"{kind} has no Triton kernel")


def empty(kind: Kind, *shape: int, device: str = "cuda") -> torch.Tensor:
    """For the codes of rows."""
    size = Codec(kind).num_bytes(shape[-1])
    return torch.full((*shape[:-1], size), 0x55, dtype=torch.uint8, device=device)


def on_gpu(rows: torch.Tensor) -> torch.Tensor:
    """With the same strides."""
    there = torch.empty_strided(rows.shape, rows.stride(), dtype=rows.dtype, device="cuda")
    return there.copy_(rows)


@pytest.mark.parametrize("dtype", TYPES)
def test_encoding(kind: Kind, dtype: torch.dtype) -> None:
    ways = ("dense", "gaps", "swapped")
    for numel, (name, make), way in itertools.product((*LENGTHS, 4099), MAKERS.items(), ways):
        source = laid_out(make(6 * numel, dtype, numel), (2, 3), way)
        ours, theirs = empty(kind, *source.shape), empty(kind, *source.shape, device="cpu")
        Codec(kind).encode(on_gpu(source), ours)
        if numel:
            quantize_reference.encode(kind, source, theirs)
        assert torch.equal(ours.cpu(), theirs), (numel, name, way)


def test_the_reference_gives_the_same_bits_on_the_gpu(kind: Kind) -> None:
    for name, make in MAKERS.items():
        source = make(4099, torch.float32, 1)
        here, there = empty(kind, 4099, device="cpu"), empty(kind, 4099)
        quantize_reference.encode(kind, source, here)
        quantize_reference.encode(kind, source.cuda(), there)
        assert torch.equal(here, there.cpu()), name
        assert same(Codec(kind).error_bound(source), Codec(kind).error_bound(source.cuda()).cpu()), name


@pytest.mark.parametrize("dtype", TYPES)
def test_decoding(kind: Kind, dtype: torch.dtype) -> None:
    """Also of bytes that no encoder wrote, with gaps between rows, into memory that is not aligned."""
    for numel, is_real in itertools.product((*LENGTHS[1:], 4099), (False, True)):
        data = torch.randint(256, (3, 2, Codec(kind).num_bytes(numel))).byte()
        if is_real:
            quantize_reference.encode(kind, likely(6 * numel, torch.float32, numel).view(3, 2, numel), data)
        data = torch.cat([data, data], -1)[..., 16 : data.shape[-1] + 16].transpose(0, 1)
        ours = torch.zeros(2, 3, numel + 5, dtype=dtype, device="cuda")
        theirs = torch.zeros(2, 3, numel, dtype=dtype)
        Codec(kind).decode(on_gpu(data), ours[..., 3 : numel + 3])
        quantize_reference.decode(kind, data, theirs)
        assert same(ours[..., 3 : numel + 3].cpu(), theirs), (numel, is_real)
        ours[..., 3 : numel + 3] = 0
        assert (ours == 0).all()


@pytest.mark.parametrize(("factor", "add"), [(1.0, False), (0.1, False), (0.1, True)])
def test_sums(kind: Kind, factor: float, add: bool) -> None:
    for numel, num_messages in itertools.product((*LENGTHS[1:], 4099), (1, 2, 7, 9)):
        data = empty(kind, num_messages, 2, numel, device="cpu")
        quantize_reference.encode(
            kind, likely(data[..., 0].numel() * numel, torch.float32, 1).view(num_messages, 2, -1), data
        )
        theirs = torch.randn(2, numel)
        ours = theirs.cuda()
        Codec(kind).decode_sum(data.cuda(), ours, factor, add=add)
        quantize_reference.decode_sum(kind, data, theirs, factor, add)
        assert same(ours.cpu(), theirs), (numel, num_messages)


def test_every_scale(kind: Kind) -> None:
    """The greatest number of each block is another one of bf16."""
    greatest = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16).float()
    source = greatest[:, None] * torch.rand(len(greatest), 256, generator=torch.Generator().manual_seed(0))
    source[:, 7] = greatest
    ours, theirs = empty(kind, source.numel()), empty(kind, source.numel(), device="cpu")
    Codec(kind).encode(source.view(-1).cuda(), ours)
    quantize_reference.encode(kind, source.view(-1), theirs)
    assert torch.equal(ours.cpu(), theirs)


def test_devices_without_conversions_of_fp8(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind != "fp8":
        pytest.skip("only fp8 has them")
    from shardwell.kernels import quantize_triton

    monkeypatch.setattr(quantize_triton, "_NARROW_CONVERSIONS", (99, 0))
    test_every_scale(kind)
    test_decoding(kind, torch.float32)


def test_large_tensors(kind: Kind) -> None:
    """More elements than 32 bits count; the last row is the first one again."""
    row = torch.randn(2**20, device="cuda").bfloat16()
    source = row.expand(2**11 + 1, -1)
    out = empty(kind, *source.shape)
    Codec(kind).encode(source, out)
    assert torch.equal(out[0], out[-1])
    back = torch.zeros(source.shape, dtype=torch.bfloat16, device="cuda")
    Codec(kind).decode(out, back)
    assert torch.equal(back[0], back[-1])
    assert (back[-1].float() - row.float()).abs().max() < 1.0
