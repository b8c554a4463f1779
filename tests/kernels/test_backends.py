"""What else the kernels do, which of them run, and what they refuse."""

from __future__ import annotations

import itertools
import math
import os
import zlib
from pathlib import Path

import pytest
import torch

from shardwell import kernels
from shardwell.errors import ShardwellError
from shardwell.kernels import AdamRule, Moments8bitArgs, OutOfPlaceState, SplitMaster, UpdateArgs, library, rounding
from shardwell.kernels.reference import Reference
from tests.support.kernel_cases import REFERENCE, any_bits, bits, isas, likely
from tests.support.kernel_cases import library as library_for

BACKENDS: list[library.Library | Reference] = [REFERENCE, *map(library_for, isas())]
EACH = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.isa)


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_sum_of_squares_is_exact_to_the_last_digits(backend: kernels.Backend, dtype: torch.dtype) -> None:
    for numel in (0, 1, 17, 255, 100_003):
        data = likely(numel, dtype, numel)
        expected = math.fsum(value * value for value in data.double().tolist())
        assert backend.sum_of_squares(data, 2) == pytest.approx(expected, rel=1e-13)


@pytest.mark.slow
@EACH
@pytest.mark.parametrize("make", [any_bits, likely])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_are_added(backend: kernels.Backend, dtype: torch.dtype, make: object) -> None:
    """Product and sum are rounded each on its own."""
    assert callable(make)
    for numel, factor, fresh in itertools.product((0, 1, 33, 200_001), (1.0, 0.3), (False, True)):
        room, gradient = make(numel + 3, torch.float32, 1), make(numel + 1, dtype, 2)[1:]
        product = gradient.float() * factor
        expected = torch.cat([room[:2], product if fresh else room[2:-1] + product, room[-1:]])
        backend.add(room[2:-1], gradient, factor, fresh, 2)
        assert ((bits(room) == bits(expected)) | (room.isnan() & expected.isnan())).all(), (numel, factor, fresh)


def test_a_fresh_total_may_hold_anything() -> None:
    total = torch.tensor([torch.nan, torch.inf])
    kernels.add(total, torch.tensor([1.0, 2.0]).half(), 0.5, fresh=True)
    assert total.tolist() == [0.5, 1.0]
    kernels.add(total, torch.tensor([1.0, 2.0]))
    assert total.tolist() == [1.5, 3.0]
    with pytest.raises(ShardwellError, match="total: found 2 elements, expected 3"):
        kernels.add(total, torch.zeros(3))


@EACH
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("place", [0, 65_536, 70_000])
def test_a_sum_of_squares_lets_inf_and_nan_through(backend: kernels.Backend, bad: float, place: int) -> None:
    data = torch.ones(70_001)
    data[place] = bad
    total = backend.sum_of_squares(data, 2)
    assert math.isnan(total) if math.isnan(bad) else total == math.inf


@EACH
def test_a_sum_of_squares_does_not_overflow(backend: kernels.Backend) -> None:
    assert backend.sum_of_squares(torch.full((1000,), 3e38), 1) == pytest.approx(9e79, rel=1e-6)


def test_all_instruction_sets_give_the_same_sum() -> None:
    data = likely(100_003, torch.bfloat16, 0)
    assert len({library_for(isa).sum_of_squares(data, 1) for isa in isas()}) <= 1


@EACH
def test_bf16_rounds_as_everywhere(backend: kernels.Backend) -> None:
    for numel in (0, 1, 33, 100_003):
        source = any_bits(numel + 1, torch.float32, numel)[1:]
        out, expected = (torch.zeros(numel, dtype=torch.bfloat16) for _ in range(2))
        backend.to_bf16(source, out, 2)
        rounding.to_bf16(source, expected)
        assert torch.equal(out.view(torch.int16), expected.view(torch.int16))


@EACH
def test_crc32_is_zlibs(backend: kernels.Backend) -> None:
    data = bytes(any_bits(5000, torch.float32, 0).view(torch.uint8).tolist())
    for length in (0, 1, 7, 63, 64, 65, 127, 128, 255, 256, 257, 511, 512, 579, 1000, 19_999):
        for part in (data[:length], data[1 : length + 1]):
            assert backend.crc32(part, 0) == zlib.crc32(part)
            assert backend.crc32(memoryview(bytearray(part)), 0xDEADBEEF) == zlib.crc32(part, 0xDEADBEEF)


@EACH
@pytest.mark.parametrize("block", [1, 64, 257, 1000, 4096, 10**6])
def test_crc32_of_blocks_gives_that_of_all_bytes_and_that_of_each_block(backend: kernels.Backend, block: int) -> None:
    data = bytes(any_bits(3000, torch.float32, 0).view(torch.uint8).tolist())
    for length in (0, 1, 63, 1000, 4096, 8192, 11_999):
        value, sums = backend.crc32_blocks(memoryview(data)[:length], block, 0xDEADBEEF)
        assert value == zlib.crc32(data[:length], 0xDEADBEEF)
        parts = [data[start : min(start + block, length)] for start in range(0, length, block)]
        assert sums == b"".join(zlib.crc32(part).to_bytes(4, "big") for part in parts)


