"""Checkpoints that can be read: shardwell's own, and those of others."""

from shardwell.checkpoint.sources.base import MODEL, SCALAR, STATE, Source, Stored
from shardwell.checkpoint.sources.deepspeed import DeepSpeedSource, is_deepspeed
from shardwell.checkpoint.sources.own import OwnSource

__all__ = ["MODEL", "SCALAR", "STATE", "DeepSpeedSource", "OwnSource", "Source", "Stored", "is_deepspeed"]
