"""Stepping the local shards with any elementwise torch optimizer."""

from shardwell.optim.factory import Recipe, recipe_for
from shardwell.optim.optimizer import ShardedOptimizer

__all__ = ["Recipe", "ShardedOptimizer", "recipe_for"]
