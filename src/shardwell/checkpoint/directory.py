"""One directory in a folder of checkpoints: whether it is a checkpoint, complete, being written, or abandoned.

The writer of a directory locks a file in it; the lock ends with the writer's process. The file names the running system
and the mount that know the lock. On other systems, and where files cannot be locked, no process can tell whether the
writer is alive: there a directory counts as abandoned if nothing in it has changed for an hour. A writer gives up long
before that.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from shardwell.checkpoint.manifest import NAME, Manifest, plain_name, read_manifest
from shardwell.checkpoint.many_files import each
from shardwell.checkpoint.parsing import failing
from shardwell.errors import CheckpointError

LOCK = ".lock"
SILENCE = 3600.0  # seconds without a change after which a directory has no writer any more
_BRIEF_SILENCE = 5.0  # the same for a small temporary file, which its writer can write again
_BEGINNING = 1.0  # the same for a directory without a locked file: its writer makes another one if it is gone
_WRITES = 3  # how often
ATTEMPTS = 10  # before a name that others keep changing is given up
_MOST_SUMMARIES = 1000
_LONGEST_TURN, _PAUSE = 10.0, 0.002  # seconds


# --- facts ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """The facts about a checkpoint that a folder needs, without its tensors."""

    step: int  # -1: it does not say
    sizes: Mapping[str, int]  # of the files


_summaries: dict[tuple[int, int, int, int], Summary] = {}  # by the identity of a manifest


def is_directory(path: Path, *, follows: bool = False) -> bool:
    try:
        return stat.S_ISDIR((os.stat if follows else os.lstat)(path).st_mode)
    except (OSError, ValueError):
        return False


def identity(path: Path) -> tuple[int, int] | None:
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def stamp(path: Path) -> int | None:
    """Return the time at which a checkpoint was committed; None if the directory, or the link's target, is none."""
    status = _manifest_of(path)
    return None if status is None else status.st_mtime_ns


def _manifest_of(path: Path) -> os.stat_result | None:
    if not is_directory(path, follows=True):
        return None
    try:
        status = os.lstat(path / NAME)
    except OSError:
        return None
    return status if stat.S_ISREG(status.st_mode) else None


def summary(path: Path) -> Summary:
    """Return the summary of a checkpoint. A manifest is read again only if it has changed."""
    status = _manifest_of(path)
    key = (0, 0, 0, 0) if status is None else (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)
    found = _summaries.get(key)
    if found is None:
        manifest = read_manifest(path)
        found = Summary(step_of(manifest), {name: record.size for name, record in manifest.files.items()})
        if len(_summaries) >= _MOST_SUMMARIES:
            _summaries.clear()
        if status is not None:
            _summaries[key] = found
    return found


def step_of(manifest: Manifest) -> int:
    """Return the step after which a checkpoint was saved; -1 if the manifest does not say."""
    counters = manifest.values.get("counters")
    step = counters.get("global_steps") if isinstance(counters, Mapping) else None
    return step if isinstance(step, int) and not isinstance(step, bool) and step >= 0 else -1


def step_in(path: Path) -> int:
    """Return the step of the checkpoint in a directory; -1 also if its manifest cannot be read."""
    try:
        return summary(path).step
    except CheckpointError:
        return -1


def is_complete(path: Path) -> bool:
    """Tell whether a checkpoint is complete: its manifest is valid, and all its files have their sizes."""
    try:
        _check_sizes(path, summary(path).sizes)
    except CheckpointError:
        return False
    return True


def looks_broken(path: Path) -> bool:
    """Tell whether a path looks like a broken checkpoint: an interrupted copy, or a link to missing storage."""
    if stamp(path) is not None:
        return False
    if path.is_symlink() and not path.exists():
        return True
    try:
        names = os.listdir(path) if is_directory(path, follows=True) else []
    except OSError:
        return False
    return NAME in names or any(name.startswith("rank-") and name.endswith(".safetensors") for name in names)


def check_files(path: Path, manifest: Manifest) -> None:
    """Raise unless each file of the manifest exists, is no link, and has its size."""
    for name in manifest.files:
        if not plain_name(name):
            raise CheckpointError(f"{path / NAME}: files[{name!r}]: not a plain name")
    _check_sizes(path, {name: record.size for name, record in manifest.files.items()})


def _check_sizes(path: Path, sizes: Mapping[str, int]) -> None:
    for _ in each(lambda name: _check_file(path / name, sizes[name]), list(sizes)):
        pass


def _check_file(path: Path, size: int) -> None:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing; the manifest names it") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path}: expected a file, found a link or something else")
    if status.st_size != size:
        raise CheckpointError(f"{path}: {status.st_size} bytes, expected {size}; it was cut or changed")


