"""What an engine uses its groups of ranks for, and how the ranks are grouped into nodes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwell.parallel.agreement import Agreement
from shardwell.parallel.collectives import Collectives, abort_links
from shardwell.parallel.grid import Grid
from shardwell.parallel.group_agreement import GroupAgreement
from shardwell.parallel.mesh import RankGroup, local_ranks_are_consecutive, mesh_of


@dataclass(frozen=True)
class MeshRoles:
    """The collectives of one engine, by what they are for. Several roles may have the same collectives."""

    shard: Collectives  # the axis of ZeRO: layouts, all-gathers, reduce-scatters, shard indices
    replicate: Collectives | None  # the average after a reduce-scatter; None if each shard is on one rank only
    data: Collectives  # shard x replicate: broadcasts of values
    stage: Collectives  # the ranks that run the same modules, and step together: all, unless there is a pipeline
    all: Collectives  # failures, budgets, checkpoints
    secondary: Collectives | None  # a secondary shard in the node (hpZ); None if there is none
    agreement: Agreement  # of all ranks: failures are theirs
    grid: Grid
    tensor: Collectives | None = None  # the ranks that hold the other parts of this rank's tensors
    expert: Collectives | None = None  # the ranks that hold the other experts
    sequence: Collectives | None = None  # the ranks that hold the other parts of this rank's sequences
    pipe: Collectives | None = None  # the ranks at the same place of the other pipeline stages
    # the roles of parameters that the ranks of the tensor or expert axis hold alike: it is in their data axis
    alike: MeshRoles | None = None

    @classmethod
    def for_one_axis(cls, world: Collectives, secondary: Collectives | None = None) -> MeshRoles:
        """Return the roles if parameters are sharded over all ranks, which is a mesh of one dimension."""
        assert world.agreement is not None, "set the agreement of the collectives first"
        grid = Grid(shard=world.rank_group.size)
        return cls(world, None, world, world, world, secondary, world.agreement, grid)

    @classmethod
    def for_grid(cls, world: Collectives, grid: Grid) -> MeshRoles:
        """Return the roles of ranks that are laid out in a grid. All ranks must call this with the same grid."""
        agreement = world.agreement
        assert agreement is not None, "set the agreement of the collectives first"
        agreement.meet(f"MESH {grid.shape} {grid.ranks}")  # ranks with different meshes would hang in what follows
        lines = _Lines(world, grid)
        stage = lines.along("replicate", "shard", "expert", "sequence", "tensor", agrees=True)
        # Ranks with other experts have other collectives for them: those of listed experts are of other parameters.
        agrees = grid.expert > 1
        shard = lines.along("shard", "sequence", agrees=agrees, within=stage)
        replicate = lines.along("replicate", within=stage) if grid.replicate > 1 else None
        data = shard
        if replicate is not None:
            data = lines.along("replicate", "shard", "sequence", agrees=agrees, within=stage)
        roles = cls(
            _replicated(shard, replicate),
            replicate,
            data,
            stage,
            world,
            None,
            agreement,
            grid,
            tensor=lines.along("tensor", agrees=True) if grid.tensor > 1 else None,
            expert=lines.along("expert", agrees=True) if grid.expert > 1 else None,
            sequence=lines.along("sequence", agrees=True) if grid.sequence > 1 else None,
            pipe=lines.along("pipe", agrees=True) if grid.pipe > 1 else None,
        )
        if grid.num_parts == 1:
            return roles
        wide = lines.along("shard", "expert", "sequence", "tensor", within=stage)
        return replace(roles, alike=replace(roles, shard=_replicated(wide, replicate), data=stage))

    @property
    def parts(self) -> Collectives | None:
        """The ranks that hold the other parts of tensors of which this rank holds one; None if all are whole."""
        return self.tensor if self.tensor is not None else self.expert

    @property
    def averaged(self) -> Collectives:
        """The ranks over which gradients are averaged: of the data axes, also of the expert axis."""
        return self.data if self.expert is None or self.alike is None else self.alike.data

    @property
    def is_first_replica(self) -> bool:
        """Whether this rank is the first of those that hold its shard: it alone counts in sums, and is saved."""
        return self.replicate is None or self.replicate.rank_group.rank == 0

    def collectives(self) -> list[Collectives]:
        """Return the collectives of all roles, each of them once."""
        roles = [self.shard, self.replicate, self.data, self.stage, self.all, self.secondary]
        roles += [self.tensor, self.expert, self.sequence, self.pipe]
        if self.alike is not None:
            roles += self.alike.collectives()
        return list(dict.fromkeys(role for role in roles if role is not None))

    def end_step_of_axes(self) -> None:
        """Let the next token begin a new step of the agreements of single axes; `all` has one of its own."""
        for collectives in (self.stage, self.shard, self.data, self.tensor, self.expert, self.sequence, self.pipe):
            if collectives is not None and collectives.agreement not in (None, self.agreement):
                collectives.agreement.tokens.begin_step()

    def abort_links(self) -> None:
        """Break this rank's links in all groups, so that peers waiting for it wake up with an error."""
        abort_links(self.collectives())

    def close(self) -> None:
        """Destroy the process groups of all roles."""
        for collectives in self.collectives():
            collectives.close()


def lines_to_make(grid: Grid, world: RankGroup, *axes: str) -> list[list[int]]:
    """Return the groups of ranks along axes that this rank must help to make: all of them, its own in a simulation."""
    return [grid.line(world.rank, *axes)] if world.is_simulated else grid.lines(*axes)


class _Lines:
    """The groups of ranks along axes of a grid. Each group is made once, in the same order on all ranks."""

    def __init__(self, world: Collectives, grid: Grid) -> None:
        self._world, self._grid = world, grid
        self._made: dict[tuple[int, ...], Collectives] = {}  # by this rank's line

    def along(self, *axes: str, agrees: bool = False, within: Collectives | None = None) -> Collectives:
        """Return the collectives of this rank's line along these axes, in the agreement of `within`.

        `agrees`: the ranks of a line have an agreement of their own, unless they are all ranks.
        """
        ranks = self._world.rank_group
        mine = tuple(sorted(self._grid.line(ranks.rank, *axes)))
        if len(mine) == self._grid.size:
            return self._world
        if mine not in self._made:
            made = self._made[mine] = self._world.over(mesh_of(ranks, lines_to_make(self._grid, ranks, *axes)))
            made.use_nodes(made.rank_group, None)
            if agrees:
                made.agreement = self._agreement(made.rank_group, "-".join(axes))
            elif within is not None:
                made.agreement = within.agreement
        return self._made[mine]

    def _agreement(self, mesh: RankGroup, axes: str) -> Agreement:
        whole = self._world.agreement
        assert whole is not None
        shape = "x".join(map(str, self._grid.shape))
        return GroupAgreement(mesh, whole, f"{axes} {shape} {mesh.ranks[0]}")


def _replicated(shard: Collectives, replicate: Collectives | None) -> Collectives:
    """Let reduce-scatters over a line of shards sum over the lines that replicate it, too."""
    if replicate is not None:
        shard.use_replicas(replicate)
    return shard


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
