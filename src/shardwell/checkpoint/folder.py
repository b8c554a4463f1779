"""The folder of checkpoints: one directory for each, committed by a rename, so that half of one is never seen.

    root/latest                      the tag of the checkpoint to go on from
    root/step-100/                   a committed checkpoint: manifest.json and the files that it names
    root/.step-200.1f..e0.partial    being written, or left by a crash
    root/.step-100.07..3c.aside      the old one, while a new one with the same tag takes its place
    root/.step-50.a1..9b.deleted     being removed

A crash leaves either the old or the new checkpoint. The order of a commit is: all files on the disk, then the
manifest, then the old checkpoint aside, then the new one in its place, then `latest`, then the old one is removed. In
the one moment in which neither has the tag as its name, the old one is read where it lies aside; `clean` gives it
its name back. To be removed, a checkpoint first loses its name.

Any number of processes may do this at once. Links are not followed below the root.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from shardwell.checkpoint.files import FileRecord, Reader
from shardwell.checkpoint.manifest import MAX_NAME, NAME, Manifest, plain_name, read_manifest
from shardwell.checkpoint.parsing import failing, open_plain
from shardwell.errors import CheckpointError

LATEST = "latest"
_LOCK = ".lock"
_TEMPORARY = re.compile(r"\.(?P<tag>.+)\.[0-9a-f]{16}\.(?P<state>partial|aside|deleted)", re.DOTALL)
_TICK = 1_000_000  # ns; the least distance of two commits in time, so that their order is kept
_ATTEMPTS = 10  # before a name that others keep changing is given up


class Folder:
    """The checkpoints under one root directory."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self._locks: dict[str, int] = {}  # of what this object began: descriptors, held until it is committed

    # --- writing ------------------------------------------------------------------------------------------------

    def begin(self, tag: str) -> Path:
        """A new directory to write the files of a checkpoint to, for `commit`. Makes the root if there is none."""
        self._check_tag(tag)
        self._make_root()
        self._check_free(tag)
        path = self._temporary(tag, "partial")
        with failing(f"{self.root}: no checkpoint can be written here"):
            os.mkdir(path)
            self._locks[path.name] = _lock(path)
        return path

    def commit(
        self, temporary: str | os.PathLike[str], tag: str, manifest: Manifest, *, is_latest: bool = True
    ) -> Path:
        """Makes what was written to `temporary` the checkpoint `tag`, and the latest; replaces the one before."""
        self._check_tag(tag)
        temporary, begun = self._begun(temporary)
        if begun != tag or not _is_directory(temporary):
            raise CheckpointError(f"{temporary}: not what begin({tag!r}) returned, or no longer there")
        _check_files(temporary, manifest)
        text = manifest.to_json(str(temporary / NAME)).encode("ascii")
        _write_whole(temporary / NAME, text, stamp=self._next_stamp())
        _sync(temporary)
        self._unlock(temporary)
        aside = self._move_in(temporary, tag)
        _sync(self.root)
        if is_latest:
            _write_whole(self.root / LATEST, f"{tag}\n".encode())
            _sync(self.root)
        for path in aside:
            try:
                self._remove(path, tag)
            except CheckpointError as error:  # of no harm to what was committed
                warnings.warn(f"an old checkpoint is left: {error}", stacklevel=2)
        return self.root / tag

    def discard(self, temporary: str | os.PathLike[str]) -> None:
        """Removes what `begin` made and nobody committed."""
        path, tag = self._begun(temporary)
        self._unlock(path)
        self._remove(path, tag)

    # --- reading ------------------------------------------------------------------------------------------------

    def latest(self) -> str | None:
        """The tag to go on from: what `latest` names, else the newest committed one, with a warning; None if none."""
        problem = f"{self.root / LATEST}: missing"
        try:
            tag = self._named()
            if tag is not None and self.is_committed(tag):
                return tag
            if tag is not None:
                problem = f"{self.root / LATEST}: names {tag!r}, which is not there"
        except CheckpointError as error:
            problem = str(error)
        newest = next(iter(self.tags()), None)
        if newest is not None:
            warnings.warn(f"{problem}; going on from the newest checkpoint, {newest!r}", stacklevel=2)
        elif os.path.lexists(self.root / LATEST):
            warnings.warn(f"{problem}, nor is any other checkpoint", stacklevel=2)
        return newest

    def tags(self) -> list[str]:
        """The committed checkpoints, the newest first: by the time of their manifests, then by name."""
        stamps: dict[str, int] = {}
        for name, path in self._list():
            match = _TEMPORARY.fullmatch(name)
            tag = match["tag"] if match is not None and match["state"] == "aside" else name
            stamp = _stamp(path) if _is_tag(tag) else None
            if stamp is not None:
                stamps[tag] = max(stamp, stamps.get(tag, stamp))
        return sorted(stamps, key=lambda tag: (stamps[tag], _natural(tag)), reverse=True)

    def is_committed(self, tag: str) -> bool:
        return _is_tag(tag) and self._find(tag) is not None

    def path(self, tag: str) -> Path:
        """Where the files of a committed checkpoint are."""
        self._check_tag(tag)
        path = self._find(tag)
        if path is None:
            reason = "not a committed checkpoint" if os.path.lexists(self.root / tag) else "no such checkpoint"
            known = ", ".join(self.tags()[:10]) or "none"
            raise CheckpointError(f"{self.root / tag}: {reason}; those here are: {known}")
        return path

    def open(self, tag: str | None = None) -> Manifest:
        """The manifest of a checkpoint (of the latest, without a tag), once all its files are there in full size."""
        if tag is None:
            tag = self.latest()
            if tag is None:
                raise CheckpointError(f"{self.root}: no checkpoint to open")
        for _ in range(_ATTEMPTS):
            path = self.path(tag)
            before = path, _identity(path)
            try:
                manifest = read_manifest(path)
                _check_files(path, manifest)
                return manifest
            except CheckpointError:
                path = self.path(tag)
                if (path, _identity(path)) == before:  # else it was moved or replaced while it was read
                    raise
        raise CheckpointError(f"{self.root / tag}: replaced again and again while it was read")

    def reader(self, tag: str, file: str, manifest: Manifest) -> Reader:
        """Opens a file of a checkpoint and checks it against the manifest."""
        if file not in manifest.files:
            raise CheckpointError(f"{self.root / tag}: {file!r} is not among the files of its manifest")
        if not plain_name(file):
            raise CheckpointError(f"{self.root / tag}: {file!r} is not a plain name")
        return Reader(self.path(tag) / file, manifest.files[file])

    # --- tidying ------------------------------------------------------------------------------------------------

    def clean(self, older_than: float = 0.0, dry_run: bool = False) -> list[str]:
        """Ends what crashes left undone: old checkpoints get their names back, leftovers are removed.

        A checkpoint that somebody still writes is locked and stays. Where the file system knows no locks, one whose
        last change is less than `older_than` seconds ago stays too. Returns the names of what was removed, or would be.
        """
        removed = []
        for name, path in self._list():
            match = _TEMPORARY.fullmatch(name)
            if match is None or not _is_tag(match["tag"], but=LATEST):
                continue
            tag, state = match["tag"], match["state"]
            if state == "aside" and self._find(tag) == path:
                if not dry_run:
                    self._move_back(path, tag)
            elif state != "partial" or (_age(path) >= older_than and not _is_locked(path)):
                if not dry_run:
                    self._remove(path, tag)
                removed.append(name)
        return removed

    def prune(self, keep_last: int, dry_run: bool = False) -> list[str]:
        """Removes all but the newest `keep_last` checkpoints and the one that `latest` names.

        Returns the tags of what was removed, or would be.
        """
        if keep_last < 1:
            raise CheckpointError(f"keep_last: expected at least 1, found {keep_last}")
        try:
            named = self._named()
        except CheckpointError:
            named = None
        removed = [tag for tag in self.tags()[keep_last:] if tag != named]
        for tag in [] if dry_run else removed:
            for path in self._asides(tag):  # first these: they are what is read once it has no name
                self._remove(path, tag)
            if _stamp(self.root / tag) is not None:
                self._remove(self.root / tag, tag)
        return removed

    # --- names --------------------------------------------------------------------------------------------------

    def _check_tag(self, tag: str) -> None:
        if not _is_tag(tag):
            raise CheckpointError(
                f"{self.root}: tag {tag!r}: expected a plain name of at most {MAX_NAME} bytes, without slashes, "
                f"not starting with a dot, and not {LATEST!r}"
            )

    def _temporary(self, tag: str, state: str) -> Path:
        return self.root / f".{tag}.{secrets.token_hex(8)}.{state}"

    def _begun(self, temporary: str | os.PathLike[str]) -> tuple[Path, str]:
        """A directory that `begin` made, and its tag."""
        path = Path(temporary)
        match = _TEMPORARY.fullmatch(path.name)
        if match is None or match["state"] != "partial" or path.parent.resolve() != self.root.resolve():
            raise CheckpointError(f"{path}: not what begin returned for {self.root}")
        return self.root / path.name, match["tag"]

    def _unlock(self, temporary: Path) -> None:
        descriptor = self._locks.pop(temporary.name, None)
        if descriptor is not None:
            try:
                with contextlib.suppress(OSError):
                    os.unlink(temporary / _LOCK)
            finally:
                _close(descriptor)

    def _named(self) -> str | None:
        """The tag in the file `latest`; None if there is no such file."""
        path = self.root / LATEST
        if not os.path.lexists(path):
            return None
        file, _ = open_plain(path)
        with file, failing(f"{path}: cannot be read"):
            tag = file.read(4 * MAX_NAME).decode("utf-8", "replace").strip()
        if not _is_tag(tag):
            raise CheckpointError(f"{path}: names {tag[:MAX_NAME]!r}, which is no tag")
        return tag

    def _list(self) -> list[tuple[str, Path]]:
        with failing(f"{self.root}: cannot be read"):
            try:
                return [(name, self.root / name) for name in sorted(os.listdir(self.root))]
            except FileNotFoundError:
                return []

    def _asides(self, tag: str) -> Iterator[Path]:
        for name, path in self._list():
            match = _TEMPORARY.fullmatch(name)
            if match is not None and match["tag"] == tag and match["state"] == "aside":
                yield path

    def _find(self, tag: str) -> Path | None:
        """Where a committed checkpoint is: under its tag, or aside while a commit is between its renames."""
        for _ in range(3):  # a commit may end between the two looks
            if _stamp(self.root / tag) is not None:
                return self.root / tag
            stamps = [(stamp, path) for path in self._asides(tag) if (stamp := _stamp(path)) is not None]
            if stamps:
                return max(stamps)[1]
        return None

    def _next_stamp(self) -> int:
        """A time for the manifest that is later than that of any other, whatever the clocks say."""
        stamps = [_stamp(self.root / tag) or 0 for tag in self.tags()]
        return max([time.time_ns(), *(stamp + _TICK for stamp in stamps)])

    # --- moves --------------------------------------------------------------------------------------------------

    def _make_root(self) -> None:
        missing = []
        path = self.root.absolute()
        while not os.path.lexists(path):
            missing.append(path)
            path = path.parent
        with failing(f"{self.root}: cannot be made"):
            for directory in reversed(missing):
                os.makedirs(directory, exist_ok=True)
                _sync(directory.parent)
        if not self.root.is_dir():
            raise CheckpointError(f"{self.root}: not a directory; checkpoints need one")

    def _check_free(self, tag: str) -> None:
        """Raises if what has the tag as its name is no checkpoint, and so not ours to replace."""
        path = self.root / tag
        identity = _identity(path)
        if identity is not None and _stamp(path) is None and _identity(path) == identity:
            raise CheckpointError(f"{path}: in the way, and not a checkpoint; move it, or use another tag")

    def _move_in(self, temporary: Path, tag: str) -> list[Path]:
        """Gives a complete checkpoint its name; returns where those are now that had it before."""
        target = self.root / tag
        aside = list(self._asides(tag))  # a crash left these, or another process that replaces the same checkpoint
        for _ in range(_ATTEMPTS):
            self._check_free(tag)
            old = self._temporary(tag, "aside")
            with failing(f"{target}: cannot be replaced"):
                try:
                    os.rename(target, old)
                    aside.append(old)
                except FileNotFoundError:
                    pass
            try:
                os.rename(temporary, target)
                return aside
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    continue  # another process was faster: its checkpoint is the one to replace
                if old in aside:
                    self._move_back(old, tag)
                raise CheckpointError(f"{target}: cannot be committed ({error.strerror})") from error
        raise CheckpointError(f"{target}: cannot be committed: others keep writing the same tag")

    def _move_back(self, aside: Path, tag: str) -> None:
        try:
            os.rename(aside, self.root / tag)
            _sync(self.root)
        except OSError as error:
            gone = (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)  # a commit was faster, or in the way
            if error.errno not in gone:
                raise CheckpointError(f"{aside}: cannot get its name back ({error.strerror})") from error

    def _remove(self, path: Path, tag: str) -> None:
        """Removes a directory of ours. It loses its name first, so that half of it is never taken for a checkpoint."""
        doomed = path
        with failing(f"{path}: cannot be removed"):
            match = _TEMPORARY.fullmatch(path.name)
            if match is None or match["state"] != "deleted":
                doomed = self._temporary(tag, "deleted")
                try:
                    os.rename(path, doomed)
                except FileNotFoundError:
                    return  # another process was faster
                _sync(self.root)
            _remove_tree(doomed)


