"""Lets gloo's event loops run where no other thread wants the core.

The thread of a loop polls while another thread holds the lock of its connection. On a machine with fewer cores than
ranks that thread often waits for a core, which the loop keeps busy: such loops then take half of the CPU time of ranks
that train small models.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed.distributed_c10d as c10d

NAME = "gloo_tcp_loop"


def yield_to_others() -> None:
    """Give the loops of all process groups that this process makes from now on the policy SCHED_IDLE."""
    make = c10d._new_process_group_helper

    def make_and_yield(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        _set_policy()
        return made

    c10d._new_process_group_helper = make_and_yield  # type: ignore[assignment]


_looks: dict[str, int] = {}  # how often a thread was looked at: a new one may not have its name yet


def _set_policy() -> None:
    tasks = os.listdir("/proc/self/task")
    for task in tasks:
        if _looks.get(task, 0) < 2:
            try:
                if Path("/proc/self/task", task, "comm").read_text().startswith(NAME):
                    os.sched_setscheduler(int(task), os.SCHED_IDLE, os.sched_param(0))
            except (FileNotFoundError, ProcessLookupError):  # it has ended
                continue
    known = {task: _looks.get(task, 0) + 1 for task in tasks}
    _looks.clear()
    _looks.update(known)
