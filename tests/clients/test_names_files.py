"""DeepSpeed's names that move files or describe machines: the handle for files, scripts, hostfiles, timers, groups."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwell.compat.deepspeed_api import (
    groups,
    launcher,
    model_parallel_unit,
    op_builders,
    zero_to_fp32,
    zero_to_torch,
)
from shardwell.compat.deepspeed_api.partitioned import PartitionedTensor, reduce_scatter_coalesced
from shardwell.compat.deepspeed_api.runtime_names import partition_balanced
from shardwell.compat.deepspeed_api.timer import NoopTimer, SynchronizedWallClockTimer, ThroughputTimer, trim_mean
from shardwell.compat.deepspeed_api.zero_to_fp32 import make_executable, write_scripts
from tests.support.ranks import Ranks


def handle(**options: Any) -> Any:
    return op_builders.by_class_name("AsyncIOBuilder")().load().aio_handle(**options)


def test_a_handle_reads_and_writes_blocks_at_offsets(tmp_path: Path) -> None:
    one = handle(block_size=1024, queue_depth=2, single_submit=True, overlap_events=False, intra_op_parallelism=2)
    assert (one.get_block_size(), one.get_queue_depth(), one.get_intra_op_parallelism()) == (1024, 2, 2)
    assert (one.get_single_submit(), one.get_overlap_events()) == (True, False)
    file, data = str(tmp_path / "data"), os.urandom(5000)
    buffer = torch.tensor(list(data), dtype=torch.uint8)
    assert one.sync_pwrite(buffer, file) == 1
    assert Path(file).read_bytes() == data
    assert one.async_pwrite(buffer[:1000], file, 4000) == 0
    assert one.wait() == 1
    assert Path(file).read_bytes() == data[:4000] + data[:1000]
    back = [torch.zeros(500, dtype=torch.float32) for _ in range(2)]
    for number, part in enumerate(back):
        assert one.async_pread(part, file, 2000 * number) == 0
    assert one.wait() == 2
    assert b"".join(part.numpy().tobytes() for part in back) == data[:4000]
    assert one.wait() == 0


def test_a_descriptor_without_the_page_cache_takes_locked_memory(tmp_path: Path) -> None:
    one = handle(block_size=4096)
    locked = one.new_cpu_locked_tensor(8192, torch.empty(0, dtype=torch.uint8))
    assert locked.data_ptr() % one.get_alignment() == 0
    locked.copy_(torch.arange(8192) % 251)
    file = os.open(tmp_path / "direct", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    assert one.async_pwrite(locked, fd=file) == 0
    assert one.wait() == 1
    os.close(file)
    assert (tmp_path / "direct").read_bytes() == bytes(locked.tolist())
    assert one.is_pinned(locked)
    assert one.free_cpu_locked_tensor(locked)
    assert not one.free_cpu_locked_tensor(locked)


def test_a_file_that_ends_early_or_is_missing_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"abc")
    with pytest.raises(OSError, match="the file ends there"):
        handle().sync_pread(torch.zeros(8, dtype=torch.uint8), str(tmp_path / "short"))
    with pytest.raises(FileNotFoundError):
        handle().sync_pread(torch.zeros(8, dtype=torch.uint8), str(tmp_path / "none"))


def test_scripts_are_put_where_permissions_are_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError("no permissions here")

    monkeypatch.setattr(os, "chmod", refuse)
    write_scripts(tmp_path / "new")
    make_executable(tmp_path / "nothing")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["zero_to_fp32.py", "zero_to_torch.py"]


def test_the_command_passes_the_dtype_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(zero_to_fp32, "convert_zero_checkpoint_to_state_dict", lambda *a, **k: calls.append((a, k)))
    zero_to_torch.main(["checkpoint", str(tmp_path), "--dtype", "fp16", "--max_shard_size", "1GB"])
    [(places, options)] = calls
    assert places == ("checkpoint", str(tmp_path))
    assert (options["dtype"], options["max_shard_size"]) == ("fp16", "1GB")


def parts() -> list[Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = torch.arange(7.0 * 3).view(7, 3)
    part = PartitionedTensor(whole, dist.group.WORLD)
    again = PartitionedTensor.from_meta(part.to_meta(), part.data(), dist.group.WORLD)
    found = [torch.equal(one.full(), whole) for one in (part, again)] + [part.local_size()[0]]
    averaged = reduce_scatter_coalesced([rank * torch.arange(6.0), rank * torch.ones(1)], dist.group.WORLD)
    return [*found, [one.tolist() for one in averaged], world]


def test_parts_of_tensors(ranks: Ranks) -> None:
    first, second = ranks.run(2, parts)
    assert first == [True, True, 11, [[0.0, 0.5, 1.0], [0.5]], 2]
    assert second == [True, True, 10, [[1.5, 2.0, 2.5], []], 2]


@pytest.mark.parametrize("text", ["0,2-6,5-9", "8,2-6", "1,6-2", "a", "1-b"])
def test_a_list_of_cores_must_ascend(text: str) -> None:
    assert launcher.parse_range_list("0,2-4,6") == [0, 2, 3, 4, 6]
    with pytest.raises(ValueError, match=r"expected numbers|must ascend"):
        launcher.parse_range_list(text)


@pytest.mark.parametrize("text", ["a slots=2\na slots=1", "this is bad slots=1", "missing", ""])
def test_a_bad_hostfile_is_refused(text: str) -> None:
    assert launcher._parse_hostfile(["  a slots=2 ", "", "# b slots=1"]) == {"a": 2}
    with pytest.raises(ValueError, match="hostfile"):
        launcher._parse_hostfile(text.splitlines())


@pytest.mark.parametrize("options", ["--num_nodes 1 -i localhost", "--num_gpus 1 -e localhost"])
def test_two_ways_to_choose_devices_are_refused(options: str) -> None:
    with pytest.raises(ValueError, match="keep one kind"):
        launcher.main(args=[*options.split(), "script.py"])


def test_an_mpu_is_asked_in_the_spelling_that_it_has() -> None:
    for spelling in ("tensor_model_parallel", "slice_parallel", "model_parallel"):
        mpu = type("Mpu", (), {f"get_{spelling}_{what}": lambda self, w=what: w for what in ("rank", "world_size")})()
        assert model_parallel_unit.bwc_tensor_model_parallel_rank(mpu) == "rank"
        assert model_parallel_unit.bwc_tensor_model_parallel_world_size(mpu) == "world_size"
        assert model_parallel_unit.bwc_tensor_model_parallel_group(mpu) is None
    assert model_parallel_unit.bwc_tensor_model_parallel_world_size(None) == 1
    assert model_parallel_unit.bwc_pipeline_parallel_world_size(None) == 1


def test_experts_would_be_shared_by_neighbours_or_by_strides() -> None:
    together, copies = groups._get_expert_parallel_ranks(8, 2, 2)
    assert together == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert copies == [[0, 4], [2, 6], [1, 5], [3, 7]]
    assert groups._get_expert_parallel_ranks(8, 1, 2, use_data_before_expert_parallel_=True)[0][0] == [0, 4]
    with pytest.raises(ValueError, match="non-zero"):
        groups._ensure_divisibility(8, 0)
    with pytest.raises(AssertionError, match="not divisible"):
        groups._ensure_divisibility(8, 3)


def test_balanced_parts_are_never_empty() -> None:
    assert partition_balanced([1] * 5, 4) in ([0, 1, 2, 3, 5], [0, 2, 3, 4, 5])
    assert partition_balanced([1, 1, 1, 1, 0, 1], 4) in ([0, 1, 2, 3, 6], [0, 2, 3, 4, 6])
    assert partition_balanced([0.0, 1.1, 30, 3.0], 3) == [0, 2, 3, 4]  # type: ignore[list-item]


def test_a_timer_reports_every_few_steps() -> None:
    timer = ThroughputTimer(batch_size=1, steps_per_output=3)
    assert [timer._is_report_boundary() for timer.global_step_count in (1, 3, 6)] == [False, True, True]
    assert not ThroughputTimer(batch_size=1)._is_report_boundary()
    for bad in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="steps_per_output must be"):
            ThroughputTimer(batch_size=1, steps_per_output=bad)  # type: ignore[arg-type]
    data = [3.0, 1.0, 2.0]
    assert (trim_mean(data, 0.1), trim_mean([], 0.1), data) == (2.0, 0.0, [3.0, 1.0, 2.0])


def test_timers_print_what_they_measured(capsys: pytest.CaptureFixture[str]) -> None:
    timers = SynchronizedWallClockTimer()
    timers("forward").start()
    timers("forward").stop()
    timers.log(["forward", "unknown"], normalizer=2.0)
    NoopTimer().log(["forward"])
    assert capsys.readouterr().out.startswith("[Rank -1] time (ms) | forward: ")
    assert timers("forward").elapsed() == 0.0  # printed, so begun anew
