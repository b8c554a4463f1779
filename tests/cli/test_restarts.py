from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped, unused-ignore]
import pytest

from shardwell.cli.agent import visible_gpus
from shardwell.cli.run_command import parse_nodes
from shardwell.errors import ShardwellError
from tests.support.command import arguments, environment, shardwell
from tests.support.patience import HANG
from tests.support.restarts import complaints, ends_of_jobs

pytestmark = pytest.mark.slow

SECRET = "of nobody but these tests"
STARTS = """
import os, signal, sys, time
from pathlib import Path
folder, rank, ranks = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
with open(folder / "starts", "a") as file:
    file.write(f"{start} {rank} {ranks}\\n")
def all_started():
    return sum(line.startswith(f"{start} ") for line in (folder / "starts").read_text().splitlines()) == ranks
def killed():
    while not all_started():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
def waits():
    time.sleep(600)
"""

SUMS = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor(rank + 1)
dist.all_reduce(total)
if start == 0:
    killed() if rank == 1 else waits()
print(f"sum {total.item()}")
dist.destroy_process_group()
"""

TOGETHER = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
while True:
    ended = torch.tensor(int((folder / "end").exists()))
    dist.all_reduce(ended)
    if not (folder / f"ranks-{ranks}").exists():
        (folder / f"ranks-{ranks}").touch()
    if ended:
        break
    time.sleep(0.05)
dist.destroy_process_group()
"""


def run_of(tmp_path: Path, script: str, *options: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "script.py").write_text(STARTS + script)
    return shardwell("run", *options, tmp_path / "script.py", tmp_path)


def starts(folder: Path) -> list[tuple[int, ...]]:
    """(start, rank, number of ranks) of every rank that was started."""
    return sorted(tuple(map(int, line.split())) for line in (folder / "starts").read_text().splitlines())


def sizes(folder: Path) -> list[int]:
    """How many ranks there were, at each start."""
    return list({start: ranks for start, _, ranks in starts(folder)}.values())


def test_all_ranks_start_again_when_one_is_killed(tmp_path: Path) -> None:
    result = run_of(tmp_path, "if start == 0: killed() if rank == 1 else waits()", "-n", "2", "--max-restarts", "3")
    assert starts(tmp_path) == [(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)]
    assert result.returncode == 0
    assert result.stderr == "rank 1 failed first: ended by SIGKILL; restart 1 of 3 with 2 ranks\n"


def test_a_process_group_forms_again(tmp_path: Path) -> None:
    result = run_of(tmp_path, SUMS, "-n", "2", "--max-restarts", "1")
    assert (result.returncode, result.stdout) == (0, "sum 3\nsum 3\n"), result.stderr


def test_a_job_that_is_killed_resumes_to_the_parameters_of_one_that_is_not(tmp_path: Path) -> None:
    wrong = complaints(ends_of_jobs(tmp_path, "cpu"))
    assert not wrong, "\n".join(wrong)


def test_the_error_is_shown_when_restarts_are_used_up(tmp_path: Path) -> None:
    script = "if rank == 1: raise ValueError(f'spoilt {start}')\nwaits()"
    result = run_of(tmp_path, script, "-n", "2", "--max-restarts", "2")
    assert [start for start, rank, _ in starts(tmp_path) if rank == 1] == [0, 1, 2]
    assert result.returncode == 1
    assert result.stderr.splitlines()[:3] == [
        "rank 1 failed first: ValueError: spoilt 0; restart 1 of 2 with 2 ranks",
        "rank 1 failed first: ValueError: spoilt 1; restart 2 of 2 with 2 ranks",
        "error: rank 1 failed first: ValueError: spoilt 2",
    ]


@pytest.mark.parametrize(
    "error", ["from shardwell.errors import ConfigError; raise ConfigError('wrong key')", "import nowhere", "1 +"]
)
def test_what_a_restart_cannot_cure_ends_the_job_at_once(tmp_path: Path, error: str) -> None:
    result = run_of(tmp_path, f"exec({error!r})", "-n", "2", "--max-restarts", "5")
    assert {start for start, _, _ in starts(tmp_path)} == {0}
    assert result.returncode == 1, result.stderr
    assert "; restart " not in result.stderr
    assert "failed first: " in result.stderr, result.stderr


