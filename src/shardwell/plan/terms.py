"""The size of one buffer as a term: a number of bytes times elements of a group, tokens, or nothing that varies.

Elements come from the engine's own arithmetic, called with symbols: `make_layout` for shards, `Codec` for quantised
rows. Which of them a buffer has is found by its sizes in several simulations; sizes that no term explains are an error.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

from shardwell.errors import ShardwellError
from shardwell.kernels.quantize import Codec, Kind
from shardwell.plan.trees import Symbol, Tree, aligned, evaluate, plus, times
from shardwell.sharding.layout import TensorSpec, make_layout

BLOCK = 512  # bytes: to which the allocator rounds activations
SEQUENCE = 256  # tokens: forms are for multiples of it, of which activations mostly are whole blocks
_ROUNDINGS = (64, 512, 4096)  # bytes: to which buffers in host memory and on disk are rounded
_BYTES = (1, 2, 4, 6, 8, 10, 12, 14, 16)  # of an element, in all states that one buffer may have
_COUNTS = (1, 2, 3, 4)  # of tensors that one buffer holds, each rounded up
_SMALL = 256  # bytes: of counters and flags that come with the state of a unit
_MOST_GROUPS = 3  # of a unit whose state is counted as one sum

Terms = dict[Tree, int]  # trees, each with its factor


class NoFormError(ShardwellError):
    """A structure class has no form that holds: a size that no term explains, or another number in a simulation."""


@dataclass(frozen=True)
class Point:
    """A point at which a model is simulated."""

    nodes: int
    per_node: int
    batch: int
    sequence: int
    depth: int

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.nodes * self.per_node

    def values(self) -> dict[str, int]:
        """Return the variables of trees."""
        return {
            "nodes": self.nodes,
            "per_node": self.per_node,
            "ranks": self.ranks,
            "batch": self.batch,
            "sequence": self.sequence,
            "depth": self.depth,
        }


def shard_tree(numel: Tree) -> Tree:
    """Return the elements of a shard, by the engine's own layout of a flat buffer of so many elements."""
    spec = TensorSpec("", cast(Any, (Symbol(numel),)), stride=(1,), is_aligned=True)
    layout = make_layout([spec], cast(Any, Symbol("ranks")))
    return cast(Symbol, cast(Any, layout.padded) // Symbol("ranks")).tree


@functools.cache
def _rows(shard: str) -> tuple[Tree, ...]:
    """Return the elements that one buffer of a group may have: of one shard, of one for each node, of all shards."""
    return shard, times("nodes", shard), times("ranks", shard)


@functools.cache
def _coded(shard: str) -> tuple[Tree, ...]:
    """Return the bytes of rows that a codec may have made of a group."""
    found = []
    for kind in get_args(Kind):
        for elements, counts in ((shard, (1, "nodes", "ranks")), (times("nodes", shard), (1, "per_node"))):
            size = cast(Symbol, cast(Any, Codec(kind).num_bytes)(Symbol(elements))).tree
            found += [times(count, size) for count in counts]
    return tuple(dict.fromkeys(found))


_PEERS: tuple[Tree, ...] = (  # of which a rank receives
    plus("per_node", -1), plus("nodes", -1), plus("ranks", times(-1, "per_node")), plus("ranks", -1)
)  # fmt: skip
_TOKENS: tuple[Tree, ...] = (times("batch", "sequence"), "sequence", "batch")


@dataclass
class Sizes:
    """Values of trees at the points of several simulations, and the terms of sizes that were seen there."""

    points: Sequence[dict[str, int]]  # values of all variables, shards included
    by_depth: dict[int, Tree]  # sizes that are one number at all points, and another one at another depth

    def __post_init__(self) -> None:
        self._values: dict[Tree, tuple[int, ...]] = {}

    def of(self, tree: Tree) -> tuple[int, ...]:
        """Return the values of a tree."""
        if tree not in self._values:
            self._values[tree] = tuple(evaluate(tree, point) for point in self.points)
        return self._values[tree]

    # ------------------------------------------------------------------------------------------------ single terms

    def _exact(self, sizes: tuple[int, ...], trees: Sequence[Tree], factors: Sequence[int] = ()) -> Terms | None:
        for tree in trees:
            values = self.of(tree)
            factor, rest = divmod(sizes[0], values[0]) if values[0] else (0, 1)
            if rest or (factors and factor not in factors):
                continue
            if all(factor * value == size for value, size in zip(values, sizes, strict=True)):
                return {tree: factor}
        return None

    def _constant(self, sizes: tuple[int, ...]) -> Terms | None:
        if len(set(sizes)) > 1:
            return None
        tree = self.by_depth.get(sizes[0])
        return {1: sizes[0]} if tree is None else {tree: 1}

    def _rounded(self, sizes: tuple[int, ...], trees: Sequence[Tree], block: int) -> Terms | None:
        """Return a term that is rounded up to a multiple of a block."""
        if any(size % block for size in sizes):
            return None
        for count, tree, factor in itertools.product(_COUNTS, trees, _BYTES):
            pairs = zip(self.of(tree), sizes, strict=True)
            if all(count * (-(-factor * value // block) * block) == size for value, size in pairs):
                return {aligned(times(factor, tree), block): count}
        return None

    def activation(self, sizes: tuple[int, ...], shards: Sequence[str]) -> Terms:
        """Return the term of an activation, or of a gradient or temporary that the engine does not count."""
        rows = [row for shard in shards for row in _rows(shard)]
        coded = [row for shard in shards for row in _coded(shard)]
        found = (
            self._exact(sizes, rows[2::3], _BYTES)
            or self._constant(sizes)
            or self._exact(sizes, _TOKENS)
            or self._exact(sizes, rows, _BYTES)
            or self._exact(sizes, coded, (1, 2))
        )
        if not found:
            raise _refused(sizes)
        ((tree, factor),) = found.items()
        if tree == 1:
            return {1: -(-factor // BLOCK) * BLOCK}
        is_whole = factor % BLOCK == 0 or (tree in _TOKENS[:2] and factor * SEQUENCE % BLOCK == 0)
        return found if is_whole else {aligned(times(factor, tree), BLOCK): 1}

    def buffer(self, sizes: tuple[int, ...], own: Sequence[str], shards: Sequence[str], *, is_staging: bool) -> Terms:
        """Return the terms of a buffer of the engine's, which mostly has a shape of its own unit's groups.

        Staging buffers are rounded, and no sums: a few points may not tell a shard and 32 bytes from a rounded one.
        """
        for names in (own, shards):
            rows = [row for shard in names for row in _rows(shard)]
            coded = [row for shard in names for row in _coded(shard)]
            found = self._exact(sizes, rows, _BYTES) or self._exact(sizes, coded, (1, 2))
            if found:
                return found
        found = self._constant(sizes) or (None if is_staging else self._sum(sizes, own))
        for block, names in itertools.product(_ROUNDINGS, (own, shards)):
            found = found or self._rounded(sizes, [row for one in names for row in _rows(one)], block)
        found = found or (self._sum(sizes, own) if is_staging else None)
        if not found:
            raise _refused(sizes)
        return found

    def received(self, sizes: tuple[int, ...], shards: Sequence[str]) -> Terms:
        """Return the term of what a rank receives in a collective: so much from each of its peers."""
        for peers in _PEERS:
            rows = [times(peers, row) for shard in shards for row in _rows(shard)]
            coded = [times(peers, row) for shard in shards for row in _coded(shard)]
            found = self._exact(sizes, rows, _BYTES) or self._exact(sizes, coded, (1,)) or self._exact(sizes, [peers])
            if found:
                return found
        found = self._constant(sizes)
        if not found:
            raise _refused(sizes)
        return found

    # ------------------------------------------------------------------------------------------------ sums of terms

    def _sum(self, sizes: tuple[int, ...], own: Sequence[str]) -> Terms | None:
        """Return the fewest terms of what is counted as one sum for a unit, such as an optimizer's state."""
        if not 0 < len(own) <= _MOST_GROUPS:
            return None
        for factors in _combinations(len(own)):
            trees = [row for shard, place in zip(own, factors, strict=True) for row in (_rows(shard)[place[1]],)]
            amounts = [
                sum(factor * self.of(tree)[at] for (factor, _), tree in zip(factors, trees, strict=True))
                for at in range(len(sizes))
            ]
            rest = {size - amount for size, amount in zip(sizes, amounts, strict=True)}
            if len(rest) == 1 and 0 <= min(rest) <= _SMALL:
                found: Terms = {tree: factor for (factor, _), tree in zip(factors, trees, strict=True) if factor}
                return found | ({1: rest.pop()} if min(rest) else {})
        return None


def _combinations(count: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield for each of several groups the bytes of an element, and which of its rows has them."""
    choices = [(0, 0), *((factor, place) for place in (0, 2, 1) for factor in _BYTES)]
    yield from sorted(itertools.product(choices, repeat=count), key=lambda one: sum(factor > 0 for factor, _ in one))


def _refused(sizes: tuple[int, ...]) -> NoFormError:
    return NoFormError(
        f"a buffer has {', '.join(f'{size:,}' for size in sizes)} bytes in simulations, which no term explains"
    )
