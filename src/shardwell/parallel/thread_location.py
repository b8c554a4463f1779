"""The place in the code where the main thread is, looked up by another thread.

CPython's own dump of one thread's traceback reads the frames without making objects of them, in one call that holds the
interpreter's lock. The other ways crash. `faulthandler` walks all threads, and CPython 3.11 shows a thread that C++ is
starting before its state is filled in. `sys._current_frames` makes frame objects, which keep all local variables alive:
what the main thread drops meanwhile would be freed later, in the thread that looks. And frames that return while they
are inspected crash Python 3.11.

Only the main thread is looked up: its state lives as long as the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sysconfig
import tempfile
import threading
from pathlib import Path

_HERE = str(Path(__file__).resolve().parents[1])
_LIBRARIES = (_HERE, *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")))
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


def main_thread_state() -> int | None:
    """Return the address of the main thread's state; None in another thread, or where CPython hides its dump."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not hasattr(ctypes.pythonapi, "_Py_DumpTraceback"):
        return None
    get = ctypes.pythonapi.PyThreadState_Get
    get.restype = ctypes.c_void_p
    state: int | None = get()
    return state


def thread_location(state: int | None) -> str:
    """Return where the main thread is, in the user's code or in the engine's, by the user's line.

    `state` is what `main_thread_state` returned in that thread.
    """
    if state is None:
        return "busy"
    inside = False
    frames = _FRAME.findall(_dumped(state))  # (file, line, function), the innermost first
    for number, (name, line, _) in enumerate(frames):
        inside = inside or name.startswith(_HERE)
        if not name.startswith((*_LIBRARIES, "<frozen")):
            place = f"{_short(name)}:{line}"
            if inside:
                return f"in the engine, called at {place}"
            return f"in user code at {place}" + (f" ({frames[0][2]})" if number else "")
    return "in library code"


def _dumped(state: int) -> str:
    """Return the traceback that CPython writes for one thread; it needs a real file."""
    dump = ctypes.pythonapi._Py_DumpTraceback
    dump.argtypes, dump.restype = [ctypes.c_int, ctypes.c_void_p], None
    with contextlib.suppress(OSError), tempfile.TemporaryFile() as file:
        dump(file.fileno(), state)
        file.seek(0)
        return file.read().decode(errors="replace")
    return ""


def _short(name: str) -> str:
    """Return a path relative to the current directory if it is below it, else the file's name."""
    with contextlib.suppress(ValueError, OSError):
        path = Path(name).resolve()
        return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name
    return os.path.basename(name)
