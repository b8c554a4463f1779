"""Stepping the local shards with any elementwise torch optimizer."""

from shardwell.optim.build import Recipe, recipe_for
from shardwell.optim.sharded import ShardedOptimizer

__all__ = ["Recipe", "ShardedOptimizer", "recipe_for"]
