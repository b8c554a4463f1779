"""Expression trees of whole numbers: what a plan says for all ranks and batches, for programs in other languages too.

A tree is a whole number, the name of a variable, or a list of an operator and its trees: "+", "*", "max", "//" (the
floor of a division) and "ceil" (the ceiling of one). `Symbol` has the operators of Python's numbers and makes trees of
them, so that the engine's own arithmetic, called with a symbol, returns its formula.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Tree = int | str | tuple[Any, ...]

# Beyond this, numbers of JSON are not exact everywhere. They become text, which no name can be: it begins with a digit.
_LARGEST = 1 << 53


@dataclass(frozen=True)
class Symbol:
    """A number that is not known yet: operations on it make trees."""

    tree: Tree

    def __add__(self, other: Symbol | int) -> Symbol:
        return Symbol(plus(self.tree, _tree(other)))

    __radd__ = __add__

    def __sub__(self, other: Symbol | int) -> Symbol:
        return Symbol(plus(self.tree, times(-1, _tree(other))))

    def __mul__(self, other: Symbol | int) -> Symbol:
        return Symbol(times(self.tree, _tree(other)))

    __rmul__ = __mul__

    def __neg__(self) -> Symbol:
        tree = self.tree
        if isinstance(tree, tuple) and tree[0] == "//":
            inner = times(-1, tree[1])
            return Symbol(("ceil", inner, tree[2]))
        return Symbol(times(-1, tree))

    def __floordiv__(self, other: Symbol | int) -> Symbol:
        divisor = _tree(other)
        if isinstance(self.tree, tuple) and self.tree[0] == "*" and divisor in self.tree[1:]:
            rest = list(self.tree[1:])
            rest.remove(divisor)
            return Symbol(times(*rest))
        return Symbol(self.tree if divisor == 1 else ("//", self.tree, divisor))


def _tree(value: Symbol | int) -> Tree:
    return value.tree if isinstance(value, Symbol) else value


def plus(*trees: Tree) -> Tree:
    """Return the sum of trees."""
    flat = [one for tree in trees for one in _operands(tree, "+")]
    number = sum(one for one in flat if isinstance(one, int))
    rest = [one for one in flat if not isinstance(one, int)]
    parts = [*rest, *([number] if number or not rest else [])]
    return parts[0] if len(parts) == 1 else ("+", *parts)


def times(*trees: Tree) -> Tree:
    """Return the product of trees."""
    flat = [one for tree in trees for one in _operands(tree, "*")]
    number = math.prod(one for one in flat if isinstance(one, int))
    rest = [one for one in flat if not isinstance(one, int)]
    if number == 0 or not rest:
        return number
    parts = [*([number] if number != 1 else []), *rest]
    return parts[0] if len(parts) == 1 else ("*", *parts)


def largest(*trees: Tree) -> Tree:
    """Return the largest of trees."""
    return trees[0] if len(trees) == 1 else ("max", *trees)


def aligned(tree: Tree, multiple: int) -> Tree:
    """Return a tree, rounded up to a multiple."""
    return times(multiple, ("ceil", tree, multiple))


def _operands(tree: Tree, operator: str) -> tuple[Tree, ...]:
    return tree[1:] if isinstance(tree, tuple) and tree[0] == operator else (tree,)


def evaluate(tree: Tree, values: Mapping[str, int]) -> int:
    """Return the number that a tree is, for values of its variables."""
    if isinstance(tree, int):
        return tree
    if isinstance(tree, str):
        return values[tree]
    operator, *rest = tree
    numbers = [evaluate(one, values) for one in rest]
    if operator == "+":
        return sum(numbers)
    if operator == "*":
        return math.prod(numbers)
    if operator == "max":
        return max(numbers)
    if operator == "//":
        return numbers[0] // numbers[1]
    if operator == "ceil":
        return -(-numbers[0] // numbers[1])
    raise ValueError(f"a tree with the operator {operator!r}: expected +, *, max, // or ceil")


def as_json(tree: Tree) -> Any:
    """Return a tree as values of JSON; a number that is too large for other languages' numbers is text."""
    if isinstance(tree, int):
        return tree if abs(tree) < _LARGEST else str(tree)
    if isinstance(tree, str):
        return tree
    return [tree[0], *(as_json(one) for one in tree[1:])]
