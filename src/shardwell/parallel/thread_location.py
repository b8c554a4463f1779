"""The place in the code where a thread is, looked up by another thread.

`faulthandler` reads the frames of all threads without making objects of them. `sys._current_frames` makes frame
objects, and they keep all local variables alive: what the other thread drops meanwhile would be freed later, in the
thread that looks, by finalizers that do not expect this. And frames that return while they are inspected crash Python
3.11.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import sysconfig
import tempfile
from pathlib import Path

_HERE = str(Path(__file__).resolve().parents[1])
_LIBRARIES = (_HERE, *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")))
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


def thread_location(thread_id: int) -> str:
    """Return where a thread is, in the user's code or in the engine's, by the user's line."""
    inside = False
    frames = _frames(thread_id)
    for number, (name, line, _) in enumerate(frames):
        inside = inside or name.startswith(_HERE)
        if not name.startswith((*_LIBRARIES, "<frozen")):
            place = f"{_short(name)}:{line}"
            if inside:
                return f"in the engine, called at {place}"
            return f"in user code at {place}" + (f" ({frames[0][2]})" if number else "")
    return "in code that is nobody's"


def _frames(thread_id: int) -> list[tuple[str, str, str]]:
    """Return (file, line, function) of a thread's frames, the innermost first."""
    text = _dumped()
    threads = list(_THREAD.finditer(text))
    for thread, after in zip(threads, [*threads[1:], None], strict=True):
        if int(thread[1], 16) == thread_id:
            return _FRAME.findall(text, thread.end(), len(text) if after is None else after.start())
    return []


def _dumped() -> str:
    """Return the traceback of all threads that `faulthandler` writes; it needs a real file."""
    with contextlib.suppress(OSError), tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")
    return ""


def _short(name: str) -> str:
    """Return a path relative to the current directory if it is below it, else the file's name."""
    with contextlib.suppress(ValueError, OSError):
        path = Path(name).resolve()
        return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name
    return os.path.basename(name)
