"""What was written is read, on every engine, from any number of paths, and nothing else is touched."""

from __future__ import annotations

import gc
import itertools
import os
import random
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwell.errors import ShardwellError
from shardwell.kernels.io import SECTOR
from shardwell.memory import Device
from shardwell.offload import disk
from shardwell.offload.disk import DiskExtent, DiskTier, FileRegion, aligned
from tests.support.command import environment
from tests.support.disk_engines import BLOCK, EACH, Stuck, noise, settings
from tests.support.internals import files_of
from tests.support.patience import HANG

SIZES = [0, 1, 511, SECTOR - 1, SECTOR, SECTOR + 1, BLOCK, BLOCK + 1, 7 * BLOCK, 9 * BLOCK + 5 * SECTOR + 17]


def paths(root: Path, num_paths: int) -> list[Path]:
    found = [root / f"drive{number}" for number in range(num_paths)]
    for path in found:
        path.mkdir(exist_ok=True)
    return found


@EACH
@pytest.mark.parametrize("num_paths", [1, 2, 3])
def test_what_was_written_is_read_and_nothing_around_it(engine: str, num_paths: int, tmp_path: Path) -> None:
    with DiskTier(paths(tmp_path, num_paths), settings(engine)) as tier:
        kept = [(tier.allocate(size), noise(size, seed)) for seed, size in enumerate(SIZES)]
        for transfer in [tier.write(extent, 0, memory) for extent, memory in kept]:
            transfer.wait()
        for extent, memory in kept:
            room = aligned(memory.numel() + SECTOR).fill_(7)
            tier.read(extent, 0, room[: memory.numel()]).wait()
            assert torch.equal(room[: memory.numel()], memory)
            assert bool((room[memory.numel() :] == 7).all())


