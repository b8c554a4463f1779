"""What a forward has begun is undone where an exception ends it, for as long as somebody holds the hook."""

from __future__ import annotations

import gc
import weakref

import pytest
from torch import nn

from shardwell.runtime.aborted_forwards import AbortHook, undone_if_aborted


def aborted(model: nn.Module) -> None:
    with pytest.raises(KeyboardInterrupt), undone_if_aborted(model):
        raise KeyboardInterrupt


def test_functions_are_called_in_reverse_order_until_they_are_removed() -> None:
    model, called = nn.Linear(1, 1), list[str]()
    first, second = AbortHook(model, lambda: called.append("first")), AbortHook(model, lambda: called.append("second"))
    aborted(model)
    assert called == ["second", "first"]
    second.remove()
    aborted(model)
    assert called == ["second", "first", "first"]
    first.remove()
    aborted(model)
    assert called == ["second", "first", "first"]


def test_a_hook_whose_function_leads_to_the_model_does_not_keep_the_model() -> None:
    model = nn.Linear(1, 1)
    held = [AbortHook(model, lambda model=model: model.train())]
    model.held = held  # as an engine does, which the model leads to
    died = weakref.ref(model)
    del model, held
    gc.collect()
    assert died() is None
