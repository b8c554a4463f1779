"""torch's elastic agent, which restarts the ranks of this node when one fails.

This one also reports restarts, knows errors that a restart cannot cure, and can continue with fewer ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from shardwell.cli.failures import RankFailure, Restarts, failures_of, is_retryable
from shardwell.cli.rank import ENDED
from shardwell.memory.local_gpus import num_gpus
from shardwell.parallel.attendance import ANY_ENDED, ended_key

GRACE = 5  # seconds that ranks get to end after Ctrl-C, before they are killed
_EARLY_FAILURES = 2  # in a row, until there is one rank less
_GPUS = "CUDA_VISIBLE_DEVICES"


class Agent(LocalElasticAgent):
    """An agent that ends all ranks of this node when one fails, and restarts them as `restarts` allows."""

    ends: list[RankFailure]  # of the last failure, the rank to blame first

    def __init__(self, spec: WorkerSpec, logs: DefaultLogsSpecs, restarts: Restarts) -> None:
        super().__init__(spec, logs)
        self.ends = []
        self._spec, self._restarts = spec, restarts
        self._logs = logs.root_log_dir
        self._noted: set[int] = set()  # local ranks that have ended without an error, and were reported
        self._num_early = 0
        self._began = 0.0
        self._told_restarts = 0
        self._num_ranks = 0  # of all nodes, when they were last started

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        num_ranks = worker_group.workers[0].world_size
        if self._num_ranks:
            self._report_restart(num_ranks)
        self._num_ranks, self._began = num_ranks, time.monotonic()
        self._noted = set()
        os.environ[ENDED] = tempfile.mkdtemp(prefix="ended-", dir=self._logs)
        return super()._start_workers(worker_group)  # type: ignore[no-any-return]

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = GRACE) -> None:
        if self._pcontext:
            self._pcontext.close(death_sig, GRACE)  # torch itself gives 30 s, and not all versions let one choose
        super()._shutdown(death_sig)

    def pass_on(self, number: int) -> None:
        """Send a signal to all ranks of this node that run."""
        for handler in getattr(self._pcontext, "subprocess_handlers", {}).values():
            if handler.proc.poll() is None:
                handler.proc.send_signal(number)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        self._note_ended(worker_group)
        if result.is_failed():
            self._plan_restart(result.failures)
        return result

    def _note_ended(self, worker_group: WorkerGroup) -> None:
        """Report ranks that have ended without an error to ranks that wait for them in `init_process_group`."""
        store: Any = worker_group.store
        for local_rank, handler in getattr(self._pcontext, "subprocess_handlers", {}).items():
            if local_rank not in self._noted and handler.proc.poll() == 0:
                self._noted.add(local_rank)
                rank = worker_group.workers[local_rank].global_rank
                with contextlib.suppress(RuntimeError, OSError):  # without the store, ranks that wait end, too
                    store.set(ended_key(rank), "")
                    store.set(ANY_ENDED, "")
                    Path(os.environ[ENDED], str(rank)).touch()

    def _plan_restart(self, failures: Mapping[int, ProcessFailure]) -> None:
        """Decide whether to restart, and with how many ranks."""
        self.ends = failures_of(failures, self._logs)
        if not is_retryable(self.ends):
            self._remaining_restarts = 0
        is_early = time.monotonic() - self._began < self._restarts.min_uptime
        self._num_early = self._num_early + 1 if is_early else 0
        fewest = self._restarts.min_ranks
        if self._num_early < _EARLY_FAILURES or fewest is None or self._spec.local_world_size <= fewest:
            return
        self._drop_rank(self.ends[0].local_rank)
        self._num_early = 0

    def _drop_rank(self, local_rank: int) -> None:
        """Continue with one rank less; if each rank has its own GPU, do not use the failed rank's GPU again."""
        gpus = visible_gpus(os.environ.get(_GPUS), num_gpus())
        if self._spec.local_world_size <= len(gpus):
            del gpus[local_rank]
            os.environ[_GPUS] = ",".join(gpus)
        self._spec.local_world_size -= 1

    def _report_restart(self, num_ranks: int) -> None:
        now = f"{num_ranks} rank{'s' if num_ranks > 1 else ''}"
        if num_ranks != self._num_ranks:
            now += f" instead of {self._num_ranks}"
        restart = self._spec.max_restarts - self._remaining_restarts
        if restart > self._told_restarts:
            first = self.ends[0]
            what = f"rank {first.rank} failed first: {first.first_line}; restart {restart} of {self._restarts.limit}"
        else:
            what = "another node has joined or restarted; restarting"
        self._told_restarts = restart
        Console(stderr=True).print(Text(f"{what} with {now}", "yellow"), soft_wrap=True)


def visible_gpus(setting: str | None, num: int) -> list[str]:
    """Return the GPUs that ranks may use, as CUDA_VISIBLE_DEVICES names them."""
    if setting is None:
        return [str(index) for index in range(num)]
    return [name.strip() for name in setting.split(",")][:num]
