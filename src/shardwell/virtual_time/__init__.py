"""Virtual time: what a simulated step would take, kept by the engine's own streams, events, workers and queues.

`clock` is the clock of the simulation that runs, or None. Code that stands for work which a simulation does not do asks
for it in its simulated branch only, so that nothing here is on the path of a real run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from shardwell.virtual_time.virtual_clock import VirtualClock

clock: VirtualClock | None = None


def touch(*tensors: Tensor) -> None:
    """Note that a kernel reads and writes these tensors, the last of which is written; without a clock do nothing."""
    if clock is not None:
        clock.touch(tensors)
