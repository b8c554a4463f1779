"""Advice for ranks that take different paths: which module to make one unit, or which key to set."""

from __future__ import annotations

import json
import re

from torch import nn

_SAME = "Make all ranks run the same modules in the same order"
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # have no forward that could be hooked


def divergence_advice(model: nn.Module, stage: int, ours: str, theirs: str) -> str:
    """Return the last sentence of an error, for two tokens of which each rank was about to run one."""
    names = [_unit_of(token) for token in (ours, theirs)]
    if any(name is None for name in names):
        return f"{_SAME}, as often as each other."
    if stage < 3:
        setting = json.dumps({"shardwell": {"find_unused_parameters": True}})
        return f"{_SAME}, or let them choose between modules, as DistributedDataParallel does: set {setting}."
    name, module = _chooser(model, [name or "" for name in names])
    if not name:
        return (
            f"{_SAME}. Here the model itself chooses between them: put them into one module whose forward chooses, and "
            'name its class in {"zero_optimization": {"leaf_module": {"classes": [...]}}}. Stages 0 to 2 need no name, '
            'with {"shardwell": {"find_unused_parameters": true}}.'
        )
    kind = type(module)
    is_own = not kind.__module__.startswith("torch.")
    leaf = {"classes": [kind.__name__]} if is_own else {"names": [name]}
    setting = json.dumps({"zero_optimization": {"leaf_module": leaf}})
    return f"{_SAME}, or make '{name}' ({kind.__name__}), which chooses between them, one unit: set {setting}."


def _unit_of(token: str) -> str | None:
    """Return the name of the unit that a token is about; None if it is about none."""
    found = re.match(r"(?:GATHER|REDUCE|PUBLISH) (\S+)", token)
    return None if found is None else found[1].split("#")[0].replace("(root)", "")


def _chooser(model: nn.Module, names: list[str]) -> tuple[str, nn.Module]:
    """Return the nearest module that contains all of the named ones and has a forward of its own."""
    paths = [name.split(".") if name else [] for name in names]
    length, modules = 0, dict(model.named_modules())
    while all(len(path) > length for path in paths) and len({path[length] for path in paths}) == 1:
        length += 1
    for end in range(length, 0, -1):
        name = ".".join(paths[0][:end])
        module = modules.get(name)  # None for a bundle, which has no module of its own
        if module is not None and not isinstance(module, _CONTAINERS):
            return name, module
    return "", model
