"""A manifest says where every element lies, survives JSON, and is refused when anything in it is wrong."""

from __future__ import annotations

import contextlib
import copy
import json
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwell.checkpoint import DTYPES, FileExtent, FilePiece, FileRecord, Manifest, TensorRecord, plan
from shardwell.checkpoint.manifest import plain_name
from shardwell.checkpoint.manifest_index import index_of, manifest_of
from shardwell.checkpoint.merging import Merger, merge
from shardwell.errors import CheckpointError
from shardwell.sharding.layout import TensorSpec, contiguous_stride, make_layout
from tests.support.forged_manifests import CRC, put, sign


def tensor(*pieces: FilePiece, shape: tuple[int, ...] = (3, 4), kind: str = "parameter") -> TensorRecord:
    return TensorRecord(torch.float32, shape, contiguous_stride(shape), kind, pieces)


def file(*keys: str, size: int = 1000) -> FileRecord:
    return FileRecord(size, CRC, dict.fromkeys(keys, CRC))


def example() -> Manifest:
    return Manifest(
        tensors={
            "blocks.0.weight": tensor(FilePiece("r0", "w", 0, 5), FilePiece("r1", "w", 5, 7)),
            "blocks.0.weight/exp_avg": tensor(FilePiece("r0", "m", 0, 12), kind="state:exp_avg"),
            "empty": tensor(shape=(0, 4)),
            "channels_last": TensorRecord(torch.bfloat16, (2, 3), (1, 2), "parameter", (FilePiece("r1", "c", 0, 6),)),
        },
        files={"r0": file("w", "m"), "r1": file("w", "c", "unused")},
        values={"step": 7, "rng": [1, 2**127], "nested": {"lr": 1e-3, "none": None, "on": True, "name": "ü\ud800"}},
    )


def changed(change: Callable[[dict[str, Any]], Any]) -> str:
    content = json.loads(example().to_json())
    change(content)
    return sign(content)


# --- plans ------------------------------------------------------------------------------------------------------


@st.composite
def tilings(draw: st.DrawFn) -> TensorRecord:
    sizes = draw(st.lists(st.integers(1, 9), max_size=8))
    pieces, start = [], 0
    for index, size in enumerate(sizes):
        pieces.append(FilePiece(f"f{index % 3}", f"k{index}", start, size))
        start += size
    return tensor(*pieces, shape=(start,))


@given(tilings(), st.data())
def test_a_plan_holds_each_element_of_the_range_once_and_in_order(record: TensorRecord, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, record.numel))
    stop = data.draw(st.integers(start, record.numel))
    held = {(piece.file, piece.key): range(piece.start, piece.end) for piece in record.pieces}
    extents = plan(record, start, stop)
    found = [held[file, key][index] for file, key, first, last in extents for index in range(first, last)]
    assert found == list(range(start, stop))
    assert all(first < last for _, _, first, last in extents)


def test_a_plan_names_the_ranges_of_a_tensor_in_two_files() -> None:
    record = example().tensors["blocks.0.weight"]
    assert plan(record, 3, 8) == [FileExtent("r0", "w", 3, 5), FileExtent("r1", "w", 0, 3)]
    assert plan(record, 5, 5) == []
    assert plan(example().tensors["empty"], 0, 0) == []


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (4, 3), (0, 13)])
def test_a_plan_beyond_the_tensor_is_an_error(start: int, stop: int) -> None:
    with pytest.raises(CheckpointError, match=f"12 elements: asked for {start} to {stop}"):
        plan(example().tensors["blocks.0.weight"], start, stop)


# --- round trips ------------------------------------------------------------------------------------------------


def test_a_manifest_comes_back_from_json() -> None:
    text = example().to_json()
    assert Manifest.from_json(text) == example()
    assert Manifest.from_json(text.encode()) == example()
    assert Manifest.from_json(json.dumps(json.loads(text), indent=2)) == example()  # pretty is as good
    assert Manifest.from_json(Manifest().to_json()) == Manifest()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=15,
)


