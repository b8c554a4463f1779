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

Any number of processes may do this at once. Only who writes cleans; who reads changes nothing. A checkpoint's directory
may be a link to other storage; below it, and to be removed, no link is followed.
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
        self._locks: dict[str, int] = {}  # of what this object began: descriptors, held until it is committed

    # --- writing ------------------------------------------------------------------------------------------------

    def begin(self, tag: str) -> Path:
        """A new directory to write the files of a checkpoint to, for `commit`. Makes the root if there is none."""
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
        """Makes what was written to `temporary` the checkpoint `tag`, and the latest; replaces the one before."""
        self._check_tag(tag)
        temporary, begun = self._begun(temporary)
        if begun != tag or not directory.is_directory(temporary):
            raise CheckpointError(f"{temporary}: not what begin({tag!r}) returned, or no longer there")
        directory.check_files(temporary, manifest)
        text = manifest.to_json(str(temporary / NAME)).encode("ascii")
        directory.write_whole(temporary / NAME, text, at=self._next_stamp())
        directory.sync(temporary)
        with directory.turn(self.root):  # or others could remove it as an old one before `latest` names it
            aside = self._move_in(temporary, tag)
            directory.sync(self.root)
            if is_latest:
                directory.write_whole(self.root / LATEST, f"{tag}\n".encode())
                directory.sync(self.root)
        self._unlock(temporary, self.root / tag)
        for path in aside:
            try:
                self._remove(path, tag)
            except CheckpointError as error:  # of no harm to what was committed
                warnings.warn(f"an old checkpoint is left: {error}", stacklevel=2)
        return self.root / tag

    def discard(self, temporary: str | os.PathLike[str]) -> None:
        """Removes what `begin` made and nobody committed."""
        path, tag = self._begun(temporary)
        _GIVEN_UP.add(path.name)
        try:
            doomed = self._doom(path, tag)  # before it is unlocked: a crash in between leaves what `clean` removes
        finally:
            self._unlock(path, path)
        with failing(f"{doomed}: cannot be removed"):
            directory.remove_tree(doomed)
        if not os.path.lexists(path):
            _GIVEN_UP.discard(path.name)

    # --- reading ------------------------------------------------------------------------------------------------

    def latest(self) -> str | None:
        """The tag to go on from: what `latest` names. None if no checkpoint was ever committed here.

        Without a file `latest` it is the newest, with a warning: a crash may have come before the first one was
        written. Where it names what is no checkpoint, or something here was one, that is an error.
        """
        try:
            tag = self._named()
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
        torn = next((name for name, path in self._list() if _is_tag(name) and directory.looks_torn(path)), None)
        if torn is not None:
            raise CheckpointError(
                f"{self.root / torn}: a checkpoint without its manifest, and there is no other: was a copy "
                "interrupted, or is its storage away? To begin from scratch, move it"
            )
        return None

    def tags(self) -> list[str]:
        """The committed checkpoints, the newest first: by the step that they say, when they were committed, by name."""
        stamps = self._stamps()

        def key(tag: str) -> tuple[int, int, list[tuple[str, int]]]:
            path = self._find(tag)
            return -1 if path is None else directory.step_in(path), stamps[tag], _natural(tag)

        return sorted(stamps, key=key, reverse=True)

    def newest_whole(self) -> str | None:
        """The newest checkpoint whose files are all there in full size."""
        return next((tag for tag in self.tags() if self._is_whole(tag)), None)

    def _whole(self) -> list[str]:
        return [tag for tag in self.tags() if self._is_whole(tag)]

    def _is_whole(self, tag: str) -> bool:
        path = self._find(tag)
        return path is not None and directory.is_whole(path)

    def _advice(self) -> str:
        newest = self.newest_whole()
        if newest is None:
            return "No checkpoint here is whole: to begin from scratch, move away what is here"
        return f"The newest checkpoint here that is whole is {newest!r}: pass tag={newest!r} to go on from it"

    def has_any(self) -> bool:
        """Whether a checkpoint is here."""
        return bool(self._stamps())

    def _stamps(self) -> dict[str, int]:
        """When each checkpoint was committed."""
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
        """Opens a file of a checkpoint and checks it against the manifest."""
        if file not in manifest.files:
            raise CheckpointError(f"{self.root / tag}: {file!r} is not among the files of its manifest")
        if not plain_name(file):
            raise CheckpointError(f"{self.root / tag}: {file!r} is not a plain name")
        return Reader(self.path(tag) / file, manifest.files[file])

    # --- tidying ------------------------------------------------------------------------------------------------

    def clean(self, older_than: float = 0.0, dry_run: bool = False) -> list[str]:
        """Ends what crashes left undone: old checkpoints get their names back, leftovers are removed.

        For who writes, not for who reads. What somebody still writes, or may do, stays (`directory.is_abandoned`), and
        what was changed less than `older_than` seconds ago. Returns the names of what was removed, or would be.
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
            elif state != "partial" or name in _GIVEN_UP or directory.is_abandoned(path, older_than=older_than):
                if not dry_run:
                    self._remove(path, tag)
                    _GIVEN_UP.discard(name)
                removed.append(name)
        return removed

    def prune(self, keep_last: int, dry_run: bool = False) -> list[str]:
        """Removes all but the newest `keep_last` checkpoints and the one that `latest` names.

        One that is not whole does not count, and is left to the user. Returns the tags of what was removed, or would
        be.
        """
        if keep_last < 1:
            raise CheckpointError(f"keep_last: expected at least 1, found {keep_last}")
        doomed = []
        with contextlib.nullcontext() if dry_run else directory.turn(self.root):
            try:
                named = self._named()
            except CheckpointError:
                named = None
            removed = [tag for tag in self._whole()[keep_last:] if tag != named]
            for tag in [] if dry_run else removed:
                # first those aside: they are what is read once it has no name
                paths = [*self._asides(tag), *([self.root / tag] if directory.stamp(self.root / tag) else [])]
                doomed += [self._doom(path, tag) for path in paths]
        for path in doomed:
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
        """A directory that `begin` made, and its tag."""
        path = Path(temporary)
        match = _TEMPORARY.fullmatch(path.name)
        if match is None or match["state"] != "partial" or path.parent.resolve() != self.root.resolve():
            raise CheckpointError(f"{path}: not what begin returned for {self.root}")
        return self.root / path.name, match["tag"]

    def _unlock(self, temporary: Path, path: Path) -> None:
        """What was begun as `temporary` is not being written any more; it is at `path` now."""
        descriptor = self._locks.pop(temporary.name, None)
        if descriptor is not None:
            directory.unlock(path, descriptor)

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
            if directory.stamp(self.root / tag) is not None:
                return self.root / tag
            stamps = [(stamp, path) for path in self._asides(tag) if (stamp := directory.stamp(path)) is not None]
            if stamps:
                return max(stamps)[1]
        return None

    def _next_stamp(self) -> int:
        """A time for the manifest that is later than that of any other, whatever the clocks say."""
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
        """Raises if what has the tag as its name is no checkpoint, and so not ours to replace."""
        path = self.root / tag
        identity = directory.identity(path)
        if identity is not None and directory.stamp(path) is None and directory.identity(path) == identity:
            raise CheckpointError(f"{path}: in the way, and not a checkpoint; move it, or use another tag")

    def _move_in(self, temporary: Path, tag: str) -> list[Path]:
        """Gives a complete checkpoint its name; returns where those are now that had it before."""
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
            directory.remove_tree(self._doom(path, tag))

    def _doom(self, path: Path, tag: str) -> Path:
        """What is to be removed loses its name first, so that half of it is never taken for a checkpoint."""
        match = _TEMPORARY.fullmatch(path.name)
        if match is not None and match["state"] == "deleted":
            return path
        doomed = self._temporary(tag, "deleted")
        with failing(f"{path}: cannot be removed"):
            try:
                os.rename(path, doomed)
            except FileNotFoundError:
                return doomed  # another process was faster
            directory.sync(self.root)
        return doomed


def _is_tag(tag: str, but: str | None = None) -> bool:
    return plain_name(tag) and (tag != LATEST or tag == but)


def _natural(tag: str) -> list[tuple[str, int]]:
    """A key that puts step-9 before step-10."""
    return [(word, int(digits or -1)) for word, digits in re.findall(r"([^0-9]*)([0-9]*)", tag)]
