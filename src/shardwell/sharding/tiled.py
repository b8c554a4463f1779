"""A linear layer as a grid of smaller ones, so that a sharded layer larger than the device is never unsharded.

`wrap_model` makes each tile a unit. A tile is all-gathered for its own product and resharded after it.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from shardwell.errors import ShardwellError
from shardwell.sharding.gathered_parameters import GatheredParameters


class TiledLinear(nn.Module):
    """The function of `nn.Linear(in_features, out_features)`, computed by `out_splits` x `in_splits` smaller linears.

    `linears[o][i]` maps part i of the input to part o of the output. The parts of a split differ by one element at
    most. The last tile of each row of the grid holds that row's bias. `init_linear` gives the initial values.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Linear | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        self.in_sizes = _even(in_features, in_splits, "in_splits")
        self.out_sizes = _even(out_features, out_splits, "out_splits")
        self.linears = nn.ModuleList()
        for rows in self.out_sizes:
            row = nn.ModuleList()
            for index, columns in enumerate(self.in_sizes):
                row.append(linear_cls(columns, rows, bias=bias and index == in_splits - 1, **kwargs))
            self.linears.append(row)
        if init_linear is not None:
            self.copy_params_from(init_linear)

    @classmethod
    def from_linear(cls, linear: nn.Linear, in_splits: int = 1, out_splits: int = 1, **kwargs: Any) -> TiledLinear:
        """Return a tiled layer with the values, dtype, device and trainability of `linear`."""
        weight, bias = linear.weight, linear.bias
        kwargs = {"device": weight.device, "dtype": weight.dtype, "init_linear": linear, **kwargs}
        tiled = cls(linear.in_features, linear.out_features, bias is not None, in_splits, out_splits, **kwargs)
        for tile in tiled.tiles():
            tile.weight.requires_grad_(weight.requires_grad)
            if tile.bias is not None:
                tile.bias.requires_grad_(bias.requires_grad)
        return tiled.train(linear.training)

    @property
    def in_parts(self) -> list[int]:
        """The first input of each column of tiles, and the number of inputs."""
        return [0, *accumulate(self.in_sizes)]

    @property
    def out_parts(self) -> list[int]:
        """The first output of each row of tiles, and the number of outputs."""
        return [0, *accumulate(self.out_sizes)]

    def tiles(self) -> list[Any]:
        """Return all tiles, in the order in which forward uses them."""
        return [tile for row in self._rows() for tile in row]

    def _rows(self) -> list[list[Any]]:
        return [list(row.children()) for row in self.linears]

    def forward(self, input_: Tensor | Sequence[Tensor]) -> Tensor | list[Tensor]:
        """Apply the layer; the output is a list of parts unless `combine_out_splits` is set."""
        outputs = [sum(products[1:], products[0]) for products in self._products(input_)]
        return torch.cat(outputs, dim=-1) if self.combine_out_splits else outputs

    def _products(self, input_: Tensor | Sequence[Tensor]) -> Iterator[list[Any]]:
        """Yield what the tiles of each row return."""
        inputs = self._parts(input_)
        for row in self._rows():
            # Each tile gets a view of its own: the gradient of the view is known as soon as the tile's backward is
            # over, and the tile can be resharded. The gradient of `part` is known only after the last row.
            yield [tile(part.view_as(part)) for tile, part in zip(row, inputs, strict=True)]

    def _parts(self, input_: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
        parts = [input_] if isinstance(input_, Tensor) and self.in_splits == 1 else input_
        if isinstance(parts, Tensor):
            if self.input_is_already_split:
                raise ShardwellError(f"{self}: expected {self.in_splits} parts of the input, found one tensor")
            parts = torch.split(parts, self.in_sizes, dim=-1)
        found = [part.shape[-1] for part in parts]
        if found != self.in_sizes:
            raise ShardwellError(f"{self}: expected inputs of width {self.in_sizes}, found {found}")
        return parts

    @torch.no_grad()
    def copy_params_from(self, other: nn.Linear) -> None:
        """Copy the values of a layer of the same size, tile by tile."""
        mine = self.in_features, self.out_features, self.tiles()[-1].bias is not None
        theirs = other.in_features, other.out_features, other.bias is not None
        if mine != theirs:
            raise ShardwellError(f"cannot copy a layer of (in, out, bias) {theirs} into a tiled one of {mine}")
        with GatheredParameters(other.parameters()):  # `zero.Init` may have sharded it
            for row, (top, bottom) in zip(self._rows(), _edges(self.out_sizes), strict=True):
                for tile, (left, right) in zip(row, _edges(self.in_sizes), strict=True):
                    tile.weight.copy_(other.weight[top:bottom, left:right])
                    if tile.bias is not None:
                        tile.bias.copy_(other.bias[top:bottom])

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"

    def __str__(self) -> str:
        return f"TiledLinear({self.extra_repr()}, in_splits={self.in_splits}, out_splits={self.out_splits})"


def tile_linears(model: nn.Module, most_elements: int) -> nn.Module:
    """Replace every `nn.Linear` of `model` whose weight has more than `most_elements` by a `TiledLinear`.

    The output is split first, then the input, until no tile's weight has more elements. Call it before `initialize`.
    Subclasses of `nn.Linear` are left unchanged, and so are tied weights, with a warning. Code that reads the `weight`
    of a tiled layer breaks.
    """
    if most_elements < 1:
        raise ShardwellError(f"tile_linears(most_elements={most_elements}): expected at least 1")
    owners: defaultdict[int, set[int]] = defaultdict(set)  # parameter -> modules that hold it
    places: defaultdict[int, list[tuple[nn.Module, str]]] = defaultdict(list)  # linear -> its parents and names
    root = nn.ModuleList([model])
    for parent in root.modules():
        for parameter in parent.parameters(recurse=False):
            owners[id(parameter)].add(id(parent))
        for name, child in parent._modules.items():
            if type(child) is nn.Linear and child.weight.numel() > most_elements:
                places[id(child)].append((parent, name))
    for stands in places.values():
        linear = stands[0][0]._modules[stands[0][1]]
        assert isinstance(linear, nn.Linear)
        if any(len(owners[id(parameter)]) > 1 for parameter in linear.parameters()):
            warnings.warn(f"{stands[0][1]} is not tiled: other modules share its parameters", stacklevel=2)
            continue
        tiled = _tiled(linear, most_elements)
        for parent, name in stands:
            parent.register_module(name, tiled)
    return root[0]


def _tiled(linear: nn.Linear, most_elements: int) -> TiledLinear:
    rows = max(most_elements // linear.in_features, 1)
    out_splits = -(-linear.out_features // rows)
    in_splits = -(-linear.in_features // most_elements)  # more than one only if a single row is too long
    return TiledLinear.from_linear(linear, in_splits, out_splits)


def _even(size: int, splits: int, what: str) -> list[int]:
    if not 1 <= splits <= size:
        raise ShardwellError(f"TiledLinear({what}={splits}): expected between 1 and {size}, the size that is split")
    return [size // splits + (index < size % splits) for index in range(splits)]


def _edges(sizes: list[int]) -> list[tuple[int, int]]:
    ends = list(accumulate(sizes))
    return [(end - size, end) for end, size in zip(ends, sizes, strict=True)]
