"""Meshes for engines in ranks: tests and helpers that know nothing of meshes run with one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwell


@contextlib.contextmanager
def every_engine_with(make: Callable[[], DeviceMesh]) -> Iterator[None]:
    """Let `shardwell.initialize` use the mesh that `make` returns, unless it is given one."""
    initialize = shardwell.initialize

    @wraps(initialize)
    def with_mesh(*args: Any, **kwargs: Any) -> Any:
        if dist.is_initialized():
            kwargs.setdefault("mesh", make())
        return initialize(*args, **kwargs)

    shardwell.initialize = with_mesh
    try:
        yield
    finally:
        shardwell.initialize = initialize


def rows(num_replicas: int) -> DeviceMesh:
    """Return a mesh of that many rows, or of one, where ranks are too few or do not divide.

    It has no process groups, so a rank may call this alone.
    """
    size = dist.get_world_size()
    num_rows = num_replicas if size % num_replicas == 0 and size > num_replicas else 1
    ranks = torch.arange(size, device="cpu").view(num_rows, -1)
    return DeviceMesh("cpu", ranks, mesh_dim_names=("dp_replicate", "dp_shard"), _init_backend=False)


def under_mesh(shape: tuple[int, ...], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the function on this rank, its engines with a mesh of that shape."""
    names = ("dp_replicate", "dp_shard")[-len(shape) :]
    with every_engine_with(lambda: init_device_mesh("cpu", shape, mesh_dim_names=names)):
        return function(*args, **kwargs)
