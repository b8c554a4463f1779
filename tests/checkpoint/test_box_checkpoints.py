"""Tensors that were saved in boxes: any cut of them is read from any other, every byte checked, by all who read."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

import shardwell
from shardwell.checkpoint import BoxPiece, FilePiece, Folder, Manifest, checksums, load, stream
from shardwell.checkpoint.boxes import Box, Region, order_of, reordered, stride_in_order
from shardwell.checkpoint.compare import compare
from shardwell.checkpoint.export import to_dcp, to_own, to_safetensors
from shardwell.checkpoint.load import CheckpointLoader
from shardwell.checkpoint.merging import merge
from shardwell.checkpoint.rank_contents import RankContents, SavedPiece
from shardwell.checkpoint.sources import DcpSource, ShardwellSource, Source, open_source, reading
from shardwell.checkpoint.verify import damages
from shardwell.errors import CheckpointError
from shardwell.sharding.layout import TensorSpec, make_layout
from tests.campaigns.mutations import OWN
from tests.support.checkpoint_legs import everything
from tests.support.checkpoint_samples import Counting, assert_same, save_own
from tests.support.checkpoint_samples import everything as all_tensors
from tests.support.internals import units_of
from tests.support.models import zero
from tests.support.ranks import Ranks

NAME = "model/w"
SHAPE = (6, 10)
LEFT_AND_RIGHT = [((0, 0), (6, 4)), ((0, 4), (6, 6))]
TOP_AND_BOTTOM = [((0, 0), (1, 10)), ((1, 0), (5, 10))]
Cut = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes


def specs(cuts: Sequence[Cut], shape: tuple[int, ...], stride: Sequence[int]) -> list[TensorSpec]:
    order = order_of(stride)
    return [TensorSpec("w", sizes, stride_in_order(sizes, order), 0, shape, offsets) for offsets, sizes in cuts]


def save_boxes(
    root: Path, tensor: Tensor, cuts: Sequence[Cut], num_shards: int, name: str = NAME, values: Any = None
) -> Path:
    """A checkpoint of a tensor, as ranks write it that hold boxes of it, each cut into shards."""
    folder = Folder(root)
    path = folder.begin("a")
    parts = []
    for number, spec in enumerate(specs(cuts, tuple(tensor.shape), tensor.stride())):
        (slot,) = (layout := make_layout([spec], num_shards, alignment=1)).slots
        (offsets, sizes), box = cuts[number], torch.empty(slot.numel, dtype=tensor.dtype)
        cut = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
        box.as_strided(slot.shape, slot.stride).copy_(tensor[cut])
        for shard in range(num_shards):
            file = f"rank-{number}-{shard}.safetensors"
            for piece in layout.pieces(shard):
                values_of_piece = box[piece.in_parameter :][: piece.numel]
                where = (piece.in_parameter, piece.numel)
                found = SavedPiece.of(slot, name, "parameter", tensor.dtype, where, lambda part=values_of_piece: part)
                saved = {one.key: one for one in found}
                record = stream(
                    path / file, [one.entry for one in saved.values()], lambda key, of=saved: of[key].read()
                )
                parts += [Manifest({name: one.record(file)}, {file: record}, values or {}) for one in saved.values()]
    return folder.commit(path, "a", merge(parts))


@contextmanager
def small_reads(block: int, stage: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksums, "BLOCK", block)
        patch.setattr(reading, "BLOCK", block)
        patch.setattr(reading, "STAGE", stage)
        patch.setattr(os, "fsync", lambda descriptor: None)  # there are many small files
        yield


# --- any cut from any other -------------------------------------------------------------------------------------


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Cut]:
    """A cut of each dimension into one or two parts."""
    marks = [sorted({0, size, *draw(st.lists(st.integers(1, size), max_size=1))}) for size in shape]
    ranges = [list(itertools.pairwise(each)) for each in marks]
    return [(tuple(a for a, _ in each), tuple(b - a for a, b in each)) for each in itertools.product(*ranges)]


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_any_cut_is_read_from_any_other(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
    order = data.draw(st.permutations(range(len(shape))))
    numbers = torch.arange(torch.tensor(shape).prod(), dtype=data.draw(st.sampled_from([torch.int16, torch.float64])))
    tensor = numbers.as_strided(shape, stride_in_order(shape, order))
    cuts = data.draw(grids(shape))
    with tempfile.TemporaryDirectory() as folder, small_reads(data.draw(st.sampled_from([4, 16])), 24):
        save_boxes(Path(folder), tensor, cuts, data.draw(st.integers(1, 3)))
        source = open_source(folder)
        assert isinstance(source, ShardwellSource)
        stored = source.tensors[NAME]
        flat = source.read(NAME, 0, tensor.numel())
        assert torch.equal(flat.as_strided(stored.shape, stored.order), tensor)
        start, stop = sorted(data.draw(st.tuples(*[st.integers(0, tensor.numel())] * 2)))
        assert torch.equal(source.read(NAME, start, stop), flat[start:stop])
        for offsets, sizes in data.draw(grids(shape)):
            check_box([source, Counting({NAME: tensor})], tensor, (offsets, sizes), data)
        source.close()


def check_box(sources: list[Source], tensor: Tensor, cut: Cut, data: st.DataObject) -> None:
    """Any range of a box is read from each source, in the order of its memory."""
    part = tensor[tuple(slice(at, at + size) for at, size in zip(*cut, strict=True))]
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, part.numel())] * 2)))
    for source in sources:
        order = order_of(source.tensors[NAME].order)
        box = Box(reordered(cut[0], order), reordered(cut[1], order))
        expected = part.permute(order).contiguous().view(-1)
        found = torch.empty(stop - start + 2, dtype=data.draw(st.sampled_from([tensor.dtype, torch.float64])))
        reading.region_into(source, NAME, Region(box, start, stop), found[1:-1])
        assert torch.equal(found[1:-1].to(tensor.dtype), expected[start:stop])


def test_a_flat_checkpoint_is_read_in_boxes(tmp_path: Path) -> None:
    tensor = torch.arange(60.0).view(SHAPE)
    save_own(tmp_path, "a", {NAME: tensor}, num_files=3)
    with small_reads(16, 64):
        source = open_source(tmp_path)
        for offsets, sizes in LEFT_AND_RIGHT:
            found = torch.empty(sizes[0] * sizes[1])
            reading.region_into(source, NAME, Region(Box(offsets, sizes), 0, len(found)), found)
            assert torch.equal(found.view(sizes), tensor[:, offsets[1] :][:, : sizes[1]])


def test_only_boxes_that_are_no_ranges_are_written_as_boxes(tmp_path: Path) -> None:
    tensor = torch.arange(60.0).view(SHAPE)
    for name, cuts, kind in (("columns", LEFT_AND_RIGHT, BoxPiece), ("rows", TOP_AND_BOTTOM, FilePiece)):
        save_boxes(tmp_path / name, tensor, cuts, 2)
        manifest = Folder(tmp_path / name).open("a")
        assert {type(piece) for piece in manifest.tensors[NAME].pieces} == {kind}
        assert manifest.version == (2 if kind is BoxPiece else 1)
        assert torch.equal(open_source(tmp_path / name).read(NAME, 0, 60).view(SHAPE), tensor)


def test_a_rank_reads_what_it_needs_of_large_boxes(tmp_path: Path) -> None:
    tensor = torch.arange(400_000.0).view(100, 4000)
    cuts: list[Cut] = [((0, 0), (100, 1000)), ((0, 1000), (100, 3000))]
    with small_reads(64, 4096):
        save_boxes(tmp_path, tensor, cuts, 2)
        source = open_source(tmp_path)
        assert isinstance(source, ShardwellSource)
        part = torch.empty(100 * 500)
        reading.region_into(source, NAME, Region(Box((0, 750), (100, 500)), 0, part.numel()), part)
    assert torch.equal(part.view(100, 500), tensor[:, 750:1250])
    ends = 2 * 2 * 100 * 64  # of each row, of each of two boxes: at most a block at each end
    assert part.nbytes <= source.bytes_read <= part.nbytes + ends


# --- damage -----------------------------------------------------------------------------------------------------


def test_every_damaged_byte_of_a_box_is_found_by_who_reads_it(tmp_path: Path) -> None:
    tensor = torch.arange(60, dtype=torch.int16).view(SHAPE)
    with small_reads(8, 16):
        path = save_boxes(tmp_path, tensor, LEFT_AND_RIGHT, 2)
        for file in sorted(path.glob("*.safetensors")):
            content = file.read_bytes()
            for at in range(8 + int.from_bytes(content[:8], "little"), len(content)):
                file.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
                source = open_source(tmp_path)
                with pytest.raises(CheckpointError, match="damaged: crc32"):
                    source.read(NAME, 0, 60)
                source.close()
            assert [file.name in each for each in damages(path, Folder(tmp_path).open("a"))] == [True]
            file.write_bytes(content)
    assert list(damages(path, Folder(tmp_path).open("a"))) == []


def test_a_file_whose_entry_is_of_another_size_is_refused(tmp_path: Path) -> None:
    path = save_boxes(tmp_path, torch.arange(60.0).view(SHAPE), LEFT_AND_RIGHT, 1)
    manifest = Folder(tmp_path).open("a")
    file = path / "rank-1-0.safetensors"
    file.unlink()
    changed = stream(file, [SavedPiece(NAME, "", torch.float32, (40,), (1,), 0, 40, torch.empty_like).entry], fill_40)
    forged = Manifest(manifest.tensors, {**manifest.files, file.name: changed})
    forged.check()
    with pytest.raises(CheckpointError, match="tensor 'model/w': 40 elements under 'model/w'; the manifest says 36"):
        ShardwellSource(path, forged).read(NAME, 0, 60)
    assert "40 elements; the manifest says 36" in "".join(damages(path, forged))


def fill_40(name: str) -> Tensor:
    return torch.zeros(40)


@pytest.mark.parametrize("name", [name for name in OWN if name != "latest"])
def test_a_changed_checkpoint_of_boxes_is_refused_or_read_as_it_was(tmp_path: Path, name: str) -> None:
    tensor = torch.arange(6000, dtype=torch.int16).view(60, 100)
    with small_reads(256, 1024):
        save_boxes(
            tmp_path / "whole",
            tensor,
            [((0, 0), (60, 30)), ((0, 30), (60, 70))],
            2,
            values={"counters": {"global_steps": 3}},
        )
        for seed in range(12):
            shutil.copytree(tmp_path / "whole", tmp_path / f"{seed}")
            OWN[name][0](tmp_path / f"{seed}" / "a", random.Random(seed))
            try:
                source = open_source(tmp_path / f"{seed}" / "a")
                found = source.read(NAME, 0, tensor.numel())
            except CheckpointError:
                continue
            assert torch.equal(found.view(tensor.shape), tensor)


# --- exports ----------------------------------------------------------------------------------------------------


def test_boxes_are_compared_and_exported_like_any_tensor(tmp_path: Path) -> None:
    tensor = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    save_boxes(tmp_path / "boxes", tensor, LEFT_AND_RIGHT, 2)
    save_own(tmp_path / "flat", "a", {NAME: tensor})
    source = open_source(tmp_path / "boxes")
    assert compare(source, open_source(tmp_path / "flat")).same
    to_own(source, tmp_path / "own", "b")
    to_dcp(source, tmp_path / "dcp")
    to_safetensors(source, tmp_path / "hf")
    assert Folder(tmp_path / "own").open("b").version == 1
    assert_same(all_tensors(open_source(tmp_path / "own")), {NAME: tensor})
    assert_same(all_tensors(DcpSource(tmp_path / "dcp")), {NAME: tensor})
    assert_same(load_file(tmp_path / "hf" / "model.safetensors"), {"w": tensor})


# --- engines ----------------------------------------------------------------------------------------------------


class Part(nn.Module):
    """A layer of which this engine may hold a part: the model's own forward works on it as it is."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.full((3,), 2.0))

    def forward(self, factor: Tensor) -> Tensor:
        return (self.w.sin() * factor).sum() + self.bias.sum()


