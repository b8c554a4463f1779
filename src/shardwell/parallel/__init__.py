"""What crosses processes. Nothing else in the package calls torch.distributed."""

from shardwell.parallel.agreement import Agreement
from shardwell.parallel.collectives import Collectives
from shardwell.parallel.mesh import Axis, Mesh, start_process_group
from shardwell.parallel.traffic import Kind, Ledger, TrafficReport
from shardwell.parallel.work import Pending

__all__ = [
    "Agreement",
    "Axis",
    "Collectives",
    "Kind",
    "Ledger",
    "Mesh",
    "Pending",
    "TrafficReport",
    "start_process_group",
]