def test_two_early_failures_in_a_row_mean_one_rank_less(tmp_path: Path) -> None:
    script = "if ranks == 3: killed() if rank == 2 else waits()"
    result = run_of(tmp_path, script, "-n", "3", "--max-restarts", "5", "--min-ranks", "1", "--min-uptime", "600")
    assert sizes(tmp_path) == [3, 3, 2]
    assert result.returncode == 0
    assert result.stderr.splitlines() == [
        "rank 2 failed first: ended by SIGKILL; restart 1 of 5 with 3 ranks",
        "rank 2 failed first: ended by SIGKILL; restart 2 of 5 with 2 ranks instead of 3",
    ]


def test_there_are_never_fewer_ranks_than_allowed(tmp_path: Path) -> None:
    result = run_of(
        tmp_path, "sys.exit(7)", "-n", "3", "--max-restarts", "5", "--min-ranks", "2", "--min-uptime", "600"
    )
    assert sizes(tmp_path) == [3, 3, 2, 2, 2, 2]
    assert result.returncode == 7


def test_failures_that_are_not_early_keep_the_ranks(tmp_path: Path) -> None:
    options = ("-n", "2", "--max-restarts", "2", "--min-ranks", "1", "--min-uptime", "0")
    run_of(tmp_path, "sys.exit(7)", *options)
    assert sizes(tmp_path) == [2, 2, 2]