@contextmanager
def slots_as(offsets: tuple[int, ...] | None) -> Iterator[None]:
    """Inside, the weight of a `Part` is a box of a tensor of SHAPE."""
    plain = TensorSpec.dense

    def dense(name: str, shape: Sequence[int], stride: Sequence[int], label: int = 0) -> TensorSpec:
        spec = plain(name, shape, stride, label)
        if offsets is None or name != "w":
            return spec
        return TensorSpec(name, spec.shape, spec.stride, label, SHAPE, offsets)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TensorSpec, "dense", dense)
        yield


def engine_of(weight: Tensor, offsets: tuple[int, ...] | None = None, steps: int = 0) -> shardwell.Engine:
    model = Part(weight)
    config = zero(3, shardwell={"shard_at_world_one": True})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with slots_as(offsets):
        engine = shardwell.initialize(model=model, optimizer=optimizer, config=config, device="cpu").engine
    for step in range(steps):
        engine.backward(engine(torch.tensor(1.0 + step)))
        engine.step()
    return engine


def box_of(tensor: Tensor, cut: Cut) -> Tensor:
    return tensor[tuple(slice(at, at + size) for at, size in zip(*cut, strict=True))].clone()


def save_engines(root: Path, engines: list[shardwell.Engine]) -> None:
    """One checkpoint of engines that hold boxes of `w`; the first one saves what all have."""
    folder = Folder(root)
    path = folder.begin("a")
    parts = []
    for number, engine in enumerate(engines):
        contents = RankContents(engine.module, units_of(engine), engine.optimizer, rank=number)
        mine = {name: part for name, part in contents.parts.items() if part.box is not None or number == 0}
        file = f"rank-{number}.safetensors"
        record = stream(path / file, [part.entry for part in mine.values()], lambda name, mine=mine: mine[name].read())
        parts.append(
            Manifest({name: part.record(file) for name, part in mine.items()}, {file: record}, contents.scalars)
        )
        contents.close()
    folder.commit(path, "a", merge(parts))


