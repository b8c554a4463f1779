"""What a job on one node shows to others, and what it leaves behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped, unused-ignore]
import pytest

from shardwell.cli.launch import LaunchTopology, _check_secret, _own_address
from shardwell.errors import ShardwellError
from tests.support import preloaded
from tests.support.command import arguments, environment, free_port, shardwell
from tests.support.patience import HANG, soon

TRAIN = """
import os, sys, torch, shardwell
from pathlib import Path
folder = Path(sys.argv[1])
start, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
engine, *_ = shardwell.initialize(model=model, config={
    "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}})
engine.load_checkpoint(folder / "checkpoints")
for step in range(2):
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
engine.save_checkpoint(folder / "checkpoints")
engine.save_checkpoint(folder / "checkpoints", tag="background")
if start == 0 and rank == 1 and len(sys.argv) > 2:
    os.kill(os.getpid(), 9)
engine.destroy()
(folder / f"done-{rank}").touch()
"""

LISTENERS = """
import os, sys, psutil, torch.distributed as dist
from pathlib import Path
dist.init_process_group("gloo")
here = psutil.Process()
found = [link.laddr.ip for one in (here, here.parent()) for link in one.net_connections() if link.status == "LISTEN"]
Path(sys.argv[1], f"listens-{os.environ['RANK']}").write_text("\\n".join(found))
dist.barrier()
dist.destroy_process_group()
"""


def poisoned(folder: Path, secret: str = "") -> dict[str, str]:
    """Return variables with which every process refuses pickles, from before anything else is imported."""
    found = {**environment(), preloaded.VARIABLE: "poisoned"}
    found["PYTHONPATH"] = os.pathsep.join([str(preloaded.POISON), found["PYTHONPATH"]])
    return {**found, "POISONED": str(folder / "poisoned"), **({"SHARDWELL_SECRET": secret} if secret else {})}


READERS = {
    "pickle": "import pickle; pickle.loads(pickle.dumps(1))",
    "torch": "import io, torch; torch.load(io.BytesIO(pickle.dumps(1)), weights_only=False)",
    "collectives": "import torch.distributed as dist; dist.distributed_c10d._unpickler(None)",
    "processes": "from multiprocessing.reduction import ForkingPickler; ForkingPickler.loads(pickle.dumps(1))",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_a_pickle_that_is_read_is_told(tmp_path: Path, name: str) -> None:
    command = [sys.executable, "-c", f"import pickle; {READERS[name]}"]
    done = subprocess.run(command, env=poisoned(tmp_path), capture_output=True, text=True, timeout=HANG, check=False)
    assert done.stderr.endswith("a pickle was read\n")
    assert "<string>" in (tmp_path / "poisoned").read_text()


def run_poisoned(folder: Path, *options: str, nodes: int = 1, secret: str = "") -> list[str]:
    """Run a training script on two ranks in all, with poison in every process; what went wrong, if anything did."""
    (folder / "script.py").write_text(TRAIN)
    command = arguments(
        "run", *options, folder / "script.py", folder, *(["kill"] if "--max-restarts" in options else [])
    )
    launchers = [
        subprocess.Popen(command, env=poisoned(folder, secret), stderr=subprocess.PIPE, text=True) for _ in range(nodes)
    ]
    try:
        said = [launcher.communicate(timeout=HANG)[1] for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()
    if (folder / "poisoned").exists():
        return [(folder / "poisoned").read_text()]
    return [words for words, launcher in zip(said, launchers, strict=True) if launcher.returncode]


@pytest.mark.slow
def test_one_node_trains_saves_and_starts_again_without_reading_a_pickle(tmp_path: Path) -> None:
    assert run_poisoned(tmp_path, "-n", "2", "--max-restarts", "1") == []
    assert (tmp_path / "done-1").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "secret"), [("2", ""), ("1:2", "s" * 32)])
def test_several_nodes_train_without_reading_a_pickle(tmp_path: Path, nodes: str, secret: str) -> None:
    where = ("--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    assert run_poisoned(tmp_path, "-n", "1", "--nnodes", nodes, *where, nodes=2, secret=secret) == []
    assert (tmp_path / "done-0").exists()


@pytest.mark.slow
def test_the_demo_reads_no_pickle(tmp_path: Path) -> None:
    command = arguments("demo", "--ranks", "2", "--stages", "3", "--steps", "1", "--out", tmp_path / "out")
    done = subprocess.run(command, env=poisoned(tmp_path), capture_output=True, text=True, timeout=HANG, check=False)
    assert not (tmp_path / "poisoned").exists(), (tmp_path / "poisoned").read_text()
    assert done.returncode == 0, done.stderr


def test_on_one_node_nothing_listens_but_on_the_loopback_address(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LISTENERS)
    result = shardwell("run", "-n", "2", tmp_path / "script.py", tmp_path)
    assert result.returncode == 0, result.stderr
    for rank in (0, 1):
        found = (tmp_path / f"listens-{rank}").read_text().split()
        assert found
        assert set(found) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def test_the_secret_is_in_no_command_line(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os, psutil, sys\n"
        "here = psutil.Process()\n"
        "words = [*here.cmdline(), *here.parent().cmdline()]\n"
        "secret = os.environ['SHARDWELL_SECRET']\n"
        "sys.exit(0 if len(secret) >= 32 and not any(secret in word for word in words) else 9)\n"
    )
    assert shardwell("run", "-n", "1", tmp_path / "script.py").returncode == 0


# -------------------------------------------------------------------------------------------- secrets and addresses


def test_nodes_that_come_and_go_need_a_secret() -> None:
    with pytest.raises(ShardwellError, match=r"--nnodes 1:2: elastic nodes need a secret.*SHARDWELL_SECRET_FILE"):
        _check_secret(LaunchTopology(1, 1, 2, "localhost"), None)


def test_a_fixed_number_of_nodes_is_told_what_no_secret_means(capsys: pytest.CaptureFixture[str]) -> None:
    _check_secret(LaunchTopology(1, 2, 2, "localhost"), None)
    assert "no secret: any process that reaches localhost:29500 can join as a node" in capsys.readouterr().err


def test_a_name_that_means_another_address_on_each_node_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(*_: object, **__: object) -> list[object]:
        return [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("127.0.1.1", 29500))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(ShardwellError, match=r"node0: means 127\.0\.1\.1 on this node, which no other node can reach"):
        _own_address(LaunchTopology(1, 2, 2, "node0"))


@pytest.mark.parametrize("name", ["0.0.0.0", "::", "0", "224.0.0.1"])
def test_an_address_that_would_listen_on_all_interfaces_is_refused(name: str) -> None:
    with pytest.raises(ShardwellError, match="is not the address of one machine"):
        _own_address(LaunchTopology(1, 2, 2, name))


@pytest.mark.parametrize("name", ["a" * 64, "node..cluster"])
def test_what_cannot_be_a_host_name_is_refused_in_words(name: str) -> None:
    with pytest.raises(ShardwellError, match=r"cannot be found .*; pass a host name"):
        _own_address(LaunchTopology(1, 2, 2, name))


# ------------------------------------------------------------------------------------------------- what is left behind

SLEEP = "import os, sys, time\nopen(os.path.join(sys.argv[1], str(os.getpid())), 'w').close()\ntime.sleep(600)\n"


@pytest.fixture
def own_tmp(tmp_path: Path) -> Path:
    """A folder for temporary files of what is started here."""
    (tmp_path / "tmp").mkdir()
    return tmp_path / "tmp"


def until_gone(own_tmp: Path, mark: str) -> tuple[list[str], list[int]]:
    """What is left of a launcher that was killed, when some seconds have passed or nothing is."""
    deadline = time.monotonic() + soon(20)
    while True:
        ranks = [one.pid for one in psutil.process_iter() if mark in _line(one)]
        left = [path.name for path in own_tmp.iterdir() if path.name.startswith("shardwell-")]
        if not (ranks or left) or time.monotonic() > deadline:
            return left, ranks
        time.sleep(0.1)


def _line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()) if "sh" not in process.name() else ""
    except psutil.Error:
        return ""


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.0, 0.02])
def test_a_launcher_that_is_killed_leaves_no_rank_and_no_folder(tmp_path: Path, own_tmp: Path, delay: float) -> None:
    """Killed when its first rank has just been started, and later."""
    (tmp_path / "script.py").write_text(SLEEP)
    mark = str(tmp_path / "script.py")
    variables = {**environment(fresh=True), "TMPDIR": str(own_tmp)}  # its ranks are known by their command
    launcher = subprocess.Popen(arguments("run", "-n", "2", mark, str(tmp_path)), env=variables)
    try:
        parent, deadline = psutil.Process(launcher.pid), time.monotonic() + HANG
        while not any("rank.py" in _line(child) for child in parent.children()):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(delay)
    finally:
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
    assert until_gone(own_tmp, mark) == ([], [])


def test_a_rank_that_finds_another_parent_than_its_launcher_ends(tmp_path: Path) -> None:
    """As one whose launcher was killed before the kernel was told to end the rank with it."""
    (tmp_path / "script.py").write_text("open(__file__ + '.ran', 'w')")
    rank = Path(__import__("shardwell").__file__).with_name("cli") / "rank.py"
    import sys

    command = [sys.executable, str(rank), str(tmp_path / "script.py")]
    ended = subprocess.run(command, env={**os.environ, "SHARDWELL_LAUNCHER": "1"}, check=False)
    assert ended.returncode == 128 + signal.SIGKILL
    assert not (tmp_path / "script.py.ran").exists()


def test_the_temporary_folder_is_nobody_elses(tmp_path: Path, own_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwell.cli.temporary_folder import kept_folder

    monkeypatch.setattr(tempfile, "tempdir", str(own_tmp))
    with kept_folder() as folder:
        assert os.stat(folder).st_mode & 0o077 == 0
        assert Path(folder).parent == own_tmp
    assert list(own_tmp.iterdir()) == []


EARLY = """
import os, shardwell, torch
if os.environ["RANK"] == "1":
    raise SystemExit(0)
model = torch.nn.Linear(2, 2)
shardwell.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), config={
    "train_micro_batch_size_per_gpu": 1})
"""


@pytest.mark.slow
def test_a_rank_that_ends_well_before_the_process_group_is_not_waited_for(tmp_path: Path) -> None:
    """Also where the script makes the group itself, and torch waits."""
    (tmp_path / "script.py").write_text(
        "import os, torch.distributed as dist\nif os.environ['RANK'] == '0':\n    dist.init_process_group('gloo')\n"
    )
    result = shardwell("run", "-n", "2", tmp_path / "script.py")
    assert result.returncode == 1
    assert "rank 1 ended, without an error, before it called `init_process_group`, where rank 0 waits" in result.stderr


@pytest.mark.slow
def test_ranks_may_go_on_after_another_has_ended_well(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os, time, torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "if os.environ['RANK'] == '0':\n    time.sleep(13)\n"
    )
    assert shardwell("run", "-n", "2", tmp_path / "script.py").returncode == 0


def test_a_rank_that_ends_well_before_initialize_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(EARLY)
    result = shardwell("run", "-n", "2", tmp_path / "script.py")
    assert result.returncode == 1
    assert "rank 1 ended, without an error, before it came to `initialize`, where rank 0 waits for it" in result.stderr