def test_an_interrupt_is_no_reason_to_start_again(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(STARTS + "waits()")
    launcher = launched(tmp_path, "-n", "2", "--max-restarts", "3")
    try:
        until(lambda: (tmp_path / "starts").exists() and len(starts(tmp_path)) == 2)
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(timeout=HANG) == 130
        assert len(starts(tmp_path)) == 2
    finally:
        launcher.kill()


def test_signals_of_a_script_reach_its_ranks_and_do_not_end_the_launcher(tmp_path: Path) -> None:
    caught = "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))\n"
    (tmp_path / "script.py").write_text(STARTS.replace("start = ", f"{caught}start = ", 1) + "waits()")
    launcher = launched(tmp_path, "-n", "2")
    try:
        until(lambda: (tmp_path / "starts").exists() and len(starts(tmp_path)) == 2)
        launcher.send_signal(signal.SIGUSR1)
        assert launcher.wait(timeout=HANG) == 0
    finally:
        launcher.kill()


# ------------------------------------------------------------------------------------------------- several nodes


def launched(folder: Path, *options: str) -> subprocess.Popen[bytes]:
    command = arguments("run", *options, folder / "script.py", folder)
    return subprocess.Popen(command, env={**environment(), "SHARDWELL_SECRET": SECRET}, stderr=subprocess.PIPE)


def until(holds: Callable[[], bool], limit: float = HANG) -> None:
    deadline = time.monotonic() + limit
    while not holds():
        assert time.monotonic() < deadline, "nothing happened within the limit"
        time.sleep(0.05)


def listens(launcher: subprocess.Popen[bytes]) -> bool:
    """Whether others can meet at this launcher."""
    return any(link.status == "LISTEN" for link in psutil.Process(launcher.pid).net_connections())


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts launchers that meet on this machine: one rank each, one node or two."""
    (tmp_path / "script.py").write_text(STARTS + TOGETHER)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ("-n", "1", "--nnodes", "1:2", "--max-restarts", "3", "--join-time", "8")
    running = []

    def start() -> subprocess.Popen[bytes]:
        running.append(launched(tmp_path, *options, "--master-addr", "localhost", "--master-port", str(port)))
        return running[-1]

    yield start
    for launcher in running:
        launcher.kill()


def test_survivors_go_on_without_a_lost_node_and_take_it_back(
    tmp_path: Path, nodes: Callable[[], subprocess.Popen[bytes]]
) -> None:
    survivor = nodes()
    until(lambda: listens(survivor))
    lost = nodes()
    until((tmp_path / "ranks-2").exists)
    (tmp_path / "ranks-1").unlink(missing_ok=True)  # on a busy machine the first does not wait for the second
    ranks_of_the_lost = psutil.Process(lost.pid).children(recursive=True)
    lost.kill()
    lost.wait()
    until((tmp_path / "ranks-1").exists)
    assert not any(process.is_running() for process in ranks_of_the_lost)
    (tmp_path / "ranks-2").unlink()
    back = nodes()
    until((tmp_path / "ranks-2").exists)
    (tmp_path / "end").touch()
    assert (survivor.wait(timeout=HANG), back.wait(timeout=HANG)) == (0, 0)
    assert survivor.stderr is not None
    *_, first, second = survivor.stderr.read().decode().splitlines()
    assert first.startswith("rank ")
    assert first.endswith("; restart 1 of 3 with 1 rank instead of 2")
    assert second == "another node has joined or restarted; restarting with 2 ranks instead of 1"


def test_the_others_end_when_the_node_is_lost_where_they_meet(
    tmp_path: Path, nodes: Callable[[], subprocess.Popen[bytes]]
) -> None:
    lost = nodes()
    until(lambda: listens(lost))
    other = nodes()
    until((tmp_path / "ranks-2").exists)
    lost.kill()
    assert other.wait(timeout=HANG) == 2
    assert other.stderr is not None
    last = other.stderr.read().decode().splitlines()[-1]
    assert last.startswith("error: localhost:")
    assert ", where the nodes meet, cannot be reached: its node has ended" in last


ONCE_MORE = """
import torch, torch.distributed as dist
first = not (folder / "second").exists()
dist.init_process_group("gloo")
total = torch.tensor(rank + 1)
dist.all_reduce(total)
if first and rank == 1:
    (folder / "second").touch()
    os.kill(os.getpid(), signal.SIGKILL)
if first:
    waits()
(folder / f"sum-{rank}").write_text(str(total.item()))
dist.destroy_process_group()
"""


def test_a_fixed_number_of_nodes_starts_again_together_when_a_rank_of_one_is_killed(tmp_path: Path) -> None:
    """The other node's rank waits, and would for long: its launcher hears that a node starts again."""
    (tmp_path / "script.py").write_text(STARTS + ONCE_MORE)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    options = ("-n", "1", "--nnodes", "2", "--max-restarts", "1", "--master-addr", "127.0.0.1", "--master-port", port)
    launchers = [launched(tmp_path, *options) for _ in range(2)]
    try:
        assert [launcher.wait(timeout=HANG) for launcher in launchers] == [0, 0]
        assert [(tmp_path / f"sum-{rank}").read_text() for rank in (0, 1)] == ["3", "3"]
    finally:
        for launcher in launchers:
            launcher.kill()


def test_a_node_that_fails_for_good_ends_the_other_whose_ranks_wait(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(STARTS + "if rank == 1: raise ValueError('spoilt')\nwaits()\n")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    options = ("-n", "1", "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port)
    launchers = [launched(tmp_path, *options) for _ in range(2)]
    try:
        said = [launcher.communicate(timeout=HANG)[1].decode() for launcher in launchers]
        assert sorted(launcher.returncode for launcher in launchers) == [1, 2]
        assert sum("error: rank 1 failed first: ValueError: spoilt" in words for words in said) == 1
        assert sum("has ended; see the other nodes for the reason" in words for words in said) == 1
    finally:
        for launcher in launchers:
            launcher.kill()


def test_a_number_of_nodes_or_a_range_is_understood() -> None:
    assert (parse_nodes("2"), parse_nodes("1:4")) == ((2, 2), (1, 4))


@pytest.mark.parametrize("text", ["", "0", "2:1", "1:2:3", "a", "1:", "-1"])
def test_other_numbers_of_nodes_are_refused(text: str) -> None:
    with pytest.raises(ShardwellError, match=r"expected a number of nodes such as 2, or the least and the most: 1:4"):
        parse_nodes(text)


def test_fewer_ranks_are_for_one_node(tmp_path: Path) -> None:
    result = run_of(tmp_path, "", "-n", "2", "--nnodes", "2", "--master-addr", "localhost", "--min-ranks", "1")
    assert (result.returncode, "--min-ranks is for one node" in result.stderr) == (2, True)


def test_a_host_that_cannot_be_found_is_one_clear_line(tmp_path: Path) -> None:
    result = run_of(tmp_path, "", "-n", "1", "--nnodes", "2", "--master-addr", "nowhere.invalid")
    assert result.returncode == 2
    assert result.stderr.startswith("error: --master-addr nowhere.invalid: cannot be found")


def test_gpus_are_named_as_the_user_named_them() -> None:
    assert visible_gpus(None, 2) == ["0", "1"]
    assert visible_gpus("3, 5,7", 3) == ["3", "5", "7"]
    assert visible_gpus("", 0) == []
