"""Communication between ranks. All collectives of an engine are issued in this package."""

from shardwell.parallel.agreement import Agreement
from shardwell.parallel.collectives import Collectives
from shardwell.parallel.mesh import Axis, RankGroup, start_process_group
from shardwell.parallel.roles import MeshRoles
from shardwell.parallel.traffic import TrafficKind, TrafficReport, TrafficStats
from shardwell.parallel.transport import Work

__all__ = [
    "Agreement",
    "Axis",
    "Collectives",
    "MeshRoles",
    "RankGroup",
    "TrafficKind",
    "TrafficReport",
    "TrafficStats",
    "Work",
    "start_process_group",
]
