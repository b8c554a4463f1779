"""Units: a module with the parameters it owns, and the moves between the states of its buffers."""

from shardwell.unit.context import Context
from shardwell.unit.cut import Cut, cut
from shardwell.unit.group import Group
from shardwell.unit.table import Precision, Row, row_for
from shardwell.unit.unit import Residency, Unit

__all__ = ["Context", "Cut", "Group", "Precision", "Residency", "Row", "Unit", "cut", "row_for"]
