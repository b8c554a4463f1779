"""DeepSpeed's launcher command line over `shardwell run`: what does not map is refused with the way out."""

from __future__ import annotations

import argparse
import os
import re
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from shardwell.errors import ShardwellError


class LauncherError(ShardwellError, ValueError):
    """The command line or the hostfile is wrong; a ValueError, as DeepSpeed raises."""


ENVIRONMENT_FILE = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
DEFAULT_HOSTFILE = "/job/hostfile"
_SLOTS = re.compile(r"^(?P<host>\S+)\s+slots=(?P<slots>\d+)\s*$")

_REFUSED = {
    "launcher": "`shardwell run --hostfile FILE` starts other nodes over ssh; or run `shardwell run` once on each node",
    "launcher_args": "there is no launcher to pass arguments to",
    "autotuning": "there is no autotuner",
    "elastic_training": "`shardwell run --nnodes MIN:MAX` goes on with fewer nodes, --min-ranks with fewer ranks",
    "ssh_port": "`shardwell run --hostfile FILE --ssh 'ssh -p PORT'` starts other nodes over ssh",
    "venv_script": "activate the environment before this command, on each node",
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m shardwell.compat.deepspeed --launch",
        description="Start the ranks of a script, with the options of DeepSpeed's launcher.",
        allow_abbrev=False,
    )
    parser.add_argument("-H", "--hostfile", default=DEFAULT_HOSTFILE, help="lines 'host slots=N'")
    parser.add_argument("-i", "--include", default="", help="host:slot,slot@host:slot")
    parser.add_argument("-e", "--exclude", default="", help="host:slot,slot@host:slot")
    parser.add_argument("--num_nodes", type=int, default=-1)
    parser.add_argument("--num_gpus", "--num_accelerators", type=int, default=-1)
    parser.add_argument(
        "--node_rank", type=int, default=-1, help="the number of this node; found by its name otherwise"
    )
    parser.add_argument("--master_addr", default="")
    parser.add_argument("--master_port", type=int, default=29500)
    parser.add_argument("--module", action="store_true", help="the script is the name of a module")
    parser.add_argument("--no_python", action="store_true")
    parser.add_argument("--no_local_rank", action="store_true", help="do not pass --local_rank to the script")
    parser.add_argument("--no_ssh", action="store_true", help="each node runs this command; that is always so")
    parser.add_argument("--force_multi", action="store_true")
    parser.add_argument("--save_pid", action="store_true")
    parser.add_argument("--enable_each_rank_log", default="None")
    parser.add_argument("--bind_cores_to_rank", action="store_true")
    parser.add_argument("--bind_core_list", default=None)
    parser.add_argument("--launcher", default=None)
    parser.add_argument("--launcher_args", default=None)
    parser.add_argument("--autotuning", default=None)
    parser.add_argument("--elastic_training", action="store_true", default=None)
    parser.add_argument("--min_elastic_nodes", type=int, default=-1)
    parser.add_argument("--max_elastic_nodes", type=int, default=-1)
    parser.add_argument("--ssh_port", type=int, default=None)
    parser.add_argument("--venv_script", default=None)
    parser.add_argument("user_script")
    parser.add_argument("user_args", nargs=argparse.REMAINDER)
    return parser


def main(args: Sequence[str] | None = None) -> None:
    """Start the ranks that DeepSpeed's launcher would start on this node."""
    asked = _parser().parse_args(sys.argv[1:] if args is None else list(args))
    command = [sys.executable, "-m", "shardwell", *command_of(asked)]
    os.execv(sys.executable, command)  # this process becomes the launcher: signals and the exit code are its own


def command_of(asked: argparse.Namespace) -> list[str]:
    """Return the arguments of `shardwell` that do what was asked for; raise where there are none."""
    _check(asked)
    resources = fetch_hostfile(asked.hostfile)
    if asked.include and asked.exclude:
        raise LauncherError("--include and --exclude contradict one another; keep one")
    if (asked.include or asked.exclude) and (asked.num_nodes != -1 or asked.num_gpus != -1):
        raise LauncherError(
            "--include and --exclude choose devices, and so do --num_nodes and --num_gpus; keep one kind"
        )
    chosen: dict[str, list[int]] = {}
    if asked.include or asked.exclude:
        chosen = parse_inclusion_exclusion(resources or {"localhost": 64}, asked.include, asked.exclude)
    names = list(chosen or resources or {})[: asked.num_nodes if asked.num_nodes > 0 else None]
    num_nodes = len(names) if resources and len(names) > 1 else max(asked.num_nodes, 1)
    if num_nodes > 1 and not asked.master_addr and not names:
        raise LauncherError(f"--num_nodes {num_nodes}: pass --master_addr too, the host name of one node")
    found = ["run", "--as-deepspeed"]
    here = _this_host(names, asked.node_rank)
    if chosen:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str(one) for one in chosen[here])
        found += ["-n", str(len(chosen[here]))]
    elif asked.num_gpus > 0:
        found += ["-n", str(asked.num_gpus)]
    elif resources and names:
        found += ["-n", str(resources[here])]
    if num_nodes > 1:
        found += ["--nnodes", str(num_nodes), "--master-addr", asked.master_addr or names[0]]
        found += ["--master-port", str(asked.master_port)]
    if not asked.no_local_rank:
        found.append("--pass-local-rank")
    if asked.module:
        found.append("-m")
    return [*found, asked.user_script, *asked.user_args]


