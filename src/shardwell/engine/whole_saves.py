"""Copies and files of a model of which this rank has a part, made by others than the engine.

Transformers and PEFT write what `model.state_dict()` has, on the rank that calls them. Values that are released say so
themselves; parts of a tensor axis, experts of one rank and layers of one pipeline stage look like any others. A copy of
such a model, or a pickle, would not know its other parts.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn

from shardwell.errors import ShardwellError
from shardwell.sharding.tensor_part import part_of

_NAME = "save_pretrained"
_COPY, _PICKLE = "__deepcopy__", "__reduce_ex__"  # methods by which modules are copied and pickled


def _parts_in(module: nn.Module) -> list[str]:
    """Return the names of parameters of which this rank has a part."""
    return [name for name, parameter in module.named_parameters() if part_of(parameter) is not None]


class WholeSave:
    """Stands before a module's `save_pretrained`, and refuses to write parts."""

    def __init__(self, module: nn.Module, is_stage: bool) -> None:
        self._module, self._is_stage = weakref.ref(module), is_stage

    def __call__(self, *args: Any, **given: Any) -> Any:
        """Save, unless the values would be those of one rank."""
        module = self._module()
        assert module is not None  # which holds this object
        has_values = given.get("state_dict") is not None or (len(args) > 2 and isinstance(args[2], dict))
        if not has_values and (what := self._what_is_missing(module)):
            raise ShardwellError(f"{_NAME} would write {what}")
        return getattr(type(module), _NAME)(module, *args, **given)

    def _what_is_missing(self, module: nn.Module) -> str:
        if self._is_stage:
            return (
                "the layers of this rank's pipeline stage only: engine.save_checkpoint(folder) writes the whole model, "
                "which loads without a pipeline, too"
            )
        parts = _parts_in(module)
        if not parts:
            return ""
        return (
            f"this rank's parts of {len(parts)} tensors, such as '{parts[0]}': call state = engine.state_dict() on all "
            f"ranks, and then {_NAME}(folder, state_dict=state) on one"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> WholeSave:
        """Stand before the copy of the module, which is being made."""
        module = self._module()
        assert module is not None
        return WholeSave(memo.get(id(module), module), self._is_stage)


class WholeCopy:
    """Stands before the methods that copy and pickle a module."""

    def __init__(self, module: nn.Module, has: str, *, is_stage: bool) -> None:
        """`has` says what the module has that a copy would not."""
        self._module, self._has, self._is_stage = weakref.ref(module), has, is_stage

    def __call__(self, given: Any) -> Any:
        """Copy one stage of a pipeline, which is of plain layers; raise for all else."""
        if not self._is_stage or not isinstance(given, dict):
            raise ShardwellError(
                "this model cannot be copied or pickled (copy.deepcopy, AveragedModel, torch.save(model), "
                f"multiprocessing): {self._has}. Use shardwell.utils.ExponentialMovingAverage(engine) for averages, "
                "engine.state_dict() or engine.save_checkpoint(folder) for files; copy a second model before "
                "initialize, and give it an initialize of its own"
            )
        module = self._module()
        assert module is not None  # which holds this object
        others = {name: value for name, value in vars(module).items() if not isinstance(value, WholeCopy)}
        if (own := getattr(type(module), _COPY, None)) is not None:
            return own(module, given)
        found = given[id(module)] = type(module).__new__(type(module))
        vars(found).update(copy.deepcopy(others, given))
        return found


def _what_copies_lack(parts: list[str], *, is_stage: bool) -> str:
    if parts:
        return f"this rank has parts of {len(parts)} of its tensors, such as '{parts[0]}', and computes with the others"
    return "this rank has one pipeline stage of it" if is_stage else "this rank computes with others, over an axis"


def save_whole_models(model: nn.Module, *, is_stage: bool) -> None:
    """Let no module of a model write or copy the values of one rank; `is_stage`: it is one stage of a pipeline."""
    for module in model.modules():
        if callable(getattr(type(module), _NAME, None)) and _NAME not in module.__dict__:
            module.__dict__[_NAME] = WholeSave(module, is_stage)
        parts = _parts_in(module)
        if parts or module is model:
            guard = WholeCopy(module, _what_copies_lack(parts, is_stage=is_stage), is_stage=is_stage and not parts)
            module.__dict__[_COPY] = module.__dict__[_PICKLE] = guard


@contextlib.contextmanager
def copied_nevertheless(model: nn.Module) -> Iterator[None]:
    """Let the engine copy a model inside, of which it knows what the other ranks have."""
    guards = {module: one for module in model.modules() if isinstance(one := vars(module).get(_COPY), WholeCopy)}
    for module in guards:
        for name in (_COPY, _PICKLE):
            vars(module).pop(name, None)
    try:
        yield
    finally:
        for module, guard in guards.items():
            vars(module).update({_COPY: guard, _PICKLE: guard})


def save_as_before(model: nn.Module) -> None:
    """Give modules their own methods back: the model is whole."""
    for module in model.modules():
        for name in (_NAME, _COPY, _PICKLE):
            if isinstance(module.__dict__.get(name), WholeSave | WholeCopy):
                del module.__dict__[name]
