"""Checkpoints that can be read: shardwell's own, and those of others."""

from shardwell.checkpoint.sources.base import MODEL, SCALAR, STATE, Source, Stored
from shardwell.checkpoint.sources.own import OwnSource


def is_foreign(path: str) -> bool:
    return False


def open_source(path: str, tag: str | None = None) -> Source:
    raise NotImplementedError


__all__ = ["MODEL", "SCALAR", "STATE", "OwnSource", "Source", "Stored"]