@pytest.mark.slow
@settings(deadline=None)
@given(st.dictionaries(st.text(), tilings(), max_size=4), st.dictionaries(st.text(), json_values, max_size=4))
def test_any_manifest_comes_back_from_json(tensors: dict[str, TensorRecord], values: dict[str, Any]) -> None:
    renamed = {
        name: tensor(
            *(FilePiece(piece.file, f"{name}:{piece.key}", piece.start, piece.numel) for piece in record.pieces),
            shape=record.shape,
        )
        for name, record in tensors.items()
    }
    keys = [(piece.file, piece.key) for record in renamed.values() for piece in record.pieces]
    files = {name: file(*(key for home, key in keys if home == name), size=10_000) for name in ("f0", "f1", "f2")}
    manifest = Manifest(renamed, files, values)
    text = manifest.to_json()
    assert Manifest.from_json(text) == manifest
    assert manifest_of(index_of(Manifest.from_json(text))) == manifest
    content = json.loads(text)
    told = f',"checksum":"{content.pop("checksum")}"}}'
    assert text == json.dumps(content, sort_keys=True, separators=(",", ":"))[:-1] + told


# --- what is wrong ----------------------------------------------------------------------------------------------

W = "blocks.0.weight"
WRONG: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (put("version", 2), "version: expected 1 for a manifest without boxes, found 2"),
    (put("version", 3), "version: expected 1 or 2, found 3; it was written by another version of shardwell"),
    (put("version", 1.0), "version: expected 1"),
    (put("version", True), "version: expected 1"),
    (lambda content: content.pop("version"), "version: expected 1 or 2, found null"),
    (lambda content: content.pop("files"), "files: missing"),
    (put("extra", 1), '"extra": unknown field'),
    (put("tensors", []), "tensors: expected an object, found []"),
    (put("values", 3), "values: expected an object, found 3"),
    (put("files", "r0", 3), 'files["r0"]: expected an object'),
    (put("files", "r0", "size", -1), 'files["r0"].size'),
    (put("files", "r0", "size", 2**63), 'files["r0"].size'),
    (put("files", "r0", "size", "9"), 'files["r0"].size'),
    (put("files", "r0", "size", True), 'files["r0"].size'),
    (put("files", "r0", "size", 60), "pieces[0]: more bytes than r0 has (60)"),
    (put("files", "r0", "algorithm", "md5"), 'files["r0"].algorithm'),
    (put("files", "r0", "header", "xyz"), 'files["r0"].header'),
    (put("files", "r0", "header", CRC + "\n"), 'files["r0"].header'),
    (put("files", "r0", "checksums", []), 'files["r0"].checksums'),
    (put("files", "r0", "checksums", "w", 12345678), 'files["r0"].checksums["w"]'),
    (put("tensors", W, None), f'tensors["{W}"]: expected an object'),
    (put("tensors", W, "more", 1), f'tensors["{W}"]: "more": unknown field'),
    (lambda content: content["tensors"][W].pop("kind"), f'tensors["{W}"]: kind: missing'),
    (put("tensors", W, "kind", 1), f'tensors["{W}"].kind'),
    (put("tensors", W, "kind", ""), f'tensors["{W}"].kind'),
    (put("tensors", W, "dtype", "F8"), f'tensors["{W}"]: dtype'),
    (put("tensors", W, "dtype", {}), f'tensors["{W}"]: dtype'),
    (put("tensors", W, "shape", 12), f'tensors["{W}"]: shape'),
    (put("tensors", W, "shape", [3, -4]), f'tensors["{W}"]: shape'),
    (put("tensors", W, "shape", [3, 4.0]), f'tensors["{W}"]: shape'),
    (put("tensors", W, "shape", [2**40, 2**40]), f'tensors["{W}"]: shape'),
    (put("tensors", W, "shape", [2**62, 1]), f'tensors["{W}"].shape'),
    (put("tensors", W, "shape", [2**63, 0]), f'tensors["{W}"]: shape'),
    (put("tensors", W, "stride", [1]), f'tensors["{W}"].stride'),
    (put("tensors", W, "stride", 1), f'tensors["{W}"].stride'),
    (put("tensors", W, "stride", [4, 0]), f'tensors["{W}"].stride'),
    (put("tensors", W, "stride", [4, 2]), f'tensors["{W}"].stride'),
    (put("tensors", W, "stride", [4, -1]), f'tensors["{W}"].stride'),
    (put("tensors", W, "stride", [4, "1"]), f'tensors["{W}"].stride'),
    (put("tensors", W, "pieces", {}), f'tensors["{W}"].pieces'),
    (put("tensors", W, "pieces", []), "elements 0 to 12 are in no piece"),
    (put("tensors", W, "pieces", 0, ["r0", "w", 0]), "pieces[0]: expected a list of 4"),
    (put("tensors", W, "pieces", 0, "r0w0"), "pieces[0]: expected a list of 4"),
    (put("tensors", W, "pieces", 0, ["r2", "w", 0, 5]), 'pieces[0].file: "r2" is not among the files'),
    (put("tensors", W, "pieces", 0, [["r0"], "w", 0, 5]), "pieces[0].file"),
    (put("tensors", W, "pieces", 0, ["r0", "x", 0, 5]), 'pieces[0].key: "x" is not in r0'),
    (put("tensors", W, "pieces", 0, ["r0", 7, 0, 5]), "pieces[0].key"),
    (put("tensors", W, "pieces", 0, ["r0", "m", 0, 5]), "claimed twice"),
    (put("tensors", W, "pieces", 0, ["r0", "w", 0, 4]), "elements 4 to 5 are in no piece"),
    (put("tensors", W, "pieces", 0, ["r0", "w", 0, 6]), "starts at element 5, but the pieces before it reach 6"),
    (put("tensors", W, "pieces", 0, ["r0", "w", 1, 4]), "elements 0 to 1 are in no piece"),
    (put("tensors", W, "pieces", 0, ["r0", "w", -1, 6]), "pieces[0].start"),
    (put("tensors", W, "pieces", 0, ["r0", "w", 0, 0]), "pieces[0]"),
    (put("tensors", W, "pieces", 0, ["r0", "w", 0.0, 5]), "pieces[0].start"),
    (put("tensors", W, "pieces", 0, ["r0", "w", 0, 2**64]), "pieces[0].numel"),
    (put("tensors", W, "pieces", 1, ["r1", "w", 5, 8]), "none beyond the end"),
    (put("tensors", W, "pieces", 1, ["r1", "w", 5, 6]), "elements 11 to 12 are in no piece"),
    (put("tensors", W, "pieces", 1, ["r1", "w", 0, 5]), "the pieces before it reach 5"),
]


