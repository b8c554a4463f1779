"""Start the ranks of measurements as fresh processes, bring their figures back, and never hang.

Knows processes, ports and time limits; it does not know what is measured. With `PRELOADED=1` in the environment ranks
are forked from a process that has imported torch (`tests/support/preloaded.py`), so that time on a lent machine is not
spent on imports; a device is initialised by each rank itself.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LEAST_SECONDS = 5.0  # no process is started for less


class RunFailedError(Exception):
    """A measurement ended without figures; the message is one line."""


def without_folders(text: str, most: int = 300) -> str:
    """One line without the folders of the machine, for results that travel."""
    return re.sub(r"(?:/[\w.+-]+)+/", "", " ".join(text.split()))[:most]


def free_port() -> int:
    """Return a port of the loopback interface that nobody listens on.

    It is below those that the system gives to connections (from 32768): none of them takes it before it is used.
    """
    for port in random.SystemRandom().sample(range(10000, 30000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no port is free from 10000 to 30000")


def rank_environment(rank: int, ranks: int, port: int, device: str) -> dict[str, str]:
    """The environment of one rank: loopback only; on the CPU one thread, and a DeepSpeed that looks for no GPU."""
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONWARNINGS": "ignore",
    }
    if device == "cuda" and ranks > 1:  # NCCL takes several ranks on one GPU if each is a host of its own
        environment |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NCCL_HOSTID": f"host{rank}"}
        environment |= {"NCCL_SOCKET_IFNAME": "lo"}
    if device == "cpu":
        environment |= {"OMP_NUM_THREADS": "1", "LOCAL_SIZE": str(ranks), "DS_ACCELERATOR": "cpu"}
    return environment


def lines_of(log: Path) -> list[str]:
    """What a rank has written, without empty lines and the launcher's prefix."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    lines = [re.sub(r"^\[rank\d+\]: ?", "", line).strip() for line in lines]
    return [line for line in lines if not re.match(r"\[W\d{4} ", line)] or lines  # without torch's warnings


def reason(log: Path, status: int) -> str:
    """One line that says why a rank failed: its signal, its last exception, or else the last line of its log."""
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    lines = lines_of(log)
    errors = [place for place, line in enumerate(lines) if "Error: " in line]
    told = lines[errors[-1] :] if errors else lines[-1:] or [f"exit status {status}, no output"]
    return " ".join(told)[:200]


def stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the ranks that still run, with whatever they started."""
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # each rank leads a group of its own
            process.wait()


def wait_for(processes: Sequence[subprocess.Popen[bytes]], limit: float) -> None:
    """Return when all ranks have ended or one has failed; raise when ``limit`` seconds have passed."""
    deadline = time.monotonic() + limit
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            time.sleep(1.0)  # its partners mostly fail next, and say why
            return
        if time.monotonic() > deadline:
            raise RunFailedError(f"failed: no result within {limit:.0f} s")
        time.sleep(0.05)


def run_ranks(
    module: str, spec: dict[str, Any], ranks: int, limit: float, device: str = "cpu", log: Path | None = None
) -> list[dict[str, Any]]:
    """Run ``python -m module SPEC`` on all ranks; each writes FOLDER/RANK.json. One dictionary of figures per rank.

    The log of rank 0 is kept in ``log`` where one is given.
    """
    port = free_port()
    if os.environ.get("PRELOADED"):
        importlib.import_module("tests.support.preloaded").install()
    with tempfile.TemporaryDirectory(prefix="shardwell-bench-") as folder:
        command = [sys.executable, "-m", module, json.dumps({**spec, "folder": folder})]
        logs = [Path(folder, f"{rank}.log") for rank in range(ranks)]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(ranks):
                with logs[rank].open("wb") as output:
                    processes.append(
                        subprocess.Popen(
                            command,
                            env=rank_environment(rank, ranks, port, device),
                            stdout=output,
                            stderr=subprocess.STDOUT,
                            start_new_session=True,
                        )
                    )
            try:
                wait_for(processes, limit)
            except RunFailedError as failure:
                last = "".join(f"; its last words: {line[:200]}" for line in lines_of(logs[0])[-1:])
                raise RunFailedError(f"{failure}{last}") from None
            statuses = [process.poll() for process in processes]  # before the rest is stopped
        finally:
            stop(processes)
            if log is not None:
                log.write_bytes(logs[0].read_bytes())
        for rank, status in enumerate(statuses):
            if status:
                raise RunFailedError(f"failed: rank {rank}: {reason(logs[rank], status)}")
        try:
            return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]
        except FileNotFoundError as error:
            raise RunFailedError("failed: a rank ended without figures") from error


class Runs:
    """Starts processes of one rank, one after the other, none beyond the time that all of them together may take."""

    def __init__(self, module: str, device: str, budget: float, logs: Path | None = None) -> None:
        self._module, self._device, self._logs = module, device, logs
        self._budget, self._end = budget, time.monotonic() + budget

    @property
    def seconds_left(self) -> float:
        return self._end - time.monotonic()

    def __call__(self, name: str, spec: dict[str, Any], limit: float) -> dict[str, Any]:
        """The figures of a process. Its log is kept under its name, if logs are."""
        left = self.seconds_left
        if left < LEAST_SECONDS:
            raise RunFailedError(f"stopped: {self._budget:.0f} s were over before this turn")
        try:
            return run_ranks(self._module, spec, 1, min(limit, left), self._device, self._log(name))[0]
        except RunFailedError as failure:
            raise RunFailedError(without_folders(str(failure))) from None

    def _log(self, name: str) -> Path | None:
        if self._logs is None:
            return None
        self._logs.mkdir(parents=True, exist_ok=True)
        return self._logs / f"{name.replace(':', '-')}.log"
