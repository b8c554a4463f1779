"""A reusable pool of ranks: real processes on gloo, started once because importing torch takes seconds.

    results = ranks.run(2, some_module_level_function, argument, ...)

runs the function on that many ranks, each with a process group of its own, and returns what each rank returned.
Tensors come back as numpy arrays.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import multiprocessing as mp
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

LIMIT = 120.0  # seconds that a job may take
LIMIT_OF_A_START = 240.0  # importing torch takes seconds, and on a busy machine much longer


class RankFailedError(AssertionError):
    """A rank raised; the message holds its traceback."""


class Ranks:
    """The pool. Workers outlive a job; they are replaced when a job fails or hangs."""

    def __init__(self, num_replicas: int | None = None) -> None:
        """Make a pool; with `num_replicas`, engines in ranks get a mesh of (replicas, ranks of each replica)."""
        self._num_replicas = num_replicas
        self._context = mp.get_context("spawn")
        self._workers: list[tuple[Any, Any]] = []
        self._store: TCPStore | None = None
        self._num_jobs = 0
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")

    def run(
        self, num_ranks: int, function: Callable[..., Any], *args: Any, limit: float = LIMIT, **kwargs: Any
    ) -> list[Any]:
        self._grow(num_ranks)
        self._num_jobs += 1
        job = (function.__module__, function.__qualname__, args, kwargs)
        for rank in range(num_ranks):
            self._workers[rank][1].send((rank, num_ranks, self._num_jobs, job))
        deadline = time.monotonic() + limit
        answers: list[Any] = [None] * num_ranks
        waiting = set(range(num_ranks))
        errors: list[str] = []
        while waiting and (left := deadline - time.monotonic()) > 0:
            ready = wait([self._workers[rank][1] for rank in waiting], left)
            for rank in sorted(waiting):
                process, pipe = self._workers[rank]
                if pipe in ready:
                    try:
                        ok, answers[rank] = pipe.recv()
                    except EOFError:
                        ok, answers[rank] = False, f"rank {rank} died with exit code {process.exitcode}"
                    waiting.discard(rank)
                    if not ok:
                        errors.append(f"--- rank {rank}\n{answers[rank]}")
                        deadline = min(deadline, time.monotonic() + 10)
        if waiting:
            errors.append(f"rank(s) {sorted(waiting)} did not answer within the limit of {limit:g} s")
            errors.extend(self._stacks(rank) for rank in sorted(waiting))
        if errors:
            self.close()
            raise RankFailedError("\n".join(errors))
        for rank in range(num_ranks):
            self._workers[rank][1].send("all have answered")
        return answers

    def _stacks(self, rank: int) -> str:
        """Where the threads of a rank are."""
        process, _ = self._workers[rank]
        file = self._stack_file(rank)
        if not process.is_alive() or not file.exists():
            return f"--- rank {rank} is not there"
        os.kill(process.pid, signal.SIGUSR2)
        time.sleep(0.5)
        return f"--- rank {rank} is at\n{file.read_text()}"

    def _stack_file(self, rank: int) -> Path:
        return Path(self._folder.name, str(rank))

    def _grow(self, num_ranks: int) -> None:
        if self._store is None:
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # at any free port
        first = len(self._workers)
        while len(self._workers) < num_ranks:
            here, there = self._context.Pipe()
            stacks = self._stack_file(len(self._workers))
            stacks.unlink(missing_ok=True)
            args = there, self._store.port, stacks, self._num_replicas
            process = self._context.Process(target=_serve, args=args, daemon=True)
            process.start()
            there.close()
            self._workers.append((process, here))
        for rank in range(first, num_ranks):  # so that the limit of a job is one of the job alone
            pipe = self._workers[rank][1]
            try:
                started = pipe.poll(LIMIT_OF_A_START) and pipe.recv() == "started"
            except EOFError:
                started = False
            if not started:
                self.close()
                raise RankFailedError(f"the process of rank {rank} did not start")

    def close(self) -> None:
        for process, pipe in self._workers:
            process.kill()
            pipe.close()
        for process, _ in self._workers:
            process.join()
        self._workers = []
        self._store = None


def _serve(pipe: Any, port: int, stacks: Path, num_replicas: int | None) -> None:
    import torch
    import torch.distributed as dist

    from tests.support import leaks

    leaks.watch()
    if num_replicas is not None:
        from tests.support import meshes

        meshes.every_engine_with(partial(meshes.rows, num_replicas)).__enter__()  # for as long as the rank lives
    file = stacks.open("w")  # for as long as the rank lives
    faulthandler.register(signal.SIGUSR2, file)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port)  # once: torch asks for the name of the address, and an answer may be slow
    num_modules = 0
    pipe.send("started")
    while True:
        try:
            rank, num_ranks, number, (module, name, args, kwargs) = pipe.recv()
        except EOFError:
            return
        os.environ.update(
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(num_ranks),
            LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(num_ranks), SHARDWELL_DEVICE="cpu",
        )  # fmt: skip
        leaks.said()  # what went with the job before is no matter of this one
        try:
            own = dist.PrefixStore(str(number), store)
            dist.init_process_group("gloo", store=own, rank=rank, world_size=num_ranks)
            function = getattr(importlib.import_module(module), name)
            answer = True, _plain(function(*args, **kwargs))
            if words := leaks.said():
                answer = False, "\n".join(words)
        except BaseException:
            answer = False, traceback.format_exc()
        try:
            pipe.send(answer)
        except Exception:
            pipe.send((False, traceback.format_exc()))
        if answer[0]:  # a rank that is done early must not cut the links that others still use
            try:
                pipe.recv()
            except EOFError:
                return
        if dist.is_initialized():
            dist.destroy_process_group()
        if (checkpointing := sys.modules.get("shardwell.checkpointing")) is not None:
            checkpointing._configured = None  # what a job asked for is no matter of the next
            checkpointing.reset()
        gc.collect()
        if len(sys.modules) > num_modules:  # hundreds of thousands of objects that would be looked at again each time
            num_modules = len(sys.modules)
            gc.freeze()


def _plain(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return (value.float() if value.dtype == torch.bfloat16 else value).numpy().copy()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(item) for item in value)
    return value
