"""Scripts in processes of their own in which `import deepspeed` means shardwell, through the public ways in."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.command import arguments, environment
from tests.support.patience import HANG

MARK = "RESULT "  # a line of a script that holds JSON for the test


def run_ranks(script: Path, *args: str, ranks: int = 2, options: tuple[str, ...] = (), limit: float = HANG) -> str:
    """Run a script by `shardwell run --as-deepspeed`; return what it printed, and fail with its errors if it failed."""
    text = script.read_text()
    done = subprocess.run(
        arguments("run", "--as-deepspeed", "-n", str(ranks), *options, script, *args),
        env={**environment(libraries="transformers" in text or "accelerate" in text), "OMP_NUM_THREADS": "1"},
        cwd=script.parent,
        capture_output=True,
        text=True,
        timeout=limit,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-6000:]
    return done.stdout


def run_python(
    *args: str | Path, cwd: Path, limit: float = HANG, libraries: bool = False, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments; `-m shardwell.compat.deepspeed` among them is one of the ways in."""
    return subprocess.run(
        [sys.executable, *map(str, args)],
        env={**environment(libraries=libraries), "OMP_NUM_THREADS": "1", **variables},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=limit,
    )


def results(printed: str) -> list[Any]:
    """Return the JSON of each line that a script marked."""
    return [json.loads(line.removeprefix(MARK)) for line in printed.splitlines() if line.startswith(MARK)]
