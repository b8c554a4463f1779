"""Reads a configuration from a file, a text or a mapping. Anything but a plain file or a pipe is refused unread."""

from __future__ import annotations

import base64
import os
import re
import select
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwell.config.text import parse
from shardwell.errors import ConfigError, printable

_BASE64 = re.compile(r"[A-Za-z0-9_\-]{2,}={0,2}")
_LARGEST = 64 << 20  # bytes of a file
_PIPE_TIMEOUT = 10.0  # seconds to wait for the writer of a pipe
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def read(source: str | os.PathLike[str] | Mapping[str, Any] | None) -> tuple[str, str, Mapping[str, Any]]:
    """Return the source's name for messages, its name for origins, and its content."""
    if source is None:
        return "default", "default", {}
    if isinstance(source, Mapping):
        return "dict", "dict", source
    if isinstance(source, str) and "{" in source and source.lstrip().startswith(("{", "//", "#", "/*")):
        return "JSON text", "JSON text", parse(source, "JSON text")
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError(f"expected a path, JSON text, a mapping or a Config, found {type(source).__name__}")
    if isinstance(source, str) and (decoded := _from_base64(source)) is not None:
        return "base64 text", "base64 text", parse(decoded, "base64 text")
    path = Path(source)
    text = text_of(path)
    return printable(str(path)), printable(path.name), parse(text, printable(str(path)))


def text_of(path: Path) -> str:
    """Return the text of a file, or of a pipe that somebody writes into; raise `ConfigError` for anything else."""
    shown = printable(str(path))
    try:
        return _bytes(path, shown).decode("utf-8-sig")
    except ConfigError:  # it is a ValueError, too
        raise
    except FileNotFoundError:
        raise ConfigError(f"{shown}: no such file (looked for {printable(str(path.absolute()))})") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{shown}: not a text file in UTF-8 ({error.reason} at byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"{shown}: cannot be read ({error.strerror})") from None
    except ValueError as error:  # NUL, or a character that no file system has
        raise ConfigError(f"{shown}: not a valid file name ({error})") from None


def _from_base64(text: str) -> str | None:
    """Return the JSON in a text of URL-safe base64, which other launchers hand over instead of a file, or None."""
    if not _BASE64.fullmatch(text) or os.path.exists(text):
        return None
    try:
        found = base64.urlsafe_b64decode(text).decode()
    except ValueError:  # also of a byte that is no text
        return None
    return found if found.lstrip().startswith("{") else None


def _bytes(path: Path, shown: str) -> bytes:
    kind = stat.S_IFMT(os.stat(path).st_mode)
    if kind in _KINDS:
        raise ConfigError(f"{shown}: {_KINDS[kind]}, not a file")
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe without a writer would block
    try:
        found = _from_pipe(file, shown) if kind == stat.S_IFIFO else _from_file(file)
    finally:
        os.close(file)
    if len(found) > _LARGEST:
        raise ConfigError(f"{shown}: more than {_LARGEST >> 20} MiB, too large to be a configuration")
    return found


def _from_file(file: int) -> bytes:
    parts = []
    size = 0
    while size <= _LARGEST and (part := os.read(file, 1 << 20)):
        parts.append(part)
        size += len(part)
    return b"".join(parts)


def _from_pipe(file: int, shown: str) -> bytes:
    """Read a pipe, such as a shell makes for `<(command)`, until its writer closes it."""
    deadline, parts, size = time.monotonic() + _PIPE_TIMEOUT, [], 0
    while size <= _LARGEST:
        left = deadline - time.monotonic()
        if left <= 0:
            raise ConfigError(f"{shown}: a pipe into which no configuration was written within {_PIPE_TIMEOUT:g} s")
        if not select.select([file], [], [], min(left, 0.1))[0]:
            continue
        try:
            part = os.read(file, 1 << 16)
        except BlockingIOError:
            continue
        if part:
            parts.append(part)
            size += len(part)
        elif parts:
            break
        else:
            time.sleep(0.05)  # there is no writer yet
    return b"".join(parts)
