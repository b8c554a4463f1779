"""Stepping the local shards with any elementwise torch optimizer."""

from shardwell.optim.factory import OptimizerFactory, factory_for
from shardwell.optim.optimizer import ShardedOptimizer

__all__ = ["OptimizerFactory", "ShardedOptimizer", "factory_for"]
