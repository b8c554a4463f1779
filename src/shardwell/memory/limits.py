"""The memory and cores that this process may use: the least of what the machine, its containers and ulimits allow.

Containers are Linux control groups, version 1 or 2: each group around this process may have a limit. What a group has
in use includes files that the kernel caches in memory and drops when memory is needed; those count as free.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import psutil  # type: ignore[import-untyped, unused-ignore]

_ROOT = Path("/")
_NO_LIMIT = 1 << 60  # version 1 writes a number near 2**63 for no limit


def free_host_bytes(local_world_size: int = 1, root: Path = _ROOT) -> float:
    """Return the bytes that the ranks of this machine may still allocate together.

    All ranks are taken to have the limits of this process.
    """
    found = [float(psutil.virtual_memory().available), *_free_in_groups(root)]
    return max(0.0, min([*found, *(local_world_size * room for room in _free_by_ulimit(root))]))


def all_host_bytes(root: Path = _ROOT) -> float:
    """Return the bytes that this process and its peers may have together, used or not."""
    limits = [limit for limit, _ in _memory_groups(root)]
    return min([float(psutil.virtual_memory().total), *limits])


def free_disk_bytes(path: Path) -> int | None:
    """Return the bytes that this user may still write; None if the path does not answer."""
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def num_cores(root: Path = _ROOT) -> int:
    """Return the number of cores that this process and its peers may keep busy."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([own, *(math.floor(quota) for quota in _quotas(root))]))


# ------------------------------------------------------------------------------------------------------- memory


def _free_in_groups(root: Path) -> Iterator[float]:
    for limit, used in _memory_groups(root):
        yield limit - used


def _memory_groups(root: Path) -> Iterator[tuple[float, float]]:
    """Yield (limit, bytes in use and not reclaimable) of each control group around this process that has a limit."""
    for folder in _groups(root, "memory"):
        second = folder / "memory.max"
        names = ("max", "current", "inactive_file") if second.exists() else (
            "limit_in_bytes", "usage_in_bytes", "total_inactive_file",
        )  # fmt: skip
        limit, used = (_number(folder / f"memory.{name}") for name in names[:2])
        if limit is not None and limit < _NO_LIMIT:
            yield limit, max(0.0, (used or 0.0) - _line_of(folder / "memory.stat", names[2]))


def _free_by_ulimit(root: Path) -> Iterator[float]:
    """Yield the bytes that `ulimit -v` and `ulimit -d` leave to this process."""
    try:
        import resource
    except ImportError:  # not a Unix system
        return
    status = _lines(root / "proc/self/status")
    for kind, used in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY and used in status:
            yield limit - 1024.0 * float(status[used].split()[0])


# -------------------------------------------------------------------------------------------------------- cores


def _quotas(root: Path) -> Iterator[float]:
    """Yield the number of cores that each group may keep busy on average."""
    for folder in _groups(root, "cpu"):
        quota, period = [*_text(folder / "cpu.max").split(), "", ""][:2]
        if not quota:
            quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
        try:
            if float(quota) > 0 and float(period) > 0:
                yield float(quota) / float(period)
        except ValueError:  # "max", or an empty text
            continue


# ----------------------------------------------------------------------------------------------- control groups


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control group and of all groups around it, as far as they are visible."""
    paths = dict(_paths(root, controller))
    for version, mount in _mounts(root, controller):
        path = PurePosixPath(paths.get(version, "/"))
        for place in (path, *path.parents):
            folder = root / mount.lstrip("/") / str(place).lstrip("/")
            if folder.is_dir():
                yield folder


def _paths(root: Path, controller: str) -> Iterator[tuple[int, str]]:
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            yield 2, path
        elif controller in controllers.split(","):
            yield 1, path


def _mounts(root: Path, controller: str) -> Iterator[tuple[int, str]]:
    """Yield (version, folder) of each control-group file system that has the controller."""
    for line in _text(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2":
            yield 2, fields[4]
        elif kind[0] == "cgroup" and controller in kind[2].split(","):
            yield 1, fields[4]


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(path: Path) -> float | None:
    text = _text(path)
    return float(text) if text.isdigit() else None


def _lines(path: Path) -> dict[str, str]:
    pairs = (line.partition(":") for line in _text(path).splitlines())
    return {name: value.strip() for name, _, value in pairs}


def _line_of(path: Path, name: str) -> float:
    for line in _text(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.isdigit():
            return float(value)
    return 0.0
