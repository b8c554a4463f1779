"""What an engine uses its groups of ranks for, and how the ranks are grouped into nodes."""

from __future__ import annotations

from dataclasses import dataclass

from shardwell.parallel.agreement import Agreement
from shardwell.parallel.collectives import Collectives
from shardwell.parallel.mesh import local_ranks_are_consecutive, mesh_of


@dataclass(frozen=True)
class MeshRoles:
    """The collectives of one engine, by what they are for. Several roles may have the same collectives."""

    shard: Collectives  # the axis of ZeRO: layouts, all-gathers, reduce-scatters, shard indices
    replicate: Collectives | None  # the average after a reduce-scatter; None if each shard is on one rank only
    data: Collectives  # shard x replicate: broadcasts of values
    all: Collectives  # norms, overflow checks, budgets, checkpoints
    secondary: Collectives | None  # a secondary shard in the node (hpZ); None if there is none
    agreement: Agreement  # of the ranks that issue the same collectives

    @classmethod
    def for_one_axis(cls, world: Collectives, secondary: Collectives | None = None) -> MeshRoles:
        """Return the roles if parameters are sharded over all ranks, which is a mesh of one dimension."""
        assert world.agreement is not None, "set the agreement of the collectives first"
        return cls(world, None, world, world, secondary, world.agreement)

    @classmethod
    def for_rows(cls, world: Collectives, rows: list[list[int]]) -> MeshRoles:
        """Return the roles if parameters are sharded over the ranks of a row, and each row replicates the others.

        Each row has the same number of ranks, at least two. All ranks must call this with the same rows.
        """
        agreement = world.agreement
        assert agreement is not None, "set the agreement of the collectives first"
        rows = [sorted(row) for row in rows]
        agreement.meet(f"MESH {rows}")  # before groups are made: ranks with different meshes would hang there
        shard = world.over(mesh_of(world.rank_group, rows))
        shard.use_nodes(shard.rank_group, None)
        replicate = world.over(mesh_of(world.rank_group, list(zip(*rows, strict=True))))
        shard.use_replicas(replicate)
        return cls(shard, replicate, world, world, None, agreement)

    @property
    def is_first_replica(self) -> bool:
        """Whether this rank is the first of those that hold its shard: it alone counts in sums, and is saved."""
        return self.replicate is None or self.replicate.rank_group.rank == 0

    def collectives(self) -> list[Collectives]:
        """Return the collectives of all roles, each of them once."""
        roles = (self.shard, self.replicate, self.data, self.all, self.secondary)
        return list(dict.fromkeys(role for role in roles if role is not None))

    def abort_links(self) -> None:
        """Break this rank's links in all groups, so that peers waiting for it wake up with an error."""
        for collectives in self.collectives():
            collectives.abort_links()

    def close(self) -> None:
        """Destroy the process groups of all roles."""
        for collectives in self.collectives():
            collectives.close()


def ranks_per_node(world: Collectives) -> int:
    """Return the ranks per node that the launchers report, after an all-reduce: all ranks get the same answer.

    The last node may have fewer ranks. With other uneven sizes or another order of ranks, each rank counts as a node.
    """
    mesh = world.rank_group
    if mesh.size == 1:
        return 1
    most = int(-world.all_reduce_min(-mesh.local_world_size, "NODES"))
    first = mesh.rank // most * most
    fits = mesh.local_world_size == min(most, mesh.size - first) and (
        most == mesh.size or local_ranks_are_consecutive(mesh.rank, most)
    )
    return most if world.all_reduce_min(float(fits), "NODES") else 1
