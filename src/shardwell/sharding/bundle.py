"""Fewer and larger units: bundles of small neighbours, and small parameters that all belong to the root unit.

A collective has a latency, which decides where units are small, and every unit costs the host some Python. So small
blocks that follow one another in a container become one unit, a bundle: it is unsharded before the first of its modules
runs and resharded after the last. Parameters that stay unsharded (persistent ones: norms and biases) are all in the
root unit, so that one reduce-scatter and one all-gather serve all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Set
from dataclasses import replace

from torch import nn

from shardwell.memory.machine import SimulatedBlocks
from shardwell.sharding.tensor_part import numel_on_all
from shardwell.sharding.wrap import UnitSpec

LARGEST_BUNDLE = 1 << 22  # elements: 8 MiB in 16 bits, beyond which the latency of a collective does not count
SMALLEST_SHARE = 32  # a bundle is at most this part of the model, so that little of it is unsharded at a time
NamedParameter = tuple[str, nn.Parameter]
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
        if container is not None and found and _follows(found[-1], names[-1], one, container, modules):
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


def _follows(last: UnitSpec, its_name: str, one: UnitSpec, container: nn.Module, modules: dict[str, nn.Module]) -> bool:
    """Return whether a unit may join the last one: in the same container, with no module of another stage between.

    The layers of a rank on both sides of such a module are of different pipeline stages, which do not run together.
    """
    if _container(last, [], modules, its_name) is not container:
        return False
    children = list(container.children())
    start, end = (children.index(module) for module in (last.modules[-1], one.module))
    return not any(getattr(module, "is_elsewhere", False) for module in children[start:end])


def _joined(first: UnitSpec, its_name: str, one: UnitSpec) -> UnitSpec:
    """Return a bundle with one more unit."""
    return replace(
        first,
        name=f"{its_name}-{one.name.rpartition('.')[2]}",
        parameters=[*first.parameters, *one.parameters],
        followers=(*first.followers, one.module),
    )


def gather_in_root(
    model: nn.Module, specs: list[UnitSpec], persistent: Set[int], blocks: SimulatedBlocks | None = None
) -> list[UnitSpec]:
    """Let the root unit own the persistent parameters (by id) of other units, the smallest first, up to a bundle.

    Parameters of one size go together, so that the blocks of a model stay alike.

    Of units that the user named it owns none: ranks may use different parts of these, so they alone say whether they
    are reduced.
    """
    others = [p for one in specs if one.name and not one.is_user_unit for p in one.parameters]
    moved = _smallest([pair for pair in others if id(pair[1]) in persistent], blocks)
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


def _smallest(parameters: list[NamedParameter], blocks: SimulatedBlocks | None) -> set[int]:
    """Return the ids of the smallest parameters: of as many sizes as a bundle has room for."""
    found: set[int] = set()
    total = 0
    for pairs in sizes_of_parameters(parameters).values():
        total += numel_of(pairs, blocks)
        if total > LARGEST_BUNDLE:
            break
        found |= {id(parameter) for _, parameter in pairs}
    return found


def sizes_of_parameters(parameters: Iterable[NamedParameter]) -> dict[int, list[NamedParameter]]:
    """Return parameters by their elements on all ranks, the smallest first."""
    found: defaultdict[int, list[NamedParameter]] = defaultdict(list)
    for pair in parameters:
        found[numel_on_all(pair[1])].append(pair)
    return dict(sorted(found.items()))


def numel_of(parameters: Iterable[NamedParameter], blocks: SimulatedBlocks | None) -> int:
    """Return the elements of parameters; where few blocks are simulated, those of all blocks."""
    sizes = [(name, numel_on_all(parameter)) for name, parameter in parameters]
    return sum(numel for _, numel in sizes) if blocks is None else blocks.on_all(sizes)
