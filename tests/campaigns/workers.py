"""Tries cases in a worker process, one after the other. One that crashes or hangs ends the worker, and is known by it.

A campaign module calls `try_cases`, and runs `work` if it is started with `--worker SEED FIRST END`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from types import FrameType

from tests.campaigns.result import Result
from tests.support.patience import soon

LIMIT = 30  # seconds for one case, inside the worker


class _Hang(BaseException):
    pass


def _ring(_signal: int, _frame: FrameType | None) -> None:
    raise _Hang


def work(outcome_of: Callable[[int, int], str], seed: int, first: int, end: int) -> None:
    """Try some cases, given as seed and number, and print a line for each."""
    signal.signal(signal.SIGALRM, _ring)
    for number in range(first, end):
        print(json.dumps({"begin": number}), flush=True)
        signal.alarm(int(soon(LIMIT)))
        try:
            outcome = outcome_of(seed, number)
        except _Hang:
            outcome = "hang"
        signal.alarm(0)
        print(json.dumps({"number": number, "outcome": outcome}), flush=True)


def try_cases(
    result: Result,
    module: str,
    cases: tuple[int, int, float],
    good: Collection[str],
    environment: Mapping[str, str] | None = None,
) -> Result:
    """Try cases, given as (count, seed, seconds), in workers that run `module`; outcomes outside of `good` are bad.

    An outcome is a kind, and after a colon what else there is to say.
    """
    count, seed, seconds = cases
    begin, first = time.monotonic(), 0
    while first < count and time.monotonic() - begin < seconds:
        command = [sys.executable, "-m", module, "--worker", str(seed), str(first), str(count)]
        options = {"env": {**os.environ, **(environment or {})}, "stderr": subprocess.DEVNULL, "text": True}
        begun = -1
        with subprocess.Popen(command, stdout=subprocess.PIPE, **options) as worker:  # type: ignore[call-overload]
            assert worker.stdout is not None
            for line in worker.stdout:
                said = json.loads(line)
                begun = said.get("begin", begun)
                if "outcome" in said:
                    first = said["number"] + 1
                    kind = said["outcome"].partition(":")[0]
                    result.count(kind, "" if kind in good else f"seed {seed}, number {begun}: {said['outcome']}")
                if time.monotonic() - begin > seconds:
                    worker.kill()
                    break
        if begun >= first and time.monotonic() - begin < seconds:
            result.count("crash", f"seed {seed}, number {begun}: exit code {worker.returncode}")
            first = begun + 1
    result.seconds = round(time.monotonic() - begin, 1)
    return result