# --- writers ----------------------------------------------------------------------------------------------------


def lock(path: Path) -> int:
    """Mark a directory as being written, for as long as the descriptor is open."""
    descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with contextlib.suppress(
            OSError
        ):  # some file systems know no locks, and a full disk takes no byte: age decides
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(descriptor, _system(descriptor))  # after the lock: readers rely on that order
        os.lstat(path / LOCK)  # gone if this process slept before it had the lock: it was taken for a leftover
    except BaseException:
        close(descriptor)
        raise
    return descriptor


def unlock(path: Path, descriptor: int) -> None:
    try:
        with contextlib.suppress(OSError):
            os.unlink(path / LOCK)
    finally:
        close(descriptor)


def close(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # nothing was written through it that matters
        os.close(descriptor)


def is_abandoned(
    path: Path, *, older_than: float = 0.0, marked: bool = False, now: Callable[[], float] = time.time
) -> bool:
    """Tell whether a directory has no writer any more. With `marked`, it must have the lock file of a writer.

    `now` is the clock that stamps files there.
    """
    if age(path, now) < older_than:
        return False
    if not is_directory(path):  # a temporary file; or a link, which is never work in progress
        return not marked and (path.is_symlink() or age(path, now) >= _BRIEF_SILENCE)
    try:
        descriptor = os.open(path / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # one that is empty lost its writer between making and locking it
        return not marked and age(path, now) >= (_BEGINNING if _names_in(path) == [] else SILENCE)
    try:
        content = os.read(descriptor, 200)
        if content in (b"", _system(descriptor)):
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if content:
                return True
            if _names_in(path) == [LOCK]:  # it lost its writer while it was locked
                return age(path, now) >= _BEGINNING
    except BlockingIOError:
        return False
    except OSError:
        pass
    finally:
        close(descriptor)
    return age(path, now) >= SILENCE


def _names_in(path: Path) -> list[str] | None:
    try:
        return os.listdir(path)
    except OSError:
        return None


@contextlib.contextmanager
def turn(root: Path) -> Iterator[None]:
    """Let one process at a time rename directories in a folder; after a few seconds, go on without the lock."""
    try:
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        yield  # the next operation reports the problem
        return
    try:
        deadline = time.monotonic() + _LONGEST_TURN
        while time.monotonic() < deadline:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_PAUSE)
            except OSError:
                break  # some file systems know no locks
        yield
    finally:
        close(descriptor)


def _system(descriptor: int) -> bytes:
    """Return a name for what knows a lock: this running system, and the file system that it has mounted.

    The name changes when the system restarts. Two mounts of the same storage need not share locks.
    """
    try:
        system = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        system = os.uname().nodename
    return f"shardwell {system} {os.fstat(descriptor).st_dev}".encode()


def clock_of(root: Path) -> float:
    """Return the time by the clock that stamps files in a folder: a file server's may differ from this machine's."""
    try:
        os.utime(root)
        return os.stat(root).st_mtime
    except OSError:
        return time.time()


def age(path: Path, now: Callable[[], float] = time.time) -> float:
    """Return the seconds since something in a directory was changed; 0 if it is stamped with a time to come."""
    last = 0.0
    with failing(f"{path}: cannot be read"), contextlib.suppress(FileNotFoundError):
        last = os.lstat(path).st_mtime
        for name in os.listdir(path) if is_directory(path) else ():
            last = max(last, os.lstat(path / name).st_mtime)
    return max(now() - last, 0.0)


# --- changes ----------------------------------------------------------------------------------------------------


def write_atomically(path: Path, content: bytes, at: int | None = None) -> None:
    """Write a small file, and rename it into place once it is on disk; `at` is its modification time.

    On a slow disk, a process that cleans up may take the temporary file for one that a crash left; then the file is
    written again.
    """
    with failing(f"{path}: cannot be written"):
        for last in (*[False] * (_WRITES - 1), True):
            temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
            try:
                _write_new(temporary, content, at)
                os.replace(temporary, path)
                return
            except OSError as error:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                if last or not isinstance(error, FileNotFoundError) or not is_directory(path.parent):
                    raise


def _write_new(path: Path, content: bytes, at: int | None) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(descriptor, view) :]
        if at is not None:
            os.utime(descriptor, ns=(at, at))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync(path: Path) -> None:
    """Sync the names in a directory to disk."""
    with failing(f"{path}: cannot be synchronised"):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot do it
                raise
        finally:
            os.close(descriptor)


def remove_tree(path: Path) -> None:
    for _ in range(ATTEMPTS):
        try:
            if is_directory(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)
            return
        except FileNotFoundError:
            if not os.path.lexists(path):
                return  # another process removes the same
    shutil.rmtree(path)
