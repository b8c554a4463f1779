"""What collectives of a simulation take: their bytes by hop, in virtual time. Without virtual time nothing is done.

A ring passes every byte that comes from other nodes through one link of each node, and the ranks of a node have one
link each: the ranks share that way. In an all-to-all each rank receives its own bytes from everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from shardwell import virtual_time
from shardwell.memory.virtual_streams import VirtualEvent
from shardwell.parallel.mesh import RankGroup


def simulate_move(collective: Callable[..., Any], args: Sequence[Any], mesh: RankGroup) -> None:
    """Add a collective of torch.distributed to the current stream."""
    simulate_moves([(collective, args)], mesh)


def simulate_moves(moves: Sequence[tuple[Callable[..., Any], Sequence[Any]]], mesh: RankGroup) -> None:
    """Add collectives that are launched as one to the current stream."""
    clock = virtual_time.clock
    if clock is None or mesh.size == 1:
        return
    name, size = moves[0][0].__name__, 0
    for collective, args in moves:
        largest = max(one.nbytes for one in args if isinstance(one, Tensor))
        size += largest * (2 if collective.__name__ == "all_reduce" else 1)
    inside, between, nodes = received(size, mesh)
    each = None if name.startswith("all_to_all") else between / (1 + mesh.num_local_peers)
    clock.move(name, inside, between, nodes, between_each=each if inside else None)


def simulate_control(mesh: RankGroup) -> None:
    """Add the exchange of a few numbers to the current stream: what statistics do not count as payload."""
    if virtual_time.clock is not None and mesh.size > 1:
        virtual_time.clock.move("control", 0, 0, received(0, mesh)[2])


def begin_simulated_move(name: str, size: int, mesh: RankGroup) -> list[Any]:
    """Begin to move the bytes of all ranks by threads of the backend; return the works to wait for."""
    clock = virtual_time.clock
    if clock is None or mesh.size == 1:
        return []
    return [_Work(clock=clock, point=clock.begin_move(name, *received(size, mesh)))]


class _Work(VirtualEvent):
    """A collective that threads of the backend move: the host waits for it."""

    def wait(self) -> None:
        self.synchronize()


def received(size: int, mesh: RankGroup) -> tuple[int, int, int]:
    """Return the bytes that this rank receives inside its node and from others, of all ranks' bytes; and the nodes."""
    part, num_local = size // mesh.size, mesh.num_local_peers
    return part * num_local, part * (mesh.size - 1 - num_local), -(-mesh.size // mesh.node_size)
