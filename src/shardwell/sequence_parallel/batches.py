"""Batches of whole rows, cut along the sequence: every rank of the sequence axis gets a part of the same rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwell.errors import ShardwellError
from shardwell.sequence_parallel.binding import SequenceBinding, binding_of
from shardwell.sequence_parallel.positions import positions_of

IGNORED = -100  # a label that is not counted


def shard_batch(
    batch: Mapping[str, Any],
    model: Any,
    *,
    num_items_in_batch: Tensor | int | None = None,
    pad_token_id: int | None = None,
) -> dict[str, Any]:
    """Return this rank's part of a batch of whole rows, which the ranks of the sequence axis must have alike.

    `model` is the engine or its model. Tensors of shape (rows, tokens, ...) are cut. `labels` are moved by one token
    before, and become `shift_labels`: entry i is what token i predicts. `position_ids` are added if there are none, as
    the model counts them (OPT and RoBERTa leave padding out). Sequences whose length the ranks do not divide are padded
    if there is a `pad_token_id`. With labels there is
    `num_items_in_batch`: a sum of losses divided by it, averaged over the ranks as an engine does with gradients, is
    the mean over the tokens of all ranks. Pass it, from `count_tokens`, for the mean over all micro-batches of a step.
    """
    binding = _needed(model, "shard_batch")
    whole = dict(batch)
    length = _length_of(whole)
    if length % binding.axis.size and pad_token_id is not None:
        whole, length = _padded(whole, length, binding.axis.size, pad_token_id)
    if length % binding.axis.size:
        raise ShardwellError(
            f"sequence_parallel_size: {binding.axis.size} ranks cannot share sequences of {length} tokens: pad them to "
            "a multiple, or pass pad_token_id to shard_batch"
        )
    if "position_ids" not in whole:
        first = whole["input_ids"] if "input_ids" in whole else next(_tensors_of(whole, length))
        whole["position_ids"] = positions_of(binding.model, whole, first, length)
    if whole.get("labels") is not None:
        whole["shift_labels"] = F.pad(whole["labels"][..., 1:], (0, 1), value=IGNORED)
    found = {key: _cut(value, length, binding) for key, value in whole.items()}
    if "shift_labels" in found:
        found["labels"] = found["shift_labels"]  # models of Transformers compute a loss if there are labels
        found["num_items_in_batch"] = _divisor(found["shift_labels"], binding, model, num_items_in_batch)
    return found


def count_tokens(batches: Iterable[Mapping[str, Any]], engine: Any) -> Tensor:
    """Return the number of labels that count in the micro-batches (of whole rows) of one step, over all ranks.

    It is `num_items_in_batch` of `shard_batch`. All ranks must call it.
    """
    binding = _needed(engine, "count_tokens")
    counts = [(batch["labels"][..., 1:] != IGNORED).sum() for batch in batches]
    total = torch.stack(counts).sum().to(binding.data.device.torch_device, torch.float64)
    binding.data.all_reduce_sum(total, "SEQUENCE tokens")
    return total / binding.axis.size  # the ranks of the sequence axis have counted the same rows


def _divisor(labels: Tensor, binding: SequenceBinding, model: Any, given: Tensor | int | None) -> Tensor:
    """Return what sums of losses are divided by, so that the engine's average of them is the mean over tokens."""
    where, num_averaged = binding.data.device.torch_device, binding.data.rank_group.size
    if given is None:
        total = (labels != IGNORED).sum().to(where, torch.float64)
        binding.data.all_reduce_sum(total, "SEQUENCE tokens")
    elif not hasattr(model, "gradient_accumulation_steps"):
        raise ShardwellError(
            "shard_batch: num_items_in_batch is about all micro-batches of a step, whose number the engine knows: pass "
            "the engine instead of its model"
        )
    else:
        total = torch.as_tensor(given, dtype=torch.float64, device=where)
        num_averaged *= model.gradient_accumulation_steps()
    return (total.clamp(min=1) / num_averaged).to(torch.float32)


def _needed(model: Any, name: str) -> SequenceBinding:
    binding = binding_of(model)
    if binding is None:
        raise ShardwellError(
            f"{name}: the model has no sequence axis: pass it to initialize with sequence_parallel_size above 1 first"
        )
    return binding


def _tensors_of(batch: Mapping[str, Any], length: int) -> Iterator[Any]:
    return (one for one in batch.values() if isinstance(one, Tensor) and one.ndim >= 2 and one.shape[1] == length)


def _length_of(batch: Mapping[str, Any]) -> int:
    for key in ("input_ids", "inputs_embeds", "labels", "position_ids"):
        if isinstance(batch.get(key), Tensor):
            return int(batch[key].shape[1])
    raise ShardwellError(
        f"shard_batch: the batch has none of input_ids, inputs_embeds, labels and position_ids, only "
        f"{', '.join(batch) or 'nothing'}: the length of its sequences is not known"
    )


def _padded(batch: dict[str, Any], length: int, num_ranks: int, token: int) -> tuple[dict[str, Any], int]:
    """Pad rows at their end with tokens that no label counts, and that the batch's padding mask hides, if it has one.

    They continue the last document, in which causal attention hides them from all others.
    """
    extra = -length % num_ranks
    fill = {"input_ids": token, "labels": IGNORED}
    found = dict(batch)
    for key, value in batch.items():
        if not isinstance(value, Tensor) or value.ndim < 2 or value.shape[1] != length:
            continue
        if value.ndim == 4:
            raise ShardwellError(f"shard_batch: {key} is a mask of tokens x tokens; pad such a batch before")
        if key == "position_ids":
            more = torch.arange(1, extra + 1, device=value.device, dtype=value.dtype)
            found[key] = torch.cat([value, value[:, -1:] + more], 1)
        else:
            found[key] = F.pad(value, (*(0, 0) * (value.ndim - 2), 0, extra), value=fill.get(key, 0))
    return found, length + extra


def _cut(value: Any, length: int, binding: SequenceBinding) -> Any:
    """Return this rank's tokens of (rows, tokens, ...); other values stay."""
    if not isinstance(value, Tensor) or value.ndim < 2 or value.ndim == 4 or value.shape[1] != length:
        return value
    return value.chunk(binding.axis.size, 1)[binding.axis.rank].contiguous()
