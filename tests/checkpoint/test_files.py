"""Tensors come back from files as they were, from any part of them, and a write that fails leaves no file."""

from __future__ import annotations

import errno
import os
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

from shardwell.checkpoint import DTYPES, Entry, Reader, stream, write
from shardwell.checkpoint.files import CHUNK
from shardwell.errors import CheckpointError
from tests.support.checkpoint_samples import same_bits
from tests.support.command import environment


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Any bits that the dtype has, NaN among them."""
    generator = torch.Generator().manual_seed(seed)
    numel = torch.Size(shape).numel()
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (numel * dtype.itemsize,), generator=generator)
    return raw.to(torch.uint8).view(dtype).view(shape)


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


# --- round trips ------------------------------------------------------------------------------------------------


def test_every_dtype_comes_back_to_the_bit(tmp_path: Path) -> None:
    tensors = one_of_each()
    record = write(tmp_path / "a", tensors, {"format": "pt"})
    with Reader(tmp_path / "a", record) as reader:
        assert reader.entries.keys() == tensors.keys()
        assert reader.metadata == {"format": "pt"}
        for name, tensor in tensors.items():
            assert same_bits(reader.read(name), tensor)
            reader.verify(name)
    assert record.size == (tmp_path / "a").stat().st_size
    assert record.algorithm == "crc32"


def test_the_safetensors_package_reads_what_we_write(tmp_path: Path) -> None:
    tensors = one_of_each()
    write(tmp_path / "a", tensors, {"key": "value"})
    found = safetensors.torch.load_file(tmp_path / "a")
    assert found.keys() == tensors.keys()
    assert all(same_bits(found[name], tensor) for name, tensor in tensors.items())
    with safetensors.safe_open(tmp_path / "a", "pt") as opened:
        assert opened.metadata() == {"key": "value"}


def test_we_read_what_the_safetensors_package_writes(tmp_path: Path) -> None:
    tensors = one_of_each()
    safetensors.torch.save_file(tensors, tmp_path / "a", {"key": "value"})
    with Reader(tmp_path / "a") as reader:
        assert reader.metadata == {"key": "value"}
        assert reader.entries.keys() == tensors.keys()
        assert all(same_bits(reader.read(name), tensor) for name, tensor in tensors.items())


@settings(deadline=None, max_examples=60)
@given(many_tensors, st.data())
def test_any_tensors_and_any_range_of_them_come_back(tensors: dict[str, Tensor], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a"
        record = write(path, tensors)
        found = safetensors.torch.load_file(path)
        with Reader(path, record) as reader:
            for name, tensor in tensors.items():
                assert same_bits(reader.read(name), tensor)
                assert same_bits(found[name], tensor)
                start = data.draw(st.integers(0, tensor.numel()))
                stop = data.draw(st.integers(start, tensor.numel()))
                before = reader.bytes_read - reader.bytes_beside
                assert same_bits(reader.read_range(name, start, stop), tensor.reshape(-1)[start:stop])
                wanted = reader.bytes_read - reader.bytes_beside - before
                assert wanted == (stop - start) * tensor.element_size()


def test_a_file_without_tensors_is_a_file(tmp_path: Path) -> None:
    record = write(tmp_path / "a", {})
    with Reader(tmp_path / "a", record) as reader:
        assert reader.entries == {}
    assert safetensors.torch.load_file(tmp_path / "a") == {}


def test_tensors_that_are_not_contiguous_are_written_in_the_order_of_their_shape(tmp_path: Path) -> None:
    tensors = {"t": torch.arange(12.0).view(3, 4).t(), "step": torch.arange(9)[::2], "wide": torch.ones(1).expand(5)}
    record = write(tmp_path / "a", tensors)
    with Reader(tmp_path / "a", record) as reader:
        assert all(same_bits(reader.read(name), tensor) for name, tensor in tensors.items())


def test_a_parameter_is_written_like_a_tensor(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    record = write(tmp_path / "a", {"p": parameter})
    with Reader(tmp_path / "a", record) as reader:
        assert same_bits(reader.read("p"), torch.ones(3))


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
        assert same_bits(reader.read("a"), torch.arange(8).view(2, 4))
        assert same_bits(reader.read("b"), torch.ones(2, 2))


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
        assert same_bits(reader.read("w"), tensor)
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
            assert all(same_bits(reader.read(name), tensor) for name, tensor in tensors.items())
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
    # With spare cores. A process that was forked from another ends its threads as Python does: `threading._shutdown`.
    variables = {**environment(), "LOCAL_WORLD_SIZE": "0"}
    subprocess.run([sys.executable, "-c", WRITE_AT_EXIT, str(tmp_path / "f")], env=variables, check=True)
    with Reader(tmp_path / "f") as reader:
        assert same_bits(reader.read("w"), torch.ones(2**20))


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
        assert same_bits(reader.read("w"), torch.arange(9))


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
