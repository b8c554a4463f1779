"""Rebuilding units of a model that was changed: parameters resized, replaced, added, or unfrozen.

Units that still fit stay. The others are taken apart, with the master weights and the optimizer state of their
parameters, and built again from the model as it is now. All ranks must change the model alike.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwell.errors import ModelChangedError
from shardwell.optim import OptimizerFactory, ShardedOptimizer
from shardwell.optim.factory import NO_LABEL
from shardwell.optim.param_access import ParamAccess, masters_of
from shardwell.parallel.consistency import Section, check_alike
from shardwell.sharding import ShardedGroup, Unit, UnitSpec, released
from shardwell.sharding.edits import take_edits_closely
from shardwell.sharding.model_states import OffloadPlan
from shardwell.sharding.tensor_part import part_of


@dataclass
class UnitBuilder:
    """The functions by which `initialize` builds units and optimizers, and the plan that they follow."""

    wrap: Callable[[], list[UnitSpec]]
    groups: Callable[[UnitSpec, list[UnitSpec], Set[int]], list[ShardedGroup]]
    optimizer: Callable[[Any, OptimizerFactory], ShardedOptimizer]  # takes the engine
    factory_of: Callable[[Optimizer], OptimizerFactory | None]
    factory: OptimizerFactory | None
    plan: OffloadPlan  # which units are updated on the host, and when their updates are committed

    def adopt(self, given: Optimizer, engine: Any, units: Sequence[Unit]) -> ShardedOptimizer:
        """Return the optimizer of an engine that was built without one, from an optimizer that the user made since."""
        self.factory = self.factory_of(given)
        assert self.factory is not None
        for group in (group for unit in units for group in unit.trainable):
            group.relabel([self.factory.label(parameter) for parameter in group.parameters])
        return self.optimizer(engine, self.factory)


def refit(
    units: list[Unit], builder: UnitBuilder, optimizer: ShardedOptimizer | None, keep_frozen_state: bool
) -> list[Unit]:
    """Return the units of the model as it is now.

    With `keep_frozen_state`, parameters that were trained and are frozen now keep their training state.
    """
    take_edits_closely(units)
    specs = builder.wrap()
    before = {unit.name: unit for unit in units}
    fitting = {one.name for one in specs if one.name in before and _fits(before[one.name], one, keep_frozen_state)}
    if units and (len(fitting) < len(specs) or before.keys() != fitting):
        check_alike(units[0].groups[0].context.roles.stage, "refit", _described(specs))
    remembered: dict[int, dict[str, Any]] = {}
    labels: dict[str, int] = {}
    present = {id(p) for one in specs for _, p in one.parameters}
    trained: set[int] = set()
    if keep_frozen_state:
        trained = {id(p) for unit in units for group in unit.trainable for p in group.parameters}
    with torch.no_grad():
        for unit in units:
            if unit.name not in fitting:
                labels.update(_labels_of_the_gone(unit, present, builder.factory))
                remembered.update(take_apart(unit, optimizer))
    unused = iter(sorted({unit.index for unit in units} ^ set(range(len(units) + len(specs)))))
    now = []
    for one in specs:
        if one.name in fitting:
            now.append(before[one.name])
            continue
        _label_newcomers(one, labels, builder.factory)
        index = before[one.name].index if one.name in before else next(unused)
        unit = Unit(index, one, builder.groups(one, specs, trained))
        now.append(unit)
        unit.keeps_frozen = one.name in before and before[one.name].keeps_frozen
        if optimizer is not None:
            optimizer.enter(unit)
            unit.owner = before[next(iter(before))].owner
            if unit.trainable:
                with optimizer.states_of(unit, changes=True):
                    _give_back(unit, remembered)
    return now


def _fits(unit: Unit, one: UnitSpec, keep_frozen_state: bool) -> bool:
    """Return whether a unit still has the module and the parameters of a unit spec, and can train them."""
    mine = {id(p): group for group in unit.groups for p in group.parameters}
    return (
        not unit.changes.needs_rebuild
        and list(map(id, unit.spec.modules)) == list(map(id, one.modules))
        and mine.keys() == {id(p) for _, p in one.parameters}
        and all(mine[id(p)].trainable or not p.requires_grad for _, p in one.parameters)
        and (keep_frozen_state or all(p.requires_grad for group in unit.trainable for p in group.parameters))
    )


def _labels_of_the_gone(unit: Unit, present: set[int], factory: OptimizerFactory | None) -> dict[str, int]:
    """Return the parameter groups of parameters that left the model, by name.

    A new parameter of the same name takes the parameter group over. The parameters that left keep it too, as long as
    they live: they may come back.
    """
    labels: dict[str, int] = {}
    if factory is None:
        return labels
    for group in unit.groups:
        for slot, parameter in zip(group.layout.slots, group.parameters, strict=True):
            if id(parameter) not in present:
                labels[slot.name] = factory.label(parameter)
                weakref.finalize(parameter, factory.labels.pop, id(parameter), None)
    return labels


def _label_newcomers(one: UnitSpec, labels: dict[str, int], factory: OptimizerFactory | None) -> None:
    """Give new parameters the parameter group of the parameter that had their name before."""
    if factory is None:
        return
    for name, parameter in one.parameters:
        if id(parameter) not in factory.labels and labels.get(name, NO_LABEL) != NO_LABEL:
            factory.labels[id(parameter)] = labels[name]


def take_apart(
    unit: Unit, optimizer: ShardedOptimizer | None, *, keeps_states: bool = True
) -> dict[int, dict[str, Any]]:
    """Make a unit's parameters ordinary ones with their master weights as values; return their optimizer state."""
    if any(any(group.gradients.has_gradient) for group in unit.trainable):
        raise ModelChangedError(
            f"the parameters of '{unit.name or '(root)'}' were changed while gradients wait for a step. "
            "Change the model after engine.step() or engine.zero_grad()."
        )
    states: dict[int, dict[str, Any]] = {}
    values: list[tuple[nn.Parameter, torch.Tensor]] = []
    unit.wait()
    unit.changes.is_off = True  # what happens to its parameters from now on is no edit of the user
    with contextlib.ExitStack() as stack:
        keeps_states = keeps_states and optimizer is not None
        if keeps_states and optimizer is not None and unit.trainable:
            stack.enter_context(optimizer.states_of(unit))
        for group in unit.groups:
            with group.swapped_in():
                dtype = group.precision.master if group.trainable else group.precision.compute
                for slot, parameter, master in zip(
                    group.layout.slots, group.parameters, masters_of(group), strict=True
                ):
                    if tuple(parameter.shape) == slot.shape:
                        values.append((parameter, master.to(dtype)))
                        states[id(parameter)] = (
                            ParamAccess(parameter).states() if keeps_states and group.trainable else {}
                        )
    if optimizer is not None:
        optimizer.leave(unit)
    for group in unit.groups:
        for parameter in group.parameters:
            released.clear_owner(parameter)
    for parameter, value in values:
        parameter.data = value
    for group in unit.groups:
        group.free()
    return states


def _give_back(unit: Unit, remembered: dict[int, dict[str, Any]]) -> None:
    """Set the optimizer state of parameters that were in another unit before."""
    with torch.no_grad():
        for group in unit.trainable:
            for parameter in group.parameters:
                for key, value in remembered.get(id(parameter), {}).items():
                    ParamAccess(parameter).set_state(key, value)


def _described(specs: Sequence[UnitSpec]) -> dict[str, Section]:
    """Describe the model as it is now, for a comparison between ranks."""
    found = {}
    for one in specs:
        for name, parameter in one.parameters:
            part = part_of(parameter)
            shape = parameter.shape if part is None else part.shape  # parts may be uneven
            kind = f"{str(parameter.dtype).removeprefix('torch.')} {list(shape)}"
            frozen = "" if parameter.requires_grad else ", frozen"
            found[repr(name)] = f"{kind}{frozen} in unit '{one.name or '(root)'}'"
    return {"parameter": found}
