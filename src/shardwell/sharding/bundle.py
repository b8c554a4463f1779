"""Fewer and larger units: bundles of small neighbours, and small parameters that all belong to the root unit.

A collective has a latency, which decides where units are small, and every unit costs the host some Python. So small
blocks that follow one another in a container become one unit, a bundle: it is unsharded before the first of its modules
runs and resharded after the last. Parameters that stay unsharded (persistent ones: norms and biases) are all in the
root unit, so that one reduce-scatter and one all-gather serve all of them.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from torch import nn

from shardwell.sharding.tensor_part import numel_on_all
from shardwell.sharding.wrap import UnitSpec

LARGEST_BUNDLE = 1 << 22  # elements: 8 MiB in 16 bits, beyond which the latency of a collective does not count
SMALLEST_SHARE = 32  # a bundle is at most this part of the model, so that little of it is unsharded at a time
_IN_ORDER = (nn.ModuleList, nn.Sequential)  # containers whose children run one after the other, as a rule


def bundle_neighbours(model: nn.Module, specs: list[UnitSpec], most: int) -> list[UnitSpec]:
    """Join units of neighbouring children of a container, as long as a bundle has at most `most` elements.

    Units that the user named, tiles, and units that contain others stay alone.
    """
    modules = dict(model.named_modules())
    found: list[UnitSpec] = []
    names: list[str] = []  # of the first module of each unit in `found`
    for number, one in enumerate(specs):
        container = _container(one, specs[number + 1 : number + 2], modules)
        if container is not None and found and _container(found[-1], [], modules, names[-1]) is container:
            joined = _joined(found[-1], names[-1], one)
            if joined.numel <= most:
                found[-1] = joined
                continue
        found.append(one)
        names.append(one.name)
    return found


def _container(
    one: UnitSpec, after: list[UnitSpec], modules: dict[str, nn.Module], name: str | None = None
) -> nn.Module | None:
    """Return the container in which a unit may be bundled; None if it must stay alone."""
    name = one.name if name is None else name
    contains_next = any(other.name.startswith(one.name + ".") for other in after)
    if not name or one.is_tile or one.is_user_unit or contains_next:
        return None
    parent = modules.get(name.rpartition(".")[0])
    return parent if isinstance(parent, _IN_ORDER) else None


def _joined(first: UnitSpec, its_name: str, one: UnitSpec) -> UnitSpec:
    """Return a bundle with one more unit."""
    return replace(
        first,
        name=f"{its_name}-{one.name.rpartition('.')[2]}",
        parameters=[*first.parameters, *one.parameters],
        followers=(*first.followers, one.module),
    )


def gather_in_root(model: nn.Module, specs: list[UnitSpec], persistent: Set[int]) -> list[UnitSpec]:
    """Let the root unit own the persistent parameters (by id) of other units, the smallest first, up to a bundle.

    Of units that the user named it owns none: ranks may use different parts of these, so they alone say whether they
    are reduced.
    """
    moved = _smallest([p for one in specs if one.name and not one.is_user_unit for p in one.parameters], persistent)
    if not moved:
        return specs
    kept: list[UnitSpec] = []
    for one in specs:
        staying = [pair for pair in one.parameters if id(pair[1]) not in moved]
        if staying:
            kept.append(one if len(staying) == len(one.parameters) else replace(one, parameters=staying))
    parameters = [pair for one in specs for pair in one.parameters if id(pair[1]) in moved]
    if kept and not kept[0].name:
        return [replace(kept[0], parameters=[*kept[0].parameters, *parameters]), *kept[1:]]
    return [UnitSpec("", model, parameters), *kept]


def _smallest(parameters: list[tuple[str, nn.Parameter]], chosen: Set[int]) -> set[int]:
    """Return the ids of the smallest of the `chosen` parameters, as many as a bundle may have."""
    found, total = set(), 0
    for _, parameter in sorted(parameters, key=lambda pair: numel_on_all(pair[1])):
        if id(parameter) in chosen:
            total += numel_on_all(parameter)
            if total > LARGEST_BUNDLE:
                break
            found.add(id(parameter))
    return found
