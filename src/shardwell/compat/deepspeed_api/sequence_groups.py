"""`deepspeed.runtime.sequence_parallel.parallel_state_sp`: the groups of ranks that share sequences, as a module."""

from __future__ import annotations

from typing import Any

from shardwell.compat.deepspeed_api.sequence import SequenceUnit
from shardwell.errors import ShardwellError

_unit: list[SequenceUnit] = []


def initialize_sequence_parallel(sequence_parallel_size: int) -> None:
    """Make the groups. All ranks must call it."""
    if sequence_parallel_size <= 1:
        raise ShardwellError(f"sequence_parallel_size {sequence_parallel_size}: groups need more than one rank")
    _unit[:] = [SequenceUnit(sequence_parallel_size)]


def _made() -> SequenceUnit:
    if not _unit:
        raise ShardwellError("no ranks share sequences yet: call initialize_sequence_parallel first")
    return _unit[0]


def get_sequence_parallel_group() -> Any:
    return _made().get_sequence_parallel_group()


def get_sequence_parallel_world_size() -> int:
    return _made().get_sequence_parallel_world_size()


def get_sequence_parallel_rank() -> int:
    return _made().get_sequence_parallel_rank()


def get_sequence_data_parallel_group() -> Any:
    return _made().get_sequence_data_parallel_group()


def get_sequence_data_parallel_world_size() -> int:
    return _made().get_sequence_data_parallel_world_size()


def get_sequence_data_parallel_rank() -> int:
    return _made().get_sequence_data_parallel_rank()


def get_data_parallel_world_size() -> int:
    return _made().get_data_parallel_world_size()


def get_data_parallel_rank() -> int:
    return _made().get_data_parallel_rank()
