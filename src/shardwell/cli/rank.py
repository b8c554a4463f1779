"""One rank: runs the user's script or module as `__main__` and writes its error to a file.

This file is started by name and imports only the standard library, so that the script is the first to import torch. The
launcher reads the error file and prints the first failing rank's error; ranks print nothing, because tracebacks of many
ranks on one terminal hide the one that matters.

    python rank.py script.py ARGS...
    python rank.py -m module ARGS...
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback

_PR_SET_PDEATHSIG = 1  # from Linux' prctl.h
LAUNCHER = "SHARDWELL_LAUNCHER"  # the process id of the launcher
ENDED = "SHARDWELL_ENDED"  # a folder with a file for each rank of this node that has ended without an error
LOCAL_RANK_ARGUMENT = "SHARDWELL_LOCAL_RANK_ARGUMENT"  # the script gets --local_rank=N
_TIMEOUT, _PAUSE = 10.0, 1.0  # seconds


def main() -> None:
    """Run the script or module that the arguments name; exit with its exit code, or with 1 after an exception."""
    _end_with_launcher()
    _write_full_lines()
    _watch_for_ended()
    if sys.path and sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
        del sys.path[0]  # the script's folder takes its place
    as_module = sys.argv[1] == "-m"
    target = sys.argv[2 if as_module else 1]
    sys.argv = sys.argv[2 if as_module else 1 :]
    if os.environ.pop(LOCAL_RANK_ARGUMENT, "") == "1":
        sys.argv.insert(1, f"--local_rank={os.environ.get('LOCAL_RANK', '0')}")
    try:
        if as_module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(target)))
            runpy.run_path(target, run_name="__main__")
    except KeyboardInterrupt as error:
        sys.last_value = error  # as Python leaves it: the engine's last message to the other ranks quotes it
        sys.exit(128 + signal.SIGINT)
    except SystemExit as leaving:
        if isinstance(leaving.code, str):
            _write_down(leaving, leaving.code, "")
        if leaving.code not in (None, 0):
            sys.last_value = leaving
        raise
    except Exception as error:
        sys.last_value = error
        trace = _own_traceback(error)
        if not _write_down(error, f"{type(error).__name__}: {error}", trace):
            sys.stderr.write(trace)
        sys.exit(1)


def _own_traceback(error: BaseException) -> str:
    """Return the traceback without the frames of this file and of runpy."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.endswith((__file__, "<frozen runpy>", "runpy.py")):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def _write_down(error: BaseException, message: str, trace: str) -> bool:
    """Write the file that torch's elastic agent expects, with a finer clock and the names of the error's classes."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return False
    kinds = [kind.__name__ for kind in type(error).__mro__]
    now = time.time()
    extra = {"py_callstack": trace, "timestamp": str(int(now)), "seconds": now, "kinds": kinds}
    try:
        with open(f"{path}.partial", "w", encoding="utf-8") as file:
            json.dump({"message": {"message": message, "extraInfo": extra}}, file)
        os.replace(f"{path}.partial", path)  # completely or not at all: the launcher may end this process at any moment
    except OSError:
        return False
    return True


def _end_with_launcher() -> None:
    """Let the kernel (Linux) end this rank if its launcher is killed.

    If the launcher was killed before this call, this process has another parent already.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    launcher = os.environ.pop(LAUNCHER, "")
    if launcher.isdigit() and os.getppid() != int(launcher):
        os._exit(128 + signal.SIGKILL)


def _watch_for_ended() -> None:
    """End this rank if it waits in torch's `init_process_group` for one that has ended already, without an error.

    torch would wait for half an hour. The launcher writes a file for each rank of this node that ends so. A thread
    polls until there is a process group, because the main thread waits inside torch and cannot be interrupted.
    """
    folder = os.environ.pop(ENDED, "")
    if folder:
        threading.Thread(target=_watch, args=(folder, threading.main_thread().ident), daemon=True).start()


def _watch(folder: str, main_thread: int | None) -> None:
    waited = 0.0
    while waited < _TIMEOUT:
        time.sleep(_PAUSE)
        if _has_joined():
            return
        try:
            ended = sorted(os.listdir(folder))
        except OSError:  # the launcher is about to end this rank
            return
        waits = ended and main_thread is not None and _is_joining(main_thread)
        waited = waited + _PAUSE if waits else 0.0
    words = (
        f"PeerError: rank {ended[0]} ended, without an error, before it called `init_process_group`, where rank "
        f"{os.environ.get('RANK')} waits for it. Let all ranks of a script call it, or none"
    )
    _write_down(RuntimeError(words), words, "")
    os._exit(1)


def _has_joined() -> bool:
    is_initialized = getattr(sys.modules.get("torch.distributed"), "is_initialized", None)
    return is_initialized is not None and bool(is_initialized())


def _is_joining(thread: int) -> bool:
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code.co_name == "init_process_group" and "distributed" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def _write_full_lines() -> None:
    """Write each line with one system call, also in unbuffered mode, so that lines of several ranks do not mix."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


if __name__ == "__main__":
    main()
