"""Expert parallelism: each rank of the expert axis holds some experts of each layer, and tokens travel to them."""

from shardwell.expert_parallel.setup import SharedExperts, share_experts

__all__ = ["SharedExperts", "share_experts"]
