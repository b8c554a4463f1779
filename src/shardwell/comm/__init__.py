"""What crosses processes. Nothing else in the package calls torch.distributed."""

from shardwell.comm.agreement import Agreement
from shardwell.comm.collectives import Collectives
from shardwell.comm.ledger import Kind, Ledger, TrafficReport
from shardwell.comm.mesh import Axis, Mesh, start_process_group
from shardwell.comm.pending import Pending

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
