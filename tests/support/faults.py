"""Faults at named points of the engine: the only place where tests know which internal function a point is.

A fault is called in place of the function, with the function as its first argument. It raises, or calls the function.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import shardwell.checkpoint.save as saving
from shardwell.engine.checkpoints import EngineCheckpoints
from shardwell.engine.pipeline_engine import PipelinedEngine
from shardwell.offload.cpu_kernels import HostKernel
from shardwell.offload.grad_swap import GradientSwapper
from shardwell.offload.optimizer_swap import OptimizerSwapper
from shardwell.offload.swapped_tensors import SwappedTensors
from shardwell.optim import ShardedOptimizer
from shardwell.parallel import Agreement
from shardwell.parallel.agreement import TokenTable
from shardwell.sharding.gradients import Gradients
from shardwell.sharding.storage import DefaultAllGather

POINTS: dict[str, tuple[Any, str]] = {
    "collective": (Agreement, "announce"),
    "all-gather of a group": (DefaultAllGather, "__call__"),
    "reduce-scatter of a group": (Gradients, "reduce_scatter"),
    "operation of a pipeline": (PipelinedEngine, "note"),
    "update on the host": (HostKernel, "step"),
    "read of optimizer state ahead of time": (OptimizerSwapper, "prefetch"),
    "read of optimizer state": (OptimizerSwapper, "acquire"),
    "read of gradient sums": (GradientSwapper, "add"),
    "write of swapped tensors": (SwappedTensors, "swap_out"),
    "wait before a save": (ShardedOptimizer, "settle"),
    "copy of a background save": (saving.Snapshot, "take"),
    "save": (saving.Saver, "write_now"),
    "background save": (saving.Saver, "_write_part"),
    "file of a checkpoint": (saving, "stream"),
    "check of a checkpoint": (EngineCheckpoints, "_check_loader"),
}


@contextlib.contextmanager
def fault_at(point: str, fault: Callable[..., Any]) -> Iterator[None]:
    """Call `fault(function, *arguments)` at a point, inside."""
    owner, name = POINTS[point]
    function = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        return fault(function, *args, **kwargs)

    follow = TokenTable.follow

    def follow_if_settled(table: TokenTable, token: str, *, is_settled: bool = False) -> bool:
        return is_settled and follow(table, token, is_settled=True)

    if point == "collective":  # an expected token is not announced otherwise
        TokenTable.follow = follow_if_settled  # type: ignore[method-assign]
    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, function)
        TokenTable.follow = follow  # type: ignore[method-assign]
