"""Two hosts on one machine: network namespaces that share nothing but a link whose rate can be set.

    with Hosts() as hosts:
        hosts.limit(100)  # Mbit/s in each direction; None for as fast as the machine goes
        with HostRanks(hosts, "some.module", logs) as ranks:
            answers = ranks.ask({"do": "something"}, limit=60)

A host is a process that does nothing but hold its network namespace, in a user namespace of its own, so no privilege is
needed where the kernel lets users make those; root does without. The hosts are joined by a pair of virtual Ethernet
interfaces. What goes from one process to another on the same host stays inside it, whatever address it uses. The kernel
counts what crosses the link, headers included, once for each packet as the sender hands it over, which may hold several
frames; the limit counts the headers of each frame. Everything ends with its processes, and these end with the one that
made them.

Knows namespaces, processes and time limits; it does not know what is measured.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.launch import RunFailedError, rank_environment, reason, stop

NUM_HOSTS = 2
LINK = "link0"  # the name of the interface, on each host
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = 29500  # nobody else lives in the namespace
MTU = 9000  # as in clusters: headers are less than 1% of what is sent
BURST = 128 * 1024  # bytes that may go at once: two of the largest packets
QUEUE = 16 * 2**20  # bytes that may wait: senders are held back before this is full, and nothing is dropped
_PR_SET_PDEATHSIG = 1  # from Linux' prctl.h
LIMITERS: dict[str, Callable[[str], list[list[str]]]] = {  # in order of preference
    "tbf": lambda rate: [["qdisc", "replace", "dev", LINK, "root", "tbf", "rate", rate, "burst", str(BURST),
                          "limit", str(QUEUE)]],
    "htb": lambda rate: [["qdisc", "replace", "dev", LINK, "root", "handle", "1:", "htb", "default", "1"],
                         ["class", "replace", "dev", LINK, "parent", "1:", "classid", "1:1", "htb", "rate", rate,
                          "burst", str(BURST)]],
    "netem": lambda rate: [["qdisc", "replace", "dev", LINK, "root", "netem", "rate", rate, "limit", "10000"]],
}  # fmt: skip


class HostsError(Exception):
    """Hosts cannot be made here; the message is one line that says what was refused."""


class Hosts:
    """Two namespaces and the link between them, from `with` to its end."""

    def __init__(self) -> None:
        self._holders: list[subprocess.Popen[bytes]] = []
        self._enter: list[str] = []
        self.limiter = ""  # what limits the rate

    def __enter__(self) -> Hosts:
        for tool in ("unshare", "nsenter", "ip", "tc"):
            if shutil.which(tool) is None:
                raise HostsError(f"no hosts without the program {tool!r} (util-linux and iproute2 have it)")
        try:
            self._hold()
            self._join()
            self.limiter = self._find_limiter()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the holders; the kernel takes the namespaces and the link with them."""
        stop(self._holders)
        for holder in self._holders:
            assert holder.stdin is not None
            holder.stdin.close()
        self._holders = []

    # ------------------------------------------------------------------------------------------------- the hosts

    def _hold(self) -> None:
        """Start the holders, in a user namespace where that is allowed; root may do without one."""
        try:
            self._holders.append(_holder(["unshare", "--user", "--map-root-user", "--net"]))
            self._enter = ["--user", "--preserve-credentials"]
        except HostsError:
            if os.geteuid() != 0:
                raise
            self._holders.append(_holder(["unshare", "--net"]))
        if self._enter:
            command = ["nsenter", "--target", str(self._holders[0].pid), *self._enter, "unshare", "--net"]
        else:
            command = ["unshare", "--net"]
        self._holders.append(_holder(command))

    def _join(self) -> None:
        peer = str(self._holders[1].pid)
        self._call(0, ["ip", "link", "add", LINK, "type", "veth", "peer", "name", LINK, "netns", peer])
        for host, address in enumerate(ADDRESSES):
            settings = ["mtu", str(MTU), "addrgenmode", "none"]  # the last: it says nothing unless told to
            self._call(host, ["ip", "link", "set", LINK, *settings])
            self._call(host, ["ip", "address", "add", f"{address}/24", "dev", LINK])
            self._call(host, ["ip", "link", "set", "lo", "up"])
            self._call(host, ["ip", "link", "set", LINK, "up"])

    def _find_limiter(self) -> str:
        refusals = []
        for name in LIMITERS:
            try:
                self._set_rate(name, 100)
                self.limit(None)
                return name
            except HostsError as refusal:
                refusals.append(str(refusal))
        raise HostsError("; ".join(refusals))

    def inside(self, host: int, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` on a host; it becomes that command, under the same process id."""
        return ["nsenter", "--target", str(self._holders[host].pid), *self._enter, "--net", *command]

    def _call(self, host: int, command: Sequence[str]) -> None:
        done = subprocess.run(self.inside(host, command), capture_output=True, text=True, check=False)
        if done.returncode:
            said = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
            raise HostsError(f"refused on host {host}: {' '.join(command)}: {said}")

    # -------------------------------------------------------------------------------------------------- the link

    def limit(self, mbit: float | None) -> None:
        """Let no more than `mbit` Mbit/s through in each direction from now on; None lifts the limit."""
        if mbit is not None:
            self._set_rate(self.limiter, mbit)
            return
        for host in range(NUM_HOSTS):
            self._call(host, ["tc", "qdisc", "replace", "dev", LINK, "root", "pfifo", "limit", "10000"])

    def _set_rate(self, limiter: str, mbit: float) -> None:
        for host in range(NUM_HOSTS):
            for arguments in LIMITERS[limiter](f"{round(mbit * 1000)}kbit"):
                self._call(host, ["tc", *arguments])

    def crossed(self) -> tuple[int, int]:
        """Bytes that went from host 0 to host 1 so far, and those that came back, by the interface's counters."""
        for line in Path(f"/proc/{self._holders[0].pid}/net/dev").read_text().splitlines():
            name, _, counters = line.partition(":")
            if name.strip() == LINK:
                fields = counters.split()
                return int(fields[8]), int(fields[0])
        raise HostsError(f"host 0 has no interface {LINK} any more")

    def quiet(self, limit: float = 3.0) -> tuple[int, int]:
        """`crossed`, once nothing has crossed for a tenth of a second (or `limit` seconds have passed)."""
        deadline = time.monotonic() + limit
        before = self.crossed()
        while time.monotonic() < deadline:
            time.sleep(0.1)
            after = self.crossed()
            if after == before:
                break
            before = after
        return before


def _holder(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """A process in a namespace of its own, when it is there. It ends when its input does: with this process."""
    holder = subprocess.Popen(
        [*command, "sh", "-c", "echo ready && exec cat >/dev/null"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert holder.stdin is not None
    assert holder.stdout is not None
    assert holder.stderr is not None
    with holder.stdout, holder.stderr:
        if holder.stdout.readline() == b"ready\n":
            return holder
        said = " ".join(holder.stderr.read().decode(errors="replace").split())
    holder.stdin.close()
    raise HostsError(f"refused: {' '.join(command)}: {said or f'exit status {holder.wait()}'}")


@functools.cache
def why_not() -> str | None:
    """Why there can be no hosts here, or None."""
    try:
        with Hosts():
            return None
    except HostsError as refusal:
        return str(refusal)


class HostRanks:
    """The ranks of a module, as many on each host, from `with` to its end.

    A rank gets questions as lines of JSON on its standard input and answers each with one on its standard output
    (`answering`); what it says besides goes to its log.
    """

    def __init__(self, hosts: Hosts, module: str, logs: Path, per_host: int = 2) -> None:
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._unread = [b""] * (NUM_HOSTS * per_host)
        self._logs = [logs / f"{rank}.log" for rank in range(NUM_HOSTS * per_host)]
        try:
            for rank, log in enumerate(self._logs):
                host, local = divmod(rank, per_host)
                with log.open("wb") as output:
                    self._ranks.append(
                        subprocess.Popen(
                            hosts.inside(host, [sys.executable, "-m", module]),
                            env=_environment(rank, local, host, per_host),
                            stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE,
                            stderr=output,
                            start_new_session=True,
                        )
                    )
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> HostRanks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def ask(self, question: dict[str, Any], limit: float) -> list[dict[str, Any]]:
        """Every rank's answer; `RunFailedError` where one ends instead, or takes more than `limit` seconds."""
        for number, rank in enumerate(self._ranks):
            assert rank.stdin is not None
            try:
                rank.stdin.write(json.dumps(question).encode() + b"\n")
                rank.stdin.flush()
            except BrokenPipeError:
                raise self._ended(number) from None
        deadline = time.monotonic() + limit
        answers: dict[int, dict[str, Any]] = {}
        with selectors.DefaultSelector() as selector:
            for number, rank in enumerate(self._ranks):
                assert rank.stdout is not None
                selector.register(rank.stdout, selectors.EVENT_READ, number)
            while len(answers) < len(self._ranks):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    missing = [number for number in range(len(self._ranks)) if number not in answers]
                    raise RunFailedError(f"failed: no answer of rank(s) {missing} within {limit:.0f} s")
                for key, _ in ready:
                    line = self._line(key.data, key.fd)
                    if line is not None:
                        answers[key.data] = json.loads(line)
        return [answers[number] for number in range(len(self._ranks))]

    def _line(self, number: int, descriptor: int) -> bytes | None:
        """A whole line of a rank, if it has come."""
        part = os.read(descriptor, 1 << 16)
        if not part:
            raise self._ended(number)
        line, found, rest = (self._unread[number] + part).partition(b"\n")
        self._unread[number] = rest if found else line
        return line if found else None

    def _ended(self, number: int) -> RunFailedError:
        return RunFailedError(f"failed: rank {number}: {reason(self._logs[number], self._ranks[number].wait())}")

    def close(self) -> None:
        stop(self._ranks)
        for rank in self._ranks:
            for pipe in (rank.stdin, rank.stdout):
                with contextlib.suppress(BrokenPipeError):  # something was still to be written
                    if pipe is not None:
                        pipe.close()
        self._ranks = []


def _environment(rank: int, local: int, host: int, per_host: int) -> dict[str, str]:
    """What a launcher on each host would say, with host 0 as the place where ranks meet."""
    return rank_environment(rank, NUM_HOSTS * per_host, PORT, "cpu") | {
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(per_host),
        "LOCAL_SIZE": str(per_host),
        "GROUP_RANK": str(host),
        "MASTER_ADDR": ADDRESSES[0],
        "GLOO_SOCKET_IFNAME": LINK,  # gloo's address; a peer on the same host reaches it without leaving the host
        "SHARDWELL_DEVICE": "cpu",
    }


def answering(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """A rank's loop: answers questions until there are no more. Whatever else is printed goes to the log."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # in the middle of an answer, too
    with os.fdopen(os.dup(1), "w") as answers, contextlib.redirect_stdout(sys.stderr):
        os.dup2(2, 1)  # for what libraries print themselves
        for question in sys.stdin:
            answers.write(json.dumps(answer(json.loads(question))) + "\n")
            answers.flush()
