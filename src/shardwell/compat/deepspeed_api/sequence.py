"""`deepspeed.sequence` and `deepspeed.runtime.sequence_parallel`: Ulysses under DeepSpeed's names.

The engine has the sequence axis: these names say which ranks share sequences, cut batches as DeepSpeed does, and give
attention of the user's own the layout that it expects.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwell import sequence_parallel
from shardwell.compat.deepspeed_api import comm, groups
from shardwell.errors import ShardwellError
from shardwell.sequence_parallel.attention import attend_over_axis

_IGNORED = -100


class SequenceUnit:
    """An object like Megatron's `mpu` for neighbouring ranks that share sequences; all ranks share states."""

    def __init__(self, size: int, disable_in_eval: bool = False) -> None:
        """Make the groups. All ranks must call it."""
        world = comm.get_world_size()
        if size < 1 or world % size:
            raise ShardwellError(
                f"sequence_parallel_size {size}: {world} rank(s) cannot be divided into groups of that size"
            )
        self.disable_in_eval = disable_in_eval  # in evaluation each rank has whole sequences
        self._size, self._rank = size, comm.get_rank()
        groups = [comm.new_group(list(range(first, first + size))) for first in range(0, world, size)]
        self._group = groups[self._rank // size]

    def get_sequence_parallel_group(self) -> Any:
        return self._group

    def get_sequence_parallel_world_size(self) -> int:
        return self._size

    def get_sequence_parallel_rank(self) -> int:
        return self._rank % self._size

    def get_data_parallel_world_size(self) -> int:
        return comm.get_world_size() // self._size

    def get_data_parallel_rank(self) -> int:
        return self._rank // self._size

    def get_sequence_data_parallel_group(self) -> Any:
        return comm.get_world_group()

    def get_sequence_data_parallel_world_size(self) -> int:
        return comm.get_world_size()

    def get_sequence_data_parallel_rank(self) -> int:
        return self._rank


class UlyssesSPAttentionHF:
    """Attention of models of Transformers over a sequence axis; `initialize` gives it to the model."""

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: Any = None,
        core_attn_implementation: str = "sdpa",
        sequence_parallel_size: int = 1,
        micro_batch_size: int = 1,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        **_options: Any,
    ) -> Any:
        """Return the `mpu` for `deepspeed.initialize`; None for a size of 1. Lengths may vary whatever is said here."""
        if sequence_parallel_size == 1:
            return None
        if core_attn_implementation != "sdpa":
            raise ShardwellError(
                f"core_attn_implementation={core_attn_implementation!r}: sequence parallelism attends by SDPA, which "
                'has flash kernels of its own; pass "sdpa", and load the model with it'
            )
        groups.mpu = SequenceUnit(sequence_parallel_size, disable_in_eval)
        return groups.mpu

    def __init__(self, *_args: Any, **_options: Any) -> None:
        raise ShardwellError(
            "UlyssesSPAttentionHF is not built by hand: call register_with_transformers, and pass the mpu that it "
            "returns to deepspeed.initialize"
        )


