from __future__ import annotations

import re
import signal
import subprocess
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped, unused-ignore]
import pytest

from shardwell.cli.failures import RankFailure, RanksFailedError, in_order, is_retryable
from tests.support.command import ROOT, arguments, environment, shardwell
from tests.support.patience import HANG, soon

PROMPT = 20.0  # seconds for a run that takes three on an idle machine; a hang would take minutes

HELLO = """
import os, sys
print(f"hello from {os.environ['RANK']} of {os.environ['WORLD_SIZE']} with {sys.argv[1:]}")
"""

CRASH = """
import os, time
if os.environ["RANK"] == "1":
    raise ValueError("the data of rank 1 is spoilt")
time.sleep(600)
"""

TALK = """
import os, sys, time
from pathlib import Path
folder, rank = Path(sys.argv[1]), os.environ["RANK"]
(folder / rank).touch()
while not all((folder / other).exists() for other in "01"):
    time.sleep(0.001)
for number in range(3000):
    print("rank", rank, "says", number)
"""

SLEEP = """
import os, sys, time
from pathlib import Path
Path(sys.argv[1], os.environ["RANK"]).write_text(str(os.getpid()))
time.sleep(600)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "script.py"


def test_options_after_the_script_go_to_the_script(script: Path) -> None:
    script.write_text(HELLO)
    result = shardwell("run", "-n", "2", script, "--lr", "3", "-n", "7")
    expected = [f"hello from {rank} of 2 with ['--lr', '3', '-n', '7']" for rank in (0, 1)]
    assert sorted(result.stdout.splitlines()) == expected


def test_a_run_that_succeeds_is_quiet(script: Path) -> None:
    script.write_text("import torch\n")
    result = shardwell("run", "-n", "1", script)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_lines_of_ranks_that_talk_at_once_stay_whole(
    script: Path, unbuffered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    script.write_text(TALK)
    result = shardwell("run", "-n", "2", script, script.parent)
    expected = [f"rank {rank} says {number}" for rank in (0, 1) for number in range(3000)]
    assert sorted(result.stdout.splitlines()) == sorted(expected)


def test_a_module_runs_by_name(script: Path) -> None:
    script.write_text(HELLO)
    result = shardwell("run", "-n", "1", "-m", "script", "--flag", cwd=script.parent)
    assert result.stdout == "hello from 0 of 1 with ['--flag']\n"


@pytest.fixture(scope="module")
def crash(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], float]:
    script = tmp_path_factory.mktemp("crash") / "script.py"
    script.write_text(CRASH)
    began = time.monotonic()
    result = shardwell("run", "-n", "2", script)
    return result, time.monotonic() - began


def test_a_crashed_rank_ends_the_others_promptly(crash: tuple[subprocess.CompletedProcess[str], float]) -> None:
    assert crash[1] < soon(PROMPT)


def test_a_crashed_rank_gives_its_exit_code(crash: tuple[subprocess.CompletedProcess[str], float]) -> None:
    assert crash[0].returncode == 1


def test_the_first_failing_ranks_error_is_on_top(crash: tuple[subprocess.CompletedProcess[str], float]) -> None:
    first = crash[0].stderr.splitlines()[0]
    assert first == "error: rank 1 failed first: ValueError: the data of rank 1 is spoilt"


def test_the_traceback_starts_in_the_users_script(crash: tuple[subprocess.CompletedProcess[str], float]) -> None:
    frames = [line for line in crash[0].stderr.splitlines() if line.startswith("  File ")]
    assert len(frames) == 1
    assert 'script.py", line 4' in frames[0]


def test_an_exit_code_of_the_script_is_handed_on(script: Path) -> None:
    script.write_text("import sys; sys.exit(7)")
    result = shardwell("run", "-n", "1", script)
    assert result.returncode == 7
    assert "rank 0 failed first: ended with exit code 7" in result.stderr


def _interrupt(command: list[str], folder: Path, number: signal.Signals) -> tuple[int, list[int], float]:
    """Start two sleeping ranks, signal the launcher; its exit code, the ranks' pids, and how long it took to end."""
    launcher = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + HANG
        files = [folder / "0", folder / "1"]
        while not all(file.exists() and file.read_text() for file in files):
            assert time.monotonic() < deadline, "the ranks did not start"
            assert launcher.poll() is None, "the launcher ended early"
            time.sleep(0.05)
        began = time.monotonic()
        launcher.send_signal(number)
        code = launcher.wait(timeout=HANG)
        return code, [int(file.read_text()) for file in files], time.monotonic() - began
    finally:
        launcher.kill()


def _alive(pids: list[int]) -> list[int]:
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=soon(10))
    return [process.pid for process in alive]


