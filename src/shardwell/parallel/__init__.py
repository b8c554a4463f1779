"""What crosses processes. Nothing else in the package calls torch.distributed."""

from shardwell.parallel.agreement import Agreement
from shardwell.parallel.collectives import Collectives
from shardwell.parallel.mesh import Axis, RankGroup, start_process_group
from shardwell.parallel.traffic import TrafficKind, TrafficReport, TrafficStats
from shardwell.parallel.work import Work

__all__ = [
    "Agreement",
    "Axis",
    "Collectives",
    "RankGroup",
    "TrafficKind",
    "TrafficReport",
    "TrafficStats",
    "Work",
    "start_process_group",
]
