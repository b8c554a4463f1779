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
_JOINING = ("cat", "concat", "concatenate")
_ADDED_PRODUCTS = ("baddbmm", "addbmm")
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
# By name, the place of the dimension among the arguments behind the tensor.
_ALONG = {
    **dict.fromkeys(("cumsum", "cumprod", "logcumsumexp", "softmax", "log_softmax", "sort", "argsort", "flip"), 0),
    **dict.fromkeys(("cummax", "cummin", "logsumexp"), 0),
    **dict.fromkeys(("roll", "diff", "normalize", "topk", "kthvalue", "fft_fft", "fft_rfft", "fft_ifft"), 1),
}
# Those that go along the last dimension unless they are told another one.
_LAST_BY_DEFAULT = ("sort", "argsort", "diff", "topk", "kthvalue", "fft_fft", "fft_rfft", "fft_ifft")
_OVER_LAST = ("avg_pool1d", "max_pool1d", "max_pool1d_with_indices", "instance_norm", "group_norm")  # width, tokens
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
        tokens = mine if is_of_batch or _sums_products(name, args, mine) else _mixed_tokens(name, args, given)
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
    if name in _ADDED_PRODUCTS:
        tensors = tensors[1:]
    if name in (*_PRODUCTS, *_ADDED_PRODUCTS) and len(tensors) > 1:
        return _crossed(tensors[0], tensors[1], args[0] if name == "einsum" else None)
    if name == "multi_head_attention_forward" and len(tensors) > 1:  # tokens are the first dimension
        return tensors[1].shape[0]
    if name == "_native_multi_head_attention" and len(tensors) > 1:
        return tensors[1].shape[1]
    if name == "conv1d" and len(tensors) > 1 and tensors[1].shape[-1] > 1:
        padding = given.get("padding", args[4] if len(args) > 4 else 0)
        before = tensors[1].shape[-1] - 1 if padding in (0, (0,), "valid") else 0  # padded by the model itself
        return tensors[0].shape[-1] - before
    if name == "pad" and tensors and tensors[0].ndim == 3 and tensors[0].requires_grad:
        pad = given.get("pad", args[1] if len(args) > 1 else ())
        return tensors[0].shape[_TOKENS] if any(pad[2:4]) else None
    if name in _JOINING and isinstance(args[0], tuple | list):
        return _joined_tokens(args[0], given.get("dim", args[1] if len(args) > 1 else 0))
    if name in _ALONG and tensors and tensors[0] is args[0]:
        return _tokens_along(_ALONG[name], args, given, default=-1 if name in _LAST_BY_DEFAULT else ())
    if name in _OVER_LAST and tensors and tensors[0].ndim == 3:
        return tensors[0].shape[-1]
    if name in _RECURRENT and tensors and tensors[0].ndim == 3:
        return tensors[0].shape[int(args[-1] is True)]  # the last argument is `batch_first`
    return None


def _joined_tokens(values: tuple[Any, ...] | list[Any], dim: Any) -> int | None:
    """Return the tokens of hidden states that are joined along the sequence with values that are none.

    Zeros before all tokens but the last shift them; a prompt before all tokens would be before those of each rank.
    """
    hidden = [one for one in values if isinstance(one, Tensor) and one.ndim == 3 and one.requires_grad]
    if dim not in (_TOKENS, -2) or not hidden or len(values) == len(hidden) or not torch.is_grad_enabled():
        return None
    most = max(one.shape[_TOKENS] for one in hidden)
    return most + 1 if most + 1 == sum(one.shape[_TOKENS] for one in values) else most


def _tokens_along(place: int, args: tuple[Any, ...], given: dict[str, Any], default: Any = ()) -> int | None:
    """Return over how many tokens of hidden states an operation goes; its dimension is at `place` behind the tensor.

    `default`: the dimension where none is given; () for all of them.
    """
    values: Tensor = args[0]
    if values.ndim != 3 or not values.is_floating_point() or (torch.is_grad_enabled() and not values.requires_grad):
        return None  # what is detached is of no use for a loss
    dim = given.get("dim", given.get("dims", given.get("axis", args[place + 1] if len(args) > place + 1 else default)))
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
    first, second, result = _letters(equation)
    mine = {left.shape[first.index(one) - len(first)] for one in set(first) & set(result) - set(second)}
    theirs = {right.shape[second.index(one) - len(second)] for one in set(second) & set(result) - set(first)}
    return max(mine & theirs, default=None)


def _letters(equation: str) -> tuple[str, str, str]:
    """Return the letters of an equation of two operands and its result; empty texts if it is not one of these."""
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    operands = [one.removeprefix("...") for one in inputs.split(",")]
    if not arrow or len(operands) != 2 or "." in "".join(operands):
        return "", "", ""
    return operands[0], operands[1], result.removeprefix("...")


def _sums_products(name: str, args: tuple[Any, ...], num_tokens: int) -> bool:
    """Return whether an operation sums products of activations over tokens, as linear attention does."""
    tensors = [one for one in args[:3] if isinstance(one, Tensor)]
    if name not in _PRODUCTS or len(tensors) != 2 or any(_is_no_activation(one) for one in tensors):
        return False
    left, right = tensors
    if name != "einsum":  # keys that were transposed, and values
        is_transposed = left.stride(-2) == 1 < left.shape[-2] and right.stride(-1) == 1
        return is_transposed and left.shape[-1] == right.shape[-2] == num_tokens
    first, second, result = _letters(args[0]) if isinstance(args[0], str) else ("", "", "")
    if (len(first), len(second)) != (left.ndim, right.ndim):
        return False
    places = [(first.index(one), second.index(one)) for one in set(first) & set(second) - set(result)]
    return any(
        left.shape[at] == num_tokens and at in (_TOKENS, left.ndim - 2) and other in (_TOKENS, right.ndim - 2)
        for at, other in places
    )


def _is_no_activation(tensor: Tensor) -> bool:
    """Return whether a tensor is none, or one that sends tokens to their experts, through which nothing is trained."""
    return tensor.ndim < 3 or isinstance(tensor, nn.Parameter) or not tensor.requires_grad
