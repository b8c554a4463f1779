"""The process that has imported torch and shardwell, and forks processes that run other programs (`preloaded.py`).

It computes nothing and has one thread, so that a fork leaves nothing half done. `clone` makes the new process a child
of the server's parent, which waits for it and signals it as it does with its own.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import fcntl
import gc
import importlib
import importlib.machinery
import io
import os
import runpy
import signal
import socket
import sys
import tempfile
import threading
import types
import warnings
from typing import Any

from tests.support import preloaded

MODULES = (
    "numpy", "torch", "torch.distributed", "torch._dynamo", "torch.distributed.elastic.agent.server.api",
    "shardwell", "shardwell.engine.engine", "shardwell.engine.initialization", "shardwell.zero", "shardwell.cli",
    "tests.support.leaks",
)  # fmt: skip
MODULES_OF_KIND = {
    "1": (),
    "poisoned": (),
    "deepspeed": (
        "shardwell.compat.deepspeed",  # first: the others look for its names when they are loaded
        "accelerate", "transformers.trainer", "transformers.models.llama.modeling_llama",
    ),
}  # fmt: skip
_CLONE_PARENT, _CLONE_CHILD_CLEARTID, _CLONE_CHILD_SETTID = 0x8000, 0x200000, 0x1000000
_SYS_CLONE, _PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_GET_TID_ADDRESS = 56, 1, 15, 40  # on x86-64


def main() -> None:
    """Serve until the connection ends. In a process that was forked, run its program."""
    early = preloaded.early_of(dict(os.environ))
    base = _paths_without(os.environ.get("PYTHONPATH", ""))
    gc.disable()  # what is imported stays
    for name in MODULES:
        importlib.import_module(name)
    for name in MODULES_OF_KIND[sys.argv[2]]:
        with contextlib.suppress(ModuleNotFoundError):  # where it is not installed, its tests are skipped
            importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a module of MODULES starts threads, which no fork survives"
    gc.collect()
    gc.freeze()
    gc.enable()
    # A thread of gloo that is woken would take the core of the thread that has its lock, and poll for the lock.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # in a terminal it is for pytest, which ends this process
    connection = socket.socket(fileno=int(sys.argv[1]))
    request, files = _serve(connection)  # returns in a child
    given = None
    while given is None and _may_start_others(request["args"]):  # others are forked from a server of its own
        given, theirs = socket.socketpair()
        if os.fork() == 0:
            given.close()
            given = None
            _hide(files)
            request, files = _serve(theirs)
        else:
            theirs.close()
    preloaded.install_given(given, early)
    _take_files(files, [0, 1, 2, *request["pass"]])
    signal.signal(signal.SIGINT, interrupt)
    _become(request, base)
    try:
        _run(request["args"])
    except SystemExit as leaving:
        _end(leaving)
    except Exception as error:
        _tell(error.with_traceback(_own_traceback(error)))
        _end(SystemExit(1))
    else:
        _end(SystemExit(0))


def _serve(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork for each request, and return the request in the child."""
    while True:
        try:
            request, files = preloaded.receive(connection)
        except (EOFError, OSError):
            os._exit(0)
        begun, begins = os.pipe()
        if (pid := _clone()) == 0:
            connection.close()
            os.close(begun)
            _take_session(request)
            os.close(begins)
            _enter(request["namespaces"])  # here, so that a server of the process forks others inside of them
            return request, files
        os.close(begins)
        os.read(begun, 1)  # the one who asked may signal the group of the process
        for file in (begun, *files):
            os.close(file)
        with contextlib.suppress(OSError):
            preloaded.send(connection, {"pid": pid}, [])


def _clone() -> int:
    """Fork a child of this process's parent. The C library must know its thread's new id, as after `fork`."""
    libc, place = ctypes.PyDLL(None, use_errno=True), ctypes.c_void_p()
    if libc.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(place), 0, 0, 0) != 0:
        os._exit(1)  # a kernel that does not tell it: those who ask start Python itself
    flags = _CLONE_PARENT | _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID | signal.SIGCHLD
    libc.syscall.argtypes = [ctypes.c_long] * 4 + [ctypes.c_void_p, ctypes.c_long]
    libc.syscall.restype = ctypes.c_long
    python = ctypes.pythonapi
    python.PyOS_BeforeFork()
    pid = int(libc.syscall(_SYS_CLONE, flags, 0, 0, place, 0))
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(ctypes.get_errno(), "clone")
    return pid


def _hide(files: list[int]) -> None:
    """Let go of what belongs to the process whose server this is, and end with it."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _prctl(_PR_SET_NAME, preloaded.NAME)
    for file in files:
        os.close(file)


def _may_start_others(args: list[str]) -> bool:
    """Tell whether a program may be a launcher: any but a text and a rank of shardwell's launcher."""
    return args[0] != "-c" and not args[0].endswith("/shardwell/cli/rank.py")


