"""The sequence axis of a model, from `initialize` until its engine ends."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shardwell.errors import ShardwellError
from shardwell.parallel import Collectives
from shardwell.parallel.model_axis import ModelAxis
from shardwell.runtime.aborted_forwards import AbortHook


@dataclass(eq=False)
class SequenceBinding:
    """A model whose ranks train on parts of the same sequences."""

    model: nn.Module
    axis: ModelAxis
    data: Collectives  # the ranks over which gradients are averaged: replicate x shard x sequence
    num_attended: int = 0  # calls of attention that knows the axis: without any, a model sees a part of the sequence
    in_eval: bool = True  # sequences are shared in evaluation as well; otherwise each rank has whole ones then
    undo: list[Callable[[], None]] = field(default_factory=list)  # what gives the model back as it was

    def close(self) -> None:
        """Let go of the model."""
        for undo in reversed(self.undo):
            undo()
        self.undo.clear()
        _bound.discard(self)


_bound: weakref.WeakSet[SequenceBinding] = weakref.WeakSet()  # of living engines
_running: list[SequenceBinding] = []  # whose models' forwards are running, innermost last


def bind(binding: SequenceBinding) -> None:
    """Make a binding known, and note while its model runs."""
    _bound.add(binding)
    begin = binding.model.register_forward_pre_hook(lambda *_: _running.append(binding), prepend=True)

    def end(*_: Any) -> None:
        if binding in _running:
            del _running[_running.index(binding) :]

    hooks = begin, binding.model.register_forward_hook(end, always_call=True)
    binding.undo += [hook.remove for hook in (*hooks, AbortHook(binding.model, end))]


@contextlib.contextmanager
def without(binding: SequenceBinding | None) -> Iterator[None]:
    """Let attention not know of a living engine's sequence axis, while another engine runs that stands for it."""
    if binding is None:
        yield
        return
    _bound.discard(binding)
    try:
        yield
    finally:
        _bound.add(binding)


def current() -> SequenceBinding | None:
    """Return the binding of the model that runs, or else of the only one that there is; None if there is none."""
    if _running:
        return _running[-1]
    if len(_bound) > 1:
        gc.collect()  # engines that were dropped without destroy() have reference cycles
    if len(_bound) > 1:
        raise ShardwellError(
            f"attention runs outside of a model's forward (is it recomputed?), and {len(_bound)} engines have a "
            "sequence axis: use shardwell.sequence_parallel.DistributedAttention in these models, which knows its own"
        )
    return next(iter(_bound), None)


def shares_sequences(binding: SequenceBinding, module: nn.Module, given: Mapping[str, Any]) -> bool:
    """Return whether a forward with these arguments gets parts of sequences: not in generation, which has a cache."""
    return given.get("past_key_values") is None and (binding.in_eval or module.training)


def binding_of(model: Any) -> SequenceBinding | None:
    """Return the binding of a model, or of an engine's model; None if its sequences are whole."""
    inner = getattr(model, "module", model)
    return next((one for one in _bound if one.model is model or one.model is inner), None)
