"""Tensor parallelism: layers of which each rank of the tensor axis holds a part."""

from shardwell.tensor_parallel.loss import vocab_parallel_cross_entropy
from shardwell.tensor_parallel.setup import CutModel, cut_model

__all__ = ["CutModel", "cut_model", "vocab_parallel_cross_entropy"]
