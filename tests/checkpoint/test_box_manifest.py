"""A manifest with pieces of boxes: what it says comes back, only boxes need it, and what is wrong in it is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from shardwell.checkpoint import BoxPiece, FilePiece, FileRecord, Manifest, TensorRecord
from shardwell.checkpoint import pieces as pieces_module
from shardwell.checkpoint.manifest_index import index_of, manifest_of
from shardwell.checkpoint.merging import Merger, merge
from shardwell.errors import CheckpointError
from tests.support.forged_manifests import CRC, put, sign

W = "w"
LEFT, RIGHT = ((0, 0), (3, 4)), ((0, 4), (3, 2))


def record(*pieces: FilePiece, shape: tuple[int, ...] = (3, 6), stride: tuple[int, ...] = (6, 1)) -> TensorRecord:
    return TensorRecord(torch.float32, shape, stride, "parameter", pieces)


def file(*keys: str, size: int = 1000, block: int = 64) -> FileRecord:
    return FileRecord(size, CRC, dict.fromkeys(keys, CRC), block=block)


def piece(number: int, start: int, numel: int, box: tuple[tuple[int, ...], tuple[int, ...]]) -> BoxPiece:
    return BoxPiece(f"r{number}", "w", start, numel, *box)


PIECES = [piece(0, 0, 5, LEFT), piece(1, 5, 7, LEFT), piece(2, 0, 3, RIGHT), piece(3, 3, 3, RIGHT)]
FILES = {f"r{number}": file("w", "plain") for number in range(4)}


def example() -> Manifest:
    plain = record(FilePiece("r0", "plain", 0, 12), shape=(3, 4), stride=(4, 1))
    return Manifest({W: record(*PIECES), "plain": plain}, FILES)


def test_boxes_come_back_from_json_in_a_version_of_their_own() -> None:
    text = example().to_json()
    assert Manifest.from_json(text) == example()
    content = json.loads(text)
    assert content["version"] == 2
    assert content["tensors"][W]["pieces"][1] == ["r1", "w", 5, 7, [0, 0], [3, 4]]
    assert content["tensors"]["plain"]["pieces"] == [["r0", "plain", 0, 12]]


def test_without_boxes_the_text_is_that_of_version_1() -> None:
    flat = Manifest({W: record(FilePiece("r0", "w", 0, 18))}, {"r0": FileRecord(100, CRC, {"w": CRC})})
    assert flat.to_json() == (
        '{"files":{"r0":{"algorithm":"crc32","checksums":{"w":"0123abcd"},"header":"0123abcd","size":100}},'
        '"tensors":{"w":{"dtype":"F32","kind":"parameter","pieces":[["r0","w",0,18]],"shape":[3,6],"stride":[6,1]}},'
        '"values":{},"version":1,"checksum":"' + json.loads(flat.to_json())["checksum"] + '"}'
    )


def box(index: int, *path: Any) -> Callable[[dict[str, Any]], None]:
    return put("tensors", W, "pieces", index, *path)


WRONG: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (put("version", 1), "version: expected 2 for a manifest with boxes, found 1"),
    (box(0, ["r0", "w", 0, 5]), "pieces[1]: expected a list of 4"),
    (box(1, ["r1", "w", 5, 7]), "pieces[1]: expected a list of 6"),
    (box(1, ["r1", "w", 5, 7, [0, 0]]), "pieces[1]: expected a list of 6"),
    (box(1, 4, 0), "pieces[1].offsets: expected a list, found 0"),
    (box(1, 5, {}), "pieces[1].sizes: expected a list, found an object"),
    (box(1, 4, [0]), "pieces[1].offsets: expected 2 sizes, found [0]"),
    (box(1, 4, [0, -1]), "pieces[1].offsets: expected 2 sizes"),
    (box(1, 4, [0, [1]]), "pieces[1].offsets: expected 2 sizes, found a list"),
    (box(1, 4, [0, True]), "pieces[1].offsets: expected 2 sizes"),
    (box(1, 5, [3, 4.0]), "pieces[1].sizes: expected 2 sizes"),
    (box(1, 5, [3, 2**70]), "pieces[1].sizes: expected 2 sizes"),
    (box(1, 5, [3, 4, 1]), "pieces[1].sizes: expected 2 sizes"),
    (box(1, 5, [3, 0]), "pieces[1]: a box of [3, 0] at [0, 0] of [3, 6]; expected at least one element"),
    (box(1, 5, [3, 7]), "pieces[1]: a box of [3, 7] at [0, 0] of [3, 6]; expected at least one element, and none bey"),
    (box(3, 4, [1, 4]), "pieces[3]: a box of [3, 2] at [1, 4] of [3, 6]"),
    (box(1, 2, "5"), "pieces[1].start: expected a whole number"),
    (box(1, 3, -7), "pieces[1].numel: expected a whole number"),
    (box(1, 3, 0), "pieces[1]: elements 5 to 5 of the 12 of its box"),
    (box(1, 3, 8), "pieces[1]: elements 5 to 13 of the 12 of its box"),
    (box(1, 3, 6), "the box of [3, 4] at [0, 0]: elements 11 to 12 are in no piece"),
    (box(0, 3, 6), "the box of [3, 4] at [0, 0]: elements 5 to 6 are in two pieces"),
    (box(0, 3, 4), "the box of [3, 4] at [0, 0]: elements 4 to 5 are in no piece"),
    (lambda content: content["tensors"][W]["pieces"].pop(0), "elements 0 to 5 are in no piece"),
    (lambda content: content["tensors"][W].update(pieces=content["tensors"][W]["pieces"][:2]), "[0, 4] is in no box"),
    (lambda content: [box(i, 4, [0, 3])(content) for i in (2, 3)], "element [0, 3] is in 2 boxes; expected one"),
    (lambda content: [box(i, 5, [3, 3])(content) or box(i, 3, 12)(content) for i in (0, 1)], "of the 9 of its box"),
    (put("tensors", W, "shape", [3, 8]), f'tensors["{W}"].stride'),
    (lambda content: content["tensors"][W].update(shape=[4, 6]), "element [3, 0] is in no box; expected one"),
    (lambda content: content["tensors"][W].update(shape=[3, 2**40], stride=[2**40, 1]), "[0, 6] is in no box"),
    (box(0, 0, "r9"), 'pieces[0].file: "r9" is not among the files'),
    (box(0, 0, "r1"), "claimed twice"),
    (put("files", "r3", "size", 11), "pieces[3]: more bytes than r3 has (11)"),
    (lambda content: content["files"]["r3"].pop("block"), "pieces[3]: r3 has no checksums of blocks"),
]


@pytest.mark.parametrize(("change", "sentence"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_box_is_named_with_the_manifest(change: Callable[[dict[str, Any]], Any], sentence: str) -> None:
    content = json.loads(example().to_json())
    change(content)
    with pytest.raises(CheckpointError) as caught:
        Manifest.from_json(sign(content), "here/manifest.json")
    assert str(caught.value).startswith("here/manifest.json: ")
    assert sentence in str(caught.value)


def test_the_number_of_boxes_and_of_cut_dimensions_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    halves = [piece(n, 0, 1, (tuple(n >> bit & 1 for bit in range(5)), (1,) * 5)) for n in range(32)]
    manifest = Manifest(
        {W: record(*halves, shape=(2,) * 5, stride=(16, 8, 4, 2, 1))}, {h.file: file(W) for h in halves}
    )
    with pytest.raises(CheckpointError, match="boxes cut 5 dimensions; expected at most 4"):
        manifest.check()
    monkeypatch.setattr(pieces_module, "MAX_BOXES", 31)
    with pytest.raises(CheckpointError, match="32 different boxes; expected at most 31"):
        manifest.check()


# --- merging ----------------------------------------------------------------------------------------------------


def parts(pieces: Sequence[FilePiece], **more: Any) -> list[Manifest]:
    return [Manifest({W: record(piece, **more)}, {piece.file: file("w")}) for piece in pieces]


def test_parts_of_boxes_are_merged_in_any_order() -> None:
    given = parts([PIECES[index] for index in (2, 1, 3, 0)])
    for part in given:
        assert Manifest.from_json(part.to_json(part=True), part=True) == part
    merger = Merger()
    for part in given:
        merger.add_text(part.text(), "part")
    whole = merge(given)
    assert whole.tensors[W] == record(*PIECES)
    assert merger.finish() == whole == manifest_of(index_of(whole))
    with pytest.raises(CheckpointError, match="elements 0 to 5 are in no piece"):
        merge(given[:3])
    with pytest.raises(CheckpointError, match=r"element \[0, 0\] is in no box"):
        merge([given[0], given[2]])


def test_boxes_that_are_rows_are_written_as_ranges_which_older_readers_know() -> None:
    rows = [piece(0, 0, 4, ((0, 0), (2, 6))), piece(1, 4, 8, ((0, 0), (2, 6))), piece(2, 0, 6, ((2, 0), (1, 6)))]
    merged = merge(parts([rows[index] for index in (2, 1, 0)]))
    ranges = [FilePiece("r0", "w", 0, 4), FilePiece("r1", "w", 4, 8), FilePiece("r2", "w", 12, 6)]
    assert merged.tensors[W] == record(*ranges)
    assert merged.version == 1
    assert Manifest.from_json(merged.to_json()) == merged


def test_columns_are_ranges_where_columns_are_rows_of_memory() -> None:
    columns = [piece(0, 0, 12, LEFT), piece(1, 0, 6, RIGHT)]
    merged = merge(parts(columns, stride=(1, 3)))
    assert merged.tensors[W].pieces == (FilePiece("r0", "w", 0, 12), FilePiece("r1", "w", 12, 6))


def test_the_order_of_dimensions_comes_from_ranks_that_can_tell() -> None:
    one, two = piece(0, 0, 3, ((0, 0), (1, 3))), piece(1, 0, 6, ((1, 0), (2, 3)))
    three = piece(2, 0, 9, ((0, 3), (3, 3)))
    given = [*parts([one]), *parts([two, three], stride=(1, 3))]  # a single row looks the same in both orders
    for order in ((0, 1, 2), (2, 1, 0)):
        assert merge([given[index] for index in order]).tensors[W].stride == (1, 3)
    with pytest.raises(CheckpointError, match=r"stride: ranks disagree: \(6, 1\) and \(1, 3\)"):
        merge([*parts([two]), *parts([one, three], stride=(1, 3))])


def test_ranks_that_disagree_about_boxes_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"here: tensors\[\"w\"\].pieces: ranks disagree: a box for some"):
        merge(parts([PIECES[0], FilePiece("r1", "w", 5, 7)]), "here")
    with pytest.raises(CheckpointError, match="elements 0 to 5 are in two pieces"):
        merge(parts([*PIECES, piece(4, 0, 5, LEFT)]))
