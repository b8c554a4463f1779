"""What the commit policy "auto" learns of a training loop: how each backward begins, and when a step does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from shardwell.runtime.pytree import tensors_in


@dataclass(frozen=True)
class StepBeginning:
    """The properties of the graph of a backward that are known before anything is updated."""

    num_forwards: int  # forwards of the engine with gradients since the last backward
    is_chained: bool  # an input has a graph of its own, for example another model's
    is_partial: bool  # parts of the model were called outside of the engine's forward
    keeps_graph: bool  # another backward may follow


class LoopObserver:
    """Counts forwards until a backward begins, and reports what they were like."""

    def __init__(self, report: Callable[[StepBeginning], None], step_begins: Callable[[], None]) -> None:
        self._report = report
        self.step_begins = step_begins
        self._num_forwards = 0  # of the engine, with gradients, since the last backward began
        self._is_partial = False  # since then, parts of the model were called outside of the engine's forwards
        self._is_chained = False  # since then, inputs of the model had a graph of their own

    def forward_begins(self, inputs: Any) -> None:
        """Note a forward of the engine with gradients."""
        self._num_forwards += 1
        self._is_chained = self._is_chained or any(tensor.requires_grad for tensor in tensors_in(inputs))

    def part_begins(self) -> None:
        """Note a forward with gradients of a part of the model, outside of the engine's forward."""
        self._is_partial = True

    def backward_begins(self) -> None:
        """Report a backward, before anything is updated."""
        keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph()
        beginning = StepBeginning(self._num_forwards, self._is_chained, self._is_partial, keeps_graph)
        self._num_forwards, self._is_chained, self._is_partial = 0, False, False
        self._report(beginning)
