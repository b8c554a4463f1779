"""Large buffers, their statistics, and the streams of the device. Only this package creates CUDA streams."""

from shardwell.memory.buffer import FlatBuffer, MemoryStats, TemporaryBuffers
from shardwell.memory.device import Device, Event, Stream
from shardwell.memory.statistics import MemoryReport, StateKind, Tier

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
