"""Positions of the tokens of whole rows, as a model counts them itself where a batch has no `position_ids`.

Most models count from 0. Some count tokens that are no padding: by the padding mask (OPT), or by the token that pads
(RoBERTa, which begins behind the number of that token).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwell.errors import ShardwellError


def positions_of(model: nn.Module, batch: Mapping[str, Any], first: Tensor, length: int) -> Tensor:
    """Return the positions (rows, tokens) of a batch of whole rows; `first` is a tensor of it, of this length."""
    counter, mask = _by_token(model), batch.get("attention_mask")
    if counter is not None:
        if not isinstance(batch.get("input_ids"), Tensor):
            raise ShardwellError(_ASKED.format(kind=type(counter).__name__, by="the tokens that pad"))
        found: Tensor = counter.create_position_ids_from_input_ids(batch["input_ids"], counter.padding_idx)
        return found
    if isinstance(mask, Tensor) and mask.ndim == 2 and counts_by_mask(model):
        tokens = mask.long()
        return tokens.cumsum(1) * tokens - 1
    return torch.arange(length, device=first.device).expand(first.shape[0], -1)


def check_positions(model: nn.Module, padding: Tensor | None) -> None:
    """Raise if parts without `position_ids` would get other positions than the model gives the tokens of whole rows."""
    counter = _by_token(model)
    if counter is not None:
        raise ShardwellError(_ASKED.format(kind=type(counter).__name__, by="the tokens that pad"))
    if padding is not None and (kind := counts_by_mask(model)) and begins_with_padding(padding):
        raise ShardwellError(_ASKED.format(kind=kind, by="the padding mask"))


def position_of_padding(model: nn.Module) -> int | None:
    """Return the position that a model gives to padding; None if it counts all tokens."""
    counter = _by_token(model)
    if counter is not None:
        return int(counter.padding_idx)
    return -1 if counts_by_mask(model) else None


def begins_with_padding(mask: Tensor) -> bool:
    """Return whether padding is before tokens of a row."""
    return mask.ndim == 2 and bool((mask[:, 1:].bool() & ~mask[:, :-1].bool()).any())


def counts_by_mask(model: nn.Module) -> str:
    """Return the name of an embedding that computes positions from the padding mask; an empty text without one."""
    for module in model.modules():
        if isinstance(module, nn.Embedding) and type(module).forward is not nn.Embedding.forward:
            names = inspect.signature(type(module).forward).parameters
            if "attention_mask" in names and "position_ids" in names:
                return type(module).__name__
    return ""


def _by_token(model: nn.Module) -> Any:
    """Return the module that computes positions from the token that pads; None if there is none."""
    name = "create_position_ids_from_input_ids"
    modules = (one for one in model.modules() if callable(getattr(type(one), name, None)))
    return next((one for one in modules if isinstance(getattr(one, "padding_idx", None), int)), None)


_ASKED = (
    "sequence_parallel_size: {kind} counts positions by {by} of whole rows: pass position_ids, or cut batches by "
    "shardwell.sequence_parallel.shard_batch"
)