@EACH
def test_any_stretch_can_be_read_and_changed(engine: str, tmp_path: Path) -> None:
    size, choose = 40 * BLOCK + 100, random.Random(0)
    with DiskTier(paths(tmp_path, 3), settings(engine)) as tier:
        extent, expected = tier.allocate(size), noise(size)
        tier.write(extent, 0, expected).wait()
        for seed in range(30):
            start = SECTOR * choose.randrange(size // SECTOR)
            end = min(size, start + SECTOR * choose.randrange(1, 60))
            fresh = noise(end - start, seed)
            tier.write(extent, start, fresh).wait()
            expected[start:end] = fresh
            start = SECTOR * choose.randrange(size // SECTOR)
            found = aligned(choose.randrange(1, size - start + 1))
            tier.read(extent, start, found).wait()
            assert torch.equal(found, expected[start : start + found.numel()])


@EACH
@pytest.mark.parametrize("single_submit", [False, True])
@pytest.mark.parametrize("overlap_events", [False, True])
@pytest.mark.parametrize("parallelism", [1, 3])
def test_every_setting_moves_the_same_bytes(
    engine: str, single_submit: bool, overlap_events: bool, parallelism: int, tmp_path: Path
) -> None:
    chosen = settings(
        engine, single_submit=single_submit, overlap_events=overlap_events, intra_op_parallelism=parallelism
    )
    with DiskTier([tmp_path], chosen) as tier:
        memory, found = noise(50 * BLOCK + 9), aligned(50 * BLOCK + 9)
        extent = tier.allocate(memory.numel())
        tier.write(extent, 0, memory).wait()
        tier.read(extent, 0, found).wait()
        assert torch.equal(found, memory)


@EACH
def test_many_threads_have_many_transfers_in_flight(engine: str, tmp_path: Path) -> None:
    size, wrong = 5 * BLOCK + 1, []

    def work(tier: DiskTier, seed: int) -> None:
        kept = [(tier.allocate(size), noise(size, 100 * seed + number)) for number in range(20)]
        for transfer in [tier.write(extent, 0, memory) for extent, memory in kept]:
            transfer.wait()
        found = [aligned(size) for _ in kept]
        for transfer in [tier.read(extent, 0, room) for (extent, _), room in zip(kept, found, strict=True)]:
            transfer.wait()
        wrong.extend(seed for (_, memory), room in zip(kept, found, strict=True) if not torch.equal(memory, room))

    with DiskTier(paths(tmp_path, 2), settings(engine)) as tier:
        threads = [threading.Thread(target=work, args=(tier, seed)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert tier.num_bytes >= 80 * size


@given(
    num_bytes=st.integers(0, 40 * BLOCK),
    num_paths=st.integers(1, 5),
    start=st.integers(0, 40),
    size=st.integers(0, 20 * BLOCK),
)
def test_stripes_cover_an_extent_without_overlap(num_bytes: int, num_paths: int, start: int, size: int) -> None:
    shares = [disk._share(num_bytes, BLOCK, place, num_paths) for place in range(num_paths)]
    assert sum(shares) == -(-num_bytes // SECTOR) * SECTOR
    assert max(shares) - min(shares) <= BLOCK
    extent = DiskExtent(num_bytes, BLOCK, tuple(FileRegion(lane, 0, share) for lane, share in enumerate(shares)))
    pieces = list(extent.places(0, num_bytes))
    taken = {(lane, offset + at) for lane, offset, _, length in pieces for at in range(0, length, SECTOR)}
    assert len(taken) == sum(shares) // SECTOR
    assert all(offset + length <= shares[lane] for lane, offset, _, length in pieces)
    start = min(start * SECTOR, num_bytes // SECTOR * SECTOR)
    size = min(size, num_bytes - start)
    at = 0
    for _, offset, place, length in extent.places(start, size):
        assert (place, offset % SECTOR, length > 0) == (at, 0, True)
        at += length
    assert at == size


def test_extents_are_spread_over_the_paths(tmp_path: Path) -> None:
    with DiskTier(paths(tmp_path, 3), settings()) as tier:
        for _ in range(30):
            tier.allocate(BLOCK)
        assert [file.size for file in files_of(tier)] == [10 * BLOCK] * 3


def test_freed_space_is_used_again_and_the_rest_of_the_extents_stays(tmp_path: Path) -> None:
    choose, kept = random.Random(0), {}
    with DiskTier(paths(tmp_path, 2), settings()) as tier:
        for seed in range(120):
            if kept and choose.random() < 0.5:
                tier.free(kept.pop(choose.choice(list(kept)))[0])
            else:
                memory = noise(choose.randrange(1, 6 * BLOCK), seed)
                kept[seed] = tier.allocate(memory.numel()), memory
                tier.write(kept[seed][0], 0, memory).wait()
        assert len(kept) > 5
        for extent, memory in kept.values():
            found = aligned(memory.numel())
            tier.read(extent, 0, found).wait()
            assert torch.equal(found, memory)
        for extent, _ in kept.values():
            tier.free(extent)
        assert tier.num_bytes == 0
        assert [os.fstat(file.descriptor).st_size for file in files_of(tier)] == [0, 0]


@EACH
def test_a_ticket_may_be_asked_at_any_time(engine: str, tmp_path: Path) -> None:
    tier = DiskTier([tmp_path], settings(engine))
    transfer = tier.write(tier.allocate(BLOCK), 0, noise(BLOCK))
    tier.close()
    assert transfer.is_done
    transfer.wait()
    transfer.wait()


def test_memory_lives_until_its_transfer_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Stuck()
    monkeypatch.setattr(disk, "open_queue", lambda *_: queue)
    tier = DiskTier([tmp_path], settings())
    extent, memory = tier.allocate(BLOCK), aligned(BLOCK)
    alive = weakref.ref(memory)
    tier.write(extent, 0, memory)
    del memory
    gc.collect()
    assert alive() is not None
    queue.is_done = True
    tier.free(extent)
    assert alive() is None
    del tier
    gc.collect()
    assert queue.is_closed


@pytest.mark.parametrize(
    ("start", "memory", "message"),
    [
        (100, aligned(SECTOR), "bytes 100 to 4196 of an extent of 40000; expected them inside it, from a multiple"),
        (-SECTOR, aligned(SECTOR), "bytes -4096 to 0 of an extent"),
        (36864, aligned(SECTOR), "bytes 36864 to 40960 of an extent of 40000"),
        (0, aligned(SECTOR + 1), "writing bytes 0 to 4097 of an extent of 40000 would change what follows"),
        (0, aligned(2 * SECTOR)[1:SECTOR], "no multiple of 4096; take it from aligned"),
        (0, torch.zeros(SECTOR, device="meta"), "found a tensor on meta"),
        (0, aligned(2 * SECTOR)[::2], "expected a contiguous one"),
    ],
)
def test_what_a_drive_cannot_do_is_refused(start: int, memory: torch.Tensor, message: str, tmp_path: Path) -> None:
    with DiskTier([tmp_path], settings()) as tier, pytest.raises(ShardwellError, match=message):
        tier.write(tier.allocate(40000), start, memory)


def test_only_extents_of_an_open_tier_are_known(tmp_path: Path) -> None:
    tier, other = DiskTier([tmp_path], settings()), DiskTier([tmp_path], settings())
    mine, freed = tier.allocate(SECTOR), tier.allocate(SECTOR)
    tier.free(freed)
    for extent in (freed, other.allocate(SECTOR)):
        with pytest.raises(ShardwellError, match="not one of this tier's, or was freed"):
            tier.read(extent, 0, aligned(SECTOR))
    other.close()
    tier.close()
    tier.close()
    with pytest.raises(ShardwellError, match="closed"):
        tier.read(mine, 0, aligned(SECTOR))


def test_aligned_memory_is_aligned() -> None:
    for num_bytes, device in itertools.product((0, 1, 4096, 100_001), (None, Device("cpu", keep_pages=False))):
        memory = aligned(num_bytes, device)
        assert (memory.numel(), memory.dtype) == (num_bytes, torch.uint8)
        assert num_bytes == 0 or memory.data_ptr() % SECTOR == 0


FORKED = """
import os, sys
from shardwell.offload.disk import AioSettings, DiskTier, aligned
tier = DiskTier([sys.argv[1]], AioSettings(engine=sys.argv[2]))
extent, memory, found = tier.allocate(1 << 20), aligned(1 << 20).fill_(5), aligned(1 << 20)
tier.write(extent, 0, memory).wait()
child = os.fork()
if child == 0:
    tier.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
tier.read(extent, 0, found).wait()
assert found.sum() == 5 << 20
"""


@EACH
def test_a_fork_can_end_while_its_parent_goes_on(engine: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORKED, os.fspath(tmp_path), engine]
    subprocess.run(command, env=environment(), check=True, timeout=HANG)


@pytest.mark.slow
@EACH
@pytest.mark.parametrize("kind", ["a write", "an urgent read"])
def test_a_long_read_holds_up_neither_writes_nor_what_is_urgent(engine: str, kind: str, tmp_path: Path) -> None:
    long, short = 4096 * BLOCK, 2 * BLOCK
    with DiskTier([tmp_path], settings(engine)) as tier:
        first, second = tier.allocate(long), tier.allocate(short)
        tier.write(first, 0, aligned(long)).wait()
        tier.write(second, 0, noise(short)).wait()
        reads = [tier.read(first, 0, aligned(long)) for _ in range(2)]
        if kind == "a write":
            tier.write(second, 0, noise(short, 1)).wait()
        else:
            tier.read(second, 0, aligned(short), urgent=True).wait()
        assert not reads[1].is_done
        for transfer in reads:
            transfer.wait()
