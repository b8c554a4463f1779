"""Starts of Python that have imported torch and shardwell already: a server forks them, in milliseconds.

Importing torch and the engine takes more than three CPU seconds, and a run of the suite starts hundreds of ranks,
commands and scripts. `install` lets `subprocess` and `multiprocessing` ask a server (`preloaded_server.py`) for a
process, if the environment of the command has `PRELOADED=1` and nothing speaks against it. With `PRELOADED=deepspeed`
Transformers is loaded, too, which takes two seconds more. The process is a child of
the one that asked, as any other: it has its own process id, session, signals, files, environment, directory and exit
code. Launchers that were started so start their ranks so, too.

What differs: modules of `MODULES` are loaded before the program begins, and processes of one server share a seed of
hashes. Tests of what is imported, of the interpreter's options, of `LD_PRELOAD` or of memory start Python itself: they
leave `PRELOADED` out. Commands whose environment sets what is read when torch is loaded do so in any case.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import json
import multiprocessing.util
import os
import platform
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped, unused-ignore]

VARIABLE = "PRELOADED"
NAME = b"preloaded"  # of a server that is the child of a process that was forked, so that tests tell it from ranks
_ROOT = Path(__file__).resolve().parents[2]
# The values of the variable, and how many servers there are of each kind. Two have different seeds of hashes, and so
# have a test's ranks. "deepspeed" has loaded libraries that know DeepSpeed, too, and shardwell under its name.
# "poisoned" refuses pickles.
KINDS = {"1": 2, "deepspeed": 1, "poisoned": 1}
_LIMIT_OF_SERVERS = 6  # where they end at once, Python itself is started in the end
_LENGTH = struct.Struct("!q")
# Read when a library is loaded or when Python starts: the server has read its own.
_EARLY = ("LD_", "PYTHON", "OMP_", "MKL_", "KMP_", "GOMP_", "MALLOC_", "GLIBC_", "ONEDNN_", "DNNL_", "ATEN_", "TORCH_",
          "PYTORCH_", "CUDA_", "LC_", "LANG", "TZ", "HF_", "TRANSFORMERS_", "FORCE_COLOR", "PY_COLORS",
          "GITHUB_ACTIONS", "TERMINAL_WIDTH")  # fmt: skip
_HONOURED = ("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONWARNINGS", "OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING",
             "PYTORCH_NVML_BASED_CUDA_CHECK")  # fmt: skip
POISON = _ROOT / "tests" / "support" / "poison"
SITE_OF_DEEPSPEED = _ROOT / "src" / "shardwell" / "compat" / "deepspeed_api" / "site"


class Server:
    """A connection to the process that forks. `early` are its variables of `_EARLY`, which it was loaded with."""

    def __init__(self, connection: socket.socket, early: dict[str, str]) -> None:
        self.early = early
        self._connection = connection

    @classmethod
    def start(cls, kind: str) -> Server:
        here, there = socket.socketpair()
        left_out = ("OMP_NUM_THREADS", VARIABLE)  # this start is one of Python itself
        environment = {name: value for name, value in os.environ.items() if name not in left_out}
        early = early_of(environment)
        if kind == "poisoned":
            environment["PYTHONPATH"] = os.pathsep.join([str(POISON), environment.get("PYTHONPATH", "")])
        environment["OPENBLAS_NUM_THREADS"] = "1"  # or numpy starts threads, which no fork survives
        environment["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # and so does pyarrow
        words = f"import sys; sys.path.insert(0, {str(_ROOT)!r}); from tests.support import preloaded_server as server"
        null = subprocess.DEVNULL
        with there:
            server = cls(here, early)
            server._process = subprocess.Popen(
                [sys.executable, "-c", f"{words}; server.main()", str(there.fileno()), kind],
                env=environment, pass_fds=[there.fileno()], stdin=null, stdout=null,
            )  # fmt: skip
        atexit.register(server._end)
        return server

    def _end(self) -> None:
        self._connection.close()
        self._process.wait()

    def fork(self, request: dict[str, Any], files: list[int]) -> int:
        """Return the id of a new child of this process; raise OSError if the server has ended."""
        send(self._connection, request, files)
        answer, _ = receive(self._connection)
        return int(answer["pid"])


_servers: dict[str, list[Server]] = {}  # by kind
_num_started = 0
_can_start_servers = False  # true in pytest; a process that was forked has at most the server that it was given


def install() -> None:
    """Let `subprocess` of this process fork what asks for it, from servers that start when they are needed."""
    global _can_start_servers
    known = tuple(inspect.signature(_execute_itself).parameters)[2:] == _GIVEN  # by this version of Python
    _can_start_servers = sys.platform == "linux" and platform.machine() == "x86_64" and known
    if _can_start_servers:
        _patch()


def install_given(connection: socket.socket | None, early: dict[str, str]) -> None:
    """Let `subprocess` of this process use the server at the other end of `connection` alone."""
    _servers.clear()
    if connection is not None:
        given = [Server(connection, early)]  # of whatever kind it is
        _servers.update(dict.fromkeys(KINDS, given))
    _patch()


def _patch() -> None:
    subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]
    multiprocessing.util.spawnv_passfds = _spawn  # type: ignore[assignment]


def _spawn(path: Any, args: list[Any], files: Any) -> int:
    """Do what `multiprocessing` does to start a process by its method "spawn"."""
    words = [os.fsdecode(one) for one in args]
    if "-c" in words and "spawn_main" in words[words.index("-c") + 1] and os.fsdecode(path) == sys.executable:
        command = [words[0], *words[words.index("-c") :]]  # what is before are the options of this process
        others = {"cwd": None, "env": None, "close_fds": True, "pass_fds": tuple(files), "process_group": -1}
        given = {**dict.fromkeys(_GIVEN), **dict.fromkeys(_STREAMS, -1), **others, "umask": -1}
        if (pid := _fork(command, given)) is not None:
            return pid
    return _spawn_itself(path, args, files)


def _execute_child(self: Any, args: Any, *others: Any) -> None:
    """Do what `subprocess.Popen` does where it forks: by a server, if the process may come from one."""
    given = dict(zip(_GIVEN, others, strict=True))
    if (pid := _fork(args, given)) is None:
        _execute_itself(self, args, *others)
        return
    self.pid, self._child_created = pid, True
    self._close_pipe_fds(*(given[one] for one in _PIPES))


def _fork(args: Any, given: dict[str, Any]) -> int | None:
    """Return the id of a process that a server forked, or None if Python itself must be started."""
    request = _request(args, given)
    if request is None:
        return None
    kind = request["env"][VARIABLE]
    if (server := _next_server(kind)) is None or early_of(request["env"]) != server.early:
        return None
    files = [given[one] if given[one] != -1 else number for number, one in enumerate(_STREAMS)]
    try:
        return server.fork(request, [*files, *given["pass_fds"]])
    except (OSError, EOFError):  # it was killed, as a child of its process
        _servers[kind].remove(server)
        return None


_spawn_itself = multiprocessing.util.spawnv_passfds
_execute_itself = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_GIVEN = ("executable", "preexec_fn", "close_fds", "pass_fds", "cwd", "env", "startupinfo", "creationflags", "shell",
          "p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite", "restore_signals", "gid", "gids", "uid",
          "umask", "start_new_session", "process_group")  # fmt: skip
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
_STREAMS = ("p2cread", "c2pwrite", "errwrite")  # standard input, output and error of the child


def _request(args: Any, given: dict[str, Any]) -> dict[str, Any] | None:
    """Return what a server needs to know, or None if the command asks for Python itself."""
    env = dict(os.environ if given["env"] is None else given["env"])
    if (
        env.get(VARIABLE) not in KINDS
        or isinstance(args, (str, bytes))
        or given["shell"]
        or given["preexec_fn"] is not None
    ):
        return None
    command, namespaces = _without_namespaces([os.fspath(one) for one in args])
    command = _with_interpreter(command)
    unbuffered = command[1:2] == ["-u"]  # as torchrun starts its ranks
    del command[1 : 1 + unbuffered]
    unusual = any(given[one] is not None for one in ("gid", "gids", "uid")) or given["umask"] >= 0
    cwd = os.getcwd() if given["cwd"] is None else os.path.abspath(os.fspath(given["cwd"]))
    if unusual or not given["close_fds"] or given["executable"] not in (None, args[0]):
        return None
    if not _is_program(command, cwd):
        return None
    paths = env.get("PYTHONPATH", "").split(os.pathsep)
    if not os.path.isdir(cwd) or any(_has_start_of_its_own(one) for one in paths):
        return None
    if (str(POISON) in paths) != (env[VARIABLE] == "poisoned"):
        return None
    return {"args": command[1:], "env": env, "cwd": cwd, "session": bool(given["start_new_session"]),
            "group": given["process_group"], "pass": list(given["pass_fds"]), "unbuffered": unbuffered,
            "namespaces": namespaces}  # fmt: skip


def _without_namespaces(command: list[str]) -> tuple[list[str], list[str]]:
    """Return what `nsenter` would run, as the benchmarks' hosts call it, and the files of the namespaces around it."""
    if command[:2] != ["nsenter", "--target"]:
        return command, []
    known = {"--user": "user", "--preserve-credentials": None, "--net": "net"}
    place, names = 3, list[str]()
    while place < len(command) and command[place] in known:
        names += [name] if (name := known[command[place]]) else []
        place += 1
    return command[place:], [f"/proc/{command[2]}/ns/{name}" for name in names]


