"""Models of Transformers: attention through its attention interface, and masks of whole sequences through its masks'.

Before a forward the ranks gather positions and padding. The function that makes masks, which a model calls once in its
forward, makes them of these for whole sequences. Layers get the mask as an argument, so it is the right one also when
they are recomputed.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardwell.errors import ShardwellError
from shardwell.sequence_parallel.attention import attend, attend_over_axis
from shardwell.sequence_parallel.binding import SequenceBinding, shares_sequences
from shardwell.sequence_parallel.masks import PackedDocuments, WholeTokens, gather_tokens
from shardwell.sequence_parallel.positions import check_positions, position_of_padding

NAME = "shardwell_sequence_parallel"  # the attention implementation
_UNKNOWN = ("softcap", "s_aux", "position_bias", "cache")  # what changes the numbers of attention
_MIXING = ("linear_attention", "mamba", "conv", "recurrent")  # kinds of layers that pass a state along the sequence


@dataclass
class _Bound:
    """A model of Transformers with a sequence axis, and what is known of the forward that runs."""

    binding: SequenceBinding
    tokens: WholeTokens | None = None  # None: each rank has whole sequences, as in generation
    before: dict[int, str | None] = field(default_factory=dict)  # by the id of a configuration: its own attention


# by the id of a configuration object of Transformers; the hook of the model holds them
_bound: weakref.WeakValueDictionary[int, _Bound] = weakref.WeakValueDictionary()


def bind_transformers(binding: SequenceBinding) -> bool:
    """Let the models of Transformers in a model attend over the sequence axis; return whether there are any."""
    found = _pretrained(binding.model)
    if not found:
        return False
    _register()
    bound = _Bound(binding)
    configs = {id(one.config): one.config for one in found}
    for one in found:
        _check_model(one)
    for config in configs.values():
        _use_attention(config, bound)
    outermost = next((one for one in binding.model.modules() if _takes_positions(one)), None)
    if outermost is None:
        raise ShardwellError(
            f"sequence_parallel_size: {type(found[0]).__name__} takes no position_ids, so that the tokens of the ranks "
            "would all begin at position 0"
        )
    hook = outermost.register_forward_pre_hook(_BeforeForward(bound), with_kwargs=True)
    binding.undo.append(hook.remove)
    return True


def _pretrained(model: nn.Module) -> list[Any]:
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:
        return []
    return [one for one in model.modules() if isinstance(one, modeling.PreTrainedModel)]


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)


def _check_model(model: Any) -> None:
    """Refuse layers that pass values along the sequence by other ways than the attention interface."""
    name = type(model).__name__
    if not model._can_set_attn_implementation():
        raise ShardwellError(
            f"sequence_parallel_size: {name} does not use Transformers' attention interface, so its attention would "
            "see a part of the sequence; use sequence_parallel_size 1"
        )
    kinds = getattr(model.config, "layer_types", None) or ()
    strange = sorted({kind for kind in kinds if any(word in kind for word in _MIXING)})
    if strange or getattr(model.config, "is_encoder_decoder", False):
        what = f"layers of type {strange[0]}" if strange else "an encoder and a decoder with different sequences"
        raise ShardwellError(
            f"sequence_parallel_size: {name} has {what}, which do not pass the attention that is exchanged over ranks; "
            "use sequence_parallel_size 1"
        )


def _use_attention(config: Any, bound: _Bound) -> None:
    before = config._attn_implementation
    config._attn_implementation_internal = NAME
    _bound[id(config)], bound.before[id(config)] = bound, before

    def undo() -> None:
        config._attn_implementation_internal = before
        _bound.pop(id(config), None)

    bound.binding.undo.append(undo)


def attention_before(config: Any) -> str | None:
    """Return the attention that a configuration named before its model got a sequence axis; None if it has none."""
    bound = _bound.get(id(config))
    return None if bound is None else bound.before[id(config)]


def _takes_positions(module: nn.Module) -> bool:
    return "position_ids" in inspect.signature(module.forward).parameters


class _BeforeForward:
    """Gather what the ranks know of their tokens, and give each token its position in the whole sequence."""

    def __init__(self, bound: _Bound) -> None:
        self._bound, self._pads_at = bound, position_of_padding(bound.binding.model)

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
        given = {**given, **given.pop("kwargs", {})}
        if not shares_sequences(self._bound.binding, module, given):
            self._bound.tokens = None
            return args, kwargs
        ids = given.get("input_ids")
        ids = given.get("inputs_embeds") if ids is None else ids
        if ids is None:
            return args, kwargs
        mask, positions = given.get("attention_mask"), given.get("position_ids")
        axis, length = self._bound.binding.axis, ids.shape[1]
        is_padding = isinstance(mask, Tensor) and mask.ndim == 2
        padding = mask if is_padding else None
        self._bound.tokens = gather_tokens(axis, positions, padding, length, self._pads_at)
        changed: dict[str, Any] = {}
        if positions is None:
            check_positions(self._bound.binding.model, self._bound.tokens.padding)
            changed["position_ids"] = torch.arange(length, device=ids.device)[None] + axis.rank * length
        if mask is None:  # with a mask the model does not look for documents in this rank's positions
            changed["attention_mask"] = torch.ones(ids.shape[:2], dtype=torch.bool, device=ids.device)
        names = list(inspect.signature(module.forward).parameters)
        args = tuple(changed.pop(name, value) for name, value in zip(names, args, strict=False))
        return args, {**kwargs, **changed}


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Tensor | PackedDocuments | None:
    """Make the mask of whole sequences; it is the one for SDPA."""
    from transformers import masking_utils

    tokens = _bound_to(options.get("config")).tokens
    makes = masking_utils.sdpa_mask
    if tokens is None:
        return makes(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **options)
    if options.get("use_vmap"):
        raise ShardwellError(
            "sequence_parallel_size: the model adds a mask function of its own to attention, which knows the tokens of "
            "one rank only; use sequence_parallel_size 1"
        )
    if tokens.documents is not None:
        documents = tokens.lengths() if mask_function is masking_utils.causal_mask_function else None
        if documents is not None:
            return documents
        packed = masking_utils.packed_sequence_mask_function(tokens.documents)
        mask_function = masking_utils.and_masks(mask_function, packed)
        options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    size = tokens.num_tokens
    return makes(batch_size, size, size, 0, 0, mask_function, tokens.padding, **options)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend over the sequence axis, as Transformers' own function for SDPA does on one rank."""
    bound = _bound_to(getattr(module, "config", None))
    for name in _UNKNOWN:
        if options.get(name) is not None:
            raise ShardwellError(
                f"sequence_parallel_size: the attention of {type(module).__name__} has {name}, which SDPA does not "
                "know; use sequence_parallel_size 1"
            )
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    whole = query.shape[2] * (1 if bound.tokens is None else bound.binding.axis.size)
    settings: dict[str, Any] = {
        "dropout_p": dropout,
        "is_causal": bool(causal) and attention_mask is None and whole > 1,
        "scale": scaling,
    }
    if bound.tokens is None:
        bound.binding.num_attended += 1
        found = attend(query, key, value, attention_mask, **settings)
    else:
        found = attend_over_axis(bound.binding, attend, query, key, value, attention_mask, **settings)
    return found.transpose(1, 2).contiguous(), None


def _bound_to(config: Any) -> _Bound:
    bound = _bound.get(id(config))
    if bound is None:
        raise ShardwellError(
            f"the attention implementation {NAME!r} is one of an engine with a sequence axis, and this model has none: "
            "set another one with model.set_attn_implementation"
        )
    return bound
