"""Large buffers, their statistics, and the streams of the device. Only this package creates CUDA streams."""

from shardwell.memory.device import Device, FlatBuffer, MemoryStats, TemporaryBuffers
from shardwell.memory.statistics import MemoryReport, StateKind, Tier
from shardwell.memory.streams import Event, Stream

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
