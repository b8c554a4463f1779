"""A model-parallel group as Megatron describes it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


class Peers:
    """All ranks as one model-parallel group, as Megatron's `mpu` says it."""

    def get_model_parallel_group(self) -> Any:
        return dist.group.WORLD

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank()

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size()