# --- one directory ----------------------------------------------------------------------------------------------


def _is_tag(tag: str, but: str | None = None) -> bool:
    return plain_name(tag) and (tag != LATEST or tag == but)


def _natural(tag: str) -> list[tuple[str, int]]:
    """A key that puts step-9 before step-10."""
    return [(word, int(digits or -1)) for word, digits in re.findall(r"([^0-9]*)([0-9]*)", tag)]


def _is_directory(path: Path) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _stamp(path: Path) -> int | None:
    """When a checkpoint was committed; None if the directory is none."""
    if not _is_directory(path):
        return None
    try:
        status = os.lstat(path / NAME)
    except OSError:
        return None
    return status.st_mtime_ns if stat.S_ISREG(status.st_mode) else None


def _age(path: Path) -> float:
    """Seconds since something in a directory was changed."""
    last = 0.0
    with failing(f"{path}: cannot be read"), contextlib.suppress(FileNotFoundError):
        last = os.lstat(path).st_mtime
        for name in os.listdir(path) if _is_directory(path) else ():
            last = max(last, os.lstat(path / name).st_mtime)
    return time.time() - last


def _lock(path: Path) -> int:
    """Marks a directory as being written, for as long as the descriptor is open."""
    descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    with contextlib.suppress(OSError):  # some file systems know no locks
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        _close(descriptor)


