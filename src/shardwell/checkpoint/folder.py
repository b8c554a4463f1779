"""The folder of checkpoints: one directory for each, committed by a rename, so that no partial one is visible.

    root/latest                      the tag of the checkpoint to resume from
    root/step-100/                   a committed checkpoint: manifest.json and the files that it names
    root/.step-200.1f..e0.partial    being written, or left by a crash
    root/.step-100.07..3c.aside      the old one, while a new one with the same tag takes its place
    root/.step-50.a1..9b.deleted     being removed

A crash leaves either the old or the new checkpoint. A commit syncs all files, writes the manifest, renames the old
checkpoint aside, renames the new one into place, writes `latest`, and removes the old one. Between the two renames the
old one is read where it is aside; after a crash there, `clean` renames it back. A checkpoint is renamed before it is
removed.

Any number of processes may do this concurrently. Only writers clean; readers change nothing. A checkpoint's directory
may be a link to other storage; inside it, and for removal, no link is followed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from shardwell.checkpoint import directory
from shardwell.checkpoint.manifest import MAX_NAME, NAME, Manifest, plain_name, read_manifest
from shardwell.checkpoint.parsing import failing, open_plain
from shardwell.checkpoint.reader import Reader
from shardwell.errors import CheckpointError

LATEST = "latest"
_TEMPORARY = re.compile(r"\.(?P<tag>.+)\.[0-9a-f]{16}\.(?P<state>partial|aside|deleted)", re.DOTALL)
_GIVEN_UP: set[str] = set()  # names of what this process began, gave up and could not remove then
_TICK = 1_000_000  # ns; the least distance of two commits in time, so that their order is kept


class Folder:
    """The checkpoints under one root directory."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self._locks: dict[str, int] = {}  # descriptors of directories that `begin` made, held until the commit

    # --- writing ------------------------------------------------------------------------------------------------

    def begin(self, tag: str) -> Path:
        """Return a new directory for the files of a checkpoint, for `commit`. Create the root if it does not exist."""
        self._check_tag(tag)
        self._make_root()
        self._check_free(tag)
        with failing(f"{self.root}: no checkpoint can be written here"):
            try:
                return self._make_locked(tag)
            except (
                FileNotFoundError
            ):  # this process slept for so long that its empty directory was taken for a leftover
                return self._make_locked(tag)

    def _make_locked(self, tag: str) -> Path:
        path = self._temporary(tag, "partial")
        os.mkdir(path)
        try:
            self._locks[path.name] = directory.lock(path)
        except OSError:
            _GIVEN_UP.add(path.name)
            with contextlib.suppress(OSError):
                os.rmdir(path)
                _GIVEN_UP.discard(path.name)
            raise
        return path

    def commit(
        self, temporary: str | os.PathLike[str], tag: str, manifest: Manifest, *, is_latest: bool = True
    ) -> Path:
        """Make the content of `temporary` the checkpoint `tag`, and the latest; replace an older one of this tag."""
        self._check_tag(tag)
        temporary, begun = self._begun(temporary)
        if begun != tag or not directory.is_directory(temporary):
            raise CheckpointError(
                f"{temporary}: not the directory that begin({tag!r}) returned, or it does not exist any more"
            )
        directory.check_files(temporary, manifest)
        text = manifest.to_json(str(temporary / NAME)).encode("ascii")
        directory.write_atomically(temporary / NAME, text, at=self._next_stamp())
        directory.sync(temporary)
        with directory.turn(self.root):  # or others could remove it as an old one before `latest` names it
            aside = self._move_in(temporary, tag)
            directory.sync(self.root)
            if is_latest:
                directory.write_atomically(self.root / LATEST, tag.encode())
                directory.sync(self.root)
                self._remove_unfinished_names()
        self._unlock(temporary, self.root / tag)
        for path in aside:
            try:
                self._remove(path, tag)
            except CheckpointError as error:  # the commit is valid without it
                warnings.warn(f"an old checkpoint was not removed: {error}", stacklevel=2)
        return self.root / tag

    def discard(self, temporary: str | os.PathLike[str]) -> None:
        """Remove a directory that `begin` made and that was not committed."""
        path, tag = self._begun(temporary)
        _GIVEN_UP.add(path.name)
        try:
            # before it is unlocked: a crash in between leaves a directory that `clean` removes
            doomed = self._rename_for_removal(path, tag)
        finally:
            self._unlock(path, path)
        with failing(f"{doomed}: cannot be removed"):
            directory.remove_tree(doomed)
        if not os.path.lexists(path):
            _GIVEN_UP.discard(path.name)

    # --- reading ------------------------------------------------------------------------------------------------

    def latest(self) -> str | None:
        """Return the tag to resume from, which the file `latest` names. None if no checkpoint was committed here.

        Without that file it is the newest checkpoint, with a warning: a crash may have come before the file was first
        written. It is an error if the file names no checkpoint, or if there are only remains of checkpoints.
        """
        try:
            tag = self.named()
        except CheckpointError as error:
            raise CheckpointError(f"{error}. {self._advice()}") from error
        if tag is not None:
            if not self.is_committed(tag):
                found = "has no manifest" if os.path.lexists(self.root / tag) else "is not there"
                raise CheckpointError(
                    f"{self.root / LATEST}: names {tag!r}, which {found}: was it removed, or is it copied still? "
                    f"{self._advice()}"
                )
            return tag
        newest = next(iter(self.tags()), None)
        if newest is not None:
            words = f"{self.root / LATEST}: missing; going on from the newest checkpoint, {newest!r}"
            warnings.warn(words, stacklevel=2)
            return newest
        broken = next((name for name, path in self._list() if _is_tag(name) and directory.looks_broken(path)), None)
        if broken is not None:
            raise CheckpointError(
                f"{self.root / broken}: a checkpoint without its manifest, and there is no other: was a copy "
                "interrupted, or is its storage away? To begin from scratch, move it"
            )
        return None

    def tags(self) -> list[str]:
        """Return the tags of committed checkpoints, newest first: by step, then by time of commit, then by name."""
        stamps = self._stamps()

        def key(tag: str) -> tuple[int, int, list[tuple[str, int]]]:
            path = self._find(tag)
            return -1 if path is None else directory.step_in(path), stamps[tag], _natural(tag)

        return sorted(stamps, key=key, reverse=True)

    def newest_complete(self) -> str | None:
        """Return the newest complete checkpoint."""
        return next((tag for tag in self.tags() if self._is_complete(tag)), None)

    def _complete_tags(self) -> list[str]:
        return [tag for tag in self.tags() if self._is_complete(tag)]

    def _is_complete(self, tag: str) -> bool:
        path = self._find(tag)
        return path is not None and directory.is_complete(path)

    def _advice(self) -> str:
        newest = self.newest_complete()
        if newest is None:
            return "No checkpoint here is complete: to start from scratch, move the contents of the folder away"
        return f"The newest complete checkpoint here is {newest!r}: pass tag={newest!r} to resume from it"

    def has_any(self) -> bool:
        """Tell whether the folder has a checkpoint."""
        return bool(self._stamps())

    def _stamps(self) -> dict[str, int]:
        """Return the time at which each checkpoint was committed."""
        stamps: dict[str, int] = {}
        for name, path in self._list():
            match = _TEMPORARY.fullmatch(name)
            tag = match["tag"] if match is not None and match["state"] == "aside" else name
            stamp = directory.stamp(path) if _is_tag(tag) else None
            if stamp is not None:
                stamps[tag] = max(stamp, stamps.get(tag, stamp))
        return stamps

    def is_committed(self, tag: str) -> bool:
        return _is_tag(tag) and self._find(tag) is not None

    def path(self, tag: str) -> Path:
        """Return the directory of a committed checkpoint."""
        self._check_tag(tag)
        path = self._find(tag)
        if path is None:
            reason = "not a committed checkpoint" if os.path.lexists(self.root / tag) else "no such checkpoint"
            known = ", ".join(self.tags()[:10]) or "none"
            raise CheckpointError(f"{self.root / tag}: {reason}; those here are: {known}")
        return path

    def open(self, tag: str | None = None) -> Manifest:
        """Return the manifest of a checkpoint, or of the latest; raise unless all its files are complete."""
        if tag is None:
            tag = self.latest()
            if tag is None:
                raise CheckpointError(f"{self.root}: no checkpoint to open")
        for _ in range(directory.ATTEMPTS):
            path = self.path(tag)
            before = path, directory.identity(path)
            try:
                manifest = read_manifest(path)
                directory.check_files(path, manifest)
                return manifest
            except CheckpointError as error:
                path = self.path(tag)
                if (path, directory.identity(path)) == before:  # else it was moved or replaced while it was read
                    raise CheckpointError(f"{error}. {self._advice()}") from error
        raise CheckpointError(f"{self.root / tag}: replaced again and again while it was read")

    def reader(self, tag: str, file: str, manifest: Manifest) -> Reader:
        """Open a file of a checkpoint and check it against the manifest."""
        if file not in manifest.files:
            raise CheckpointError(f"{self.root / tag}: {file!r} is not among the files of its manifest")
        if not plain_name(file):
            raise CheckpointError(f"{self.root / tag}: {file!r} is not a plain name")
        return Reader(self.path(tag) / file, manifest.files[file])

    # --- tidying ------------------------------------------------------------------------------------------------

    def clean(self, older_than: float = 0.0, dry_run: bool = False) -> list[str]:
        """Repair what crashes left: rename old checkpoints back, remove temporary directories.

        Only writers call this. Directories that a process writes, or may write, stay (`directory.is_abandoned`), and
        so do those that changed less than `older_than` seconds ago. Return the names of the removed directories, or of
        those that would be removed.
        """
        removed = []
        now = time.time if dry_run else partial(directory.clock_of, self.root)
        for name, path in self._list():
            match = _TEMPORARY.fullmatch(name)
            if match is None or not _is_tag(match["tag"], but=LATEST):
                continue
            tag, state = match["tag"], match["state"]
            if state == "aside" and self._find(tag) == path:
                if not dry_run:
                    self._move_back(path, tag)
            elif (
                state != "partial" or name in _GIVEN_UP or directory.is_abandoned(path, older_than=older_than, now=now)
            ):
                if not dry_run:
                    self._remove(path, tag)
                    _GIVEN_UP.discard(name)
                removed.append(name)
        return removed

    def _remove_unfinished_names(self) -> None:
        """Remove temporary files of `latest` that crashes left. It is this process's turn, so nobody writes one now."""
        for name, path in self._list():
            match = _TEMPORARY.fullmatch(name)
            if match is not None and (match["tag"], match["state"]) == (LATEST, "partial"):
                with contextlib.suppress(OSError):  # `clean` removes it later
                    path.unlink()

    def prune(self, keep_last: int, dry_run: bool = False) -> list[str]:
        """Remove all but the newest `keep_last` checkpoints and the one that `latest` names.

        Incomplete checkpoints do not count, and are left to the user. Return the tags of the removed checkpoints, or of
        those that would be removed.
        """
        if keep_last < 1:
            raise CheckpointError(f"keep_last: expected at least 1, found {keep_last}")
        renamed = []
        with contextlib.nullcontext() if dry_run else directory.turn(self.root):
            try:
                named = self.named()
            except CheckpointError:
                named = None
            removed = [tag for tag in self._complete_tags()[keep_last:] if tag != named]
            for tag in [] if dry_run else removed:
                # first the copies aside: they would be read once the name is gone
                paths = [*self._asides(tag), *([self.root / tag] if directory.stamp(self.root / tag) else [])]
                renamed += [self._rename_for_removal(path, tag) for path in paths]
        for path in renamed:
            with failing(f"{path}: cannot be removed"):
                directory.remove_tree(path)
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
        """Return a directory that `begin` made, and its tag."""
        path = Path(temporary)
        match = _TEMPORARY.fullmatch(path.name)
        if match is None or match["state"] != "partial" or path.parent.resolve() != self.root.resolve():
            raise CheckpointError(f"{path}: not a directory that begin returned for {self.root}")
        return self.root / path.name, match["tag"]

    def _unlock(self, temporary: Path, path: Path) -> None:
        """Release the lock of a directory that was begun as `temporary` and is at `path` now."""
        descriptor = self._locks.pop(temporary.name, None)
        if descriptor is not None:
            directory.unlock(path, descriptor)

    def named(self) -> str | None:
        """Return the tag in the file `latest`; None if there is no such file."""
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
        """Return the directory of a committed checkpoint: its tag, or aside while a commit is between its renames."""
        for _ in range(3):  # a commit may end between the two looks
            if directory.stamp(self.root / tag) is not None:
                return self.root / tag
            stamps = [(stamp, path) for path in self._asides(tag) if (stamp := directory.stamp(path)) is not None]
            if stamps:
                return max(stamps)[1]
        return None

    def _next_stamp(self) -> int:
        """Return a time for the manifest that is later than that of any other, whatever the clocks say."""
        return max([time.time_ns(), *(stamp + _TICK for stamp in self._stamps().values())])

    # --- moves --------------------------------------------------------------------------------------------------

    def _make_root(self) -> None:
        missing = []
        path = self.root.absolute()
        while not os.path.lexists(path):
            missing.append(path)
            path = path.parent
        with failing(f"{self.root}: cannot be made"):
            for made in reversed(missing):
                os.makedirs(made, exist_ok=True)
                directory.sync(made.parent)
        if not self.root.is_dir():
            raise CheckpointError(f"{self.root}: not a directory; checkpoints need one")

    def _check_free(self, tag: str) -> None:
        """Raise if the tag names something that is no checkpoint, and must not be replaced."""
        path = self.root / tag
        identity = directory.identity(path)
        if identity is not None and directory.stamp(path) is None and directory.identity(path) == identity:
            raise CheckpointError(f"{path}: in the way, and not a checkpoint; move it, or use another tag")

    def _move_in(self, temporary: Path, tag: str) -> list[Path]:
        """Rename a complete checkpoint to its tag; return the new paths of those that had the name before."""
        target = self.root / tag
        aside = list(self._asides(tag))  # a crash left these, or another process that replaces the same checkpoint
        for _ in range(directory.ATTEMPTS):
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
            directory.sync(self.root)
        except OSError as error:
            gone = (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)  # a commit was faster, or in the way
            if error.errno not in gone:
                raise CheckpointError(f"{aside}: cannot get its name back ({error.strerror})") from error

    def _remove(self, path: Path, tag: str) -> None:
        with failing(f"{path}: cannot be removed"):
            directory.remove_tree(self._rename_for_removal(path, tag))

    def _rename_for_removal(self, path: Path, tag: str) -> Path:
        """Rename a directory before it is removed, so that a part of it is never taken for a checkpoint."""
        match = _TEMPORARY.fullmatch(path.name)
        if match is not None and match["state"] == "deleted":
            return path
        renamed = self._temporary(tag, "deleted")
        with failing(f"{path}: cannot be removed"):
            try:
                os.rename(path, renamed)
            except FileNotFoundError:
                return renamed  # another process was faster
            directory.sync(self.root)
        return renamed


def _is_tag(tag: str, but: str | None = None) -> bool:
    return plain_name(tag) and (tag != LATEST or tag == but)


def _natural(tag: str) -> list[tuple[str, int]]:
    """Return a sort key that puts step-9 before step-10."""
    return [(word, int(digits or -1)) for word, digits in re.findall(r"([^0-9]*)([0-9]*)", tag)]
