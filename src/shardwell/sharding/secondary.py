"""The secondary shard of a group's parameters (hpZ), sharded over the ranks of one node.

The result of an all-gather over all ranks is kept, so that the next all-gathers stay within the node:

    flat buffer      | slice 0 | slice 1 | slice 2 | rest |
    kept by rank 1             | slice 1 |         | rest |

The slices are equal. The elements that do not divide, fewer than eight for each rank of the node, are kept by all
ranks.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

from torch import Tensor

from shardwell.memory import FlatBuffer, StateKind, TemporaryBuffers
from shardwell.parallel import Collectives, Work
from shardwell.parallel.joined import Joined
from shardwell.sharding.layout import even_part


class AllGather(Protocol):
    """The way in which the parameters of a group are all-gathered; each group has one, chosen once."""

    is_exact: bool  # the last all-gather gave the stored values, not values that a codec rounded
    secondary: SecondaryShard | None

    def __call__(self, *, exact: bool = False, joined: Joined | None = None) -> Work:
        """Start to fill the flat buffer; with `exact`, the values are not quantised for the all-gather.

        `joined` starts it later, together with those of other groups.
        """


class SecondaryShard:
    """This rank's secondary shard: on the device, from an all-gather until the parameters change.

    It is in the compute dtype, or quantised if the parameters are stored quantised.
    """

    def __init__(self, name: str, unit: str, comm: Collectives, temporary: TemporaryBuffers) -> None:
        self._name, self._unit = name, unit
        self._comm, self._temporary = comm, temporary
        self._kept: Tensor | None = None

    @property
    def is_valid(self) -> bool:
        """Whether the secondary shard is filled."""
        return self._kept is not None

    def _parts(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Return the elements that the ranks of the node share out, and the rest (both 1D)."""
        even = even_part(flat.numel(), self._comm.rank_group.size)
        return flat[:even], flat[even:]

    def fill(self, flat: Tensor) -> None:
        """Fill the secondary shard with a part of the parameters that were all-gathered."""
        mesh = self._comm.rank_group
        split, rest = self._parts(flat)
        mine = split.chunk(mesh.size)[mesh.rank]
        self._kept = self._temporary.allocate(mine.numel() + rest.numel(), flat.dtype, StateKind.PARAMETERS, self._unit)
        self._kept[: mine.numel()] = mine
        self._kept[mine.numel() :] = rest

    def gather(self, flat: Tensor, joined: Joined | None = None) -> Work:
        """Start filling `flat` by an all-gather within the node."""
        assert self._kept is not None
        mesh, gathers = self._comm.rank_group, self._comm.device.all_gather_stream
        split, rest = self._parts(flat)
        with gathers.after_current():
            mine = split.chunk(mesh.size)[mesh.rank]
            mine.copy_(self._kept[: mine.numel()])
            rest.copy_(self._kept[mine.numel() :])
            event = gathers.record()
        token = f"GATHER {self._name} in the node"
        if joined is not None:
            return joined.over(self._comm).all_gather(split, token).then(event.wait)
        move = self._comm.all_gather(split, token)
        return Work(event.wait).then(move.wait)

    def invalidate(self) -> None:
        """Free the secondary shard: the parameters change, or are unsharded for good."""
        if self._kept is not None:
            self._temporary.free(self._kept)
            self._kept = None


class SecondaryAllGather:
    """An all-gather whose result fills the secondary shard, from which the next all-gathers are served."""

    def __init__(self, inner: AllGather, secondary: SecondaryShard, flat: FlatBuffer, *, is_rounded: bool) -> None:
        """`is_rounded`: the inner all-gather quantises values unless they must be exact."""
        self._inner, self._flat = inner, flat
        self.secondary: SecondaryShard | None = secondary
        self._is_rounded = is_rounded
        self.is_exact = True

    def __call__(self, *, exact: bool = False, joined: Joined | None = None) -> Work:
        """Start to fill the flat buffer, within the node if the secondary shard is filled."""
        self.is_exact = exact or not self._is_rounded
        if self.secondary is None or (exact and self._is_rounded):
            return self._inner(exact=exact, joined=joined)  # a secondary shard would hold rounded values
        if self.secondary.is_valid:
            self._flat.allocate()
            return self.secondary.gather(self._flat.tensor, joined)
        return self._inner(exact=exact, joined=joined).then(partial(self.secondary.fill, self._flat.tensor))
