"""Wrapping a model into units: which module owns which parameters.

By default every block of a repeated container is a unit, every embedding or other large leaf outside the blocks is a
unit, and the rest is the root unit. Named classes, names and name suffixes override that. The tiles of a `TiledLinear`
are units wherever they are, except inside a unit that was named. A parameter that several units share belongs to their
nearest common ancestor unit only.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from torch import nn

from shardwell.errors import ConfigError
from shardwell.sharding.tensor_part import numel_on_all
from shardwell.sharding.tiled import TiledLinear

_REPEATED = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_LEAF_SHARE = 0.25  # a leaf outside the blocks is a unit from this share of the largest block


@dataclass(frozen=True)
class LeafRules:
    """The classes, names and name suffixes of modules that the user wants as units."""

    classes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    suffixes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.classes or self.names or self.suffixes)

    def match(self, name: str, module: nn.Module) -> bool:
        """Return whether the user wants this module as one unit."""
        if is_leaf(module):
            return True
        kinds = {kind.__name__ for kind in type(module).__mro__}
        kinds |= {f"{kind.__module__}.{kind.__qualname__}" for kind in type(module).__mro__}
        return (
            name in self.names
            or any(name == suffix or name.endswith("." + suffix) for suffix in self.suffixes)
            or not kinds.isdisjoint(self.classes)
        )


def set_leaf(module: nn.Module, flag: bool = True) -> None:
    """Mark a module as one unit from code, as `leaf_module` does in the configuration."""
    module._shardwell_leaf = flag  # type: ignore[assignment]


def is_leaf(module: nn.Module) -> bool:
    """Return whether `set_leaf` marked the module."""
    return bool(module.__dict__.get("_shardwell_leaf", False))


@dataclass(frozen=True)
class UnitSpec:
    """A unit to be built: a module, and the names and parameters that it owns."""

    name: str
    module: nn.Module
    parameters: list[tuple[str, nn.Parameter]]
    is_tile: bool = False  # recomputation does not keep it for its backward: it is all-gathered again
    is_user_unit: bool = False  # the user named it as a leaf: ranks may use different parts of it, or none
    followers: tuple[nn.Module, ...] = ()  # of a bundle: the modules that run after `module`, in their order

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """Return the modules whose forwards use the unit: one, or those of a bundle."""
        return (self.module, *self.followers)

    @property
    def numel(self) -> int:
        """Return the number of elements of all parameters."""
        return sum(numel_on_all(parameter) for _, parameter in self.parameters)


def wrap_model(model: nn.Module, wanted: LeafRules | None = None) -> list[UnitSpec]:
    """Wrap `model` into units, in the order of their modules; the root unit ("") is first if it owns parameters."""
    wanted = wanted or LeafRules()
    chosen = _chosen(model, wanted)
    owner = _owners(model, chosen)
    owned: defaultdict[str, list[tuple[str, nn.Parameter]]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        owned[owner[id(parameter)]].append((name, parameter))
    modules = dict(model.named_modules())
    tiles = _tiles(model) & chosen
    return [
        UnitSpec(name, module, owned[name], name in tiles, wanted.match(name, module))
        for name, module in modules.items()
        if owned.get(name)
    ]


def _chosen(model: nn.Module, wanted: LeafRules) -> set[str]:
    """Return the names of the modules that become units, without the root."""
    _check_all_matched(model, wanted)
    if wanted.match("", model):
        return set()  # the model is one unit
    explicit = {name for name, module in model.named_modules() if wanted.match(name, module)}
    # a named unit is not wrapped further, so that one all-gather covers it
    explicit = {name for name in explicit if not any(_inside(name, other) for other in explicit if other != name)}
    inside_explicit = {name for name, _ in model.named_modules() if any(_inside(name, other) for other in explicit)}
    blocks = {name for name in repeated_blocks(model) if name not in inside_explicit}
    blocks = {name for name in blocks if not any(_inside(inner, name) for inner in explicit)} | explicit
    return blocks | {name for name in _large_leaves(model, blocks) | _tiles(model) if name not in inside_explicit}


def repeated_blocks(model: nn.Module) -> set[str]:
    """Return the children of the outermost containers that hold two or more modules of one class with parameters."""
    found: set[str] = set()
    for name, module in model.named_modules():
        if not any(_inside(name, block) for block in found):
            found |= {_join(name, child_name) for child_name in _blocks_in(module)}
    return found & dict(model.named_modules()).keys()  # a module that is in two places has one name


def _blocks_in(container: nn.Module) -> list[str]:
    """Return the names of the children that are repeated blocks; stages with blocks of their own are not."""
    if not isinstance(container, _REPEATED):
        return []
    candidates = [
        (name, child)
        for name, child in container.named_children()
        if next(child.children(), None) is not None and _count(child) and not _blocks_in(child)
    ]
    kinds = [type(child) for _, child in candidates]
    return [
        name
        for name, child in candidates
        if kinds.count(type(child)) >= 2 and not isinstance(child, nn.ModuleList | nn.ModuleDict)
    ]


def _large_leaves(model: nn.Module, blocks: set[str]) -> set[str]:
    modules = dict(model.named_modules())
    largest = max((_count(modules[name]) for name in blocks), default=0)
    found = set()
    for name, module in modules.items():
        size = sum(numel_on_all(parameter) for parameter in module.parameters(recurse=False))
        if not name or not size or any(_inside(name, block) for block in blocks):
            continue
        if (
            isinstance(module, nn.Embedding)
            or (largest and size >= _LEAF_SHARE * largest)
            or (not largest and next(module.children(), None) is None and size >= _LEAF_SHARE * _count(model))
        ):
            found.add(name)
    return found


def _tiles(model: nn.Module) -> set[str]:
    tiles = {id(tile) for module in model.modules() if isinstance(module, TiledLinear) for tile in module.tiles()}
    return {name for name, module in model.named_modules() if id(module) in tiles}


def _owners(model: nn.Module, chosen: set[str]) -> dict[int, str]:
    """Return the owning unit of each parameter, by id."""
    users: defaultdict[int, set[str]] = defaultdict(set)
    for name, module in model.named_modules(remove_duplicate=False):
        for parameter in module._parameters.values():
            if parameter is not None:
                users[id(parameter)].add(_unit_of(name, chosen))
    return {key: _common_ancestor(units, chosen) for key, units in users.items()}


def _unit_of(name: str, chosen: set[str]) -> str:
    while name and name not in chosen:
        name = name.rpartition(".")[0]
    return name


def _common_ancestor(units: set[str], chosen: set[str]) -> str:
    if len(units) == 1:
        return next(iter(units))
    paths = [name.split(".") if name else [] for name in units]
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return _unit_of(".".join(shared), chosen)


def _check_all_matched(model: nn.Module, wanted: LeafRules) -> None:
    modules = dict(model.named_modules())
    kinds = {kind.__name__ for m in modules.values() for kind in type(m).__mro__}
    kinds |= {f"{kind.__module__}.{kind.__qualname__}" for m in modules.values() for kind in type(m).__mro__}
    missing = [f"class {name}" for name in wanted.classes if name not in kinds]
    missing += [f"module {name}" for name in wanted.names if name not in modules]
    missing += [f"suffix {s}" for s in wanted.suffixes if not any(n == s or n.endswith("." + s) for n in modules)]
    if missing:
        raise ConfigError(
            f"zero_optimization.leaf_module names what the model does not have: {', '.join(missing)}. "
            f"Its classes are: {', '.join(sorted({type(m).__name__ for m in modules.values()}))}"
        )


def _inside(name: str, other: str) -> bool:
    return name == other or name.startswith(other + ".")


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _count(module: nn.Module) -> int:
    return sum(numel_on_all(parameter) for parameter in module.parameters())
