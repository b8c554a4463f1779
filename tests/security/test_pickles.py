"""Pickles that are read as data: whatever they ask for, the answer is an error, soon, in little memory."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import random
import struct
import tracemalloc
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwell.checkpoint.sources import pickles
from shardwell.checkpoint.sources.opcodes import MOST_DEPTH, check_value
from shardwell.checkpoint.sources.torch_files import load as load_torch
from shardwell.errors import CheckpointError

PROTO = b"\x80\x02"
FEW_BYTES = 64 * 2**20  # of memory, for a file of a few


def as_text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def bomb(pairs: int) -> bytes:
    """A tuple that holds one tuple twice, which holds ..., through the memo."""
    return b"(" + as_text("x") + b"t" + b"".join(b"q%c" % i + b"h%c" % i + b"\x86" for i in range(pairs))


HARM = {
    "nested tuples as a key": PROTO + b"}" + b")" + b"\x85" * 2_000_000 + b"Ns.",
    "a value twice in itself, sixty times": PROTO + b"}" + b")" + b"2\x86" * 60 + b"Ns.",
    "the same through the memo": PROTO + b"}" + bomb(60) + b"Ns.",
    "the same as a value": PROTO + b"}" + as_text("k") + bomb(60) + b"s.",
    "three gigabytes": b"\x80\x05\x96" + struct.pack("<Q", 3 * 2**30),
    "three gigabytes of text": b"\x80\x04\x8d" + struct.pack("<Q", 3 * 2**30) + b".",
    "three gigabytes in a frame": b"\x80\x04\x95" + struct.pack("<Q", 3 * 2**30) + b".",
    "a place in the memo far away": PROTO + b"]r\xff\xff\xff\x7fj\xff\xff\xff\x7e.",
    "an integer of a megabyte": PROTO + b"\x8b" + struct.pack("<i", 2**20) + b"\x7f" * 2**20 + b".",
    "lists in lists": PROTO + b"]" * 100_000 + b"a" * 99_999 + b".",
    "marks in marks": PROTO + b"(" * 100_000 + b"t" * 100_000 + b".",
    "a list that holds itself": PROTO + b"]q\x00h\x00a.",
    "lists that grow when they are inside others": PROTO
    + b"]q\x00"
    + b"".join(b"]q%c" % i for i in range(1, 60))
    + b"0" * 59
    + b"".join(b"(h%ch%ce" % (i, i) for i in range(1, 60))
    + b".",
    "a frozen set": b"\x80\x04(" + as_text("a") + b"\x91.",
    "a set": b"\x80\x04\x8f(" + as_text("a") + b"\x90.",
    "bytes as a key": b"\x80\x04}C\x01aNs.",
    "nothing as a key": PROTO + b"}NNs.",
    "a dictionary of pairs": PROTO + b"ccollections\nOrderedDict\n(](" + b")" + b"\x85" * 50 + b"N\x86etR.",
    "values for a string": PROTO + as_text("a") + as_text("b") + b"a.",
    "values left over": PROTO + as_text("a") + as_text("b") + b".",
    "no values": PROTO + b"\x86.",
    "nothing": b"",
}
KNOWN: dict[str, Any] = {"collections.OrderedDict": pickles.ordered, "some.Class": pickles.Record}


@pytest.mark.parametrize("what", HARM)
def test_a_pickle_that_asks_for_too_much_is_refused_at_once(what: str) -> None:
    data = HARM[what]
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=r"damaged|nested too deeply"):
            pickles.load(data, KNOWN, "file")
        assert tracemalloc.get_traced_memory()[1] < FEW_BYTES + 60 * len(data)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("what", HARM)
def test_so_is_one_in_a_file_of_torch(what: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "file.pt", "w") as archive:
        archive.writestr("archive/data.pkl", HARM[what])
        archive.writestr("archive/version", "3\n")
    with pytest.raises(CheckpointError):
        load_torch(tmp_path / "file.pt")


@pytest.mark.parametrize("name", ["archive/Data.pkl", "archive/DATA.PKL", "other/data.pkl/"])
@pytest.mark.parametrize("comes_first", [True, False])
def test_the_pickle_that_is_looked_through_is_the_one_that_torch_reads(
    tmp_path: Path, name: str, comes_first: bool
) -> None:
    """Torch's reader of archives ignores case; which of two names it takes depends on how many others there are."""
    torch.save({"a": 1, "b": torch.ones(3)}, tmp_path / "good.pt")
    with zipfile.ZipFile(tmp_path / "good.pt") as archive:
        root = archive.namelist()[0].partition("/")[0]
        honest = [(one.replace(root, "archive", 1), archive.read(one)) for one in archive.namelist()]
    hidden = [(name, PROTO + b"}" + as_text("a") + b"K\x02s.")]
    with zipfile.ZipFile(tmp_path / "file.pt", "w") as archive:
        for one, content in [*hidden, *honest] if comes_first else [*honest, *hidden]:
            archive.writestr(one, content)
    with contextlib.suppress(CheckpointError):
        assert load_torch(tmp_path / "file.pt")["a"] == 1


