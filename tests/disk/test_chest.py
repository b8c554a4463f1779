"""Tensors that rest on disk keep their identity and come back as they were."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwell import kernels
from shardwell.errors import ShardwellError
from shardwell.memory import Device, MemoryStats, Tier
from shardwell.offload.disk import DiskExtent, DiskTier, DiskTransfer, aligned
from shardwell.offload.swapped_tensors import SwappedTensors
from tests.support.disk_engines import replace_file, settings
from tests.support.internals import files_of


def test_a_chest_gives_back_what_was_put_into_it(tmp_path: Path) -> None:
    with DiskTier([tmp_path], settings()) as tier:
        moved: list[int] = []
        memory_stats = MemoryStats()
        swapped = SwappedTensors(tier, memory_stats, "unit", lambda: moved.append(1))
        values = [torch.randn(5000), torch.arange(7, dtype=torch.uint8), torch.randn(1)]
        tensors = [value.clone() for value in values]
        blank = torch.full((1,), 3.0).expand(1000)
        swapped.register([*tensors, blank])
        assert tensors[0].isnan().all()
        assert (tensors[1] == 255).all()
        assert (blank == 3.0).all()
        assert [t.untyped_storage().nbytes() for t in (*tensors, blank)] == [4, 1, 4, 4]
        swapped.open()
        swapped.open()
        assert all(torch.equal(t, v) for t, v in zip(tensors, values, strict=True))
        assert memory_stats.report().total() == swapped.num_bytes == 20480 + 3 * 4096
        tensors[0][17], blank[999] = 5.0, 4.0
        swapped.close(changed=True)
        swapped.close(changed=False)
        assert memory_stats.report().total() == 0
        assert blank.isnan().all()
        reserved = tier.num_bytes
        swapped.register([tensors[0], blank])
        assert tier.num_bytes <= reserved
        swapped.restore()
        values[0][17] = 5.0
        assert torch.equal(tensors[0], values[0])
        assert blank.tolist() == [3.0] * 999 + [4.0]
        assert tier.num_bytes == 0
        assert len(moved) >= 4


def test_one_number_may_have_any_stride(tmp_path: Path) -> None:
    with DiskTier([tmp_path], settings()) as tier:
        tensor = torch.full((1,), 2.5).as_strided((1,), (0,))
        swapped = SwappedTensors(tier, MemoryStats(), "unit")
        swapped.register([tensor])
        with swapped.swapped_in(changes=True):
            assert tensor.tolist() == [2.5]
            tensor.fill_(3.5)
        with swapped.swapped_in(changes=False):
            assert tensor.tolist() == [3.5]


def test_what_is_not_changed_is_not_kept(tmp_path: Path) -> None:
    with DiskTier([tmp_path], settings()) as tier:
        tensor = torch.zeros(100)
        swapped = SwappedTensors(tier, MemoryStats(), "unit")
        swapped.register([tensor])
        swapped.open()
        tensor.fill_(1.0)
        swapped.close(changed=False)
        swapped.open()
        assert not tensor.any()
        swapped.close(changed=False)


def test_a_write_that_failed_does_not_matter_to_who_writes_all_anew(tmp_path: Path) -> None:
    with DiskTier([tmp_path], settings()) as tier:
        swapped, tensor = SwappedTensors(tier, MemoryStats(), "unit"), torch.zeros(1).expand(5000)
        swapped.register([tensor])
        memory = aligned(swapped.num_bytes)
        drive = os.dup(files_of(tier)[0].descriptor)

        def rewrite(value: float) -> None:
            swapped.swap_in_to(memory, blank=True)
            tensor.fill_(value)
            for transfer in swapped.swap_out(changed=True):
                transfer.end()

        replace_file(tier, __file__, os.O_RDONLY)
        rewrite(1.0)
        with pytest.raises(ShardwellError, match="Bad file descriptor"):
            swapped.swap_in_to(memory)
        os.dup2(drive, files_of(tier)[0].descriptor)
        os.close(drive)
        with pytest.raises(ShardwellError, match="Bad file descriptor"):
            swapped.open()
        rewrite(2.0)
        with swapped.swapped_in(changes=False):
            assert (tensor == 2.0).all()


@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_tensors_that_cannot_be_kept_stay_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    with DiskTier([tmp_path], settings()) as tier:
        swapped, write, calls = SwappedTensors(tier, MemoryStats(), "unit"), tier.write, list[DiskExtent]()
        old, new = torch.randn(3000), [torch.randn(size) for size in (5000, 100, 7000)]
        before = [tensor.clone() for tensor in (old, *new)]
        swapped.register([old])

        def failing(extent: DiskExtent, *args: Any, **kwargs: Any) -> Any:
            calls.append(extent)
            if len(calls) == fails_at + 1:
                raise ShardwellError("no room")
            return write(extent, *args, **kwargs)

        monkeypatch.setattr(tier, "write", failing)
        with pytest.raises(ShardwellError, match="no room"):
            swapped.register([old, *new])
        assert all(one.equal(other) for one, other in zip(new, before[1:], strict=True))
        for _ in range(2):
            with swapped.swapped_in(changes=False):
                assert old.equal(before[0])
                assert all(one.equal(other) for one, other in zip(new, before[1:], strict=True))
            swapped.register([old, *new])
        assert all(tensor.stride() == (0,) for tensor in new)


def test_what_is_being_written_is_waited_for_if_the_rest_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DiskTier([tmp_path], settings()) as tier:
        swapped, write, begun = SwappedTensors(tier, MemoryStats(), "unit"), tier.write, list[DiskTransfer]()
        tensors = [torch.zeros(1).expand(5000) for _ in range(3)]
        swapped.register(tensors)
        swapped.swap_in_to(aligned(swapped.num_bytes))

        def failing(*args: Any, **kwargs: Any) -> DiskTransfer:
            if len(begun) == 2:
                raise ShardwellError("no memory")
            begun.append(write(*args, **kwargs))
            return begun[-1]

        monkeypatch.setattr(tier, "write", failing)
        with pytest.raises(ShardwellError, match="no memory"):
            swapped.swap_out(changed=True)
        assert all(transfer._request is None for transfer in begun)
        assert [tensor[0].isnan().item() for tensor in tensors] == [True, True, False]  # the last is what it was


def test_host_memory_is_host_memory_whatever_the_default_device_is(tmp_path: Path) -> None:
    """Models are often built inside `torch.device(...)`."""
    with DiskTier([tmp_path], settings()) as tier, torch.device("meta"):
        device = Device("cpu")
        kept = device.empty(8, torch.float32, Tier.HOST)
        held = [
            device.empty(8, torch.float32, Tier.HOST),
            device.pinned(8),
            kernels.Moment8bit.zeros(9, is_second=True)[:],
        ]
        swapped = SwappedTensors(tier, MemoryStats(), "a unit")
        swapped.register([kept.fill_(3.0)])
        held += [kept]
        assert [tensor.device.type for tensor in held] == ["cpu"] * 4
        assert kept.isnan().all()
        swapped.open()
        assert kept.tolist() == [3.0] * 8
        swapped.close(changed=False)