def _close(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # nothing was written through it
        os.close(descriptor)


def _check_files(path: Path, manifest: Manifest) -> None:
    """Raises unless each file of the manifest is there, is no link, and has its size."""
    for name, record in manifest.files.items():
        if not plain_name(name):
            raise CheckpointError(f"{path / NAME}: files[{name!r}]: not a plain name")
        _check_file(path / name, record)


def _check_file(path: Path, record: FileRecord) -> None:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing; the manifest names it") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path}: expected a file, found a link or something else")
    if status.st_size != record.size:
        raise CheckpointError(f"{path}: {status.st_size} bytes, expected {record.size}; it was cut or changed")


def _write_whole(path: Path, content: bytes, stamp: int | None = None) -> None:
    """Puts a file in its place by a rename, once it is on the disk."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    with failing(f"{path}: cannot be written"):
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            try:
                view = memoryview(content)
                while view:
                    view = view[os.write(descriptor, view) :]
                if stamp is not None:
                    os.utime(descriptor, ns=(stamp, stamp))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise


def _sync(path: Path) -> None:
    """Brings the names in a directory to the disk."""
    with failing(f"{path}: cannot be synchronised"):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot do it
                raise
        finally:
            os.close(descriptor)


def _remove_tree(path: Path) -> None:
    for _ in range(_ATTEMPTS):
        try:
            if _is_directory(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)
            return
        except FileNotFoundError:
            if not os.path.lexists(path):
                return  # another process removes the same
    shutil.rmtree(path)
