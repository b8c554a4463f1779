"""Tensors come back from files as they were, from any part of them, and damage is found and named."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwell.checkpoint import DTYPES, Entry, FileRecord, Reader, stream, write
from shardwell.checkpoint.files import CHUNK
from shardwell.errors import CheckpointError


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Any bits that the dtype has, NaN among them."""
    generator = torch.Generator().manual_seed(seed)
    numel = torch.Size(shape).numel()
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (numel * dtype.itemsize,), generator=generator)
    return raw.to(torch.uint8).view(dtype).view(shape)


def same(found: Tensor, expected: Tensor) -> bool:
    """Equal to the bit."""
    return (
        found.dtype == expected.dtype
        and found.shape == expected.shape
        and torch.equal(
            found.contiguous().reshape(-1).view(torch.uint8), expected.contiguous().reshape(-1).view(torch.uint8)
        )
    )


def one_of_each() -> dict[str, Tensor]:
    tensors = {f"layer.{code}": random_tensor(dtype, (3, 5)) for code, dtype in DTYPES.items()}
    tensors["scalar"] = torch.tensor(7.5)
    tensors["empty"] = torch.empty(3, 0, dtype=torch.int16)
    tensors['name with \n, " and ü/../'] = random_tensor(torch.bfloat16, (7,))
    return tensors


shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
many_tensors = st.dictionaries(
    st.text(st.characters(codec="utf-8"), max_size=12),
    st.builds(random_tensor, st.sampled_from(list(DTYPES.values())), shapes, st.integers(0, 99)),
    max_size=6,
)


def raw_file(path: Path, header: Any, data: bytes = b"") -> Path:
    """A file with this header, right or wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


# --- round trips ------------------------------------------------------------------------------------------------


def test_every_dtype_comes_back_to_the_bit(tmp_path: Path) -> None:
    tensors = one_of_each()
    record = write(tmp_path / "a", tensors, {"format": "pt"})
    with Reader(tmp_path / "a", record) as reader:
        assert reader.entries.keys() == tensors.keys()
        assert reader.metadata == {"format": "pt"}
        for name, tensor in tensors.items():
            assert same(reader.read(name), tensor)
            reader.verify(name)
    assert record.size == (tmp_path / "a").stat().st_size
    assert record.algorithm == "crc32"


def test_the_safetensors_package_reads_what_we_write(tmp_path: Path) -> None:
    tensors = one_of_each()
    write(tmp_path / "a", tensors, {"key": "value"})
    found = safetensors.torch.load_file(tmp_path / "a")
    assert found.keys() == tensors.keys()
    assert all(same(found[name], tensor) for name, tensor in tensors.items())
    with safetensors.safe_open(tmp_path / "a", "pt") as opened:
        assert opened.metadata() == {"key": "value"}


def test_we_read_what_the_safetensors_package_writes(tmp_path: Path) -> None:
    tensors = one_of_each()
    safetensors.torch.save_file(tensors, tmp_path / "a", {"key": "value"})
    with Reader(tmp_path / "a") as reader:
        assert reader.metadata == {"key": "value"}
        assert reader.entries.keys() == tensors.keys()
        assert all(same(reader.read(name), tensor) for name, tensor in tensors.items())


@settings(deadline=None, max_examples=60)
@given(many_tensors, st.data())
def test_any_tensors_and_any_range_of_them_come_back(tensors: dict[str, Tensor], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a"
        record = write(path, tensors)
        found = safetensors.torch.load_file(path)
        with Reader(path, record) as reader:
            for name, tensor in tensors.items():
                assert same(reader.read(name), tensor)
                assert same(found[name], tensor)
                start = data.draw(st.integers(0, tensor.numel()))
                stop = data.draw(st.integers(start, tensor.numel()))
                before = reader.bytes_read
                assert same(reader.read_range(name, start, stop), tensor.reshape(-1)[start:stop])
                assert reader.bytes_read - before == (stop - start) * tensor.element_size()


def test_a_file_without_tensors_is_a_file(tmp_path: Path) -> None:
    record = write(tmp_path / "a", {})
    with Reader(tmp_path / "a", record) as reader:
        assert reader.entries == {}
    assert safetensors.torch.load_file(tmp_path / "a") == {}


def test_tensors_that_are_not_contiguous_are_written_in_the_order_of_their_shape(tmp_path: Path) -> None:
    tensors = {"t": torch.arange(12.0).view(3, 4).t(), "step": torch.arange(9)[::2], "wide": torch.ones(1).expand(5)}
    record = write(tmp_path / "a", tensors)
    with Reader(tmp_path / "a", record) as reader:
        assert all(same(reader.read(name), tensor) for name, tensor in tensors.items())


def test_a_parameter_is_written_like_a_tensor(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    record = write(tmp_path / "a", {"p": parameter})
    with Reader(tmp_path / "a", record) as reader:
        assert same(reader.read("p"), torch.ones(3))


# --- streams ----------------------------------------------------------------------------------------------------


def test_a_stream_asks_for_each_tensor_once_and_takes_parts(tmp_path: Path) -> None:
    parts = {"a": [torch.arange(3), torch.empty(0, dtype=torch.int64), torch.arange(3, 8)], "b": [torch.ones(2, 2)]}
    asked = []

    def data(name: str) -> Iterator[Tensor]:
        asked.append(name)
        yield from parts[name]

    entries = [Entry("b", torch.float32, (2, 2)), Entry("a", torch.int64, (2, 4))]
    record = stream(tmp_path / "f", entries, data)
    assert asked == ["a", "b"]  # the wider dtype first
    with Reader(tmp_path / "f", record) as reader:
        assert same(reader.read("a"), torch.arange(8).view(2, 4))
        assert same(reader.read("b"), torch.ones(2, 2))


def test_neither_writing_nor_verifying_copies_a_tensor(tmp_path: Path) -> None:
    tensor = torch.zeros(8 * CHUNK)
    tracemalloc.start()
    try:
        record = write(tmp_path / "a", {"w": tensor})
        with Reader(tmp_path / "a", record) as reader:
            reader.verify("w")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * CHUNK  # of 32: one chunk to verify, and small change


def test_checksums_do_not_depend_on_how_a_tensor_was_cut(tmp_path: Path) -> None:
    tensor = random_tensor(torch.float32, (CHUNK // 2 + 3,))
    whole = write(tmp_path / "a", {"w": tensor})
    entries = [Entry("w", tensor.dtype, tuple(tensor.shape))]
    cut = stream(tmp_path / "b", entries, lambda _: tensor.split(1001))
    assert whole == cut
    with Reader(tmp_path / "a", cut) as reader:
        assert same(reader.read("w"), tensor)
        reader.verify("w")


def test_the_same_is_written_with_and_without_a_spare_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"large": random_tensor(torch.float32, (CHUNK,)), "small": random_tensor(torch.int16, (5,))}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    written = []
    for ranks in (4, 5):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        record = write(tmp_path / str(ranks), tensors)
        written.append((record, (tmp_path / str(ranks)).read_bytes()))
        with Reader(tmp_path / str(ranks), record) as reader:
            assert all(same(reader.read(name), tensor) for name, tensor in tensors.items())
    assert written[0] == written[1]


WRITE_AT_EXIT = """
import sys, threading, torch
from shardwell.checkpoint import write

