"""Attention over whole sequences of which each rank holds a part."""

from __future__ import annotations

from collections.abc import Callable
from math import lcm
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwell.errors import ShardwellError
from shardwell.parallel.model_axis import ModelAxis
from shardwell.runtime.token_mixing import whole_sequences
from shardwell.sequence_parallel.binding import SequenceBinding, current
from shardwell.sequence_parallel.exchange import to_heads, to_tokens
from shardwell.sequence_parallel.masks import PackedDocuments

Mask = Tensor | PackedDocuments | None


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Mask = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attend as torch's function of this name does, over the sequences of which all ranks of the axis hold parts.

    Tensors are (batch, heads, this rank's tokens, width). `attn_mask` is about whole sequences: a tensor as torch takes
    it, or `PackedDocuments`. Outside of a model with a sequence axis this is torch's function.
    """
    binding = current()
    if binding is None and not isinstance(attn_mask, PackedDocuments):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ShardwellError(
            f"attention has {query.shape[1]} heads of queries and {key.shape[1]} of keys: pass enable_gqa=True"
        )
    options: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    if binding is None:
        return attend(query, key, value, attn_mask, **options)
    return attend_over_axis(binding, attend, query, key, value, attn_mask, **options)


class DistributedAttention(nn.Module):
    """Attention of a model whose engine has a sequence axis, which `initialize` makes known to it.

    `local_attention` is called with query, key and value (batch, heads, tokens, width) of whole sequences and some
    heads; by default it is scaled dot-product attention, whose keys and values may have fewer heads than queries.
    Without a sequence axis it gets what this module gets.
    """

    def __init__(self, local_attention: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.local_attention = attend if local_attention is None else local_attention
        self.binding: SequenceBinding | None = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Attend; other arguments are those of the function, and masks among them are about whole sequences."""
        if self.binding is None:
            return self.local_attention(query, key, value, *args, **kwargs)
        return attend_over_axis(self.binding, self.local_attention, query, key, value, *args, **kwargs)


def attend_over_axis(
    binding: SequenceBinding,
    local_attention: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    *args: Any,
    **options: Any,
) -> Tensor:
    """Exchange tokens for heads, attend, and exchange back."""
    axis = binding.axis
    key, value = shared_heads(query, key, value, axis.size)
    binding.num_attended += 1
    whole = to_heads(axis, (query, key, value), "SEQUENCE attention")
    if isinstance(attn_mask, Tensor):
        attn_mask = _mask_of_heads(attn_mask, query, whole, axis)
    with whole_sequences():
        found = local_attention(*whole, attn_mask, *args, **options)
    return to_tokens(axis, found, "SEQUENCE output")


def shared_heads(query: Tensor, key: Tensor, value: Tensor, num_ranks: int) -> tuple[Tensor, Tensor]:
    """Return keys and values of which each rank can have the heads that its queries need: repeated if there are few."""
    if query.ndim != 4 or key.ndim != 4 or value.ndim != 4:
        raise ShardwellError(
            f"sequence_parallel_size: attention takes (batch, heads, tokens, width), found {tuple(query.shape)}, "
            f"{tuple(key.shape)} and {tuple(value.shape)}"
        )
    heads, few = query.shape[1], key.shape[1]
    needed = lcm(few, num_ranks)
    if heads % num_ranks or heads % needed:
        raise ShardwellError(
            f"sequence_parallel_size: {num_ranks} ranks cannot share {heads} heads of queries and {few} of keys and "
            "values: the number of ranks must divide the heads of queries, and the heads of keys be such that each "
            "rank gets whole groups; use fewer ranks"
        )
    if needed == few:
        return key, value
    return key.repeat_interleave(needed // few, 1), value.repeat_interleave(needed // few, 1)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Mask = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Attend over whole sequences on this rank; keys and values may have fewer heads than queries."""
    if isinstance(attn_mask, PackedDocuments):
        return _attend_in_documents(query, key, value, attn_mask, dropout_p, scale)
    is_grouped = query.shape[1] != key.shape[1]
    if is_grouped and attn_mask is not None:  # torch's kernels take groups without a mask only
        groups = query.shape[1] // key.shape[1]
        key, value, is_grouped = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1), False
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=is_grouped
    )


def _attend_in_documents(
    query: Tensor, key: Tensor, value: Tensor, documents: PackedDocuments, dropout_p: float, scale: float | None
) -> Tensor:
    """Let each document of a row attend to itself, causally: no mask of tokens x tokens is needed."""
    if sum(documents.lengths) != query.shape[2]:
        raise ShardwellError(f"documents of {sum(documents.lengths)} tokens, and sequences of {query.shape[2]}")
    queries, keys, values = (one.split(documents.lengths, 2) for one in (query, key, value))
    parts = zip(queries, keys, values, strict=True)
    return torch.cat([attend(q, k, v, None, dropout_p, True, scale) for q, k, v in parts], 2)


def _mask_of_heads(mask: Tensor, query: Tensor, whole: tuple[Tensor, ...], axis: ModelAxis) -> Tensor:
    """Return the mask for this rank's heads; refuse one that is not about whole sequences."""
    tokens = whole[0].shape[2], whole[1].shape[2]
    if tuple(mask.shape[-2:]) not in (tokens, (1, tokens[1])):
        raise ShardwellError(
            f"sequence_parallel_size: attention got a mask of shape {tuple(mask.shape)}, and sequences have "
            f"{tokens[0]} tokens on {axis.size} ranks: a mask must be about whole sequences, see "
            "shardwell.sequence_parallel.whole_attention_mask"
        )
    if mask.ndim == 4 and mask.shape[1] == query.shape[1] and mask.shape[1] > 1:
        return mask.chunk(axis.size, 1)[axis.rank]
    return mask
