"""`save_pretrained` of a model of which this rank has a part: files of parts, which nothing could load.

Transformers and PEFT write what `model.state_dict()` has, on the rank that calls them. Values that are released say so
themselves; parts of a tensor axis, experts of one rank and layers of one pipeline stage look like any others.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from shardwell.errors import ShardwellError
from shardwell.sharding.tensor_part import part_of

_NAME = "save_pretrained"


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
        parts = [name for name, parameter in module.named_parameters() if part_of(parameter) is not None]
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


def save_whole_models(model: nn.Module, *, is_stage: bool) -> None:
    """Let no module of a model write the values of one rank; `is_stage`: the model is one stage of a pipeline."""
    for module in model.modules():
        if callable(getattr(type(module), _NAME, None)) and _NAME not in module.__dict__:
            module.__dict__[_NAME] = WholeSave(module, is_stage)


def save_as_before(model: nn.Module) -> None:
    """Give modules their own `save_pretrained` back: the model is whole."""
    for module in model.modules():
        if isinstance(module.__dict__.get(_NAME), WholeSave):
            del module.__dict__[_NAME]
