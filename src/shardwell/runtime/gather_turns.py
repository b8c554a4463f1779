"""All-gathers in turns on two communicators: that of all-gathers, and that of reductions while it has nothing to do.

NCCL runs the collectives of one communicator one after the other, and over sockets one of them leaves much of a link
idle. In a forward, no gradients are reduced. So every other all-gather takes the stream of reductions then, and the
transport takes the communicator that belongs to the stream (`TorchTransport`). All ranks decide alike: a reduction is
in flight from its start to the place in the program that waits for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwell.memory import Device
    from shardwell.runtime.reducer import Reducer
    from shardwell.sharding import Unit
    from shardwell.sharding.pending_update import PendingUpdate


class GatherTurns:
    """Starts the all-gathers of an engine's units, every other one on the communicator of reductions."""

    def __init__(self, device: Device, reducer: Reducer) -> None:
        self._device, self._reducer = device, reducer
        self._was_beside = False  # the last all-gather

    def unshard(self, unit: Unit) -> bool:
        """Start the all-gather of a unit, see `Unit.unshard`."""
        return self._start(unit.unshard)

    def publish(self, unit: Unit, arrival: PendingUpdate | None = None) -> bool:
        """Start the all-gather of updated slices, see `Unit.publish`."""
        return self._start(lambda: unit.publish(arrival))

    def _start(self, start: Callable[[], bool]) -> bool:
        self._was_beside = not (self._was_beside or self._reducer.in_flight)
        if not self._was_beside:
            return start()
        device = self._device
        usual, device.all_gather_stream = device.all_gather_stream, device.reduce_stream
        try:
            return start()
        finally:
            device.all_gather_stream = usual