def work():
    threading.main_thread().join()
    write(sys.argv[1], {"w": torch.ones(2**20)})

threading.Thread(target=work).start()
"""


def test_a_thread_can_write_while_the_process_ends(tmp_path: Path) -> None:
    environment = {**os.environ, "LOCAL_WORLD_SIZE": "0"}  # spare cores
    subprocess.run([sys.executable, "-c", WRITE_AT_EXIT, str(tmp_path / "f")], env=environment, check=True)
    with Reader(tmp_path / "f") as reader:
        assert same(reader.read("w"), torch.ones(2**20))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (torch.ones(3), "expected 4 elements, found 3"),
        (torch.ones(5), "expected 4 elements of torch.float32, found 5"),
        (torch.ones(4, dtype=torch.float64), "found 4 of torch.float64"),
        (torch.ones(4, device="meta"), "expected a dense tensor on cpu"),
        ([torch.ones(4), torch.ones(1)], "found 5"),
    ],
)
def test_data_that_is_not_as_announced_leaves_no_file(tmp_path: Path, given: Any, sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence) as caught:
        stream(tmp_path / "f", [Entry("w", torch.float32, (4,))], lambda _: given)
    assert f'{tmp_path / "f"}: tensor "w"' in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_an_error_while_data_is_made_leaves_no_file(tmp_path: Path) -> None:
    def data(name: str) -> Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stream(tmp_path / "f", [Entry("w", torch.float32, (4,))], data)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("entries", "metadata", "sentence"),
    [
        ([Entry("w", torch.complex64, (1,))], {}, "torch.complex64 cannot be stored"),
        ([Entry("w", torch.float32, (1,)), Entry("w", torch.float32, (1,))], {}, "the name is taken"),
        ([Entry("__metadata__", torch.float32, (1,))], {}, "the name is taken"),
        ([Entry("\ud800", torch.float32, (1,))], {}, "no text in UTF-8"),
        ([], {"a": 1}, "expected a string, found 1"),
    ],
)
def test_what_the_format_cannot_hold_is_refused(tmp_path: Path, entries: Any, metadata: Any, sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        stream(tmp_path / "f", entries, lambda _: torch.ones(1), metadata)
    assert list(tmp_path.iterdir()) == []


# --- failing writes ---------------------------------------------------------------------------------------------


def test_a_full_disk_names_file_and_tensor_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_bytes, room = os.write, [CHUNK * 2]

    def full(descriptor: int, view: memoryview) -> int:
        if room[0] <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        num_bytes = write_bytes(descriptor, view[: room[0]])  # as a disk does: what still fits is written
        room[0] -= num_bytes
        return num_bytes

    monkeypatch.setattr(os, "write", full)
    tensors = {"small": torch.ones(4), "large": torch.ones(CHUNK)}
    with pytest.raises(CheckpointError, match="No space left on device") as caught:
        write(tmp_path / "f", tensors)
    assert f'{tmp_path / "f"}: tensor "large": cannot be written' in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("function", ["fsync", "close"])
def test_a_file_that_does_not_reach_the_disk_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    real: Callable[[int], None] = getattr(os, function)

    def fail(descriptor: int) -> None:
        if function == "close":
            real(descriptor)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, function, fail)
        with pytest.raises(CheckpointError, match="cannot be written"):
            write(tmp_path / "f", {"w": torch.ones(4)})
    assert list(tmp_path.iterdir()) == []


def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_bytes = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, view: write_bytes(descriptor, view[:5]))
        record = write(tmp_path / "f", {"w": torch.arange(9)})
    with Reader(tmp_path / "f", record) as reader:
        assert same(reader.read("w"), torch.arange(9))


def test_a_file_that_exists_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("f", "link"):
        with pytest.raises(CheckpointError, match="cannot be created"):
            write(tmp_path / name, {"w": torch.ones(4)})
    assert (tmp_path / "f").read_text() == "mine"
    assert not (tmp_path / "elsewhere").exists()
    with pytest.raises(CheckpointError, match="cannot be created"):
        write(tmp_path / "missing" / "f", {})


# --- headers that are wrong -------------------------------------------------------------------------------------

W = "w"
BAD_HEADERS: list[tuple[Any, str]] = [
    (b"[]", "expected a JSON object"),
    (b"7", "expected a JSON object"),
    (b"{", "not valid JSON"),
    (b"\xff{}", "not text in UTF-8"),
    (b"", "not valid JSON"),
    (b"[" * 100_000, "nested too deeply"),
    (b'{"w":{"a":' * 50_000, "nested too deeply"),
    (b'{"w": NaN}', "NaN is not a finite number"),
    (b'{"w": 1e999}', "1e999 is not a finite number"),
    (b'{"w": ' + b"9" * 5000 + b"}", "a number of 5000 digits"),
    (b'{"w": {}, "w": {}}', '"w": written twice'),
    (b'{"w":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}', '"dtype": written twice'),
    ({W: []}, "expected an object of dtype"),
    ({W: {}}, "expected an object of dtype"),
    ({W: entry(extra=1)}, "expected an object of dtype"),
    ({W: entry(dtype="F8_E4M3")}, 'found "F8_E4M3"'),
    ({W: entry(dtype=3)}, "dtype: expected one of"),
    ({W: entry(dtype=["F32"])}, "dtype: expected one of"),
    ({W: entry(shape=2)}, "shape: expected a list"),
    ({W: entry(shape=[-2])}, "shape: expected a list"),
    ({W: entry(shape=[2.0])}, "shape: expected a list"),
    ({W: entry(shape=[True])}, "shape: expected a list"),
    ({W: entry(shape=["2"])}, "shape: expected a list"),
    ({W: entry(shape=[1] * 65)}, "shape: expected a list"),
    ({W: entry(shape=[2**63])}, "shape: expected a list"),
    ({W: entry(shape=[2**32, 2**32])}, "more than 2"),
    ({W: entry(shape=[2**62, 2**62, 0], data_offsets=[0, 0])}, "more than 2"),
    ({W: entry(shape=[2**62])}, "data_offsets"),
    ({W: entry(shape=[3])}, "data_offsets: expected 12 bytes"),
    ({W: entry(data_offsets=[8, 0])}, "data_offsets"),
    ({W: entry(data_offsets=[-8, 0])}, "data_offsets: expected two sizes"),
    ({W: entry(data_offsets=[0, 8.0])}, "data_offsets: expected two sizes"),
    ({W: entry(data_offsets=[0, 8, 16])}, "data_offsets: expected two sizes"),
    ({W: entry(data_offsets=[0])}, "data_offsets: expected two sizes"),
    ({W: entry(data_offsets=[1, 9])}, "begins at 1, expected 0"),
    ({W: entry(), "v": entry()}, "begins at 0, expected 8"),
    ({W: entry(), "v": entry(data_offsets=[4, 12])}, "begins at 4, expected 8"),
    ({W: entry(), "v": entry(data_offsets=[12, 20])}, "begins at 12, expected 8"),
    ({W: entry(shape=[4], data_offsets=[0, 16])}, "truncated"),
    ({}, "too long"),
    ({W: entry(), "__metadata__": {"a": 1}}, "__metadata__: expected an object of strings"),
    ({W: entry(), "__metadata__": []}, "__metadata__: expected an object of strings"),
]


@pytest.mark.parametrize(("header", "sentence"), BAD_HEADERS, ids=range(len(BAD_HEADERS)))
def test_a_wrong_header_is_refused_by_name_of_its_file(tmp_path: Path, header: Any, sentence: str) -> None:
    path = raw_file(tmp_path / "f", header, bytes(8))
    with pytest.raises(CheckpointError) as caught:
        Reader(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert sentence in str(caught.value)


def test_the_header_that_the_wrong_ones_derive_from_is_right(tmp_path: Path) -> None:
    with Reader(raw_file(tmp_path / "f", {W: entry()}, bytes(8))) as reader:
        assert same(reader.read("w"), torch.zeros(2))


@pytest.mark.parametrize("length", [9, 1000, 2**31, 2**63, 2**64 - 1])
def test_a_length_beyond_the_file_allocates_nothing(tmp_path: Path, length: int) -> None:
    (tmp_path / "f").write_bytes(length.to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match="truncated, or no safetensors file"):
        Reader(tmp_path / "f")


def test_a_header_beyond_the_limit_is_not_read(tmp_path: Path) -> None:
    with open(tmp_path / "f", "wb") as file:
        file.write((200_000_000).to_bytes(8, "little"))
        file.truncate(300_000_000)  # sparse
    with pytest.raises(CheckpointError, match="a header of 200000000"):
        Reader(tmp_path / "f")


def test_a_file_that_claims_more_than_memory_is_an_error(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    path = raw_file(tmp_path / "f", {W: entry(dtype="U8", shape=[2**43 - 4096], data_offsets=[0, 2**43 - 4096])})
    header = path.stat().st_size
    try:
        os.truncate(path, header + 2**43 - 4096)  # sparse
    except OSError:
        pytest.skip("the file system has no files of 8 TiB")
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**42, before[1]))  # some machines promise any amount of memory
    request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_AS, before))
    with Reader(path) as reader, pytest.raises(CheckpointError, match="not enough memory"):
        reader.read("w")


def test_booleans_that_are_neither_true_nor_false_are_refused(tmp_path: Path) -> None:
    header = {W: entry(dtype="BOOL", shape=[3], data_offsets=[0, 3])}
    with Reader(raw_file(tmp_path / "f", header, b"\0\1\2")) as reader:
        assert same(reader.read_range("w", 0, 2), torch.tensor([False, True]))
        with pytest.raises(CheckpointError, match="neither true nor false"):
            reader.read("w")


@pytest.mark.parametrize("kind", ["missing", "directory", "link", "pipe"])
def test_only_regular_files_are_opened(tmp_path: Path, kind: str) -> None:
    write(tmp_path / "real", {"w": torch.ones(2)})
    path = tmp_path / kind
    if kind == "directory":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(tmp_path / "real")
    elif kind == "pipe":
        os.mkfifo(path)
    with pytest.raises(CheckpointError, match=kind):
        Reader(path)


# --- damage -----------------------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> tuple[Path, FileRecord, dict[str, Tensor]]:
    tensors = {"w": torch.arange(5.0), "b": torch.arange(3, dtype=torch.int16), "flag": torch.tensor([True, False])}
    return tmp_path / "f", write(tmp_path / "f", tensors, {"k": "v"}), tensors


def read_all(path: Path, record: FileRecord | None) -> dict[str, Tensor]:
    with Reader(path, record) as reader:
        return {name: reader.read(name) for name in reader.entries}


def test_every_truncation_is_an_error(small: tuple[Path, FileRecord, dict[str, Tensor]]) -> None:
    path, record, _ = small
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        for known in (record, None):
            with pytest.raises(CheckpointError, match=str(path)):
                read_all(path, known)
    path.write_bytes(content + b"\0")
    with pytest.raises(CheckpointError):
        read_all(path, None)


def test_every_flipped_bit_is_found(small: tuple[Path, FileRecord, dict[str, Tensor]]) -> None:
    path, record, _ = small
    content = bytearray(path.read_bytes())
    for index in range(len(content)):
        for bit in range(8):
            content[index] ^= 1 << bit
            path.write_bytes(content)
            with pytest.raises(CheckpointError, match=str(path)):
                read_all(path, record)
            content[index] ^= 1 << bit
    path.write_bytes(content)
    read_all(path, record)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_random_damage_is_found_or_harmless(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "f"
        tensors = {"w": torch.arange(5.0), "b": torch.tensor(3)}
        record = write(path, tensors)
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 6))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(content)
        try:
            found = read_all(path, record)
        except CheckpointError:
            pass
        else:
            assert all(same(found[name], tensor) for name, tensor in tensors.items())
        with contextlib.suppress(CheckpointError):
            read_all(path, None)  # may be anything, but nothing else may be raised


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
offsets = st.integers(-1, 17)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPES, "F8"]) | json_values,
        "shape": st.lists(st.integers(-1, 2**64), max_size=3) | st.lists(st.integers(0, 3), max_size=3) | json_values,
        "data_offsets": st.lists(offsets, min_size=2, max_size=2) | json_values,
    }
)


@settings(deadline=None, max_examples=200)
@given(st.dictionaries(st.text(max_size=3), entries | json_values, max_size=3), st.binary(max_size=16))
def test_a_random_header_is_refused_or_consistent(header: dict[str, Any], data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = raw_file(Path(folder) / "f", header, data)
        with contextlib.suppress(CheckpointError), Reader(path) as reader:
            assert sum(found.num_bytes for found in reader.entries.values()) == len(data)
            for name, found in reader.entries.items():
                assert reader.read(name).shape == found.shape


def test_a_flipped_byte_names_file_and_tensor(small: tuple[Path, FileRecord, dict[str, Tensor]]) -> None:
    path, record, tensors = small
    content = bytearray(path.read_bytes())
    content[content.index(tensors["b"].numpy().tobytes()) + 2] ^= 1
    path.write_bytes(content)
    with Reader(path, record) as reader:
        for use in (reader.read, reader.verify, lambda name: reader.read_range(name, 0, 3)):
            with pytest.raises(CheckpointError, match="damaged") as caught:
                use("b")
            assert f'{path}: tensor "b"' in str(caught.value)
        reader.read_range("b", 0, 1)  # a part cannot be checked
        assert same(reader.read("w"), tensors["w"])
    with Reader(path) as reader:
        with pytest.raises(CheckpointError, match="damaged"):
            reader.read("b", record.checksums["b"])
        with pytest.raises(CheckpointError, match="damaged"):
            reader.verify("b", record.checksums["b"])
        with pytest.raises(CheckpointError, match="no checksum"):
            reader.verify("b")


def test_a_file_that_shrinks_while_it_is_open_is_an_error(small: tuple[Path, FileRecord, dict[str, Tensor]]) -> None:
    path, record, _ = small
    with Reader(path, record) as reader:
        os.truncate(path, record.size - 1)
        with pytest.raises(CheckpointError, match="truncated"):
            reader.read("flag")


def test_a_missing_tensor_and_a_wrong_range_are_named(small: tuple[Path, FileRecord, dict[str, Tensor]]) -> None:
    path, record, _ = small
    with Reader(path, record) as reader:
        with pytest.raises(CheckpointError, match='tensor "other": not in this file'):
            reader.read("other")
        for start, stop in ((-1, 2), (3, 2), (0, 6)):
            with pytest.raises(CheckpointError, match=f'"w": has 5 elements, asked for {start} to {stop}'):
                reader.read_range("w", start, stop)


def test_a_record_of_another_file_is_refused(small: tuple[Path, FileRecord, dict[str, Tensor]]) -> None:
    path, record, _ = small
    for changed, sentence in (
        (FileRecord(record.size + 1, record.header, record.checksums), "bytes"),
        (FileRecord(record.size, "00000000", record.checksums), "header is damaged"),
        (FileRecord(record.size, record.header, {"w": "00000000"}), "other tensors"),
        (FileRecord(record.size, record.header, record.checksums, "md5"), "algorithm"),
    ):
        with pytest.raises(CheckpointError, match=sentence):
            Reader(path, changed)


def test_a_refused_file_is_closed(tmp_path: Path) -> None:
    path = raw_file(tmp_path / "f", b"[]")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(CheckpointError):
            Reader(path)
        with pytest.raises(CheckpointError):
            Reader(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before
