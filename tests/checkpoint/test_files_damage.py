"""Files of tensors with wrong headers or damage are refused, and what is wrong is named."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwell.checkpoint import DTYPES, FileRecord, Reader, write
from shardwell.errors import CheckpointError
from tests.support.checkpoint_samples import same_bits


def raw_file(path: Path, header: Any, data: bytes = b"") -> Path:
    """A file with this header, right or wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


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
    ({W: entry(dtype="F8_E8M0")}, 'found "F8_E8M0"'),
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
        assert same_bits(reader.read("w"), torch.zeros(2))


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
        assert same_bits(reader.read_range("w", 0, 2), torch.tensor([False, True]))
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
            assert all(same_bits(found[name], tensor) for name, tensor in tensors.items())
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
        with pytest.raises(CheckpointError, match="damaged"):  # parts are checked, too
            reader.read_range("b", 0, 1)
        assert same_bits(reader.read("w"), tensors["w"])
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