def _with_interpreter(command: list[str]) -> list[str]:
    """Put this Python before a script whose first line names it, as the kernel does."""
    line = f"#!{sys.executable}\n".encode()
    with contextlib.suppress(OSError), open(command[0], "rb") as file:
        if os.path.isabs(command[0]) and file.read(len(line)) == line and os.access(command[0], os.X_OK):
            return [sys.executable, *command]
    return command


def _is_program(command: list[str], cwd: str) -> bool:
    """Tell whether it is this Python with a script, a module or a text, and no other options."""
    if len(command) < 2 or command[0] != sys.executable:
        return False
    return len(command) > 2 if command[1] in ("-m", "-c") else os.path.isfile(os.path.join(cwd, command[1]))


def _has_start_of_its_own(folder: str) -> bool:
    """Tell whether Python would execute a file of the folder at its start. That of DeepSpeed's names may be later."""
    own = [os.path.join(folder, name) for name in ("sitecustomize.py", "usercustomize.py")]
    return bool(folder) and Path(folder) not in (SITE_OF_DEEPSPEED, POISON) and any(map(os.path.exists, own))


def _next_server(kind: str) -> Server | None:
    global _num_started
    servers = _servers.setdefault(kind, [])
    if _can_start_servers and len(servers) < KINDS[kind] and _num_started < _LIMIT_OF_SERVERS:
        _num_started += 1
        servers.append(Server.start(kind))
        return servers[-1]
    if servers:
        servers.append(servers.pop(0))
        return servers[-1]
    return None


def children_of(pid: int) -> list[psutil.Process]:
    """Return the processes that a process has started, without the server that it was given."""
    found = []
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.name() != NAME.decode():
                found.append(child)
    return found


def early_of(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_EARLY) and name not in _HONOURED}


def send(connection: socket.socket, value: dict[str, Any], files: list[int]) -> None:
    words = json.dumps(value).encode()
    socket.send_fds(connection, [_LENGTH.pack(len(words))], files)
    connection.sendall(words)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return a value and the files that came with it; raise EOFError at the end."""
    head, files, _, _ = socket.recv_fds(connection, _LENGTH.size, 64)
    words, size = b"", _LENGTH.unpack(head)[0] if head else -1
    while len(words) < size:
        more = connection.recv(size - len(words))
        if not more:
            break
        words += more
    if len(words) != size:
        raise EOFError("the other end is gone")
    return json.loads(words), files
