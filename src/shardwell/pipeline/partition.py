"""How the layers of a model are divided into stages: what each layer costs, and where the borders are.

A stage's time follows the FLOPs of its layers, and its memory follows their parameters. `best` makes the slowest stage
as fast as possible, and of the divisions that do so takes the one whose largest stage is smallest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from shardwell.errors import ConfigError


@dataclass(frozen=True)
class LayerCost:
    """The parameters of a layer, and the FLOPs of its forward for one token."""

    parameters: int
    flops: int

    def __add__(self, other: LayerCost) -> LayerCost:
        return LayerCost(self.parameters + other.parameters, self.flops + other.flops)


NOTHING = LayerCost(0, 0)


def cost_of(modules: Iterable[nn.Module]) -> LayerCost:
    """Return what modules cost: a matrix takes two FLOPs per element and token, and a row of an embedding is copied.

    Parameters that are used twice count once, but their FLOPs count each time. The part of attention that grows with
    the sequence is the same in every block, and is not counted.
    """
    seen: set[int] = set()
    parameters = flops = 0
    for module in modules:
        for inner in module.modules():
            for parameter in inner.parameters(recurse=False):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    parameters += parameter.numel()
                if parameter.ndim >= 2 and not isinstance(inner, nn.Embedding | nn.EmbeddingBag):
                    flops += 2 * parameter.numel()
    return LayerCost(parameters, flops)


def divide(method: str, costs: Sequence[LayerCost], classes: Sequence[str], num_stages: int) -> list[int]:
    """Return the index of the first layer of each stage, and at the end the number of layers.

    The methods are `best`, and DeepSpeed's: `parameters`, `uniform` and `type:REGEX`, by which each stage gets the same
    number of layers whose class matches.
    """
    if num_stages > len(costs):
        raise ConfigError(
            f"pipeline: {num_stages} stages (stages x chunks) need at least as many layers, and the model has "
            f"{len(costs)} to divide. Use fewer stages."
        )
    if method == "best":
        return _balanced([(cost.flops, cost.parameters) for cost in costs], num_stages)
    if method == "parameters":
        return _balanced([(cost.parameters, cost.flops) for cost in costs], num_stages)
    if method == "uniform":
        return _balanced([(1, 0)] * len(costs), num_stages)
    kind, _, pattern = method.partition(":")
    if kind != "type" or not pattern:
        raise ConfigError(f"pipeline.partition: expected best, parameters, uniform or type:REGEX, found '{method}'")
    matches = [bool(re.search(pattern, name, re.IGNORECASE)) for name in classes]
    if sum(matches) < num_stages:
        raise ConfigError(
            f"pipeline.partition: '{method}' matches {sum(matches)} of the layers, and there are {num_stages} stages. "
            f"The classes are {', '.join(sorted(set(classes)))}."
        )
    return _balanced([(int(found), cost.flops) for found, cost in zip(matches, costs, strict=True)], num_stages)


def _balanced(weights: Sequence[tuple[int, int]], num_stages: int) -> list[int]:
    """Divide so that the largest first weight is smallest, then the largest second weight; no stage is empty."""
    first = _smallest_largest([one for one, _ in weights], num_stages)
    limit = max(sum(one for one, _ in weights[a:b]) for a, b in pairwise(first))
    return _smallest_largest([two for _, two in weights], num_stages, ([one for one, _ in weights], limit))


def _smallest_largest(
    weights: Sequence[int], num_stages: int, bounded: tuple[Sequence[int], int] | None = None
) -> list[int]:
    """Return the borders of the division whose largest part is smallest; `bounded` weights of a part have a limit."""
    count = len(weights)
    sums, bounded_sums = _sums(weights), _sums(bounded[0] if bounded else [0] * count)
    limit = bounded[1] if bounded else 0
    best: list[list[float]] = [[float("inf")] * (count + 1) for _ in range(num_stages + 1)]
    begin = [[0] * (count + 1) for _ in range(num_stages + 1)]
    best[0][0] = 0.0
    for parts in range(1, num_stages + 1):
        for end in range(parts, count + 1):
            for start in range(parts - 1, end):
                if bounded_sums[end] - bounded_sums[start] > limit:
                    continue
                largest = max(best[parts - 1][start], float(sums[end] - sums[start]))
                if largest < best[parts][end]:
                    best[parts][end], begin[parts][end] = largest, start
    borders = [count]
    for parts in range(num_stages, 0, -1):
        borders.append(begin[parts][borders[-1]])
    return borders[::-1]


def _sums(weights: Sequence[int]) -> list[int]:
    sums = [0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    return sums
