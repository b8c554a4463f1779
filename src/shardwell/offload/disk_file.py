"""A file that no other process can open and that leaves nothing behind, with space that is allocated in regions.

The file has no name (O_TMPFILE; where the file system does not support that, the name is removed immediately), so its
bytes are freed with the process, however it ends. Space is reserved before it is handed out: a full disk is an error
here, and not in the middle of a step.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import warnings
from pathlib import Path

from shardwell.errors import ShardwellError
from shardwell.kernels.io import ENDED_EARLY, SECTOR
from shardwell.memory.machine import current_machine
from shardwell.memory.statistics import human

_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
_NO_UNNAMED = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)  # errors of systems that lack O_TMPFILE
_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENODEV)
_FULL = "free space there, or add a path on another drive"
_REMEDIES = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: "raise the limit on the size of files (ulimit -f), or add a path",
    errno.EROFS: "mount it for writing, or use another path",
    errno.EACCES: "allow this user to write there, or use another path",
    errno.ENOENT: "mount the drive, or make the directory",
    errno.ENOTDIR: "name a directory",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    ENDED_EARLY: "the file was cut while it was in use: use a path that no other program changes",
}
_LOOK = "look for the drive in the kernel's log (dmesg), and use another path"


def disk_error(path: Path, doing: str, error: int) -> ShardwellError:
    """Return an error that says what failed where, what is free there, and what to do."""
    reason = "fewer bytes moved than were asked for" if error == ENDED_EARLY else os.strerror(error)
    free = free_bytes(path)
    found = "the free space there is unknown" if free is None else f"{human(free)} are free there"
    return ShardwellError(f"{path}: {doing} failed ({reason}); {found}; {_REMEDIES.get(error, _LOOK)}")


def free_bytes(path: Path) -> int | None:
    """Return the bytes that this user may still write; None if the path does not answer."""
    return current_machine().free_disk_bytes(path)


class DiskFile:
    """One file in a directory. Regions are aligned to SECTOR, and freed regions are reused."""

    descriptor: int
    is_direct: bool  # reads and writes bypass the page cache

    def __init__(self, directory: str | os.PathLike[str], *, is_simulated: bool = False) -> None:
        self.path = Path(directory)
        self.size = 0
        self._vacant: list[tuple[int, int]] = []  # (offset, size), sorted; no region touches another or the end
        self._is_simulated = is_simulated  # there is no file, and only sizes are counted
        if is_simulated:
            self.descriptor, self.is_direct = -1, True
            return
        try:
            self.descriptor = _open_unnamed(self.path)
        except OSError as error:
            raise disk_error(self.path, "opening a file", error.errno or 0) from error
        self.is_direct = _go_direct(self.descriptor)
        _tell(self.path, self.is_direct)

    def take(self, size: int) -> int:
        """Return the offset of a region of that many bytes, which the disk has reserved."""
        size = rounded(size)
        fitting = [(length, offset) for offset, length in self._vacant if length >= size]
        if fitting:
            length, offset = min(fitting)
            self._vacant.remove((offset, length))
            if length > size:
                self._vacant = sorted([*self._vacant, (offset + size, length - size)])
            return offset
        offset = self.size
        self._grow(offset + size)
        return offset

    def give(self, offset: int, size: int) -> None:
        """Free a region. Free space at the end of the file is returned to the disk."""
        size = rounded(size)
        if size == 0:
            return
        merged: list[tuple[int, int]] = []
        for start, length in sorted([*self._vacant, (offset, size)]):
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        if sum(merged[-1]) == self.size:
            self.size, _ = merged.pop()
            with contextlib.suppress(OSError):  # the space is only returned later
                if not self._is_simulated:
                    os.ftruncate(self.descriptor, self.size)
        self._vacant = merged

    def close(self) -> None:
        if self.descriptor >= 0:
            with contextlib.suppress(OSError):  # the contents are not needed
                os.close(self.descriptor)
            self.descriptor = -1

    def _grow(self, size: int) -> None:
        more = size - self.size
        doing = f"reserving {human(more)}"
        free = free_bytes(self.path)
        if free is not None and more > free:  # the system would fill the disk before it reports the error
            raise disk_error(self.path, doing, errno.ENOSPC)
        if self._is_simulated:
            self.size = size
            return
        try:
            os.posix_fallocate(self.descriptor, self.size, more)
        except OSError as error:
            try:
                if error.errno not in _CANNOT_RESERVE:
                    raise
                os.ftruncate(self.descriptor, size)
            except OSError as problem:
                with contextlib.suppress(OSError):
                    os.ftruncate(self.descriptor, self.size)
                raise disk_error(self.path, doing, problem.errno or 0) from problem
        self.size = size


def rounded(size: int) -> int:
    """Round a size up to full sectors."""
    return -(-size // SECTOR) * SECTOR


def _open_unnamed(directory: Path) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(directory, flags | os.O_TMPFILE | os.O_EXCL, 0o600)  # it can never get a name
    except OSError as error:
        if error.errno not in _NO_UNNAMED or not directory.is_dir():
            raise
    name = directory / f".shardwell-{secrets.token_hex(16)}"
    descriptor = os.open(name, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        os.unlink(name)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _go_direct(descriptor: int) -> bool:
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        return False
    return True


_told: set[Path] = set()


def _tell(path: Path, is_direct: bool) -> None:
    """Warn once about a path that is in memory or cannot bypass the page cache."""
    kind = file_system(path)
    if path in _told or (is_direct and kind not in _MEMORY_FILE_SYSTEMS):
        return
    _told.add(path)
    if kind in _MEMORY_FILE_SYSTEMS:
        warnings.warn(f"{path}: files here are kept in memory, not on a disk ({kind}); use another path", stacklevel=5)
    else:
        warnings.warn(
            f"{path}: the file system ({kind}) cannot go around the page cache; reads and writes go through it",
            stacklevel=5,
        )


def file_system(path: Path) -> str:
    """Return the type of a path's file system, as the kernel names it."""
    try:
        device = os.stat(path).st_dev
        name = f"{os.major(device)}:{os.minor(device)}"
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            words = line.split()
            if words[2] == name:
                return words[words.index("-") + 1]
    except (OSError, ValueError, IndexError):
        pass
    return "unknown"