def _prctl(option: int, value: Any) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _take_session(request: dict[str, Any]) -> None:
    if request["session"]:
        os.setsid()
    elif request["group"] != -1:
        os.setpgid(0, request["group"])
    elif os.getpgid(0) != (group := os.getpgid(os.getppid())):
        os.setpgid(0, group)


def _become(request: dict[str, Any], base: list[str]) -> None:
    """Take on the directory, environment and paths that the process was asked for with."""
    _prctl(_PR_SET_NAME, os.path.basename(sys.executable).encode())
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    unbuffered = request["unbuffered"] or bool(os.environ.get("PYTHONUNBUFFERED"))
    old = (sys.stdin, sys.stdout, sys.stderr)
    sys.stdin, sys.stdout, sys.stderr = (_stream(number, old[number], unbuffered) for number in range(3))
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    here = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
    sys.path[:] = [*here, *base]
    sys.path_importer_cache.clear()
    importlib.invalidate_caches()
    for name in [name for name in sys.modules if name == "tests" or name.startswith("tests.")]:
        if not name.startswith("tests.support.preloaded"):
            del sys.modules[name]  # a program may have modules of these names
    tempfile.tempdir = None  # as TMPDIR says
    if threads := os.environ.get("OMP_NUM_THREADS"):
        sys.modules["torch"].set_num_threads(int(threads))
    if filters := os.environ.get("PYTHONWARNINGS"):
        sys.warnoptions[:] = filters.split(",")
        warnings._processoptions(sys.warnoptions)  # type: ignore[attr-defined]  # as Python does at its start
    sys.modules["torch"].default_generator.seed()  # other numbers in each process
    sys.modules["numpy"].random.seed()
    if str(preloaded.SITE_OF_DEEPSPEED) in here:
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")


def _enter(namespaces: list[str]) -> None:
    """Enter the namespaces, as `nsenter` does: all are opened while this process may still see them."""
    libc = ctypes.CDLL(None, use_errno=True)
    for file in [os.open(name, os.O_RDONLY | os.O_CLOEXEC) for name in namespaces]:
        if libc.setns(file, 0) != 0:
            raise OSError(ctypes.get_errno(), "setns")
        os.close(file)


def _take_files(files: list[int], numbers: list[int]) -> None:
    """Give the files that came their numbers, and close them where they were."""
    above = max([*numbers, 99]) + 1
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, above) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(moved, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


def _stream(number: int, old: Any, unbuffered: bool) -> io.TextIOWrapper:
    """Open a standard stream again, which may be another file now, as Python does at its start."""
    unbuffered = number > 0 and unbuffered
    raw: Any = io.FileIO(number, "w" if number else "r", closefd=False)
    inner = raw if unbuffered else io.BufferedWriter(raw) if number else io.BufferedReader(raw)
    by_lines = number == 2 or raw.isatty()
    stream: Any = io.TextIOWrapper(inner, old.encoding, old.errors, None, by_lines, unbuffered)
    stream.mode, raw.name = ("w" if number else "r"), old.name
    return stream


def _paths_without(given: str) -> list[str]:
    """Return the paths of Python itself and of what is installed."""
    named = {"", *given.split(os.pathsep)}
    return [one for one in sys.path if one not in named]


def _run(args: list[str]) -> None:
    """Run a text, a module or a script, as Python does with the same arguments."""
    main = types.ModuleType("__main__")
    main.__builtins__ = builtins  # type: ignore[attr-defined]
    sys.modules["__main__"] = main
    sys.orig_argv = [sys.executable, *args]
    if args[0] == "-c":
        sys.argv, sys.path[:0] = ["-c", *args[2:]], [""]
        exec(compile(args[1], "<string>", "exec"), main.__dict__)
    elif args[0] == "-m":
        sys.argv, sys.path[:0] = ["-m", *args[2:]], [os.getcwd()]
        runpy._run_module_as_main(args[1])  # type: ignore[attr-defined]  # what `python -m` calls
    else:
        sys.argv, sys.path[:0] = args, [os.path.dirname(os.path.realpath(args[0]))]
        path = os.path.abspath(args[0])
        main.__file__, main.__cached__ = path, None  # type: ignore[attr-defined]
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec")
        exec(code, main.__dict__)


def _own_traceback(error: Exception) -> types.TracebackType | None:
    """Return the traceback without the frames of this file."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _tell(error: Exception) -> None:
    """Do what Python does with an exception that nobody caught."""
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    sys.last_exc = error  # type: ignore[attr-defined]  # from Python 3.12 on
    sys.excepthook(type(error), error, error.__traceback__)


def _end(leaving: SystemExit) -> None:
    """End as Python does; without native threads, modules need not go: that would copy the memory of all of them."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    if len(os.listdir("/proc/self/task")) > threading.active_count():
        raise leaving
    atexit._run_exitfuncs()
    sys.modules["__main__"].__dict__.clear()
    if leaving.code is not None and not isinstance(leaving.code, int):
        print(leaving.code, file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    code = 0 if leaving.code is None else leaving.code if isinstance(leaving.code, int) else 1
    os._exit(code & 0xFF)
