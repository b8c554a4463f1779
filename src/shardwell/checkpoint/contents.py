"""What the tensors of a checkpoint are: trained parameters in their groups, frozen ones, buffers, optimizer state.

The names come from the checkpoint's values, which shardwell and the reader of DeepSpeed's files provide. Checkpoints
that do not have them (older ones, those of other libraries) are understood as far as this is safe.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwell.checkpoint.sources.base import MODEL, SCALAR, STATE, Source
from shardwell.checkpoint.sources.reading import is_contiguous, read_full, weights
from shardwell.errors import CheckpointError
from shardwell.json_values import decode


def names_in(values: Mapping[str, Any], key: str) -> list[str] | None:
    """Return a list of names from the values of a checkpoint; None if it has none."""
    found = values.get(key)
    return found if isinstance(found, list) and all(isinstance(name, str) for name in found) else None


@dataclass(frozen=True)
class Contents:
    """The names of a model's tensors, in the order of the checkpoint, and what they are."""

    trained: tuple[str, ...]
    frozen: tuple[str, ...]
    buffers: tuple[str, ...]
    aliases: Mapping[str, str]  # {other name: name} of shared parameters

    @staticmethod
    def of(source: Source) -> Contents:
        """Sort the tensors of a model."""
        names = [name.removeprefix(MODEL) for name in weights(source)]
        known = names_in(source.values, "buffers")
        buffers = {name for name in names if not source.tensors[MODEL + name].dtype.is_floating_point}
        buffers |= set(known or ())
        with_state = _with_state(source)
        frozen = set(_frozen(source, with_state, [name for name in names if name not in buffers]))
        aliases = source.values.get("aliases", {})
        if not isinstance(aliases, Mapping) or not all(isinstance(name, str) for name in aliases.values()):
            raise CheckpointError(f"{source.where}: values.aliases: expected an object of names")
        return Contents(
            tuple(name for name in names if name not in buffers and name not in frozen),
            tuple(name for name in names if name in frozen and name not in buffers),
            tuple(name for name in names if name in buffers),
            {other: name for other, name in aliases.items() if name in set(names) and other not in set(names)},
        )


def _with_state(source: Source) -> set[str]:
    tensors = [name.removeprefix(STATE) for name in source.tensors if name.startswith(STATE)]
    scalars = [name.removeprefix(SCALAR) for name in source.values if name.startswith(SCALAR)]
    return {name.rpartition("/")[0] for name in (*tensors, *scalars)}


def _frozen(source: Source, with_state: set[str], names: list[str]) -> list[str]:
    """Return the parameters that were not trained; those without optimizer state, if the checkpoint does not say."""
    known = names_in(source.values, "frozen")
    if known is not None:
        return known
    return [name for name in names if name not in with_state] if with_state else []


@dataclass(frozen=True)
class ParamGroup:
    """A parameter group of the optimizer: the names of its parameters, and its options."""

    names: tuple[str, ...]
    options: Mapping[str, Any]


def param_groups(source: Source, contents: Contents) -> list[ParamGroup]:
    """Return the parameter groups of the optimizer; one group of all trained parameters if there was no optimizer."""
    saved = value_of(source, "optimizer") or {}
    groups = saved.get("param_groups") if isinstance(saved, Mapping) else None
    groups = groups or source.values.get("param_groups") or [{}]
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        raise CheckpointError(f"{source.where}: values.optimizer.param_groups: expected a list of objects")
    options = [
        {key: _tuple(value) for key, value in group.items() if key not in ("params", "param_names")} for group in groups
    ]
    named = [names_in(group, "params") for group in groups]
    if named == [None]:
        named = [list(contents.trained)]
    if None in named:
        raise CheckpointError(
            f"{source.where}: does not say which parameters belong to which of its {len(groups)} parameter groups. "
            "Load it into an engine and save it again."
        )
    left = set(contents.trained)
    found = []
    for names, one in zip(named, options, strict=True):
        mine = tuple(name for name in dict.fromkeys(names or ()) if name in left)
        left.difference_update(mine)
        found.append(ParamGroup(mine, one))
    return found


def _tuple(value: Any) -> Any:
    """Return a tuple for a list of numbers: JSON has none, and optimizers have no lists of numbers (betas)."""
    is_numbers = isinstance(value, list) and bool(value) and all(isinstance(item, (int, float)) for item in value)
    return tuple(value) if is_numbers else value


def state_keys(source: Source, names: tuple[str, ...]) -> list[str]:
    """Return the keys of the optimizer state of these parameters that has their shapes."""
    members, found = set(names), dict[str, None]()
    for name in source.tensors:
        owner, _, key = name.removeprefix(STATE).rpartition("/")
        if name.startswith(STATE) and owner in members and source.tensors[name].shape == _shape(source, owner):
            found[key] = None
    return list(found)


def step_of(source: Source, names: tuple[str, ...]) -> float | None:
    """Return the greatest step count of these parameters."""
    steps = [source.values.get(f"{SCALAR}{name}/step") for name in names]
    known = [float(step) for step in steps if isinstance(step, (int, float)) and math.isfinite(step)]
    return max(known, default=None)


def _shape(source: Source, name: str) -> tuple[int, ...] | None:
    stored = source.tensors.get(MODEL + name)
    return None if stored is None else stored.shape


def elements(source: Source, name: str, start: int, stop: int) -> Tensor:
    """Return elements of a tensor, counted in the order of its dimensions, however they are stored."""
    if is_contiguous(source.tensors[name]):
        return source.read(name, start, stop)
    return read_full(source, name).view(-1)[start:stop]


def value_of(source: Source, key: str) -> Any:
    """Return a value of a checkpoint in the form that the user gave it, with arrays of numpy as tensors."""

    def get(name: str) -> Tensor:
        if name not in source.tensors:
            raise CheckpointError(f"{source.where}: tensor {name!r}: named by a value, but not there")
        return read_full(source, name)

    return _without_numpy(decode(source.values.get(key), f"{source.where}: values.{key}", get))


def _without_numpy(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, dict):
        return {key: _without_numpy(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_without_numpy(item) for item in value)
    return value


def is_on(config: Any, block: str) -> bool:
    """Tell whether a block of a configuration, such as bf16, is enabled."""
    found = config.get(block) if isinstance(config, Mapping) else None
    return bool(isinstance(found, Mapping) and found.get("enabled") is True)


def compute_dtype(source: Source) -> torch.dtype | None:
    """Return the dtype that parameters had in forward and backward; None if it is that of their masters."""
    config = source.values.get("config")
    if is_on(config, "bf16") or is_on(config, "bfloat16"):
        return torch.bfloat16
    return torch.float16 if is_on(config, "fp16") else None
