"""The launcher's temporary folder, which is removed however the launcher ends."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator

# A process that waits for the end of its input, and is not a child of the launcher: its children are ranks.
_SWEEP = 'exec 3<&0; (cat <&3 >/dev/null; rm -rf -- "$1") &'


@contextlib.contextmanager
def kept_folder(prefix: str = "shardwell-") -> Iterator[str]:
    """Make a private folder, and remove it at the end.

    A launcher that is killed cannot remove it. Therefore a process waits until the launcher ends, by a pipe that the
    kernel closes. The process has its own session, so that a signal to the launcher's session does not end it.
    """
    reading, writing = os.pipe()  # not inherited by the ranks
    try:
        with tempfile.TemporaryDirectory(prefix=prefix) as folder:
            _start_sweeper(folder, reading)
            yield folder
    finally:
        os.close(reading)
        os.close(writing)


def _start_sweeper(folder: str, reading: int) -> None:
    with contextlib.suppress(OSError):  # no shell: the folder stays after a kill, and nothing else is different
        subprocess.run(
            ["/bin/sh", "-c", _SWEEP, "sh", folder],
            stdin=reading,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
            check=False,
        )