@pytest.mark.parametrize(("change", "sentence"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_entry_is_named_with_the_manifest(change: Callable[[dict[str, Any]], Any], sentence: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        Manifest.from_json(changed(change), "here/manifest.json")
    assert str(caught.value).startswith("here/manifest.json: ")
    assert sentence in str(caught.value)


BAD_NAMES = [
    "",
    ".",
    "..",
    "../r0",
    "/r0",
    "a/b",
    "a\\b",
    "a\0b",
    ".r0",
    "a\nb",
    " a",
    "a ",
    "x" * 201,
    "manifest.json",
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_file_name_that_is_not_plain_is_refused(name: str) -> None:
    def rename(content: dict[str, Any]) -> None:
        content["files"][name] = content["files"].pop("r0")
        for record in content["tensors"].values():
            record["pieces"] = [[name if home == "r0" else home, *rest] for home, *rest in record["pieces"]]

    with pytest.raises(CheckpointError, match="expected the plain name of a data file"):
        Manifest.from_json(changed(rename))


@pytest.mark.parametrize("name", ["a", "rank-0.safetensors", "a b", "ü", "a..b", "x" * 200])
def test_plain_names_are_accepted(name: str) -> None:
    assert plain_name(name)


def test_a_changed_manifest_does_not_match_its_checksum() -> None:
    text = example().to_json().replace('"step":7', '"step":8')
    with pytest.raises(CheckpointError, match="checksum: the manifest was damaged or changed"):
        Manifest.from_json(text)
    for checksum in (None, 7, "0" * 8):
        with pytest.raises(CheckpointError, match="checksum"):
            Manifest.from_json(json.dumps({**json.loads(example().to_json()), "checksum": checksum}))


def test_a_manifest_that_was_formatted_anew_matches_its_checksum() -> None:
    text = json.dumps(json.loads(example().to_json()), indent=1, sort_keys=True)
    assert Manifest.from_json(text) == Manifest.from_json(text.encode("ascii")) == example()


def deep(levels: int) -> Any:
    value: Any = 1
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (float("nan"), "values.a[1]: nan is not a number in JSON"),
        (float("-inf"), "values.a[1]: -inf is not a number in JSON"),
        ((1, 2), "values.a[1]: expected a JSON value, found tuple"),
        (b"x", "found bytes"),
        (torch.ones(1), "found Tensor"),
        ({1: 2}, "values.a[1]: a key: expected a string, found 1"),
        (2**20_000, "values.a[1]: expected a number of at most"),
        (deep(63), "nested too deeply"),
        (deep(3000), "nested too deeply"),
    ],
    ids=["nan", "inf", "tuple", "bytes", "tensor", "key", "huge", "deep", "abyss"],
)
def test_values_that_would_not_come_back_are_refused_when_written(value: Any, sentence: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        Manifest(values={"a": [0, value]}).to_json("here")
    assert str(caught.value).startswith("here: values.a[1]")
    assert sentence in str(caught.value)


def test_values_as_deep_as_allowed_come_back() -> None:
    manifest = Manifest(values={"a": deep(63)})
    assert Manifest.from_json(manifest.to_json()) == manifest
    with pytest.raises(CheckpointError, match="nested too deeply"):
        Manifest.from_json(sign({**json.loads(Manifest().to_json()), "values": {"a": deep(64)}}))


# --- random damage ----------------------------------------------------------------------------------------------


def test_every_flipped_bit_of_a_manifest_is_found_or_harmless() -> None:
    expected = example()
    content = bytearray(expected.to_json().encode())
    for index in range(len(content)):
        for bit in range(8):
            content[index] ^= 1 << bit
            with contextlib.suppress(CheckpointError):
                assert Manifest.from_json(bytes(content)) == expected
            content[index] ^= 1 << bit


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=8), st.integers(0, 10_000))
def test_random_damage_of_a_manifest_is_found_or_harmless(flips: list[tuple[int, int]], cut: int) -> None:
    content = bytearray(example().to_json().encode())
    for place, value in flips:
        content[place % len(content)] = value
    for text in (bytes(content), bytes(content[: cut % len(content)])):
        with contextlib.suppress(CheckpointError):
            assert Manifest.from_json(text) == example()


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_a_random_value_anywhere_is_refused_or_gives_a_valid_manifest(data: st.DataObject) -> None:
    content = json.loads(example().to_json())
    place = content
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(place[key], (dict, list)) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(json_values | st.sampled_from([0, 1, 5, 12, 2**62, 2**63, 2**64, "r0", "w"]))
    try:
        manifest = Manifest.from_json(sign(content))
    except CheckpointError:
        return
    manifest.check()
    assert Manifest.from_json(manifest.to_json()) == manifest


# --- parts ------------------------------------------------------------------------------------------------------


def parts() -> list[Manifest]:
    return [
        Manifest({W: tensor(FilePiece("r1", "w", 5, 7))}, {"r1": file("w")}, {"step": 3, "rng.1": [4]}),
        Manifest(
            {W: tensor(FilePiece("r0", "w", 0, 5)), "b": tensor(FilePiece("r0", "b", 0, 12))},
            {"r0": file("w", "b")},
            {"step": 3, "rng.0": [5]},
        ),
    ]


def merge_texts(given: list[Manifest], where: str = "") -> Manifest:
    """What rank 0 does: its own part is a value, the others are texts."""
    merger = Merger(where)
    merger.add(given[0])
    for number, part in enumerate(given[1:]):
        merger.add_text(part.text(), f"{where}: part {number}")
    return merger.finish()


MERGES = [merge, merge_texts]


@pytest.mark.parametrize("merge", MERGES)
def test_parts_of_ranks_become_one_manifest(merge: Callable[[list[Manifest]], Manifest]) -> None:
    merged = merge(parts())
    assert merged.tensors[W].pieces == (FilePiece("r0", "w", 0, 5), FilePiece("r1", "w", 5, 7))
    assert merged.files.keys() == {"r0", "r1"}
    assert merged.values == {"step": 3, "rng.0": [5], "rng.1": [4]}
    assert merge([Manifest()]) == Manifest()


def test_a_part_that_changed_on_its_way_is_refused() -> None:
    text = parts()[1].text()
    for number in range(len(text)):
        changed = text[:number] + chr(ord(text[number]) ^ 1) + text[number + 1 :]
        with pytest.raises(CheckpointError, match="there: "):
            Merger().add_text(changed, "there")


@pytest.mark.parametrize("pieces", [None, 3, [3], [[]], [["r1"]], [["r1", "w", 0, 5, 1]], [["r1", "w", "0", 5]]])
def test_a_forged_part_is_refused(pieces: Any) -> None:
    content = json.loads(parts()[0].text())
    content["tensors"][W]["pieces"] = pieces
    content.pop("checksum")
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    merger = Merger()
    merger.add(parts()[1])

    def add() -> None:
        merger.add_text(f'{text[:-1]},"checksum":"{zlib.crc32(text.encode()):08x}"}}', "there")
        merger.finish()

    with pytest.raises(CheckpointError, match=r"tensors\["):
        add()


def test_a_part_travels_as_json_and_is_no_manifest() -> None:
    first = parts()[0]
    text = first.to_json(part=True)
    assert Manifest.from_json(text, part=True) == first
    with pytest.raises(CheckpointError, match="elements 0 to 5 are in no piece"):
        Manifest.from_json(text)
    with pytest.raises(CheckpointError, match="elements 0 to 5 are in no piece"):
        first.to_json()


def test_a_valid_part_is_still_no_manifest_and_a_changed_copy_is_checked() -> None:
    first = Manifest.from_json(parts()[0].to_json(part=True), part=True)
    with pytest.raises(CheckpointError, match="elements 0 to 5 are in no piece"):
        first.check()
    with pytest.raises(CheckpointError, match="step: nan"):
        replace(first, values={"step": float("nan")}).check(part=True)


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (Manifest({W: tensor(FilePiece("x", "w", 0, 5), shape=(4, 3))}, {"x": file("w")}), "shape: ranks disagree"),
        (Manifest({W: tensor(FilePiece("x", "w", 0, 5), kind="state:m")}, {"x": file("w")}), "kind: ranks disagree"),
        (
            Manifest({W: TensorRecord(torch.float16, (3, 4), (4, 1), "parameter", ())}),
            "dtype: ranks disagree: torch.float32 and torch.float16",
        ),
        (
            Manifest({W: TensorRecord(torch.float32, (3, 4), (1, 3), "parameter", ())}),
            "stride: ranks disagree",
        ),
        (Manifest({W: tensor(FilePiece("x", "w", 0, 5))}, {"x": file("w")}), "the pieces before it reach 5"),
        (Manifest({"other": tensor(FilePiece("x", "w", 0, 5))}, {"x": file("w")}), "elements 5 to 12 are in no piece"),
        (Manifest({"other": tensor(FilePiece("x", "w", 0, 12))}), "is not among the files"),
        (Manifest(files={"r0": file()}), 'files["r0"]: written by two ranks'),
        (Manifest(values={"step": 4}), "values.step: ranks disagree"),
        (Manifest(values={"step": True}), "values.step: ranks disagree"),
    ],
)
@pytest.mark.parametrize("merge", MERGES)
def test_parts_that_contradict_one_another_are_refused(
    other: Manifest, sentence: str, merge: Callable[[list[Manifest], str], Manifest]
) -> None:
    with pytest.raises(CheckpointError) as caught:
        merge([*parts(), other], "here")
    assert str(caught.value).startswith("here: ")
    assert sentence in str(caught.value)


