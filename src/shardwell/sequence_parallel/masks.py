"""Masks of whole sequences, from the parts that ranks hold: padding, and documents that are packed into one row.

Documents in a row are told by their positions: where they do not go up by one, another document begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwell.errors import ShardwellError
from shardwell.parallel.model_axis import ModelAxis
from shardwell.parallel.traffic import TrafficKind
from shardwell.sequence_parallel.binding import binding_of


@dataclass(frozen=True)
class PackedDocuments:
    """The lengths of the documents of one row, each of which attends to itself: no mask is made for them."""

    lengths: tuple[int, ...]


@dataclass(frozen=True)
class WholeTokens:
    """The facts that the ranks know together about the tokens of whole sequences."""

    num_tokens: int  # of a row
    padding: Tensor | None  # batch, tokens: whether a token is one; None if all are
    documents: Tensor | None  # batch, tokens: the number of the document in its row; None if each row is one document

    def lengths(self) -> PackedDocuments | None:
        """Return the documents of a single row without padding; None if there is no such row."""
        if self.documents is None or self.padding is not None or self.documents.shape[0] != 1:
            return None
        return PackedDocuments(tuple(torch.unique_consecutive(self.documents[0], return_counts=True)[1].tolist()))


@torch.no_grad()
def gather_tokens(
    axis: ModelAxis, positions: Tensor | None, padding: Tensor | None, num_tokens: int, pads_at: int | None = None
) -> WholeTokens:
    """Gather positions and padding (batch, tokens) over the axis; each of them is given on all ranks or on none.

    Padding that is at the position `pads_at`, before and between tokens that count on, begins no document.
    """
    given = [one.to(torch.int64) for one in (positions, padding) if one is not None]
    if not given:
        return WholeTokens(num_tokens * axis.size, None, None)
    rows = max(one.shape[0] for one in given)
    parts = torch.stack([one.expand(rows, -1) for one in given]).to(axis.comm.device.torch_device)
    whole = list(axis.all_gather(parts, 2, "SEQUENCE positions", TrafficKind.CONTROL).unbind())
    if parts.is_meta:  # a simulation has no values: rows are whole documents without padding
        return WholeTokens(num_tokens * axis.size, None, None)
    documents = None
    if positions is not None:
        at = whole.pop(0)
        breaks = torch.diff(at, dim=-1) != 1
        if pads_at is not None and bool(((at == pads_at) | (at == (at != pads_at).cumsum(-1) + pads_at)).all()):
            breaks = torch.zeros_like(breaks)
        documents = torch.nn.functional.pad(breaks.cumsum(-1), (1, 0)) if bool(breaks.any()) else None
    real = whole.pop().bool() if padding is not None else None
    if real is not None and bool(real.all()):
        real = None
    return WholeTokens(num_tokens * axis.size, real, documents)


def whole_attention_mask(
    model: Any, *, attention_mask: Tensor | None = None, position_ids: Tensor | None = None, is_causal: bool = True
) -> Tensor | PackedDocuments | None:
    """Return the `attn_mask` of whole sequences for attention, from this rank's part of padding and positions.

    All ranks must call it. `attention_mask` (batch, tokens) is 0 where a token is padding. `position_ids` begin again
    in each document of a row. The result is None where nothing but `is_causal` is needed.
    """
    binding = binding_of(model)
    if binding is None:
        raise ShardwellError("whole_attention_mask: the model has no sequence axis; pass it to initialize first")
    found = attention_mask if attention_mask is not None else position_ids
    if found is None:
        return None
    tokens = gather_tokens(binding.axis, position_ids, attention_mask, found.shape[1])
    if is_causal and (documents := tokens.lengths()) is not None:
        return documents
    if tokens.padding is None and tokens.documents is None:
        return None
    return _square_mask(tokens, is_causal=is_causal, device=binding.axis.comm.device.torch_device)


def _square_mask(tokens: WholeTokens, *, is_causal: bool, device: torch.device) -> Tensor:
    """Return which token (last but one dimension) attends to which: batch, 1, tokens, tokens."""
    size = tokens.num_tokens
    mask = torch.ones(1, 1, size, size, dtype=torch.bool, device=device)
    if is_causal:
        mask = mask.tril()
    if tokens.documents is not None:
        mask = mask & (tokens.documents[:, None, :, None] == tokens.documents[:, None, None, :])
    if tokens.padding is not None:
        mask = mask & tokens.padding[:, None, None, :]
    return mask