def test_a_list_that_grew_inside_others_has_no_end() -> None:
    lists: list[Any] = [[] for _ in range(60)]
    for inner, outer in itertools.pairwise(lists):
        outer += [inner, inner]
    with pytest.raises(CheckpointError, match="without end"):
        check_value(lists[-1], 100, "file", lambda _: None)
    lists[0].append(lists[-1])
    with pytest.raises(CheckpointError, match="holds itself"):
        check_value(lists[-1], 100, "file", lambda _: None)


def honest() -> list[Any]:
    shared = ("a", 1)
    deep: Any = 0
    for _ in range(MOST_DEPTH // 2):
        deep = [deep]
    return [
        {"a": [1, 2.5, None, True, "é", 2**100], 3: (1, 2, 3, 4), 2.5: {}},
        OrderedDict(a=OrderedDict(b=1)),
        [shared] * 1000,
        [f"layer.{index}" for index in range(5000)],
        deep,
    ]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("index", range(5))
def test_honest_values_come_through(index: int, protocol: int) -> None:
    value = honest()[index]
    assert pickles.load(pickle.dumps(value, protocol), KNOWN, "file") == value


def test_files_of_torch_come_through(tmp_path: Path) -> None:
    layer = torch.nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    saved = {"module": layer.state_dict(), "optimizer": optimizer.state_dict(), "step": 7, "shape": torch.Size([3])}
    torch.save(saved, tmp_path / "file.pt")
    found = load_torch(tmp_path / "file.pt")
    assert found["step"] == 7
    assert torch.equal(found["module"]["weight"], layer.weight)


def _mutated(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(changed))
        match draw.randrange(4):
            case 0:
                changed[at] = draw.randrange(256)
            case 1:
                del changed[at : at + draw.randint(1, 8)]
            case 2:
                changed[at:at] = draw.choice(OPERATIONS) * draw.randint(1, 40)
            case _:
                changed[at:at] = changed[at : at + draw.randint(1, 30)] * draw.randint(1, 40)
        if not changed:
            return b"."
    return bytes(changed)


OPERATIONS = [bytes([code]) for code in b"(.012FGIJKLMNPQRSTUVX]^_abcdeghijlopqrstu}\x80\x81\x85\x86\x87\x8f\x90\x94"]
OPERATIONS += [
    b"h\x00\x86",
    b"2\x86",
    b"]\x94",
    b"\x96" + b"\xff" * 4 + b"\x00" * 4,
    b"\x95\xff\xff\xff\xff\x00\x00\x00\x00",
]


@pytest.mark.parametrize("seed", range(4))
def test_whatever_the_operations_are_the_answer_is_a_value_or_an_error(seed: int) -> None:
    draw = random.Random(seed)
    sources = [[pickle.dumps(value, protocol) for value in honest()[:2] for protocol in (2, 4)], SMALL_HARM]
    answers = {"read": 0, "refused": 0}
    for _ in range(1500):
        data = _mutated(draw.choice(draw.choice(sources)), draw)
        try:
            value = pickles.load(data, KNOWN, "file")
            hash(repr(value))
            answers["read"] += 1
        except CheckpointError:
            answers["refused"] += 1
    assert answers["read"] > 20
    assert answers["refused"] > 500


SMALL_HARM = [data for data in HARM.values() if 0 < len(data) < 1000]
