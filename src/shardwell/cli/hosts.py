"""`shardwell run --hostfile`: starts the launcher of every host over ssh, and ends all of them together.

On each host ssh runs `python -m shardwell.cli.host`, which reads what to start from its standard input: so nothing is
quoted for a shell, and the secret of the job is in no list of processes. When that input ends, because this process has
ended however it did, the host ends its ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import typer

from shardwell.compat.deepspeed_api.launcher import fetch_hostfile
from shardwell.errors import ShardwellError
from shardwell.secret import FILE_VARIABLE, VARIABLE, job_secret

SSH = "ssh -o BatchMode=yes"  # BatchMode: without a key this is an error, and not a question on a terminal
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@%-]*")  # never an option of ssh
_FORWARDED = ("SHARDWELL_", "NCCL_", "GLOO_", "TORCH", "HF_")
_FORWARDED_NAMES = ("PYTHONPATH", "OMP_NUM_THREADS", "NO_COLOR")
_LOST = 2  # the exit code of a launcher that has lost the others; that of the ranks is another one
_PATIENCE = 20.0  # seconds in which the other hosts end, once one has


@dataclass(frozen=True)
class Host:
    """A line of a hostfile."""

    name: str
    slots: int

    @property
    def address(self) -> str:
        """The name without the user."""
        return self.name.rpartition("@")[2]


def read_hosts(path: Path) -> list[Host]:
    """Return the hosts of a file with lines `host slots=N`."""
    found = fetch_hostfile(str(path)) or {}
    for name in found:
        if not _HOST.fullmatch(name):
            raise ShardwellError(f"{path}: '{name}' is no name or address of a host")
    return [Host(name, slots) for name, slots in found.items()]


def run_on_hosts(hosts: Sequence[Host], options: Sequence[str], script: Sequence[str], ssh: str) -> int:
    """Run `shardwell run` with these options and this script on all hosts; return the exit code of the ranks.

    What a host prints appears here, each line behind the name of the host.
    """
    secret = (job_secret() or secrets.token_hex(32).encode()).decode("utf-8", "surrogateescape")
    environment = {**_forwarded(os.environ), VARIABLE: secret}
    running: list[subprocess.Popen[str]] = []
    with _ended(running):
        for host in hosts:
            arguments = ["run", "-n", str(host.slots), *options, *script]
            order = {"arguments": arguments, "directory": os.getcwd(), "environment": environment}
            running.append(_start(host, order, ssh))
        return _wait(hosts, running)


def _forwarded(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that ranks on other hosts get as well; the file of a secret may not exist there."""
    return {
        name: value
        for name, value in environ.items()
        if (name.startswith(_FORWARDED) or name in _FORWARDED_NAMES) and name != FILE_VARIABLE
    }


def _start(host: Host, order: Mapping[str, object], ssh: str) -> subprocess.Popen[str]:
    words = [*shlex.split(ssh), host.name, shlex.quote(sys.executable), "-m", "shardwell.cli.host"]
    try:
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
        )
    except OSError as error:
        raise ShardwellError(f"--ssh: '{words[0]}' cannot be started ({error.strerror})") from None
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # what ssh has to say comes on its standard error
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()
    for source, is_error in ((process.stdout, False), (process.stderr, True)):
        assert source is not None
        threading.Thread(target=_relay, args=(host.name, source, is_error), daemon=True).start()
    return process


def _relay(host: str, source: IO[str], is_error: bool) -> None:
    """Print the lines of a host behind its name."""
    for line in source:
        typer.echo(f"{host}: {line}", nl=False, err=is_error)


def _wait(hosts: Sequence[Host], running: Sequence[subprocess.Popen[str]]) -> int:
    """Wait until all have ended; after the first failure the others, which notice it themselves, get some time."""
    ended = threading.Condition()
    order: list[int] = []

    def watch(number: int) -> None:
        running[number].wait()
        with ended:
            order.append(number)
            ended.notify()

    for number in range(len(running)):
        threading.Thread(target=watch, args=(number,), daemon=True).start()
    with ended:
        ended.wait_for(lambda: len(order) == len(running) or any(running[number].returncode for number in order))
        ended.wait_for(lambda: len(order) == len(running), _PATIENCE)
        failed = {hosts[number].name: running[number].returncode for number in order if running[number].returncode}
    if not failed:
        return 0
    words = ", ".join(f"{name} with exit code {code}" for name, code in failed.items())
    typer.echo(f"error: hosts failed: {words}; all hosts are ended", err=True)
    code = next((code for code in failed.values() if code != _LOST), _LOST)
    return code if code > 0 else 128 - code


@contextlib.contextmanager
def _ended(running: Sequence[subprocess.Popen[str]]) -> Iterator[None]:
    """End all hosts after the block: when their input ends, they end their ranks."""
    try:
        yield
    finally:
        for process in running:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for process in running:
            try:
                process.wait(timeout=_PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