LEAVE = """
import os, sys, torch, shardwell
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
engine = shardwell.initialize(model=model, optimizer=optimizer, config={"zero_optimization": {"stage": 2}}).engine
for step in range(3):
    if step == 2 and os.environ["RANK"] == "1":
        exec(sys.argv[1])
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("raise KeyboardInterrupt", 130, "rank 1 ended with KeyboardInterrupt after 2 batches"),
        ("sys.exit(3)", 3, "rank 1 ended with SystemExit (3) after 2 batches"),
        ("raise ValueError('spoilt')", 1, "rank 1 ended with ValueError (spoilt) after 2 batches"),
    ],
)
def test_a_rank_that_leaves_in_the_scripts_own_code_is_not_said_to_have_finished(
    script: Path, how: str, code: int, words: str
) -> None:
    script.write_text(LEAVE)
    result = shardwell("run", "-n", "2", script, how)
    assert result.returncode == code, result.stderr
    assert "rank 1 failed first" in result.stderr
    assert words in result.stderr


def test_more_ranks_than_a_node_can_have_are_refused_before_memory_is_full(script: Path) -> None:
    script.write_text(SLEEP)
    result = shardwell("run", "-n", "99999999999999999999", script)
    assert result.returncode == 2
    assert "4096" in result.stderr


def test_ctrl_c_ends_all_ranks_promptly(script: Path) -> None:
    script.write_text(SLEEP)
    code, pids, seconds = _interrupt(arguments("run", "-n", "2", script, script.parent), script.parent, signal.SIGINT)
    assert (code, _alive(pids), seconds < soon(PROMPT)) == (130, [], True)


def test_ranks_do_not_outlive_a_killed_launcher(script: Path) -> None:
    script.write_text(SLEEP)
    _, pids, _ = _interrupt(arguments("run", "-n", "2", script, script.parent), script.parent, signal.SIGKILL)
    assert _alive(pids) == []


def test_a_missing_script_is_one_clear_line() -> None:
    result = shardwell("run", "-n", "2", "nowhere.py")
    assert result.returncode == 2
    assert result.stderr.startswith("error: there is no script 'nowhere.py'")
    assert "Traceback" not in result.stderr


def test_several_nodes_need_an_address_to_meet(script: Path) -> None:
    script.touch()
    result = shardwell("run", "-n", "1", "--nnodes", "2", script)
    assert (result.returncode, "pass --master-addr" in result.stderr) == (2, True)


@pytest.mark.slow
def test_the_example_trains_and_shows_what_stage_3_does(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 16)
    result = shardwell("run", "-n", "2", ROOT / "examples" / "train_gpt.py", text)
    assert result.stdout.startswith("step    0  loss 5."), result.stderr
    assert re.search(r"gather\W+14\W+3\.3 MiB", result.stdout), result.stdout  # blocks, embeddings and the rest, twice
    assert "on each rank: parameters 1.7 MiB on the device; optimizer state 3.3 MiB on the device" in result.stderr
    assert "nothing is all-gathered" not in result.stderr


# ------------------------------------------------------------------------------------------- which rank to blame


def test_a_rank_that_reports_its_peer_is_not_blamed() -> None:
    peer = RankFailure(0, 1, "PeerError: rank 1 failed first", "", when=10.0)
    cause = RankFailure(1, 1, "ValueError: bad", "", when=10.5)
    assert in_order([peer, cause]) == [cause, peer]


def test_a_rank_that_was_killed_is_blamed_for_its_peers_errors() -> None:
    broken_link = RankFailure(0, 1, "RuntimeError: connection closed by peer", "", when=10.2)
    killed = RankFailure(1, -9, "", "", when=11.0)  # when torch noticed, in whole seconds
    assert in_order([broken_link, killed]) == [killed, broken_link]


def test_a_rank_that_the_launcher_ended_is_blamed_last() -> None:
    ended = RankFailure(0, -15, "", "", when=9.0)
    cause = RankFailure(1, 3, "", "", when=10.0)
    assert in_order([ended, cause]) == [cause, ended]


# ------------------------------------------------------------------------------------- what a restart cannot cure


def test_a_rank_that_is_ended_after_its_error_gives_the_code_of_the_error() -> None:
    first = RankFailure(0, -15, "ValueError: bad", "", when=10.0)
    second = RankFailure(1, 3, "ValueError: worse", "", when=10.1)
    assert RanksFailedError(in_order([second, first])).exit_code == 1
    assert RanksFailedError([RankFailure(0, -9, "", "", when=10.0)]).exit_code == 137


CONFIG_ERROR = RankFailure(0, 1, "ConfigError: bad", "", when=10.0, kinds=("ConfigError", "ShardwellError"))


def test_a_configuration_is_as_wrong_after_a_restart() -> None:
    ended = RankFailure(1, -15, "", "", when=10.0)
    reports = RankFailure(2, 1, "PeerError: rank 0 failed first", "", when=10.0, kinds=("PeerError", "ShardwellError"))
    assert not is_retryable([CONFIG_ERROR, ended, reports])


def test_a_rank_that_failed_otherwise_may_be_cured() -> None:
    assert is_retryable([RankFailure(1, -9, "", "", when=10.0), CONFIG_ERROR])
    assert is_retryable([RankFailure(1, 1, "PeerError: a peer stopped answering", "", when=10.0, kinds=("PeerError",))])
