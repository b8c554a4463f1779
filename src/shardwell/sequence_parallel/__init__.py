"""Sequence parallelism (Ulysses): each rank of the sequence axis trains on a part of the same sequences.

Attention takes whole sequences of some heads: an all-to-all before it, and another one after it. Everything else in a
model works on a part of the sequence.
"""

from shardwell.sequence_parallel.attention import DistributedAttention, scaled_dot_product_attention
from shardwell.sequence_parallel.batches import count_tokens, shard_batch
from shardwell.sequence_parallel.loss import average_loss, cross_entropy
from shardwell.sequence_parallel.masks import PackedDocuments, whole_attention_mask

__all__ = [
    "DistributedAttention",
    "PackedDocuments",
    "average_loss",
    "count_tokens",
    "cross_entropy",
    "scaled_dot_product_attention",
    "shard_batch",
    "whole_attention_mask",
]
