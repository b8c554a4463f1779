"""Big buffers and the devices they lie on. Nothing else in the package allocates or names a stream."""

from shardwell.memory.buffer import FlatBuffer
from shardwell.memory.device import Device, Event, Stream
from shardwell.memory.statistics import MemoryReport, MemoryStats, StateKind, Tier
from shardwell.memory.temporary import TemporaryBuffers

__all__ = [
    "Device",
    "Event",
    "FlatBuffer",
    "MemoryReport",
    "MemoryStats",
    "StateKind",
    "Stream",
    "TemporaryBuffers",
    "Tier",
]
