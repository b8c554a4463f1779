"""The process groups of an engine, and the context that its parts share."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardwell.config import Config
from shardwell.errors import ConfigError, ShardwellError
from shardwell.memory import Device, MemoryStats, TemporaryBuffers
from shardwell.parallel import Agreement, Collectives, MeshRoles, TrafficStats
from shardwell.parallel.collectives import NodeHops
from shardwell.parallel.consistency import Section, check_alike
from shardwell.parallel.device_mesh import grid_of_mesh, grid_of_mpu
from shardwell.parallel.grid import Grid, grid_of_sizes
from shardwell.parallel.mesh import RankGroup, across_mesh, node_mesh, smallest_node, world_mesh
from shardwell.parallel.roles import ranks_per_node
from shardwell.sharding import EngineContext


def axes_of_arguments(mesh: Any, mpu: Any, world: RankGroup, home: Device, agreement: Agreement) -> Grid | None:
    """Return the grid of a mesh or an `mpu` that the user passed; None if the configuration names the axes.

    A simulation of a running job passes the grid itself.
    """
    if mesh is not None and mpu is not None:
        raise ShardwellError("initialize got mesh and mpu, which both say where ranks are: pass one of them")
    if isinstance(mesh, Grid):
        return mesh
    if mesh is not None:
        return grid_of_mesh(mesh, world.size, home.torch_device)
    if mpu is None:
        return None
    everyone = Collectives(world, home, TrafficStats(), TemporaryBuffers(home, MemoryStats()))
    everyone.agreement = agreement
    return grid_of_mpu(mpu, everyone)


def axes_to_load(given: Grid | None, stages: dict[str, int] | None, line: tuple[int, ...]) -> dict[str, int] | None:
    """Return the ranks along axes as far as a mesh or the model says how many there are."""
    if given is not None:
        return given.model_axes
    return {**(stages or {}), "tensor": len(line)} if line else stages


def axes_of_settings(settings: Config, num_ranks: int, line: tuple[int, ...]) -> Grid:
    """Return the grid that the configuration asks for, with the tensor axis that a model comes cut over."""
    grid = grid_of_sizes(
        num_ranks,
        pipe=settings.pipeline.stages,
        expert=settings.shardwell.expert_parallel_size,
        sequence=settings.sequence_parallel_size,
        tensor=len(line) or settings.tensor_parallel.size,
    )
    if grid.pipe == 1 and len(line) > 1 and (step := line[1] - line[0]) == num_ranks // len(line) > 1:
        # the tensor axis is the outer one, as in a mesh ("tp", "dp")
        return replace(grid, ranks=tuple(at + step * index for at in range(step) for index in range(len(line))))
    return grid


def check_line(grid: Grid, line: tuple[int, ...], rank: int) -> None:
    """Raise if a model comes cut over other ranks than those of this rank's tensor axis."""
    mine = grid.line(rank, "tensor")
    if line and tuple(mine) != line:
        raise ShardwellError(
            f"the model is cut over ranks {list(line)}, and rank {rank} is on a tensor axis of ranks {mine}: pass the "
            'mesh that the model was cut over, such as mesh=init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", '
            '"tp")), of which mesh["tp"] went to parallelize_module'
        )


def make_context(
    home: Device,
    world: RankGroup,
    settings: Config,
    agreement: Agreement,
    grid: Grid,
    alike: Mapping[str, Section] | None = None,
) -> EngineContext:
    """Make the groups of ranks and what all parts of an engine share.

    `alike` is what all ranks must have alike. It is compared first: ranks that differ may make other groups, and the
    ranks of a group, such as those of one pipeline stage, may have the same while those of another have not.
    """
    memory_stats = MemoryStats()
    temporary = TemporaryBuffers(home, memory_stats)
    everyone = Collectives(world, home, TrafficStats(), temporary)
    agreement.time_limit, everyone.agreement = settings.shardwell.divergence_timeout, agreement
    agreement.probe, agreement.failures.cut_links = everyone.links.probe, everyone.abort_links
    if alike is not None:
        check_alike(everyone, "initialize", alike)
    nodes = replace(world, node_size=ranks_per_node(everyone))
    if not grid.has_model_axes and grid.replicate == 1:
        roles = _one_axis(everyone, nodes, settings)
    else:
        _check_grid(settings, grid)
        everyone.use_nodes(nodes, None)
        roles = MeshRoles.for_grid(everyone, grid)
        agreement.failures.cut_links = roles.abort_links
    return EngineContext(home, memory_stats, temporary, roles)


