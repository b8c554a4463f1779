"""What must be undone where a forward of a model ends by an exception.

Torch calls forward hooks that are always called only for an `Exception`: Ctrl-C in a notebook leaves a function mode,
a generator or a list as they were inside of the forward. The engine undoes them, in the reverse order of registration;
what has ended by itself must not mind.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

_undo: weakref.WeakKeyDictionary[nn.Module, list[AbortHook]] = weakref.WeakKeyDictionary()


class AbortHook:
    """A function that is called where a forward of a model is aborted, until it is removed as other hooks are."""

    def __init__(self, model: nn.Module, undo: Callable[[], Any]) -> None:
        self._model, self.undo = weakref.ref(model), undo
        _undo.setdefault(model, []).append(self)

    def remove(self) -> None:
        """Do not call the function any more."""
        model = self._model()
        hooks = [] if model is None else _undo.get(model, [])
        if self in hooks:
            hooks.remove(self)


@contextlib.contextmanager
def undone_if_aborted(model: nn.Module) -> Iterator[None]:
    """Run a forward of a model inside; undo what its hooks have begun there if an exception ends it."""
    try:
        yield
    except BaseException:
        for hook in reversed(_undo.get(model, [])):
            hook.undo()
        raise