def masters_and_states(engine: shardwell.Engine) -> dict[str, Tensor]:
    return {name: torch.as_tensor(value) for name, value in everything(engine).items()}


def load_engine(engine: shardwell.Engine, root: Path) -> dict[str, Tensor]:
    source = open_source(root)
    loader = CheckpointLoader(source, engine.module, units_of(engine), engine.optimizer)
    loader.fetch()
    loader.apply()
    source.close()
    return masters_and_states(engine)


@pytest.fixture
def trained(tmp_path: Path) -> dict[str, Tensor]:
    """A checkpoint of two engines that hold columns, and what an engine of the full weight has after the same steps."""
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    engines = [engine_of(box_of(weight, cut), cut[0], steps=2) for cut in LEFT_AND_RIGHT]
    save_engines(tmp_path / "run", engines)
    return masters_and_states(engine_of(weight, steps=2))


def test_halves_of_engines_are_loaded_as_the_full_tensor(trained: dict[str, Tensor], tmp_path: Path) -> None:
    manifest = Folder(tmp_path / "run").open("a")
    boxed = [name for name, record in manifest.tensors.items() if record.is_boxed]
    assert boxed == ["model/w", "state/w/exp_avg", "state/w/exp_avg_sq"]
    assert manifest.tensors["model/w"].shape == SHAPE
    assert_same(load_engine(engine_of(torch.zeros(SHAPE)), tmp_path / "run"), trained)


