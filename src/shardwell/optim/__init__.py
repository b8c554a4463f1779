"""Stepping this rank's shards with any elementwise torch optimizer, or with Lamb or Muon."""

from shardwell.optim.factory import OptimizerFactory, factory_for
from shardwell.optim.optimizer import ShardedOptimizer

__all__ = ["OptimizerFactory", "ShardedOptimizer", "factory_for"]
