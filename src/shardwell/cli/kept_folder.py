"""The launcher's temporary folder, which goes however the launcher ends."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator

_SWEEP = 'cat >/dev/null; rm -rf -- "$1"'  # when the other end of the pipe is gone


@contextlib.contextmanager
def kept_folder(prefix: str = "shardwell-") -> Iterator[str]:
    """A folder that nobody else may enter.

    A launcher that is killed cannot remove it. So a process waits beside it until the launcher ends, by a pipe that the
    kernel closes. It is in a session of its own, so that what ends the launcher's does not end it.
    """
    with tempfile.TemporaryDirectory(prefix=prefix) as folder:
        sweeper = _sweeper(folder)
        try:
            yield folder
        finally:
            if sweeper is not None:
                sweeper.communicate()


def _sweeper(folder: str) -> subprocess.Popen[bytes] | None:
    try:
        return subprocess.Popen(
            ["/bin/sh", "-c", _SWEEP, "sh", folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )
    except OSError:  # no shell: the folder stays after a kill, and nothing else
        return None
