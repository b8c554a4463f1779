"""Parameters that are parts of larger tensors: which part, by a record that a parameter carries.

The layers of `tensor_parallel/` write the record; Megatron's attributes (`tensor_model_parallel`, `partition_dim`,
`partition_stride`, `sequence_parallel`) are read as one. Everything else of the engine treats the part as an ordinary
parameter.

A tensor may be packed of blocks along the dimension that is cut (gate and up projection in one matrix, say). Then each
block is cut, and a part holds its part of each block, one after the other:

    tensor    | gate 0 | gate 1 | up 0 | up 1 |
    part 1    | gate 1 | up 1 |
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwell.errors import ShardwellError
from shardwell.sharding import released

_RECORD, _PARTIAL = "_shardwell_part", "sequence_parallel"


@dataclass(frozen=True)
class TensorPart:
    """The place of a parameter in a larger tensor, which is cut along one dimension."""

    shape: tuple[int, ...]  # ND, of the whole tensor
    dim: int  # that is cut
    num_parts: int
    index: int  # of this part
    blocks: tuple[int, ...] = ()  # sizes of the blocks that are packed along the dimension; empty: it is one block
    owner: int | None = None  # the part that is the whole tensor, where all others are empty: one of listed experts

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Return the half-open ranges along the dimension that this part holds, one for each block."""
        return self.ranges_of(self.index)

    def ranges_of(self, index: int) -> list[tuple[int, int]]:
        """Return the half-open ranges along the dimension that part `index` holds. Last parts may be smaller."""
        if self.owner is not None:
            size = self.shape[self.dim]
            return [(0, size) if index == self.owner else (size, size)]
        found, first = [], 0
        for size in self.blocks or (self.shape[self.dim],):
            step = -(-size // self.num_parts)
            found.append((first + min(index * step, size), first + min((index + 1) * step, size)))
            first += size
        return found

    def shape_of(self, index: int) -> tuple[int, ...]:
        """Return the shape (ND) of part `index`."""
        size = sum(end - start for start, end in self.ranges_of(index))
        return (*self.shape[: self.dim], size, *self.shape[self.dim + 1 :])

    @property
    def offset(self) -> tuple[int, ...]:
        """Return where in the whole tensor (ND) a part without blocks begins."""
        return (*(0,) * self.dim, self.ranges[0][0], *(0,) * (len(self.shape) - self.dim - 1))

    @property
    def is_even(self) -> bool:
        """Whether all parts have the same shape."""
        return self.shape_of(self.num_parts - 1) == self.shape_of(0)

    def cut(self, whole: Tensor) -> Tensor:
        """Return this part of the whole tensor: a view if it is one range, else a copy."""
        parts = [whole.narrow(self.dim, start, end - start) for start, end in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def join(self, parts: list[Tensor]) -> Tensor:
        """Return the whole tensor of all its parts, in order."""
        whole = parts[0].new_empty(self.shape)
        for index, part in enumerate(parts):
            at = 0
            for start, end in self.ranges_of(index):
                whole.narrow(self.dim, start, end - start).copy_(part.narrow(self.dim, at, end - start))
                at += end - start
        return whole


def part_of(parameter: Any) -> TensorPart | None:
    """Return which part of a larger tensor a parameter is; None if it is a whole one."""
    record: TensorPart | None = parameter.__dict__.get(_RECORD)
    return record


def numel_on_all(parameter: nn.Parameter) -> int:
    """Return a number of elements by which all ranks decide alike: of a part, that of the first one that has any."""
    part = part_of(parameter)
    return parameter.numel() if part is None else math.prod(part.shape_of(part.owner or 0))


def mark_part(parameter: nn.Parameter, part: TensorPart | None) -> None:
    """Record which part of a larger tensor a parameter is, or that it is a whole one again."""
    if part is None:
        parameter.__dict__.pop(_RECORD, None)
    else:
        parameter.__dict__[_RECORD] = part


def mark_partial(parameter: nn.Parameter, is_partial: bool = True) -> None:
    """Record whether each rank of the tensor axis computes a part of the gradient, and their sum is the gradient."""
    parameter.__dict__[_PARTIAL] = is_partial


def is_partial(parameter: Any) -> bool:
    """Return whether each rank of the tensor axis computes a part of the parameter's gradient."""
    return bool(parameter.__dict__.get(_PARTIAL, False))


def check_parts(model: nn.Module, num_parts: int) -> None:
    """Refuse a model whose parameters are parts for another number of ranks than those of the tensor axis."""
    for name, parameter in model.named_parameters():
        part = part_of(parameter)
        if part is not None and part.num_parts != num_parts:
            raise ShardwellError(
                f"parameter '{name}' is one of {part.num_parts} parts, and the tensor axis has {num_parts} rank(s): "
                "end the engine that cut it with destroy(), which makes it whole, before the model is handed over again"
            )


def is_marked(parameter: Any) -> bool:
    """Return whether Megatron's attributes say that a parameter is a part."""
    marks = parameter.__dict__
    return bool(marks.get("tensor_model_parallel") or marks.get("model_parallel"))


def read_megatron_marks(model: nn.Module, num_parts: int, index: int) -> int:
    """Record the parts that Megatron's attributes name; return the number of parameters with a record."""
    count = 0
    for name, parameter in model.named_parameters():
        if part_of(parameter) is None and is_marked(parameter):
            mark_part(parameter, _of_marks(name, parameter, num_parts, index))
        count += part_of(parameter) is not None
    return count


def _of_marks(name: str, parameter: nn.Parameter, num_parts: int, index: int) -> TensorPart:
    if released.is_owned(parameter):
        raise ShardwellError(
            f"parameter '{name}' is marked as a part of a larger tensor, and was built in zero.Init, which gives all "
            "ranks the values of the first: build such a model outside of it, or whole, with a tensor_parallel.plan"
        )
    dim, stride = parameter.__dict__.get("partition_dim"), int(parameter.__dict__.get("partition_stride", 1))
    if not isinstance(dim, int) or not 0 <= dim < parameter.ndim:
        raise ShardwellError(
            f"parameter '{name}' is marked as a part of a larger tensor, and its partition_dim is {dim!r}: set the "
            "dimension that is cut, as Megatron does"
        )
    size = parameter.shape[dim] * num_parts
    shape = (*parameter.shape[:dim], size, *parameter.shape[dim + 1 :])
    return TensorPart(shape, dim, num_parts, index, (size // stride,) * stride if stride > 1 else ())