def _this_host(names: Sequence[str], node_rank: int) -> str:
    """Return the host of the hostfile that this node is: by its number, by its name, else the first."""
    if names and node_rank >= len(names):
        raise LauncherError(f"--node_rank {node_rank}: the hostfile has {len(names)} host(s), numbered from 0")
    if node_rank >= 0 and names:
        return names[node_rank]
    own = {socket.gethostname(), socket.gethostname().partition(".")[0]}
    return next((name for name in names if name in own), names[0] if names else "")


def _check(asked: argparse.Namespace) -> None:
    for name, reason in _REFUSED.items():
        if getattr(asked, name):
            raise LauncherError(f"--{name} is not supported: {reason}")
    if asked.no_python:
        raise LauncherError("--no_python is not supported: the ranks are Python scripts or modules")
    if asked.bind_cores_to_rank or asked.bind_core_list:
        raise LauncherError("--bind_cores_to_rank is not supported: put `numactl` or `taskset` in front of the command")


def fetch_hostfile(hostfile_path: str) -> dict[str, int] | None:
    """Return the slots of each host that a hostfile names; None if there is no such file."""
    path = Path(hostfile_path)
    if not path.is_file():
        if hostfile_path != DEFAULT_HOSTFILE:
            raise LauncherError(f"--hostfile {hostfile_path}: no such file")
        return None
    return _parse_hostfile(path.read_text().splitlines(), hostfile_path)


def _parse_hostfile(hostfile_lines: Sequence[str], hostfile_path: str = "hostfile") -> dict[str, int]:
    """Return the slots of each host that the lines of a hostfile name."""
    found: dict[str, int] = {}
    for number, line in enumerate(hostfile_lines, 1):
        text = line.split("#")[0].strip()
        if not text:
            continue
        match = _SLOTS.match(text)
        if match is None:
            raise LauncherError(f"{hostfile_path}, line {number}: expected 'host slots=N', found '{text}'")
        if match["host"] in found:
            raise LauncherError(f"{hostfile_path}, line {number}: host '{match['host']}' is named twice")
        found[match["host"]] = int(match["slots"])
    if not found:
        raise LauncherError(f"{hostfile_path}: no hosts in it")
    return found


def parse_inclusion_exclusion(
    resource_pool: dict[str, int], inclusion: str = "", exclusion: str = ""
) -> dict[str, list[int]]:
    """Return the slots of each host that remain, from texts such as `worker-0:0,2@worker-1`."""
    return parse_resource_filter(
        {host: list(range(slots)) for host, slots in resource_pool.items()}, inclusion, exclusion
    )


def parse_resource_filter(
    host_info: dict[str, list[int]], include_str: str = "", exclude_str: str = ""
) -> dict[str, list[int]]:
    """Return the slots that `include_str` names, or those that `exclude_str` leaves."""
    if include_str and exclude_str:
        raise ValueError("include_str and exclude_str contradict one another; keep one")
    if not include_str and not exclude_str:
        return host_info
    named: dict[str, list[int]] = {}
    for part in (include_str or exclude_str).split("@"):
        host, _, slots = part.strip().partition(":")
        if host not in host_info:
            raise ValueError(f"host '{host}' is not in the hostfile, which has {', '.join(host_info)}")
        numbers = [int(slot) for slot in slots.split(",")] if slots else host_info[host]
        missing = [number for number in numbers if number not in host_info[host]]
        if missing:
            raise ValueError(f"host '{host}' has no slot {missing[0]}; it has {len(host_info[host])}")
        named[host] = sorted(set(named.get(host, []) + numbers))
    if include_str:
        return {host: named[host] for host in host_info if host in named}
    left = {host: [slot for slot in slots if slot not in named.get(host, [])] for host, slots in host_info.items()}
    return {host: slots for host, slots in left.items() if slots}


def parse_range_list(rng_str: str) -> list[int]:
    """Return the numbers of a text such as `0,2-4,6`, which must ascend."""
    found: list[int] = []
    for part in rng_str.split(","):
        first, _, last = part.partition("-")
        if not first.strip().isdigit() or (last and not last.strip().isdigit()):
            raise LauncherError(f"{rng_str!r}: expected numbers and ranges such as 0,2-4, found {part!r}")
        numbers = range(int(first), int(last or first) + 1)
        if not numbers or (found and numbers[0] <= found[-1]):
            raise LauncherError(f"{rng_str!r}: numbers must ascend, without overlaps, at {part!r}")
        found += numbers
    return found
