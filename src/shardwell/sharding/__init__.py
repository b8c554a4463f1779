"""Units: a module with the parameters it owns, and the moves between the states of its buffers."""

from shardwell.sharding.context import Context
from shardwell.sharding.group import Group
from shardwell.sharding.spec import Precision, Row, row_for
from shardwell.sharding.unit import Residency, Unit
from shardwell.sharding.wrap import Cut, cut

__all__ = ["Context", "Cut", "Group", "Precision", "Residency", "Row", "Unit", "cut", "row_for"]
