"""The check that a model does not mix tokens where a rank has a part of them only.

Attention, convolutions and recurrent layers that see a part of a sequence compute other numbers, and nothing is raised.
So the first forwards are searched for operations of torch that pass values along a sequence: one over as many tokens
as a rank has is an error. Products of two activations with tokens on both sides count, as scores of attention that is
written out, and so do cumulative sums, sorts and the like along the dimension of tokens, and statistics of a batch.
Sums and means of tokens count where they can be of no loss. Functions of other libraries are not seen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shardwell.errors import ShardwellError
from shardwell.runtime.aborted_forwards import AbortHook
from shardwell.runtime.first_forwards import FirstForwards

_PRODUCTS = ("matmul", "__matmul__", "bmm", "einsum")
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
# By name, the place of the dimension among the arguments behind the tensor.
_ALONG = {
    **dict.fromkeys(("cumsum", "cumprod", "logcumsumexp", "softmax", "log_softmax", "sort", "argsort", "flip"), 0),
    **dict.fromkeys(("roll", "diff"), 1),
}
_SUMS = ("mean", "sum", "prod", "var", "std", "amax", "amin", "max", "min")  # of all values without a dimension
_TOKENS = 1  # the dimension of tokens in hidden states: rows, tokens, width
_num_whole = 0  # modules and functions that run on whole sequences now


def enter_whole_sequences() -> None:
    """Note that code runs which has whole sequences."""
    global _num_whole
    _num_whole += 1


def leave_whole_sequences() -> None:
    """Note that it has ended."""
    global _num_whole
    _num_whole = max(0, _num_whole - 1)  # hooks that are always called run also if the first one was not reached


def forget_whole_sequences() -> None:
    """Note that nothing runs any more: an interrupt ends modules without their hooks."""
    global _num_whole
    _num_whole = 0


@contextlib.contextmanager
def whole_sequences() -> Iterator[None]:
    """Let code run that has whole sequences: it may mix tokens."""
    enter_whole_sequences()
    try:
        yield
    finally:
        leave_whole_sequences()


class TokenMixingCheck(FirstForwards):
    """Raises in the first forwards of a model where an operation mixes the tokens of one rank only."""

    def __init__(self, num_tokens: Callable[[], int | None], words: str, *, sees_sums: bool = False) -> None:
        """`num_tokens`: how many a rank has of the sequence now; `words`: what to say of {name} and {tokens}.

        `sees_sums`: a sum or mean over tokens is no loss, of which each rank has its share.
        """
        super().__init__()
        self._num_tokens, self._words, self._sees_sums = num_tokens, words, sees_sums

    def hook(self, model: nn.Module, inside: nn.Module | None = None) -> list[Any]:
        """Look at the forwards of a model, or of one `inside` of it; return the hooks."""
        return [*super().hook(model, inside), AbortHook(model, forget_whole_sequences)]

    def before(self, name: str, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        """Look at an operation before it runs."""
        if _num_whole or (mine := self._num_tokens()) is None:
            return
        is_of_batch = name == "batch_norm" and (given.get("training") or (len(args) > 5 and args[5] is True))
        tokens = mine if is_of_batch else _mixed_tokens(name, args, given)
        if self._sees_sums and name in _SUMS and args and isinstance(args[0], Tensor):
            tokens = _tokens_along(0, args, given)
        if tokens == mine:
            raise ShardwellError(self._words.format(name=name.strip("_"), tokens=tokens))


def _mixed_tokens(name: str, args: tuple[Any, ...], given: dict[str, Any]) -> int | None:
    """Return over how many tokens an operation passes values; None if it does not pass them along a sequence."""
    tensors = [one for one in args[:3] if isinstance(one, Tensor)]
    if name == "scaled_dot_product_attention":
        key = tensors[1] if len(tensors) > 1 else given.get("key")
        return key.shape[-2] if isinstance(key, Tensor) else None
    if name in _PRODUCTS and len(tensors) > 1:
        return _crossed(tensors[0], tensors[1], args[0] if name == "einsum" else None)
    if name == "multi_head_attention_forward" and len(tensors) > 1:  # tokens are the first dimension
        return tensors[1].shape[0]
    if name == "_native_multi_head_attention" and len(tensors) > 1:
        return tensors[1].shape[1]
    if name == "conv1d" and len(tensors) > 1 and tensors[1].shape[-1] > 1:
        padding = given.get("padding", args[4] if len(args) > 4 else 0)
        before = tensors[1].shape[-1] - 1 if padding in (0, (0,), "valid") else 0  # padded by the model itself
        return tensors[0].shape[-1] - before
    if name in _ALONG and tensors and tensors[0] is args[0]:
        return _tokens_along(_ALONG[name], args, given)
    if name in _RECURRENT and tensors and tensors[0].ndim == 3:
        return tensors[0].shape[int(args[-1] is True)]  # the last argument is `batch_first`
    return None


def _tokens_along(place: int, args: tuple[Any, ...], given: dict[str, Any]) -> int | None:
    """Return over how many tokens of hidden states an operation goes; its dimension is at `place` behind the tensor."""
    values: Tensor = args[0]
    if values.ndim != 3 or not values.is_floating_point() or (torch.is_grad_enabled() and not values.requires_grad):
        return None  # what is detached is of no use for a loss
    dim = given.get("dim", given.get("dims", given.get("axis", args[place + 1] if len(args) > place + 1 else ())))
    if isinstance(dim, Tensor):  # an elementwise maximum
        return None
    if dim is None or dim == ():
        return values.shape[_TOKENS]
    dims = dim if isinstance(dim, tuple | list) else (dim,)
    is_along = any(isinstance(one, int) and one % values.ndim == _TOKENS for one in dims)
    return values.shape[_TOKENS] if is_along else None


def _crossed(left: Tensor, right: Tensor, equation: str | None) -> int | None:
    """Return the dimension that the result of a product of two activations has on both sides, as scores have."""
    if min(left.ndim, right.ndim) < 3 or isinstance(left, nn.Parameter) or isinstance(right, nn.Parameter):
        return None
    if equation is None:
        is_batched = left.ndim > 3 and left.shape[-3] == left.shape[-2]  # over tokens, perhaps
        return left.shape[-2] if left.shape[-2] == right.shape[-1] and not is_batched else None
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    first, _, second = inputs.partition(",")
    if not arrow or "." in equation:
        return None
    mine = {left.shape[first.index(one)] for one in set(first) & set(result) - set(second)}
    theirs = {right.shape[second.index(one)] for one in set(second) & set(result) - set(first)}
    return max(mine & theirs, default=None)
