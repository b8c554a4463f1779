"""Several machines: hostfiles over a stand-in for ssh, Slurm scripts with a stand-in for srun, Kubernetes objects."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.hosts import ADDRESSES, Hosts, why_not
from shardwell.cli.hosts import read_hosts
from shardwell.errors import ShardwellError
from tests.support.command import ROOT, arguments, environment, free_port
from tests.support.command import shardwell as command
from tests.support.listings import listing
from tests.support.patience import HANG, soon

pytestmark = pytest.mark.slow

REFUSED = why_not()
SCRIPT = """
import os, pathlib, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "SHARDWELL_SECRET", "NCCL_DEBUG")
pathlib.Path(f"rank-{os.environ['RANK']}").write_text("|".join(os.environ.get(name, "") for name in names))
print("argument", *sys.argv[1:])
"""
TRAINS = """
import torch, shardwell
model = torch.nn.Linear(8, 8)
engine, *_ = shardwell.initialize(model=model, config={"optimizer": {"type": "SGD", "params": {"lr": 0.1}},
                                  "zero_optimization": {"stage": 3}})
for _ in range(3):
    engine.backward(engine(torch.ones(2, 8)).square().mean())
    engine.step()
print("trained on", engine.world_size)
"""


# Stand-ins for ssh, in Python, so that what they start may come preloaded. The first becomes the module that it is
# asked to run, and notes for which host and how; the second starts it in the network namespace of its host.
HERE = """
import runpy, sys
with open({calls!r}, "a") as file:
    print(*sys.argv[1:], file=file)
host, python, option, module, *arguments = sys.argv[1:]
assert (python, option) == (sys.executable, "-m")
sys.argv = [module, *arguments]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
IN_NAMESPACES = """
import subprocess, sys
sys.exit(subprocess.call([*{inside!r}[sys.argv[1]], *sys.argv[2:]]))
"""


def program(file: Path, text: str) -> str:
    file.write_text(f"#!{sys.executable}{text}")
    file.chmod(0o755)
    return str(file)


@pytest.fixture
def ssh(tmp_path: Path) -> str:
    """Runs a command on this machine, and notes for which host and how."""
    return program(tmp_path / "ssh", HERE.format(calls=str(tmp_path / "calls")))


