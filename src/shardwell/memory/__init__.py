"""Large buffers, their statistics, and the streams of the device. Only this package creates CUDA streams."""

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
