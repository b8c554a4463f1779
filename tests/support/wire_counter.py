"""An independent count of what crosses processes: a dispatch mode that sees every c10d call."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class WireCounter(TorchDispatchMode):
    """Payload bytes that this rank receives, by c10d operation, from the operations' own arguments."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        super().__init__()
        self.rank, self.num_ranks = rank, num_ranks
        self.received: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.split("::")[1]
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            size = tensors[0].nbytes if tensors else 0
            if name.endswith("_coalesced_"):  # several tensors at once: the outputs come first
                size = sum(tensor.nbytes for tensor in tensors[: len(tensors) // 2])
            self.calls[name] += 1
            self.received[name] += self._received(name, size)
        return func(*args, **(kwargs or {}))

    def _received(self, name: str, size: int) -> int:
        others, every = self.num_ranks - 1, self.num_ranks
        if name == "recv_":
            return size
        if name == "send":
            return 0
        if name in (
            "_allgather_base_",
            "alltoall_base_",
            "allgather_into_tensor_coalesced_",
        ):  # the first tensor is the whole output
            return size * others // every
        if name in (
            "_reduce_scatter_base_",
            "reduce_scatter_tensor_coalesced_",
        ):  # the first tensor is this rank's shard
            return size * others
        if name == "allreduce_":
            return 2 * size * others
        raise AssertionError(f"no formula for {name}")
