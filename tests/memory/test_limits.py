"""Budgets are the smallest of what the machine, the containers around a process and its ulimits allow."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

import shardwell
from shardwell.memory.limits import all_host_bytes, free_host_bytes, num_cores

MIB = 1 << 20
SECOND = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
FIRST = (
    "31 23 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "32 23 0:28 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
)


def tree(root: Path, mounts: str, groups: str, files: dict[str, str]) -> Path:
    """A file system as a process in a container sees it."""
    for name, text in {"proc/self/mountinfo": mounts, "proc/self/cgroup": groups, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_the_limit_of_a_second_version_group_counts_less_what_is_in_use(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/job/memory.max": f"{900 * MIB}\n",
        "sys/fs/cgroup/job/memory.current": f"{500 * MIB}\n",
        "sys/fs/cgroup/job/memory.stat": f"anon {100 * MIB}\nfile {400 * MIB}\ninactive_file {300 * MIB}\n",
    }
    root = tree(tmp_path, SECOND, "0::/job\n", files)
    assert free_host_bytes(root=root) == (900 - (500 - 300)) * MIB
    assert all_host_bytes(root) == 900 * MIB


def test_a_group_further_out_may_have_the_smaller_limit(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/pod/memory.max": f"{100 * MIB}\n",
        "sys/fs/cgroup/pod/memory.current": f"{40 * MIB}\n",
        "sys/fs/cgroup/pod/rank/memory.max": "max\n",
        "sys/fs/cgroup/pod/rank/memory.current": f"{30 * MIB}\n",
        "sys/fs/cgroup/pod/cpu.max": "250000 100000\n",
        "sys/fs/cgroup/pod/rank/cpu.max": "max 100000\n",
    }
    root = tree(tmp_path, SECOND, "0::/pod/rank\n", files)
    assert free_host_bytes(root=root) == 60 * MIB
    assert num_cores(root) == min(2, len(os.sched_getaffinity(0)))


def test_the_limit_of_a_first_version_group_counts(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{900 * MIB}\n",
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{500 * MIB}\n",
        "sys/fs/cgroup/memory/job/memory.stat": f"inactive_file 5\ntotal_inactive_file {300 * MIB}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "100000\n",
        "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
    }
    root = tree(tmp_path, FIRST, "4:memory:/job\n3:cpu,cpuacct:/job\n0::/\n", files)
    assert free_host_bytes(root=root) == 700 * MIB
    assert num_cores(root) == 1


def test_a_container_that_sees_its_own_group_as_the_root_has_its_limit(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/memory/memory.limit_in_bytes": f"{64 * MIB}\n"}
    root = tree(tmp_path, FIRST, "4:memory:/docker/0123abc\n", files)
    assert free_host_bytes(root=root) == 64 * MIB


@pytest.mark.parametrize("files", [{}, {"sys/fs/cgroup/memory.max": "max\n"}, {"sys/fs/cgroup/memory.max": "junk"}])
def test_without_a_limit_the_machine_decides(tmp_path: Path, files: dict[str, str]) -> None:
    root = tree(tmp_path, SECOND, "0::/\n", files)
    assert free_host_bytes(root=root) == pytest.approx(psutil.virtual_memory().available, rel=0.2)
    assert num_cores(root) == len(os.sched_getaffinity(0))
    assert free_host_bytes(root=tmp_path / "nothing") > 0


def test_a_group_that_is_full_has_no_room_and_not_less(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/memory.max": f"{MIB}\n", "sys/fs/cgroup/memory.current": f"{2 * MIB}\n"}
    assert free_host_bytes(root=tree(tmp_path, SECOND, "0::/\n", files)) == 0


PROGRAM = """
import resource, sys
from shardwell.memory.limits import free_host_bytes
resource.setrlimit(getattr(resource, sys.argv[1]), (int(sys.argv[2]), resource.RLIM_INFINITY))
print(free_host_bytes(1), free_host_bytes(2))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_a_ulimit_is_a_budget_of_each_rank(kind: str) -> None:
    limit = 6 << 30  # less than what is free on most machines, and more than Python and torch have in use
    command = [sys.executable, "-c", PROGRAM, kind, str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    one, two = map(float, done.stdout.split())
    assert 0 < one < limit
    assert 0.9 * one <= two <= 2.1 * one  # what is in use, and free, changes a little between the two


@pytest.mark.parametrize("kind", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_a_ulimit_below_what_is_in_use_leaves_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    none, tight = (resource.RLIM_INFINITY,) * 2, (1 << 20, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda asked: tight if asked == getattr(resource, kind) else none)
    assert free_host_bytes() == 0


def test_initialize_refuses_what_does_not_fit_into_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwell.memory.limits.free_host_bytes", lambda local_world_size: 1000.0)
    config = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    optimizer = {"type": "AdamW", "params": {"lr": 0.1}}
    with pytest.raises(shardwell.ShardwellError, match="memory"):
        shardwell.initialize(model=torch.nn.Linear(64, 64), config={**config, "optimizer": optimizer}, device="cpu")


@contextlib.contextmanager
def real_group(limit: int) -> Iterator[Path]:
    """A control group of this machine, or a skip with the reason."""
    bases = [Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")]
    base = next((base for base in bases if (base / "cgroup.procs").exists()), None)
    folder = None if base is None else base / f"shardwell-test-{os.getpid()}"
    try:
        if folder is None:
            pytest.skip("there are no control groups to be seen")
        folder.mkdir()
        name = "memory.limit_in_bytes" if (folder / "memory.limit_in_bytes").exists() else "memory.max"
        (folder / name).write_text(str(limit))
        yield folder
    except OSError as error:
        pytest.skip(f"control groups cannot be made here: {error}")
    finally:
        if folder is not None and folder.exists():
            folder.rmdir()


IN_A_GROUP = """
import os, sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
from shardwell.memory.limits import free_host_bytes
print(free_host_bytes())
"""


@pytest.mark.slow
def test_a_real_group_limits_the_budget() -> None:
    with real_group(2 << 30) as folder:
        command = [sys.executable, "-c", IN_A_GROUP, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if "Permission" in done.stderr or "Read-only" in done.stderr:
            pytest.skip("processes cannot be moved into control groups here")
        assert 0 < float(done.stdout) <= 2 << 30, done.stderr