class UlyssesSPDataLoaderAdapter:
    """Batches of which each rank of a sequence group has a part, from loaders with rows of their own on each rank.

    The batches of the ranks of a group are trained one after the other, by all of them.
    """

    def __init__(self, dl: Iterable[Any], sp_rank: int, sp_group: Any, sp_world_size: int, device: Any = None) -> None:
        self.dl, self.device = dl, torch.device("cpu") if device is None else torch.device(device)
        self.sp_rank, self.sp_group, self.sp_world_size = sp_rank, sp_group, sp_world_size
        self.iter = iter(dl)
        self.micro_batches: deque[dict[str, Any]] = deque()

    def __len__(self) -> int:
        """Return the number of batches of one pass: those of all ranks of the group."""
        return len(self.dl) * self.sp_world_size  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return self

    def __getattr__(self, name: str) -> Any:
        """Look up what loaders have besides, as a sampler, on the loader."""
        if name == "dl":
            raise AttributeError(name)
        return getattr(self.dl, name)

    def __next__(self) -> dict[str, Any]:
        if not self.micro_batches:
            self.refill()
        return self.micro_batches.popleft()

    def refill(self) -> None:
        """Gather the next batch of each rank, and keep this rank's part of each."""
        try:
            batch = next(self.iter)
        except StopIteration:
            self.iter = iter(self.dl)
            raise
        for whole in self._gathered(batch):
            self.micro_batches.append(self._part(whole))

    def _gathered(self, batch: Mapping[str, Any]) -> list[dict[str, Any]]:
        if "position_ids" not in batch:
            raise ShardwellError(
                "UlyssesSPDataLoaderAdapter: batches need position_ids, which tell the tokens of the ranks apart: add "
                "torch.arange(length) for each row in the collate function"
            )
        length = torch.tensor([batch["input_ids"].shape[1]], device=self.device)
        lengths = [torch.empty_like(length) for _ in range(self.sp_world_size)]
        comm.all_gather(lengths, length, group=self.sp_group)
        found: list[dict[str, Any]] = [{} for _ in lengths]
        for key, value in batch.items():
            if not isinstance(value, Tensor):
                for one in found:
                    one[key] = value
                continue
            own = value.to(self.device).contiguous()
            if own.ndim < 2 or own.shape[1] != int(length):
                raise ShardwellError(f"{key} has shape {tuple(own.shape)}, and input_ids have {int(length)} tokens")
            padded = own.new_zeros(own.shape[0], max(map(int, lengths)), *own.shape[2:])  # gloo gathers one shape
            padded[:, : own.shape[1]] = own
            parts = [torch.empty_like(padded) for _ in lengths]
            comm.all_gather(parts, padded, group=self.sp_group)
            for one, part, size in zip(found, parts, lengths, strict=True):
                one[key] = part[:, : int(size)]
        return found

    def _part(self, whole: dict[str, Any]) -> dict[str, Any]:
        length = whole["input_ids"].shape[1]
        if length % self.sp_world_size:
            raise ShardwellError(f"{self.sp_world_size} ranks cannot share sequences of {length} tokens; pad them")
        labels = whole.pop("labels")
        whole["shift_labels"] = F.pad(labels[..., 1:], (0, 1), value=_IGNORED)
        return {
            key: value.chunk(self.sp_world_size, 1)[self.sp_rank].contiguous().cpu()
            if isinstance(value, Tensor)
            else value
            for key, value in whole.items()
        }


class DistributedAttention(sequence_parallel.DistributedAttention):
    """Attention of the user's own in DeepSpeed's layouts: (tokens, batch, heads, width) or (batch, tokens, ...)."""

    def __init__(
        self,
        local_attention: Any,
        sequence_process_group: Any = None,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
        num_kv_heads: int | None = None,
    ) -> None:
        super().__init__(local_attention)
        if scatter_idx != 2 or gather_idx not in (0, 1):
            raise ShardwellError(
                f"DistributedAttention: scatter_idx {scatter_idx} and gather_idx {gather_idx} are not heads and tokens "
                "of (tokens, batch, heads, width) or (batch, tokens, heads, width): use 2, and 0 or 1"
            )
        self.spg, self.gather_idx = sequence_process_group, gather_idx

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, batch_dim_idx: int = 1, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Attend over whole sequences; `batch_dim_idx` is the dimension of the batch, 0 or 1."""
        if self.binding is None:
            if self.spg is not None and comm.get_world_size(self.spg) > 1:
                raise ShardwellError(
                    "DistributedAttention: the engine has the sequence axis; pass the model to deepspeed.initialize "
                    "with sequence_parallel_size, a mesh_param or an mpu first"
                )
            return self._call(query, key, value, *args, **kwargs)
        order = (1, 2, 0, 3) if batch_dim_idx == 1 else (0, 2, 1, 3)  # to batch, heads, tokens, width
        back = (2, 0, 1, 3) if batch_dim_idx == 1 else (0, 2, 1, 3)

        def local(q: Tensor, k: Tensor, v: Tensor, _mask: Any) -> Tensor:
            found = self._call(*(one.permute(back) for one in (q, k, v)), *args, **kwargs)
            if found.ndim == 3:  # heads and width in one
                found = found.unflatten(-1, (q.shape[1], -1))
            return found.permute(order)

        states = [one.permute(order) for one in (query, key, value)]
        return attend_over_axis(self.binding, local, *states).permute(back)

    def _call(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found: Tensor = self.local_attention(query, key, value, *args, **kwargs)
        return found
