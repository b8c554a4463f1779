"""The check that a model divides the outputs of its cut layers in a way that is right for parts of them.

A weight that is packed of queries, keys and values and is cut as one block gives the first rank all queries and some
keys. A model that divides such an output by `chunk` gets three tensors of the right shape and of wrong values. And one
that divides an output into its number of heads, `view(batch, length, heads, -1)`, gets as many heads as before, each of
which is a part of one. Both would train without an error. What is right for parts says how large a head is, and not
how many there are: `view(batch, length, -1, size)`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from shardwell.errors import ShardwellError
from shardwell.runtime.first_forwards import FirstForwards
from shardwell.runtime.pytree import map_tensors, tensors_in
from shardwell.sharding.tensor_part import part_of
from shardwell.tensor_parallel.across_parts import (
    ADDED_PRODUCTS,
    PRODUCTS,
    SAME_PLACES,
    crosses_parts,
    keeps_last,
    moved_dimension,
    part_of_output,
    sums_over,
)

_DIVISIONS = ("chunk", "tensor_split", "split", "split_with_sizes")
_RESHAPES = ("view", "reshape", "unflatten")
_MISFIT = re.compile(
    "must match|is invalid for input of size|cannot be multiplied|is not compatible|Sizes of tensors|does not match|"
    "should contain"
)
_SIZE_OF_HEADS = re.compile(r"head.*(dim|size|width|channels)|(dim|size|width|^d).*head|head|d_kv?|d_v")
_NUMBER_OF_HEADS = re.compile(r"(n|num|nb|number)_?.*heads?|heads|h|.*groups")


@dataclass(frozen=True)
class CutOutput:
    """A tensor that a layer which is cut by columns has returned, or a block of it."""

    weight: str
    whole: int  # the size of its last dimension if the layer were whole
    num_blocks: int  # that are packed in it, of which each is cut
    num_parts: int
    from_end: int = 1  # the dimension along which it is a part, counted from the last one


class PackedUseCheck(FirstForwards):
    """Raises where an output of a cut layer is divided as only a whole one may be."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._modules = dict(model.named_modules())
        self._outputs = WeakTensorKeyDictionary()  # as `CutOutput`
        self._transposed = WeakTensorKeyDictionary()  # weights of layers that transpose them
        self._returned: dict[tuple[Any, ...], dict[int, tuple[int, str]]] = {}  # among outputs, by kind

    def before(self, name: str, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        """Look at an operation before it runs."""
        if (known := self._crossed(name, args, given)) is not None:
            raise ShardwellError(_over_a_part(known).format(name=name.strip("_")))
        if name == "linear":
            self._check_blocks(args)
        if not args or not isinstance(args[0], Tensor) or args[0] not in self._outputs:
            return
        values, known = args[0], self._outputs[args[0]]
        if known.from_end > 1:
            return
        if name in _RESHAPES:
            if (asked := _asked_shape(name, values, args[1:], given)) is not None:
                self._check_shape(asked, values, known)
        elif known.num_blocks == 1 and (number := _num_pieces(name, values, args[1:], given)) > 1:
            raise ShardwellError(
                f"tensor_parallel.plan: the output of '{known.weight}' is divided by {name.strip('_')} into {number} "
                f"blocks, and colwise cuts its weight as one, so that ranks would have others: use "
                f"packed_colwise:{number} for it, or packed_colwise with the sizes of the blocks"
            )

        elif name in ("split", "split_with_sizes") and known.num_blocks > 1:
            sizes = given.get("split_size_or_sections", args[1] if len(args) > 1 else 0)
            total = sum(sizes) if isinstance(sizes, list | tuple) else sizes * known.num_blocks
            if total == known.whole != values.shape[-1]:
                raise ShardwellError(
                    f"tensor_parallel.plan: the output of '{known.weight}' is divided by split into blocks of {sizes} "
                    f"as if it were whole, and each of {known.num_parts} ranks has a part of each: let their sizes "
                    "follow from the output, as chunk does, or divide the size in the module by the number of ranks"
                )

    def _crossed(self, name: str, args: tuple[Any, ...], given: dict[str, Any]) -> CutOutput | None:
        """Return the part over whose cut dimension an operation goes, if there is one."""
        if name == "einsum":
            operands = args[1:] if len(args) > 2 or not isinstance(args[-1], tuple | list) else tuple(args[1])
            for number, one in enumerate(operands):
                known = self._known(one)
                if known is not None and sums_over(args[0], operands, number, one.ndim - known.from_end):
                    return known
            return None
        if name in ADDED_PRODUCTS:
            name, args = "matmul", args[1:]
        if name in PRODUCTS and len(args) > 1 and (known := self._known(args[1])) is not None and known.from_end == 2:
            return known
        known = self._known(args[0]) if args else None
        if known is None or not crosses_parts(name, args[0].ndim - known.from_end, args, given):
            return None
        return known

    def _known(self, value: Any) -> CutOutput | None:
        found: CutOutput | None = self._outputs.get(value) if isinstance(value, Tensor) else None
        return found

    def _check_blocks(self, args: tuple[Any, ...]) -> None:
        """Raise if a layer that is cut by rows takes outputs that were joined, as if they were one."""
        known = self._outputs.get(args[0]) if isinstance(args[0], Tensor) else None
        part = part_of(args[1]) if isinstance(args[1], nn.Parameter) else None
        if known is None or part is None or part.dim != 1 or known.num_blocks == max(len(part.blocks), 1):
            return
        raise ShardwellError(
            f"tensor_parallel.plan: '{self._names.get(id(args[1]), 'a layer')}' takes outputs of '{known.weight}' and "
            f"others, joined into {known.num_blocks} blocks, of each of which a rank has a part, and rowwise cuts its "
            f"weight as {max(len(part.blocks), 1)}: use packed_rowwise:{known.num_blocks} for it, or packed_rowwise "
            "with the sizes of the blocks"
        )

    def explain(self, name: str, args: tuple[Any, ...], error: RuntimeError) -> str | None:
        """Return words for an operation on shapes that do not fit: it may have got a part, and count on the whole."""
        if isinstance(error, ShardwellError) or not _MISFIT.search(str(error)):
            return None
        shapes = " and ".join(str(tuple(one.shape)) for one in args if isinstance(one, Tensor))
        return (
            f"tensor_parallel: {name.strip('_')} of {shapes or 'these shapes'} failed: {str(error).splitlines()[0]}. If"
            " the model runs without tensor_parallel, a module counts on a whole tensor of which a rank has a part: "
            "leave the layers around it out of the plan, or leave sequence_parallel out if it is set"
        )

    def after(self, name: str, args: tuple[Any, ...], given: dict[str, Any], found: Any) -> None:
        """Note what layers that are cut by columns have returned."""
        if name == "t" and isinstance(args[0], nn.Parameter):
            self._transposed[found] = args[0]
        elif name == "linear":
            self._note_layer(args[1], found)
        elif name in ("cat", "concat", "concatenate") and isinstance(args[0], tuple | list):
            self._note_joined(args, given, found)
        else:
            tensors = [one for one in args[:3] if isinstance(one, Tensor)]
            cut = next((one for one in tensors if one in self._outputs), None)
            if cut is not None:
                self._note_result(name, cut, args, given, found)

    def _note_result(self, name: str, cut: Tensor, args: tuple[Any, ...], given: dict[str, Any], found: Any) -> None:
        """Note what an operation on a part returned, if it is one."""
        known = self._outputs[cut]
        if name in _DIVISIONS and known.num_blocks > 1:
            for one in found:
                whole = known.whole * one.shape[-1] // cut.shape[-1]
                self._outputs[one] = CutOutput(known.weight, whole, 1, known.num_parts)
        elif not isinstance(found, Tensor):
            return
        elif SAME_PLACES.fullmatch(name) and found.shape == cut.shape:
            self._outputs[found] = known
        elif cut is not args[0] or known.num_blocks > 1:
            return
        elif known.from_end == 1 and keeps_last(name, cut, found):
            self._outputs[found] = known
        elif (at := moved_dimension(name, cut.ndim - known.from_end, args, given)) is not None:
            self._outputs[found] = replace(known, from_end=cut.ndim - at)

    def _note_joined(self, args: tuple[Any, ...], given: dict[str, Any], found: Tensor) -> None:
        """Note that outputs of cut layers were joined along their last dimension, as blocks."""
        parts = [self._outputs.get(one) for one in args[0] if isinstance(one, Tensor)]
        kept = [one for one in parts if one is not None and one.from_end == 1]
        dim = given.get("dim", given.get("axis", args[1] if len(args) > 1 else 0))
        is_last = dim in (-1, found.ndim - 1)
        if is_last and kept and len(kept) == len(parts):
            blocks, whole = sum(one.num_blocks for one in kept), sum(one.whole for one in kept)
            self._outputs[found] = CutOutput(kept[0].weight, whole, blocks, kept[0].num_parts)

    def _note_layer(self, weight: Any, found: Any) -> None:
        is_transposed = isinstance(weight, Tensor) and weight in self._transposed
        parameter = self._transposed[weight] if is_transposed else weight
        if not isinstance(parameter, nn.Parameter) or id(parameter) not in self._names:
            return
        part = part_of(parameter)
        if part is not None and part.dim == int(is_transposed) and part.owner is None:
            name, blocks = self._names[id(parameter)], max(len(part.blocks), 1)
            self._outputs[found] = CutOutput(name, part.shape[part.dim], blocks, part.num_parts)

    def _end(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Let outputs that are parts say so to what the loop does with them, in this forward and in all others."""
        is_first = self._is_looking
        super()._end(module, args, output)
        parts = self._parts_of(output, is_first)
        if not parts:
            return None
        return map_tensors(output, lambda one: part_of_output(one, parts[id(one)]) if id(one) in parts else one)

    def _parts_of(self, output: Any, is_first: bool) -> dict[int, str]:
        """Return what to say of the outputs that are parts, by their ids."""
        kind = self._kinds.kind
        if is_first:
            self._returned[kind] = {
                at: (one.shape[-1], _over_a_part(self._outputs[one]))
                for at, one in enumerate(tensors_in(output))
                if self._is_part(one)
            }
        known = self._returned.get(kind)
        if not known:
            return {}
        return {
            id(one): known[at][1]
            for at, one in enumerate(tensors_in(output))
            if at in known and one.ndim and one.shape[-1] == known[at][0]
        }

    def _is_part(self, tensor: Tensor) -> bool:
        known = self._outputs.get(tensor)
        return known is not None and known.from_end == 1

    # ------------------------------------------------------------------------------------------------------- heads

    def _check_shape(self, asked: list[int], values: Tensor, known: CutOutput) -> None:
        """Raise if a shape divides the last dimension into as many heads as a whole layer has."""
        rows, size = math.prod(values.shape[:-1]), values.shape[-1]
        tail = _last_dimensions(asked, rows, size, known.whole)
        if tail and min(tail) > 0 and math.prod(tail) == known.whole != size:
            raise _misfit(tail[0], asked, known)
        if known.num_blocks > 1 and tail and tail[0] == known.num_blocks:
            tail, size = tail[1:], size // known.num_blocks
        if len(tail) < 2:
            return
        number, rest = tail[0], tail[1:]
        if number == -1:
            if size % math.prod(rest):
                raise ShardwellError(
                    f"tensor_parallel.autotp_size: the output of '{known.weight}' is divided into pieces (heads) of "
                    f"{math.prod(rest)}, of which it has {known.whole // math.prod(rest)}: {known.num_parts} ranks "
                    "cannot share them. Use a number of ranks that divides them"
                )
            return
        sizes, numbers = self._declared(known.weight)
        if number == 1 or size % number or size // number in sizes:
            return
        if -1 in rest or number in numbers:
            raise _misfit(number, asked, known)

    def _declared(self, weight: str) -> tuple[set[int], set[int]]:
        """Return what the modules around a weight, and their configurations, name as sizes and as numbers of heads."""
        sizes: set[int] = set()
        numbers: set[int] = set()
        for module in _around(weight, self._modules):
            for key, value in _numbers_of(module):
                if _SIZE_OF_HEADS.fullmatch(key):
                    sizes.add(value)
                elif _NUMBER_OF_HEADS.fullmatch(key):
                    numbers.add(value)
        return sizes, numbers


def _over_a_part(known: CutOutput) -> str:
    return (
        f"tensor_parallel.plan: {{name}} is over the outputs of '{known.weight}', of which each of "
        f"{known.num_parts} ranks has a part: it would be over this rank's values alone. Cut that layer by "
        "colwise_gather_output, or leave it whole; over a cut vocabulary, "
        "shardwell.tensor_parallel.vocab_parallel_cross_entropy is the loss"
    )


def _misfit(number: int, asked: list[int], known: CutOutput) -> ShardwellError:
    shape, size = ", ".join(map(str, asked)), known.whole // known.num_blocks // number
    return ShardwellError(
        f"tensor_parallel.plan: the output of '{known.weight}', of which each of {known.num_parts} ranks has a part, "
        f"is given the shape ({shape}), with {number} heads (or blocks) as if it were whole, so that each would be a "
        f"part of one. Let their number follow from their size, as in view(..., -1, {size}), or leave the layer whole"
    )


def _around(weight: str, modules: dict[str, nn.Module]) -> Iterator[nn.Module]:
    name = weight
    while name:
        name = name.rpartition(".")[0]
        if name in modules:
            yield modules[name]


def _numbers_of(module: nn.Module) -> Iterator[tuple[str, int]]:
    for owner in (module, getattr(module, "config", None)):
        for key, value in getattr(owner, "__dict__", {}).items():
            if isinstance(value, int) and not isinstance(value, bool):
                yield key, value


def _asked_shape(name: str, values: Tensor, args: tuple[Any, ...], given: dict[str, Any]) -> list[int] | None:
    """Return the shape that a reshape asks for, with -1 where it is to follow; None if it does something else."""
    if name == "unflatten":
        dim, sizes = given.get("dim", args[0] if args else None), given.get("sizes", args[1] if len(args) > 1 else None)
        if dim not in (-1, values.ndim - 1) or not isinstance(sizes, Iterable):
            return None
        return [*values.shape[:-1], *map(int, sizes)]
    wanted = given.get("shape", given.get("size", args[0] if len(args) == 1 else args))
    wanted = wanted if isinstance(wanted, Iterable) else (wanted,)
    found = list(wanted)
    return list(map(int, found)) if all(isinstance(one, int) for one in found) else None


def _last_dimensions(asked: list[int], rows: int, size: int, whole: int) -> list[int]:
    """Return the two or more dimensions of a shape that divide the last one; none if there are none, or rows change."""
    starts = range(len(asked) - 2, 0, -1)
    for start in starts:
        if math.prod(asked[:start]) == rows:
            return asked[start:]
    for product in (size, whole):  # the number of rows is left open
        for start in starts:
            if -1 in asked[:start] and math.prod(asked[start:]) == product:
                return asked[start:]
    return []


def _num_pieces(name: str, values: Tensor, args: tuple[Any, ...], given: dict[str, Any]) -> int:
    """Return into how many blocks an operation divides the last dimension; 1 if it does not."""
    if name == "__getitem__":
        place = args[0] if isinstance(args[0], tuple) else (args[0],)
        reaches_last = len(place) == values.ndim or any(one is Ellipsis for one in place)
        last = place[-1]
        if not reaches_last or not isinstance(last, slice) or last.step not in (None, 1):
            return 1
        taken = len(range(*last.indices(values.shape[-1])))
        return -(-values.shape[-1] // taken) if 0 < taken < values.shape[-1] else 1
    if name == "narrow":
        dim, length = given.get("dim", args[0] if args else 0), given.get("length", args[2] if len(args) > 2 else 0)
        is_part = dim in (-1, values.ndim - 1) and isinstance(length, int) and 0 < length < values.shape[-1]
        return -(-values.shape[-1] // length) if is_part else 1
    if name not in _DIVISIONS:
        return 1
    keys = ("chunks", "tensor_indices_or_sections", "indices_or_sections", "split_size_or_sections", "split_size")
    how = next((given[key] for key in (*keys, "split_sizes", "sections", "indices") if key in given), None)
    how = how if how is not None else args[0] if args else 1
    dim = given.get("dim", args[1] if len(args) > 1 else 0)
    if dim not in (-1, values.ndim - 1):
        return 1
    if isinstance(how, list | tuple):
        return len(how) + (name == "tensor_split")
    if not isinstance(how, int):
        return 1
    return how if name in ("chunk", "tensor_split") else -(-values.shape[-1] // max(how, 1))
