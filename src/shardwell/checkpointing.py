"""Activation checkpointing under the name that users import, which DeepSpeed has, too.

`shardwell.activation_checkpointing` implements it. Checkpoints on disk are another matter: `Engine.save_checkpoint`.
"""

from __future__ import annotations

from shardwell.activation_checkpointing import ModelParallel, checkpoint, configure, is_configured, reset

__all__ = ["ModelParallel", "checkpoint", "configure", "is_configured", "reset"]
