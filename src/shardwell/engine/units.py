"""`engine.units`: what an engine all-gathers and steps together, for users, tests and benchmarks to look at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from shardwell.memory import MemoryReport, StateKind, Tier
from shardwell.memory.statistics import PrintsAsTable, human
from shardwell.sharding import ShardedGroup, Unit

if TYPE_CHECKING:
    from rich.table import Table

_DEPTHS = list(Tier)  # from the device down


@dataclass(frozen=True)
class UnitInfo:
    """A unit: a module and the parameters that are all-gathered together.

    The information describes this rank at the moment when `engine.units` was read.
    """

    name: str  # of the module in the model; the root's is ""
    module: nn.Module
    parameters: dict[str, nn.Parameter]  # by their names in the model
    residency: str  # "sharded", "unsharding" or "unsharded"
    tiers: dict[str, str]  # where "parameters" and "optimizer" are stored; the deepest tier, if groups differ
    bytes: dict[tuple[str, str], int]  # by state and tier, as in `engine.memory()`

    @property
    def numel(self) -> int:
        """The number of elements of all parameters."""
        return sum(parameter.numel() for parameter in self.parameters.values())


class UnitList(PrintsAsTable, tuple[UnitInfo, ...]):
    """The units of an engine; it prints as a table."""

    __slots__ = ()

    def table(self) -> Table:
        """Return a rich table of the units."""
        from rich.table import Table

        table = Table(title="units")
        for column in ("unit", "module", "parameters", "stored on", "bytes on this rank"):
            table.add_column(column, justify="right" if column in ("parameters", "bytes on this rank") else "left")
        for unit in self:
            places = ", ".join(dict.fromkeys(unit.tiers.values()))
            size = human(sum(unit.bytes.values()))
            table.add_row(unit.name or "(root)", type(unit.module).__name__, f"{unit.numel:,}", places, size)
        return table


def describe_units(units: Sequence[Unit], memory: MemoryReport) -> UnitList:
    """Return one `UnitInfo` for each unit, in the order of their modules in the model."""
    held: dict[str, dict[tuple[str, str], int]] = {}
    for (state, name, tier), size in memory.now.items():
        held.setdefault(name, {})[state.value, tier.value] = size
    return UnitList(
        UnitInfo(
            unit.name,
            unit.module,
            {
                slot.name: parameter
                for group in unit.groups
                for slot, parameter in zip(group.layout.slots, group.parameters, strict=True)
            },
            unit.residency.name.lower(),
            _tiers(unit.groups),
            held.get(unit.name, {}),
        )
        for unit in units
    )


def _tiers(groups: Sequence[ShardedGroup]) -> dict[str, str]:
    places = {
        StateKind.PARAMETERS: [group.spec.parameters.tier for group in groups],
        StateKind.OPTIMIZER: [group.spec.optimizer.tier for group in groups if group.trainable],
    }
    return {state.value: max(tiers, key=_DEPTHS.index).value for state, tiers in places.items() if tiers}
