"""Two hosts on one machine: what crosses the link is counted, what stays on a host is not, and rates are kept."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.hosts import ADDRESSES, HostRanks, Hosts, HostsError, why_not
from benchmarks.launch import RunFailedError
from tests.support.command import environment
from tests.support.patience import HANG, soon

pytestmark = pytest.mark.slow

REFUSED = why_not()
needs_hosts = pytest.mark.skipif(REFUSED is not None, reason=f"no hosts here: {REFUSED}")

SINK = """
import socket, sys
with socket.create_server((sys.argv[1], 4000)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    with connection:
        while connection.recv(1 << 16):
            pass
        connection.sendall(b"!")
"""
SOURCE = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 4000)) as connection:
    begin = time.perf_counter()
    connection.sendall(bytes(int(sys.argv[2])))
    connection.shutdown(socket.SHUT_WR)
    assert connection.recv(1) == b"!"
    print(time.perf_counter() - begin)
"""


def send(hosts: Hosts, source: int, to: int, size: int) -> float:
    """Seconds that `size` bytes take from one host to another, until the last was read there."""
    python = sys.executable
    with subprocess.Popen(hosts.inside(to, [python, "-c", SINK, ADDRESSES[to]]), stdout=subprocess.PIPE) as sink:
        assert sink.stdout is not None
        assert sink.stdout.readline() == b"ready\n"
        command = hosts.inside(source, [python, "-c", SOURCE, ADDRESSES[to], str(size)])
        return float(subprocess.run(command, capture_output=True, check=True, timeout=HANG).stdout)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts() as made:
        yield made


@needs_hosts
@pytest.mark.parametrize("mbit", [None, 400])
def test_the_link_counts_what_is_sent_over_it_and_its_headers(hosts: Hosts, mbit: float | None) -> None:
    hosts.limit(mbit)
    size = 4_000_000
    for _ in range(3):  # a busy machine may send shorter packets, and some of them again
        before = hosts.quiet()
        send(hosts, 0, 1, size)
        there, back = (now - then for now, then in zip(hosts.quiet(), before, strict=True))
        if there < 1.02 * size and back < 0.02 * size:  # 66 bytes for each packet of 8948 or more, and the handshake
            break
    assert size < there < 1.02 * size
    assert back < 0.02 * size  # 66 bytes for each packet at most


@needs_hosts
def test_what_stays_on_a_host_does_not_cross_the_link(hosts: Hosts) -> None:
    before = hosts.quiet()
    send(hosts, 1, 1, 4_000_000)
    assert hosts.quiet() == before


@needs_hosts
def test_the_rate_is_kept_in_both_directions_and_can_be_changed(hosts: Hosts) -> None:
    for mbit, size in ((40, 2_000_000), (160, 8_000_000)):  # 0.4 s
        hosts.limit(mbit)
        for source, to in ((0, 1), (1, 0)):
            rates: list[float] = []
            while not rates or (max(rates) < 0.85 * mbit and len(rates) < 20):  # others may use the machine, too
                rates.append(size * 8e-6 / send(hosts, source, to, size))
            assert 0.85 * mbit < max(rates) < 1.1 * mbit  # below for headers, above for the first burst


@needs_hosts
def test_nothing_is_left_and_nothing_shows_outside() -> None:
    def interfaces() -> set[str]:
        return {line.partition(":")[0].strip() for line in Path("/proc/net/dev").read_text().splitlines()[2:]}

    outside = interfaces()
    with Hosts() as hosts:
        namespaces = {os.readlink(f"/proc/{holder.pid}/ns/net") for holder in hosts._holders}
        assert len(namespaces | {os.readlink("/proc/self/ns/net")}) == 3
        assert interfaces() == outside
    assert not namespaces & living_namespaces()


@needs_hosts
def test_hosts_and_busy_ranks_end_with_the_process_that_made_them(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, signal, sys; from benchmarks.hosts import *\n"
        "with Hosts() as hosts, HostRanks(hosts, 'tests.support.echo', pathlib.Path(sys.argv[1])) as ranks:\n"
        "    for holder in hosts._holders: print(os.readlink(f'/proc/{holder.pid}/ns/net'), flush=True)\n"
        "    ranks.ask({'names': []}, 300)\n"
        "    try: ranks.ask({'names': [], 'sleep': '1'}, 1)\n"
        "    finally: os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=False)
    namespaces = set(done.stdout.split())
    assert len(namespaces) == 2
    deadline = time.monotonic() + soon(10)
    while namespaces & living_namespaces() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not namespaces & living_namespaces()


def living_namespaces() -> set[str]:
    """The network namespaces of all processes that this one may look at."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found.add(os.readlink(process / "ns/net"))
        except OSError:
            continue
    return found


@needs_hosts
def test_ranks_answer_with_what_a_launcher_told_them(hosts: Hosts, tmp_path: Path) -> None:
    with HostRanks(hosts, "tests.support.echo", tmp_path) as ranks:
        told = ranks.ask({"names": ["RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "GROUP_RANK"]}, 60)
        assert [list(answer.values()) for answer in told] == [
            ["0", "0", "2", "4", "0"],
            ["1", "1", "2", "4", "0"],
            ["2", "0", "2", "4", "1"],
            ["3", "1", "2", "4", "1"],
        ]
        assert {answer["MASTER_ADDR"] for answer in ranks.ask({"names": ["MASTER_ADDR"]}, 60)} == {ADDRESSES[0]}
    assert "noise" in (tmp_path / "3.log").read_text()


@needs_hosts
def test_a_rank_that_fails_or_is_late_is_named(hosts: Hosts, tmp_path: Path) -> None:
    with (
        HostRanks(hosts, "tests.support.echo", tmp_path) as ranks,
        pytest.raises(RunFailedError, match="rank 2: ValueError: told to"),
    ):
        ranks.ask({"names": [], "fail": "2"}, 60)
    with HostRanks(hosts, "tests.support.echo", tmp_path) as ranks:
        ranks.ask({"names": []}, 60)
        with pytest.raises(RunFailedError, match=r"no answer of rank\(s\) \[1\] within 2 s"):
            ranks.ask({"names": [], "sleep": "1"}, 2)


def test_a_missing_program_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HostsError, match="without the program 'unshare'"):
        Hosts().__enter__()


@needs_hosts
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can do without user namespaces")
def test_root_does_without_user_namespaces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "unshare"
    program.write_text(f'#!/bin/sh\n[ "$1" = --user ] && exit 1\nexec {shutil.which("unshare")} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with Hosts() as hosts:
        assert len({os.readlink(f"/proc/{holder.pid}/ns/user") for holder in hosts._holders}) == 1
        assert os.readlink("/proc/self/ns/user") == os.readlink(f"/proc/{hosts._holders[0].pid}/ns/user")
        before = hosts.quiet()
        send(hosts, 0, 1, 100_000)
        assert 100_000 < hosts.quiet()[0] - before[0] < 110_000


def test_a_refusal_says_what_was_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("unshare", "nsenter", "ip", "tc"):
        program = tmp_path / name
        program.write_text("#!/bin/sh\necho 'unshare failed: Operation not permitted' >&2; exit 1\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(HostsError, match=r"refused: unshare .*--net: unshare failed: Operation not permitted"):
        Hosts().__enter__()


@needs_hosts
def test_a_process_with_torch_loaded_is_on_its_host(hosts: Hosts) -> None:
    look = "import os, sys; print(os.readlink('/proc/self/ns/net'), os.geteuid(), 'torch' in sys.modules)"
    places = set()
    for host in range(2):
        command = hosts.inside(host, [sys.executable, "-c", look])
        kinds = [environment(fresh=True), environment()]
        fresh, loaded = (subprocess.run(command, env=one, capture_output=True, check=True).stdout for one in kinds)
        assert loaded == fresh.replace(b"False", b"True") != fresh
        places.add(loaded)
    assert len(places | {os.readlink("/proc/self/ns/net")}) == 3
