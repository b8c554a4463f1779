"""Checks that what a checkpoint says of parameter groups is said of the same groups: it goes by their order.

Settings of a group, and the learning rates in the state of a schedule, would silently go to other parameters.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from shardwell.errors import CheckpointError
from shardwell.optim import ShardedOptimizer

_OF_GROUPS = ("base_lrs", "_last_lr", "min_lrs", "max_lrs", "lr_lambdas")  # of torch's schedules: one value for each


def check_order(optimizer: ShardedOptimizer, saved: Any) -> None:
    """Raise if none of the parameters of a group were in it, but in a group with other settings."""
    groups = _groups_in(saved)
    for mine, names in _whence(optimizer, groups).items():
        others = {then: name for then, name in names.items() if _settings(groups[then]) != _settings(groups[mine])}
        if others and mine not in names:
            then, name = next(iter(others.items()))
            raise CheckpointError(
                f"values.optimizer.param_groups: '{name}' was in parameter group {then} and is in group {mine} of this "
                "optimizer, with other settings. Give the optimizer its groups in the order that they had; to begin "
                "with its own settings, pass load_optimizer_states=False and load_lr_scheduler_states=False"
            )


def warn_of_moved(optimizer: ShardedOptimizer, saved: Any) -> None:
    """Warn of parameters that were in a group with other settings."""
    groups = _groups_in(saved)
    for mine, names in _whence(optimizer, groups).items():
        for then, name in names.items():
            if then != mine and _settings(groups[then]) != _settings(groups[mine]):
                warnings.warn(
                    f"'{name}' was in parameter group {then} when the checkpoint was saved. It has the settings of "
                    f"group {mine} now",
                    stacklevel=2,
                )


def check_schedule(now: Any, then: Any, num_groups: int) -> None:
    """Raise if the state of a schedule has another number of learning rates than there are groups."""
    if isinstance(now, Mapping) and isinstance(then, Mapping):
        for key in now.keys() & then.keys():
            mine, saved = now[key], then[key]
            both = isinstance(mine, (list, tuple)) and isinstance(saved, (list, tuple))
            if key in _OF_GROUPS and both and len(mine) == num_groups != len(saved):
                raise CheckpointError(
                    f"{key}: holds {len(saved)} value(s), one for each parameter group, and this optimizer has "
                    f"{num_groups} group(s). To begin the schedule anew, pass load_lr_scheduler_states=False"
                )
            check_schedule(mine, saved, num_groups)
    elif isinstance(now, (list, tuple)) and isinstance(then, (list, tuple)):
        for mine, saved in zip(now, then, strict=False):
            check_schedule(mine, saved, num_groups)


def _groups_in(saved: Any) -> Sequence[Mapping[str, Any]]:
    """Return the saved groups; none if they are not known."""
    groups = saved.get("param_groups") if isinstance(saved, Mapping) else None
    return groups if isinstance(groups, list) and all(isinstance(group, Mapping) for group in groups) else []


def _whence(optimizer: ShardedOptimizer, groups: Sequence[Mapping[str, Any]]) -> dict[int, dict[int, str]]:
    """Return, for each group, in which groups its parameters were, each with one of them.

    The result is empty if the number of groups has changed: then no settings are loaded.
    """
    if len(groups) != len(optimizer.param_groups):
        return {}
    known = [group.get("params") for group in groups]
    before = {name: index for index, names in enumerate(known) if isinstance(names, list) for name in map(str, names)}
    found: defaultdict[int, dict[int, str]] = defaultdict(dict)
    for name, label in optimizer.shards.labels.items():
        if name in before and 0 <= label < len(groups):
            found[label].setdefault(before[name], name)
    return found


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group in a form that can be compared."""
    return {
        key: value.tolist() if isinstance(value, Tensor) else list(value) if isinstance(value, tuple) else value
        for key, value in group.items()
        if key not in ("params", "param_names")
    }
