"""What a model is told of the sequence and expert axes. Without them their packages are not imported."""

from __future__ import annotations

from typing import Any

from torch import nn

from shardwell.sharding import EngineContext


def bind_to_sequences(model: nn.Module, context: EngineContext, mpu: Any) -> Any:
    """Let the model's attention know the sequence axis, if there is one."""
    if context.roles.sequence is None:
        return None
    from shardwell.sequence_parallel.setup import bind_sequences

    return bind_sequences(model, context.roles, in_eval=not getattr(mpu, "disable_in_eval", False))


def keep_own_experts(model: nn.Module, context: EngineContext) -> Any:
    """Give this rank its experts, if the ranks of an expert axis share them."""
    if context.roles.expert is None:
        return None
    from shardwell.expert_parallel.setup import share_experts

    return share_experts(model, context)