def test_merging_does_not_change_the_parts() -> None:
    given_parts = parts()
    before = copy.deepcopy(given_parts)
    merge(given_parts)
    assert given_parts == before


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=6),
    st.integers(1, 5),
    st.integers(1, 5),
    st.sampled_from(list(DTYPES.values())),
)
def test_any_number_of_ranks_finds_its_shards_in_what_another_number_wrote(
    shapes: list[tuple[int, ...]], writers: int, readers: int, dtype: torch.dtype
) -> None:
    """The layouts of flat buffers, cut for `writers`, read by `readers`: each shard element comes from its own."""
    specs = [TensorSpec(f"p{index}", shape) for index, shape in enumerate(shapes)]
    flat, found = make_layout(specs, writers), []
    for rank in range(writers):
        held: dict[str, list[FilePiece]] = {slot.name: [] for slot in flat.slots}
        for piece in flat.pieces(rank):
            held[piece.slot.name].append(FilePiece(f"r{rank}", piece.slot.name, piece.in_parameter, piece.numel))
        records = {
            slot.name: TensorRecord(dtype, slot.shape, slot.stride, "parameter", tuple(held[slot.name]))
            for slot in flat.slots
        }
        found.append(Manifest(records, {f"r{rank}": file(*held, size=10_000)}))
    merged = Manifest.from_json(merge(found).to_json())
    starts = {(piece.file, piece.key): piece.start for record in merged.tensors.values() for piece in record.pieces}
    other = make_layout(specs, readers, alignment=1)
    for rank in range(readers):
        for wanted in other.pieces(rank):
            record = merged.tensors[wanted.slot.name]
            got = [
                starts[name, key] + index
                for name, key, first, last in plan(record, wanted.in_parameter, wanted.in_parameter + wanted.numel)
                for index in range(first, last)
            ]
            assert got == list(range(wanted.in_parameter, wanted.in_parameter + wanted.numel))
