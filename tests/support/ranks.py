"""A reusable pool of ranks: real processes on gloo or NCCL, which stay from job to job.

    results = ranks.run(2, some_module_level_function, argument, ...)

runs the function on that many ranks, each with a process group of its own, and returns what each rank returned.
Tensors come back as numpy arrays. NCCL takes several ranks on one GPU if each is a host of its own to it.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from tests.support.command import environment
from tests.support.patience import HANG, soon


class RankFailedError(AssertionError):
    """A rank raised; the message holds its traceback."""


class Ranks:
    """The pool. Workers outlive a job; they are replaced when a job fails or hangs."""

    def __init__(self, num_replicas: int | None = None, backend: str = "gloo") -> None:
        """Make a pool; with `num_replicas`, engines in ranks get a mesh of (replicas, ranks of each replica)."""
        self._num_replicas, self._backend = num_replicas, backend
        self._workers: list[tuple[subprocess.Popen[bytes], Connection]] = []
        self._store: TCPStore | None = None
        self._num_jobs = 0
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")

    def run(
        self, num_ranks: int, function: Callable[..., Any], *args: Any, limit: float = HANG, **kwargs: Any
    ) -> list[Any]:
        try:
            return self._run(num_ranks, function, args, kwargs, limit)
        except (
            BaseException
        ):  # pytest's own limit, too: a rank that is left in a job would take the next one's messages
            self.close()
            raise

    def _run(
        self, num_ranks: int, function: Callable[..., Any], args: Any, kwargs: dict[str, Any], limit: float
    ) -> list[Any]:
        self._grow(num_ranks)
        self._num_jobs += 1
        job = (function.__module__, function.__qualname__, args, kwargs)
        for rank in range(num_ranks):
            _send(self._workers[rank][1], (rank, num_ranks, self._num_jobs, job))
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
                        ok, answers[rank] = False, f"rank {rank} died with exit code {process.wait()}"
                    waiting.discard(rank)
                    if not ok:
                        errors.append(f"--- rank {rank}\n{answers[rank]}")
                        deadline = min(deadline, time.monotonic() + soon(10))
        if waiting:
            errors.append(f"rank(s) {sorted(waiting)} did not answer within the limit of {limit:g} s")
            errors.extend(self._stacks(rank) for rank in sorted(waiting))
        if errors:
            raise RankFailedError("\n".join(errors))
        for rank in range(num_ranks):
            self._workers[rank][1].send("all have answered")
        return answers

    def _stacks(self, rank: int) -> str:
        """Where the threads of a rank are."""
        process, _ = self._workers[rank]
        file = self._stack_file(rank)
        if process.poll() is not None or not file.exists():
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
            self._workers.append(self._start(self._stack_file(len(self._workers)), self._store.port))
        for rank in range(first, num_ranks):  # so that the limit of a job is one of the job alone
            pipe = self._workers[rank][1]
            try:
                started = pipe.poll(HANG) and pipe.recv() == "started"
            except EOFError:
                started = False
            if not started:
                self.close()
                raise RankFailedError(f"the process of rank {rank} did not start")

    def _start(self, stacks: Path, port: int) -> tuple[subprocess.Popen[bytes], Connection]:
        here, there = Pipe()
        stacks.unlink(missing_ok=True)
        replicas = "" if self._num_replicas is None else str(self._num_replicas)
        program = getattr(sys.modules["__main__"].__spec__, "name", "")
        program = program if program.startswith("tests.") else ""
        words = "import sys; from tests.support import ranks; ranks.serve(*sys.argv[1:])"
        command = [sys.executable, "-c", words, str(there.fileno()), str(port), str(stacks), replicas, program]
        command.append(self._backend)
        with there:
            env = environment(root=True)  # imports would take more CPU time than most jobs of a rank
            return subprocess.Popen(command, env=env, pass_fds=[there.fileno()]), here

    def close(self) -> None:
        for process, pipe in self._workers:
            process.kill()
            pipe.close()
        for process, _ in self._workers:
            process.wait()
        self._workers = []
        self._store = None


def _send(pipe: Connection, value: Any) -> None:
    """Send by value: the pipe's own `send` would share the memory of tensors."""
    pipe.send_bytes(pickle.dumps(value))


def serve(file: str, port: str, stacks: str, num_replicas: str, program: str, backend: str) -> None:
    """Be a rank of the pool, until the other end of the pipe is closed. Jobs may be functions of the `program`."""
    import torch
    import torch.distributed as dist

    from tests.support import event_loops, leaks

    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))  # a server of forks is SCHED_BATCH
    leaks.watch()
    event_loops.yield_to_others()
    if program:
        sys.modules["__main__"] = importlib.import_module(program)
    pipe = Connection(int(file))
    if num_replicas:
        from tests.support import meshes

        meshes.every_engine_with(partial(meshes.rows, int(num_replicas))).__enter__()  # for as long as the rank lives
    faulthandler.register(signal.SIGUSR2, own := open(stacks, "w"))  # noqa: F841, SIM115  # as long as the rank lives
    torch.set_num_threads(1)
    store = dist.TCPStore(
        "127.0.0.1", int(port)
    )  # once: torch asks for the name of the address, and an answer may be slow
    num_modules = 0
    pipe.send("started")
    while True:
        try:
            rank, num_ranks, number, (module, name, args, kwargs) = pipe.recv()
        except EOFError:
            return
        os.environ.update(
            MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE=str(num_ranks),
            LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(num_ranks), SHARDWELL_DEVICE="cpu",
        )  # fmt: skip
        if backend == "nccl":
            os.environ.update(hosts_of_their_own(rank))
        leaks.said()  # what went with the job before is no matter of this one
        try:
            names = dist.PrefixStore(str(number), store)
            device = torch.device("cuda", 0) if backend == "nccl" else None
            dist.init_process_group(backend, store=names, rank=rank, world_size=num_ranks, device_id=device)
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
        _forget_meshes()
        if (checkpointing := sys.modules.get("shardwell.activation_checkpointing")) is not None:
            checkpointing._configured = None  # what a job asked for is no matter of the next
            checkpointing.reset()
        gc.collect()
        if len(sys.modules) > num_modules:  # hundreds of thousands of objects that would be looked at again each time
            num_modules = len(sys.modules)
            gc.freeze()


def _forget_meshes() -> None:
    """Empty torch's caches of DTensor operations: they return the mesh of an earlier job where ranks are the same."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import _redistribute, debug

        debug._clear_sharding_prop_cache()
        _redistribute._gen_transform_infos.cache_clear()


def hosts_of_their_own(rank: int) -> dict[str, str]:
    """Return the environment of a rank that shares one GPU with others: NCCL refuses two ranks of one host there."""
    return {
        "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "SHARDWELL_DEVICE": "cuda:0", "NCCL_HOSTID": f"host{rank}",
        "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip


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
