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


def _set_policy() -> None:
    for task in Path("/proc/self/task").iterdir():
        try:
            if (task / "comm").read_text().startswith(NAME):
                os.sched_setscheduler(int(task.name), os.SCHED_IDLE, os.sched_param(0))
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
