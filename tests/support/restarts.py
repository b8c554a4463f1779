"""Jobs of `shardwell run` that are killed and start again, on CPU ranks or on NCCL ranks of one GPU."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support import restarted
from tests.support.command import arguments, environment
from tests.support.patience import HANG


def ends_of_jobs(folder: Path, device: str) -> dict[str, tuple[int, str, str]]:
    """Return exit status, output and errors of a job that is killed once, and of one that is not."""
    found = {}
    for kills in ("kills", "runs"):
        command = arguments("run", "-n", "2", "--max-restarts", "1", restarted.__file__, folder / kills, device, kills)
        env = environment(root=True)
        if device == "cuda":
            del env["SHARDWELL_DEVICE"]
        ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=HANG)
        found[kills] = ended.returncode, ended.stdout, ended.stderr
    return found


def complaints(found: dict[str, tuple[int, str, str]]) -> list[str]:
    """Return what is wrong with how the jobs ended: the one that was killed must have the other's parameters."""
    (status, killed, errors), (plain_status, plain, plain_errors) = found["kills"], found["runs"]
    wrong = [] if (status, plain_status) == (0, 0) else [errors, plain_errors]
    if "rank 1 failed first: ended by SIGKILL; restart 1 of 1 with 2 ranks" not in errors:
        wrong.append(f"the restart is not told: {errors}")
    begins = f"start 1, from step {restarted.KILLED_AFTER}: ", "start 0, from step 0: "
    for out, begin in zip((killed, plain), begins, strict=True):
        if not out.startswith(begin):
            wrong.append(f"expected {begin!r}: {out}")
    if killed.rpartition(" ")[2] != plain.rpartition(" ")[2]:
        wrong.append(f"other parameters: {killed} {plain}")
    return wrong
