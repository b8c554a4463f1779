"""The command line as its users start it: a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.launch import free_port
from tests.support import preloaded
from tests.support.patience import HANG

__all__ = ["ROOT", "arguments", "environment", "free_port", "shardwell"]
ROOT = Path(__file__).resolve().parents[2]


def environment(*, fresh: bool = False, root: bool = False, libraries: bool = False) -> dict[str, str]:
    """Return the variables of a command. `fresh`: the test is about imports, memory or the end of Python itself.

    `root` lets the command import `tests`. Without `fresh`, Python may come with torch and shardwell loaded
    (`preloaded.py`), with `libraries` also with Transformers, to which shardwell is DeepSpeed.
    """
    paths = [*([str(ROOT)] if root else []), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "SHARDWELL_DEVICE": "cpu",
        "NO_COLOR": "1",
        preloaded.VARIABLE: "0" if fresh else "deepspeed" if libraries else "1",
    }


def arguments(*args: str | Path) -> list[str]:
    return [sys.executable, "-m", "shardwell", *map(str, args)]


def shardwell(
    *args: str | Path, cwd: Path | None = None, limit: float = HANG, libraries: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run to the end; stdout and stderr as text."""
    env = environment(libraries=libraries)
    return subprocess.run(arguments(*args), env=env, cwd=cwd, capture_output=True, text=True, timeout=limit)
