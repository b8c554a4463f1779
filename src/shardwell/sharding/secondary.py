"""A second copy of a group's parameters, split over the ranks of one node.

What a gather over all ranks brought is kept, so that the next ones need not leave the node:

    flat buffer      | slice 0 | slice 1 | slice 2 | rest |
    kept by rank 1             | slice 1 |         | rest |

Slices are equal. What does not divide, fewer than eight elements for each rank of the node, is kept by all of them.
"""

from __future__ import annotations

from torch import Tensor

from shardwell.memory import StateKind, TemporaryBuffers
from shardwell.parallel import Collectives, Work
from shardwell.sharding.layout import even_part


class SecondaryShard:
    """This rank's part of it: in the compute dtype, on the device, from a gather until the parameters change."""

    def __init__(self, name: str, unit: str, comm: Collectives, scratch: TemporaryBuffers) -> None:
        self._name, self._unit = name, unit
        self._comm, self._scratch = comm, scratch
        self._kept: Tensor | None = None

    @property
    def is_there(self) -> bool:
        return self._kept is not None

    def _parts(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Both 1D: what the ranks of the node split, and the rest."""
        even = even_part(flat.numel(), self._comm.mesh.size)
        return flat[:even], flat[even:]

    def keep(self, flat: Tensor) -> None:
        """Take a part of what was gathered."""
        mesh = self._comm.mesh
        split, rest = self._parts(flat)
        mine = split.chunk(mesh.size)[mesh.rank]
        self._kept = self._scratch.allocate(mine.numel() + rest.numel(), flat.dtype, StateKind.PARAMETERS, self._unit)
        self._kept[: mine.numel()] = mine
        self._kept[mine.numel() :] = rest

    def gather(self, flat: Tensor) -> Work:
        """Start filling `flat` from the copies of this node."""
        assert self._kept is not None
        mesh, gathers = self._comm.mesh, self._comm.device.all_gather_stream
        split, rest = self._parts(flat)
        with gathers.after_current():
            mine = split.chunk(mesh.size)[mesh.rank]
            mine.copy_(self._kept[: mine.numel()])
            rest.copy_(self._kept[mine.numel() :])
            mark = gathers.record()
        move = self._comm.all_gather(split, f"GATHER {self._name} in the node")
        return Work(mark.wait).then(move.wait)

    def forget(self) -> None:
        """The parameters change, or are whole for good."""
        if self._kept is not None:
            self._scratch.free(self._kept)
            self._kept = None
