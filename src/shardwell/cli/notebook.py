"""`shardwell.notebook_launcher`: runs a function of a notebook on several ranks of this machine.

The ranks are forks of this process, so that functions that a cell defines need not be pickled. A fork of a process that
has used CUDA cannot use it, and is refused. Threads do not survive a fork: on the CPU a rank computes with one.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

from shardwell.errors import ShardwellError
from shardwell.secret import VARIABLE


def notebook_launcher(function: Callable[..., Any], args: tuple[Any, ...] = (), num_ranks: int = 2) -> list[Any]:
    """Run `function(*args)` on `num_ranks` ranks, and return what each returned if JSON can hold it, else None.

    What the ranks print appears in the notebook. If one raises, the others are ended and its traceback is the error.
    Build model and engine inside the function; nothing before it may use a GPU. On the CPU a rank computes with one
    thread; set OMP_NUM_THREADS and use `shardwell run` for more.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise ShardwellError(
            "notebook_launcher starts ranks as forks of this process, which has used a GPU already: restart the "
            "notebook, and let only the function use the GPU"
        )
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        raise ShardwellError(
            "notebook_launcher: this notebook is a rank already, because a cell made an engine or a process group; "
            "restart the notebook, or call torch.distributed.destroy_process_group() when you need its engines no more"
        )
    if num_ranks < 1:
        raise ShardwellError(f"notebook_launcher: found {num_ranks} ranks, expected 1 or more")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        VARIABLE: os.environ.get(VARIABLE) or secrets.token_hex(32),
    }
    sys.stdout.flush()
    ranks = [
        _start(function, args, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(num_ranks)
    ]
    return _collect(ranks)


def _start(function: Callable[..., Any], args: tuple[Any, ...], environment: dict[str, str]) -> tuple[int, int]:
    """Fork a rank; return its process id, and the pipe that its answer comes through."""
    reader, writer = os.pipe()
    process = os.fork()
    if process:
        os.close(writer)
        return process, reader
    os.close(reader)
    os.environ.update(environment)
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)  # the threads of OpenMP did not come along, and a loop that is divided waits for them
    code, answer = 0, {}
    try:
        answer["value"] = function(*args)
    except BaseException:
        code, answer["error"] = 1, traceback.format_exc()
    try:
        text = json.dumps(answer)
    except (TypeError, ValueError):
        text = json.dumps({"value": None})
    with contextlib.suppress(BaseException):
        _leave()
    with os.fdopen(writer, "w") as pipe:
        pipe.write(text)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a notebook's own handlers for the end of a process are not this rank's


def _leave() -> None:
    """Let the other ranks know that this one has ended."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()


def _collect(ranks: list[tuple[int, int]]) -> list[Any]:
    """Wait for all ranks; after the first that fails, end the others."""
    import selectors

    texts = {reader: b"" for _, reader in ranks}
    failed: str | None = None
    with selectors.DefaultSelector() as selector:
        for reader in texts:
            selector.register(reader, selectors.EVENT_READ)
        try:
            while selector.get_map() and failed is None:
                for key, _ in selector.select():
                    part = os.read(key.fd, 1 << 16)
                    texts[key.fd] += part
                    if not part:
                        selector.unregister(key.fd)
                        failed = failed or _error_of(texts[key.fd])
        finally:
            for process, reader in ranks:
                if failed is not None or selector.get_map():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
                os.close(reader)
    if failed is not None:
        raise ShardwellError(f"a rank failed:\n{failed}")
    return [json.loads(texts[reader]).get("value") for _, reader in ranks]


def _error_of(text: bytes) -> str | None:
    if not text:
        return "it ended without an answer: it was killed, or left by os._exit"
    found = json.loads(text).get("error")
    return str(found) if found is not None else None