def test_a_hostfile_starts_all_hosts_with_the_same_secret(tmp_path: Path, ssh: str, monkeypatch: Any) -> None:
    (tmp_path / "hosts").write_text("localhost slots=1\nuser@127.0.0.1 slots=2  # more\n")
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("SHARDWELL_SECRET", "a secret of this job alone")
    options = ["--hostfile", "hosts", "--ssh", ssh, "--master-port", str(free_port())]
    done = command("run", *options, "train.py", "a b", "$HOME", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = [(tmp_path / f"rank-{rank}").read_text().split("|") for rank in range(3)]
    assert {words[1] for words in found} == {"3"}
    assert {words[4] for words in found} == {"a secret of this job alone"}
    assert {words[5] for words in found} == {"WARN"}
    assert sorted(done.stdout.splitlines()) == sorted(
        [*(["user@127.0.0.1: argument a b $HOME"] * 2), "localhost: argument a b $HOME"]
    )
    calls = (tmp_path / "calls").read_text()
    assert sorted(line.split()[0] for line in calls.splitlines()) == ["localhost", "user@127.0.0.1"]
    assert "secret" not in calls


def test_a_host_that_fails_ends_all_and_is_named(tmp_path: Path, ssh: str) -> None:
    (tmp_path / "hosts").write_text("localhost slots=1\n127.0.0.1 slots=1\n")
    (tmp_path / "train.py").write_text(
        "import os, sys, time\nif os.environ['RANK'] == '1':\n    sys.exit('no data here')\ntime.sleep(1000)"
    )
    options = ["--hostfile", "hosts", "--ssh", ssh, "--master-port", str(free_port())]
    begin = time.monotonic()
    done = command("run", *options, "train.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "no data here" in done.stderr
    assert "127.0.0.1 with exit code 1" in done.stderr or "localhost with exit code 1" in done.stderr
    assert done.stderr.rstrip().endswith("; all hosts are ended")
    assert time.monotonic() - begin < soon(90)


def test_when_the_command_is_killed_no_rank_is_left(tmp_path: Path, ssh: str) -> None:
    (tmp_path / "hosts").write_text("localhost slots=1\n")
    (tmp_path / "train.py").write_text(
        "import os, pathlib, time\npathlib.Path('pid').write_text(str(os.getpid()))\ntime.sleep(1000)"
    )
    words = arguments("run", "--hostfile", "hosts", "--ssh", ssh, "train.py")
    process = subprocess.Popen(words, env=environment(), cwd=tmp_path, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + HANG
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)  # nothing of it can clean up
    process.wait()
    rank = int((tmp_path / "pid").read_text())
    while time.monotonic() < deadline and Path(f"/proc/{rank}").exists():
        time.sleep(0.1)
    assert not Path(f"/proc/{rank}").exists()


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("-oProxyCommand=x slots=1", [], "is no name or address of a host"),
        ("one", [], "expected 'host slots=N'"),
        ("one slots=1", ["-n", "2"], "-n and --hostfile both say where ranks run"),
        ("one slots=1", ["--ssh", "no-such-program"], "'no-such-program' cannot be started"),
    ],
)
def test_what_cannot_be_started_is_one_line(tmp_path: Path, text: str, options: list[str], words: str) -> None:
    (tmp_path / "hosts").write_text(text)
    done = command("run", "--hostfile", "hosts", *options, "train.py", cwd=tmp_path)
    assert done.returncode == 2
    assert words in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_users_and_ports_are_ssh_s_and_addresses_are_not(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("me@one.example slots=8\nfe80::1%eth0 slots=4\n")
    first, second = read_hosts(tmp_path / "hosts")
    assert (first.address, second.address) == ("one.example", "fe80::1%eth0")
    (tmp_path / "hosts").write_text("")
    with pytest.raises(ShardwellError, match="no hosts in it"):
        read_hosts(tmp_path / "hosts")


@pytest.mark.skipif(REFUSED is not None, reason=f"no hosts here: {REFUSED}")
def test_two_hosts_train_from_one_hostfile(tmp_path: Path) -> None:
    """Two network namespaces; the command runs on the first, and its ssh enters the other."""
    (tmp_path / "train.py").write_text(TRAINS)
    (tmp_path / "hosts").write_text("".join(f"{address} slots=1\n" for address in ADDRESSES))
    with Hosts() as hosts:
        inside = {address: hosts.inside(number, []) for number, address in enumerate(ADDRESSES)}
        ssh = program(tmp_path / "ssh", IN_NAMESPACES.format(inside=inside))
        done = command("run", "--hostfile", "hosts", "--ssh", ssh, "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{address}: trained on 2" for address in ADDRESSES]


# ----------------------------------------------------------------------------------------------------------- schedulers

SRUN = """#!/bin/bash
# Runs the command as SLURM_NTASKS tasks on this machine.
for ((task = 0; task < SLURM_NTASKS; task++)); do
    SLURM_PROCID=$task SLURM_LOCALID=$task "$@" & tasks+=($!)
done
for task in "${tasks[@]}"; do wait "$task" || code=$?; done
exit ${code:-0}
"""


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a job of two tasks, with stand-ins for srun and scontrol."""
    programs = {
        "srun": SRUN,
        "scontrol": '#!/bin/bash\n[[ "$*" == "show hostnames nodes[1-2]" ]] && printf "localhost\\nnode2\\n"\n',
        "shardwell": f'#!/bin/bash\nexec {sys.executable} -m shardwell "$@"\n',
        "python": f'#!/bin/bash\nexec {sys.executable} "$@"\n',
    }
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (tmp_path / "train.py").write_text(SCRIPT)
    variables = {"SLURM_JOB_NODELIST": "nodes[1-2]", "SLURM_JOB_ID": str(free_port() - 10000)}
    variables |= {"SLURM_NTASKS": "2", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "1", "HOME": str(tmp_path)}
    return {**environment(), **variables, "PATH": f"{folder}:{os.environ['PATH']}"}


def ranks_of(folder: Path, count: int) -> list[list[str]]:
    return [(folder / f"rank-{rank}").read_text().split("|") for rank in range(count)]


def run_job(script: str, *args: str, variables: dict[str, str], cwd: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", script, "job", *args], env=variables, cwd=cwd, capture_output=True, text=True, timeout=HANG
    )
    assert done.returncode == 0, done.stderr


def test_the_slurm_example_starts_a_launcher_on_each_node(tmp_path: Path, slurm: dict[str, str]) -> None:
    run_job((ROOT / "examples" / "clusters" / "slurm.sh").read_text(), "train.py", variables=slurm, cwd=tmp_path)
    assert {words[1] for words in ranks_of(tmp_path, 2)} == {"2"}
    assert (tmp_path / ".shardwell-secret").stat().st_mode & 0o077 == 0


def test_the_slurm_scripts_of_the_page_start_ranks(tmp_path: Path, slurm: dict[str, str]) -> None:
    """A task for each rank; and a launcher on each node, with the secret that the page makes."""
    run_job(listing("docs/clusters.md: (umask 077").text.splitlines()[0], variables=slurm, cwd=tmp_path)
    run_job(listing("docs/clusters.md: #!/bin/bash").text, variables=slurm, cwd=tmp_path)
    found = ranks_of(tmp_path, 2)
    assert [(words[0], words[1], words[2], words[3]) for words in found] == [
        ("0", "2", "0", "localhost"), ("1", "2", "1", "localhost"),
    ]  # fmt: skip
    second = listing("docs/clusters.md: #SBATCH --nodes=4 --ntasks-per-node=1").text
    second = second.replace("-n 8 --nnodes 4", f"-n 2 --nnodes 2 --master-port {free_port()}")
    secret = {"MASTER_ADDR": "localhost", "SHARDWELL_SECRET_FILE": str(tmp_path / "job.secret")}
    run_job(second, variables={**slurm, **secret}, cwd=tmp_path)
    assert {words[1] for words in ranks_of(tmp_path, 4)} == {"4"}


def test_torchrun_starts_the_ranks_of_the_page(tmp_path: Path, slurm: dict[str, str]) -> None:
    one, several = listing("docs/clusters.md: torchrun").commands
    shorter = one.replace("--nproc-per-node 8", f"--nproc-per-node 2 --master-port {free_port()}")
    run_job(shorter.replace("torchrun", "python -m torch.distributed.run"), variables=slurm, cwd=tmp_path)
    assert {words[1] for words in ranks_of(tmp_path, 2)} == {"2"}
    port = str(free_port())
    for old, new in {"torchrun": "python -m torch.distributed.run", "10.0.0.1": "127.0.0.1", "29500": port}.items():
        several = several.replace(old, new)
    several = several.replace("--nproc-per-node 8 --nnodes 4", "--nproc-per-node 1 --nnodes 2")
    both = f"export RANK_OF_NODE=0; {several} & export RANK_OF_NODE=1; {several}; wait $!"
    run_job(both, variables=slurm, cwd=tmp_path)
    assert {words[1] for words in ranks_of(tmp_path, 2)} == {"2"}


@pytest.mark.parametrize("place", ["page", "example"])
def test_kubernetes_objects_fit_together(place: str) -> None:
    if place == "page":
        text = listing("docs/clusters.md: apiVersion").text
    else:
        text = (ROOT / "examples" / "clusters" / "kubernetes.yaml").read_text()
    job, service, policy = yaml.safe_load_all(text)
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    words = dict(zip(container["command"], container["command"][1:], strict=False))
    assert container["command"][:2] == ["shardwell", "run"]
    assert int(words["-n"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert int(words["--nnodes"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert words["--master-addr"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert spec["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert labels == service["spec"]["selector"] == policy["spec"]["podSelector"]["matchLabels"]
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in spec["volumes"]}
    assert all(isinstance(word, str) for word in container["command"])
