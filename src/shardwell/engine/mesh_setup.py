"""The process groups of an engine, and the context that its parts share."""

from __future__ import annotations

import logging
from dataclasses import replace

from shardwell.config import Config
from shardwell.errors import ConfigError
from shardwell.memory import Device, MemoryStats, TemporaryBuffers
from shardwell.parallel import Agreement, Collectives, MeshRoles, TrafficStats
from shardwell.parallel.collectives import NodeHops
from shardwell.parallel.mesh import RankGroup, across_mesh, node_mesh, smallest_node, world_mesh
from shardwell.parallel.roles import ranks_per_node
from shardwell.sharding import EngineContext


def make_context(
    home: Device, world: RankGroup, settings: Config, agreement: Agreement, rows: list[list[int]]
) -> EngineContext:
    """Make the groups of ranks and what all parts of an engine share; `rows` are the shard groups of the mesh."""
    memory_stats = MemoryStats()
    temporary = TemporaryBuffers(home, memory_stats)
    everyone = Collectives(world, home, TrafficStats(), temporary)
    agreement.time_limit, everyone.agreement = settings.shardwell.divergence_timeout, agreement
    agreement.probe, agreement.failures.cut_links = everyone.links.probe, everyone.abort_links
    nodes = replace(world, node_size=ranks_per_node(everyone))
    if len(rows) == 1:
        roles = _one_axis(everyone, nodes, settings)
    else:
        _check_replicas(settings)
        everyone.use_nodes(nodes, None)
        roles = MeshRoles.for_rows(everyone, rows)
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


def _check_replicas(settings: Config) -> None:
    """Raise if the configuration has what a mesh that replicates cannot have: its own groups inside a node."""
    zero = settings.zero_optimization
    on = {
        "zero_hpz_partition_size": zero.zero_hpz_partition_size not in (0, 1),
        "zero_quantized_weights": zero.zero_quantized_weights == "auto",
        "zero_quantized_gradients": bool(zero.zero_quantized_gradients),
    }
    for key in (key for key, is_on in on.items() if is_on):
        raise ConfigError(
            f"zero_optimization.{key}: {getattr(zero, key)} does not work with a mesh that replicates: hpZ, quantised "
            "reduce-scatters and measured choices know one group of all ranks. Leave it out, or the mesh."
        )


def open_nodes(context: EngineContext, settings: Config) -> EngineContext:
    """Return the context with this rank's node, if its ranks hold a secondary shard of the parameters (hpZ)."""
    shard = context.roles.shard
    if not ranks_per_copy(settings, shard.rank_group.size):
        return context
    roles = replace(context.roles, secondary=shard.over(node_mesh(shard.rank_group)))
    roles.agreement.failures.cut_links = roles.abort_links
    return replace(context, roles=roles)


def reconnect(context: EngineContext, settings: Config, rows: list[list[int]]) -> None:
    """Give the collectives of a context new links, in process groups of their own. All ranks must call it."""
    agreement = context.roles.agreement
    fresh = make_context(context.device, world_mesh(context.device.torch_device), settings, agreement, rows)
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
