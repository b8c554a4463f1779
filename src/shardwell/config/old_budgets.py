"""The keys that limited memory before there was the block `shardwell.memory`: one row each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class OldBudget:
    """An old key of a memory budget."""

    tier: Literal["device", "host", "disk"]
    meaning: Literal["bytes", "share left free"]

    @property
    def new(self) -> str:
        """The key of today."""
        return f"shardwell.memory.{self.tier}"


# A limit in bytes comes before a share, because it holds where a file has both.
OLD_BUDGETS: dict[str, OldBudget] = {
    "shardwell.device_memory": OldBudget("device", "bytes"),
    "shardwell.host_memory": OldBudget("host", "bytes"),
    "shardwell.disk_memory": OldBudget("disk", "bytes"),
    "shardwell.device_room": OldBudget("device", "share left free"),
    "shardwell.host_room": OldBudget("host", "share left free"),
}
