"""Big buffers and the devices they lie on. Nothing else in the package allocates or names a stream."""

from shardwell.memory.buffer import Buffer
from shardwell.memory.device import Device, Lane, Mark
from shardwell.memory.statistics import Account, MemoryReport, State, Tier
from shardwell.memory.temporary import Scratch

__all__ = ["Account", "Buffer", "Device", "Lane", "Mark", "MemoryReport", "Scratch", "State", "Tier"]