@EACH
@pytest.mark.parametrize("block", [1000, 65_536, 300_000])
def test_bytes_read_from_a_file_are_checked_with_those_around_them(
    backend: kernels.Backend, block: int, tmp_path: Path
) -> None:
    data = bytes(any_bits(160_000, torch.float32, 0).view(torch.uint8).tolist())
    (tmp_path / "file").write_bytes(data)
    with (tmp_path / "file").open("rb") as file:
        for offset, before, size, after in ((0, 0, 0, 0), (3, 0, 999, 1), (0, 70_001, 1, 0), (5, 999, 530_000, 66_000)):
            room = bytearray(size)
            read = kernels.FileRead(file.fileno(), offset, memoryview(room), block, before, after, 0xDEADBEEF)
            sums = backend.read_blocks(read)
            found = data[offset : offset + before + size + after]
            assert room == found[before : before + size]
            parts = [found[start : start + block] for start in range(0, len(found), block)]
            values = [zlib.crc32(part, 0 if index else 0xDEADBEEF) for index, part in enumerate(parts)]
            assert sums == b"".join(value.to_bytes(4, "big") for value in values)


@EACH
def test_a_read_beyond_the_end_or_of_no_file_is_an_error(backend: kernels.Backend, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(100))
    with (tmp_path / "file").open("rb") as file:
        for before, size, after in ((0, 101, 0), (101, 0, 0), (0, 100, 1)):
            with pytest.raises(EOFError):
                backend.read_blocks(kernels.FileRead(file.fileno(), 0, memoryview(bytearray(size)), 64, before, after))
    reading, writing = os.pipe()
    try:
        with pytest.raises(OSError, match="seek"):
            backend.read_blocks(kernels.FileRead(reading, 0, memoryview(bytearray(8)), 8))
    finally:
        os.close(reading)
        os.close(writing)


@EACH
def test_crc32_of_two_texts_follows_from_those_of_each(backend: kernels.Backend) -> None:
    for first, second in ((b"", b""), (b"a", b""), (b"", b"b"), (b"abc" * 70, b"xyz" * 9001), (bytes(5), bytes(2**18))):
        found = backend.crc32_combine(zlib.crc32(first), zlib.crc32(second), len(second))
        assert found == zlib.crc32(first + second)


@EACH
def test_a_parameter_may_be_stepped(backend: kernels.Backend) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    backend.update(kernels.SgdRule(0.5), UpdateArgs(torch.ones(3), parameter), 1)
    assert parameter.tolist() == [0.5, 0.5, 0.5]


def test_the_environment_chooses() -> None:
    assert str(kernels.choose("0", "")[1]) == "torch operations (SHARDWELL_NATIVE=0)"
    for isa in isas():
        assert kernels.choose("1", isa)[1] == kernels.KernelInfo(True, isa)
    with pytest.raises(ShardwellError, match="SHARDWELL_NATIVE: found 'yes', expected 0"):
        kernels.choose("yes", "")
    with pytest.raises(ShardwellError, match="SHARDWELL_NATIVE_ISA: found 'sse', expected one of scalar, avx2, avx512"):
        kernels.choose("", "sse")


@pytest.mark.skipif(not isas(), reason="the native library was not built")
def test_a_library_that_does_not_fit_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    built = library.ABI_VERSION
    monkeypatch.setattr(library, "ABI_VERSION", 99)
    backend, description = kernels.choose("", "")
    assert isinstance(backend, Reference)
    assert f"interface {built}, expected 99" in str(description)
    with pytest.raises(ShardwellError, match="install shardwell again"):
        kernels.choose("1", "")


def test_without_a_library_torch_operations_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "__path__", [os.fspath(tmp_path)])
    backend, description = kernels.choose("", "")
    assert isinstance(backend, Reference)
    assert "was not built" in str(description)
    (tmp_path / library.NAME).write_bytes(b"no library")
    assert "cannot be loaded" in str(kernels.choose("", "")[1])


def good() -> dict[str, object]:
    return {"gradient": torch.zeros(300), "master": torch.zeros(300), "state": (torch.zeros(300), torch.zeros(300))}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gradient": torch.zeros(300, dtype=torch.float64)}, "gradient: found float64, expected float32 or bfloat16"),
        ({"gradient": torch.zeros(300, device="meta")}, "gradient: found a torch.strided tensor on meta"),
        ({"master": torch.zeros(600)[::2]}, "master: found shape .300. with strides .2., expected one dimension"),
        ({"master": torch.zeros(3, 100)}, "master: found shape .3, 100."),
        ({"master": torch.zeros(299)}, "master: found 299 elements, expected 300"),
        (
            {"master": SplitMaster(torch.zeros(300).bfloat16(), torch.zeros(300))},
            "low half of the master: found float32",
        ),
        ({"state": (torch.zeros(300), torch.zeros(300).half())}, "state 1: found float16, expected float32"),
        ({"state": (torch.zeros(300),)}, "AdamRule: found 1 tensors of state, expected 2"),
        ({"state": Moments8bitArgs.zeros(512)}, "codes of the first moment: found 512 elements, expected 300"),
        ({"new": OutOfPlaceState(torch.zeros(299))}, "new master: found 299 elements, expected 300"),
        ({"new": OutOfPlaceState(torch.zeros(300), (torch.zeros(300).half(),))}, "new state 0: found float16"),
        (
            {"new": OutOfPlaceState(torch.zeros(300))},
            "new: found .* fp32 and 0 tensors of state, expected .* and 2 tensors",
        ),
        (
            {"new": OutOfPlaceState(torch.zeros(300), Moments8bitArgs.zeros(300))},
            "new: found .* 8-bit moments, expected the form",
        ),
        ({"out": torch.zeros(300)}, "out: found float32, expected bfloat16 or float16"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ShardwellError, match=message):
        kernels.update(AdamRule(1e-3, 1), UpdateArgs(**{**good(), **change}))  # type: ignore[arg-type]


def test_only_adam_has_8_bit_moments() -> None:
    stretch = UpdateArgs(torch.zeros(3), torch.zeros(3), Moments8bitArgs.zeros(3))
    with pytest.raises(ShardwellError, match="LionRule: found 8-bit moments"):
        kernels.update(kernels.LionRule(1e-3), stretch)