def _one_axis(everyone: Collectives, nodes: RankGroup, settings: Config) -> MeshRoles:
    """Return the roles if parameters are sharded over all ranks, whose collectives take two hops over several nodes."""
    hops = None
    if nodes.has_nodes:
        hops = NodeHops(everyone.over(node_mesh(nodes)), everyone.over(across_mesh(nodes)))
    everyone.use_nodes(nodes, hops)
    asked = settings.zero_optimization.zero_hpz_partition_size
    if asked != "auto" and ranks_per_copy(settings, nodes.size):
        everyone.set_nodes(_with_nodes(nodes, asked))
    return MeshRoles.for_one_axis(everyone)


def _check_grid(settings: Config, grid: Grid) -> None:
    """Raise if the configuration has what a grid of ranks cannot have."""
    if grid.sequence > 1 and grid.pipe > 1:
        raise ConfigError(
            f"sequence_parallel_size: {grid.sequence} does not work with {grid.pipe} pipeline stages: they do not cut "
            "micro-batches along the sequence. Use tensor parallelism with one of the two, or one of them alone."
        )
    if grid.expert > 1 and grid.pipe * grid.tensor * grid.replicate > 1:
        raise ConfigError(
            f"shardwell.expert_parallel_size: {grid.expert} does not work with {grid.pipe} pipeline stages, "
            f"{grid.tensor} tensor ranks and {grid.replicate} replicas: only ranks of the data axis share them. Make "
            "the other sizes 1, or this one: a plan of tensor_parallel cuts experts as well."
        )
    zero = settings.zero_optimization
    on = {
        "zero_hpz_partition_size": zero.zero_hpz_partition_size not in (0, 1),
        "zero_quantized_weights": zero.zero_quantized_weights == "auto",
        "zero_quantized_gradients": bool(zero.zero_quantized_gradients)
        and (grid.replicate > 1 or zero.zero_quantized_gradients == "auto"),
    }
    what = "a mesh that replicates" if grid.replicate > 1 else f"the axes {grid}"
    for key in (key for key, is_on in on.items() if is_on):
        raise ConfigError(
            f"zero_optimization.{key}: {getattr(zero, key)} does not work with {what}: hpZ, quantised reduce-scatters "
            "over replicas and measured choices know one group of all ranks. Leave it out, or the mesh."
        )


def open_nodes(context: EngineContext, settings: Config) -> EngineContext:
    """Return the context with this rank's node, if its ranks hold a secondary shard of the parameters (hpZ)."""
    shard = context.roles.shard
    if not ranks_per_copy(settings, shard.rank_group.size):
        return context
    roles = replace(context.roles, secondary=shard.over(node_mesh(shard.rank_group)))
    roles.agreement.failures.cut_links = roles.abort_links
    return replace(context, roles=roles)


def reconnect(context: EngineContext, settings: Config) -> None:
    """Give the collectives of a context new links, in process groups of their own. All ranks must call it."""
    agreement, grid = context.roles.agreement, context.roles.grid
    fresh = make_context(context.device, world_mesh(context.device.torch_device), settings, agreement, grid)
    fresh = open_nodes(fresh, settings)
    for old, new in zip(context.roles.collectives(), fresh.roles.collectives(), strict=True):
        old.connect_as(new)


def ranks_per_copy(settings: Config, num_ranks: int) -> int:
    """Return over how many ranks a secondary shard is split, in the smallest node; 0 if there is none."""
    asked = settings.zero_optimization.zero_hpz_partition_size
    return smallest_node(num_ranks, asked) if asked != "auto" and asked > 1 and num_ranks > 1 else 0


def _with_nodes(world: RankGroup, ranks_per_node: int) -> RankGroup:
    """Return the same ranks, with the node size that the configuration sets."""
    if world.rank == 0 and world.local_world_size < world.size and world.local_world_size % ranks_per_node:
        logging.getLogger("shardwell").warning(
            "zero_optimization.zero_hpz_partition_size %d: some secondary shards are split over ranks of two nodes, "
            "since a node has %d. All-gathers in backward leave it then; use %d, or a number that divides it.",
            ranks_per_node,
            world.local_world_size,
            world.local_world_size,
        )
    return replace(world, node_size=min(ranks_per_node, world.size))