@pytest.mark.parametrize("few_bytes", [False, True], ids=["staged", "read twice"])
@pytest.mark.parametrize("transposed", [False, True], ids=["row-major", "column-major"])
@pytest.mark.parametrize("cuts", [LEFT_AND_RIGHT, TOP_AND_BOTTOM, [((2, 3), (3, 5))]], ids=["same", "rows", "inside"])
def test_columns_are_loaded_as_other_cuts(
    trained: dict[str, Tensor],
    tmp_path: Path,
    cuts: list[Cut],
    transposed: bool,
    few_bytes: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if few_bytes:
        monkeypatch.setattr(load, "_SHARE", 0.0)
    for cut in cuts:
        empty = torch.zeros(cut[1][::-1]).t() if transposed else torch.zeros(cut[1])
        found = load_engine(engine_of(empty, cut[0]), tmp_path / "run")
        expected = {name: box_of(one, cut) if one.shape == SHAPE else one for name, one in trained.items()}
        assert_same(found, expected)


def test_a_box_of_another_tensor_is_refused(trained: dict[str, Tensor], tmp_path: Path) -> None:
    engine = engine_of(torch.zeros(6, 4))
    before = masters_and_states(engine)
    with pytest.raises(CheckpointError, match=r"'model/w' has shape \(6, 10\), but 'w' of the model has \(6, 4\)"):
        load_engine(engine, tmp_path / "run")
    assert_same(masters_and_states(engine), before)


def load_at_two_ranks(root: str) -> dict[str, Tensor]:
    return load_engine(engine_of(torch.zeros(SHAPE)), Path(root))


@pytest.mark.slow
def test_halves_of_engines_are_loaded_by_two_ranks(trained: dict[str, Tensor], tmp_path: Path, ranks: Ranks) -> None:
    for found in ranks.run(2, load_at_two_ranks, str(tmp_path / "run")):
        assert_same({name: torch.as_tensor(value) for name, value in found.items()}, trained)
