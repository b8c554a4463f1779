"""Which operations need all values along a dimension of a tensor, of which a rank has some.

The output of a layer that is cut by columns is a part along its last dimension, which views may move. Elementwise
operations are right on parts. A softmax, a norm, a mean or a product over that dimension is of this rank's values
alone: a number of the right shape and of another value, and no error.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from shardwell.errors import ShardwellError
from shardwell.runtime.first_forwards import positional

# What changes no element's place.
SAME_PLACES = re.compile(
    r"_*r?(add|mul|sub|(true)?div|pow)_*|clamp_?|clip_?|dropout|contiguous|clone|to|type|type_as|float|half|bfloat16|double|"
    "(leaky_)?relu6?_?|gelu|silu|sigmoid|tanh|softplus|elu|selu|celu|mish|hardswish|hardtanh|logsigmoid|exp|abs|square|"
    "sqrt|rsqrt|neg|__neg__|detach|cpu|cuda|masked_fill|where|maximum|minimum"
)
_MISSING = object()
# Name of an operation: the place of its dimension among the arguments behind the tensor, and its default; None is all.
_DIMENSIONS: dict[str, tuple[int, Any]] = {
    **dict.fromkeys(("softmax", "log_softmax", "softmin", "_softmax"), (0, None)),
    **dict.fromkeys(("mean", "sum", "nanmean", "nansum", "prod", "var", "std", "var_mean", "std_mean"), (0, None)),
    **dict.fromkeys(("amax", "amin", "max", "min", "argmax", "argmin", "aminmax", "logsumexp"), (0, None)),
    **dict.fromkeys(("all", "any", "count_nonzero", "median", "nanmedian"), (0, None)),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"), (0, None)),
    **dict.fromkeys(("norm", "vector_norm", "linalg_vector_norm", "linalg_norm"), (1, None)),
    **dict.fromkeys(("normalize", "cosine_similarity"), (1, 1)),
    "gumbel_softmax": (3, -1),
    **dict.fromkeys(("topk", "kthvalue", "quantile", "nanquantile", "roll", "diff"), (1, -1)),
    **dict.fromkeys(("fft_fft", "fft_ifft", "fft_rfft", "fft_irfft"), (1, -1)),
    **dict.fromkeys(("gather", "take_along_dim", "index_select", "select"), (0, None)),
    "unbind": (0, 0),
    **dict.fromkeys(("sort", "argsort", "glu", "mode", "flip"), (0, -1)),
}
_OVER_LAST = ("layer_norm", "rms_norm", "scaled_dot_product_attention", "cdist", "pairwise_distance", "inner", "dot")
_LOSSES = ("cross_entropy", "nll_loss", "kl_div", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
PRODUCTS = ("matmul", "__matmul__", "bmm", "mm", "tensordot")
ADDED_PRODUCTS = ("baddbmm", "addbmm", "addmm")  # of the second tensor and the third
_POOLING = re.compile(r"(?:adaptive_)?(?:avg|max|lp)_pool(\d)d(?:_with_indices)?")
_KEEPS_LAST = ("flatten", "squeeze", "unsqueeze", "__getitem__", "narrow", "index_select")  # if its size is the same


def crosses_parts(name: str, at: int, args: tuple[Any, ...], given: dict[str, Any]) -> bool:
    """Return whether an operation is one over the dimension along which its first tensor is a part: `at`, from 0."""
    values: Tensor = args[0]
    others = args[1:]
    if name in _LOSSES:
        return True
    if name in _OVER_LAST:
        return at == values.ndim - 1
    if name == "group_norm":  # how many groups a part has is not known
        return at == 1
    if (pooling := _POOLING.fullmatch(name)) is not None:
        return at >= values.ndim - int(pooling[1])
    if name in ("instance_norm", "interpolate"):
        return at > 1
    if name == "pad":
        return _pads(at - values.ndim, given.get("pad", others[0] if others else ()))
    if name in PRODUCTS:  # of activations: scores of a head that is itself divided
        return at == values.ndim - 1 and bool(others) and not isinstance(others[0], nn.Parameter)
    if name not in _DIMENSIONS:
        return False
    place, default = _DIMENSIONS[name]
    dim = given.get("dim", given.get("axis", given.get("dims", _MISSING)))
    if dim is _MISSING:
        dim = others[place] if len(others) > place else default
    if isinstance(dim, Tensor):  # an elementwise maximum of two tensors
        return False
    if isinstance(dim, bool) or dim is None:  # all dimensions; a flag stands in the place of a dimension
        return True
    dims = dim if isinstance(dim, tuple | list) else (dim,)
    return not dims or any(isinstance(one, int) and one % max(values.ndim, 1) == at for one in dims)


def _pads(dim: int, pad: Any) -> bool:
    """Return whether values are put before or behind a dimension, which is counted from the end; the last is -1."""
    place = 2 * (-dim - 1)
    return isinstance(pad, tuple | list) and any(pad[place : place + 2])


def sums_over(equation: Any, operands: tuple[Any, ...], number: int, at: int) -> bool:
    """Return whether an einsum of activations sums over dimension `at` of one of its operands."""
    if not isinstance(equation, str) or "." in equation or any(isinstance(one, nn.Parameter) for one in operands):
        return False
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    letters = inputs.split(",")
    return bool(arrow) and number < len(letters) and at < len(letters[number]) and letters[number][at] not in result


def moved_dimension(name: str, at: int, args: tuple[Any, ...], given: dict[str, Any]) -> int | None:
    """Return where dimension `at` of the first tensor is behind an operation that moves dimensions; None: not known."""
    ndim: int = args[0].ndim
    if name in ("mT", "mH", "adjoint"):
        return {ndim - 1: ndim - 2, ndim - 2: ndim - 1}.get(at, at)
    if name in ("T", "H", "t"):
        return ndim - 1 - at
    named = [given[key] for key in ("dim0", "dim1", "axis0", "axis1") if key in given]
    others = [one for one in (*args[1:], *named) if isinstance(one, int)]
    if name in ("transpose", "swapaxes", "swapdims"):
        if len(others) < 2:
            return None
        first, second = others[0] % ndim, others[1] % ndim
        return {first: second, second: first}.get(at, at)
    if name == "permute":
        order = args[1] if len(args) == 2 and isinstance(args[1], tuple | list) else given.get("dims", others)
        return [int(one) % ndim for one in order].index(at) if len(order) == ndim else None
    return None


def keeps_last(name: str, values: Tensor, found: Tensor) -> bool:
    """Return whether an operation leaves the last dimension as it is: by rows, or one row of it."""
    if found.ndim == 0 or found.shape[-1] != values.shape[-1]:
        return False
    return found.ndim == 2 if name in ("view", "reshape") else name in _KEEPS_LAST


class PartOfOutput(Tensor):
    """An output of a model of which this rank has a part along the last dimension, as logits of a cut vocabulary.

    Forwards return it, so that a loss or a choice of words over this rank's part alone is an error.
    """

    words: str  # of the error, which say {name}

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on plain tensors, unless it needs all parts."""
        given, name = kwargs or {}, getattr(func, "__name__", "")
        seen = positional(args, given)
        part = next((one for one in seen[:3] if isinstance(one, cls)), None)
        with torch._C.DisableTorchFunctionSubclass():
            if part is not None and part is seen[0] and crosses_parts(name, part.ndim - 1, seen, given):
                raise ShardwellError(part.words.format(name=name.strip("_")))
            found = func(*args, **given)
            if part is not None and isinstance(found, Tensor):
                is_same = SAME_PLACES.fullmatch(name) is not None and found.shape == part.shape
                if is_same or keeps_last(name, part, found):
                    return part_of_output(found, part.words)
        return plain(found)


def part_of_output(values: Tensor, words: str) -> Tensor:
    """Return the same values, known as a part."""
    found = values.as_subclass(PartOfOutput)
    found.words = words
    return found


def plain(values: Any) -> Any:
    """Return a tensor as an ordinary one, and anything else as it is."""
    if not isinstance(values, PartOfOutput):
        return values
    with torch._C.DisableTorchFunctionSubclass():
        return values.as_subclass(Tensor)
