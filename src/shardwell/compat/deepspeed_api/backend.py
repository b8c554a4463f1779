"""The one change to a client: Accelerate's `PartialState` gets gloo where several ranks have no accelerator.

Accelerate finds no backend for DeepSpeed without an accelerator, and then each rank takes itself for a single process:
all would train on all data, and nobody would say so. With `cpu=True` it uses gloo, and does not use DeepSpeed. This
layer lets it use gloo for both. It changes nothing on machines that have an accelerator.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any


def give_gloo(state: ModuleType) -> None:
    """Let `PartialState._prepare_backend` answer gloo where it has no answer, and DeepSpeed is asked for."""
    kind = state.PartialState
    prepare = kind._prepare_backend

    def _prepare_backend(self: Any, *args: Any, **kwargs: Any) -> Any:
        backend, distributed_type = prepare(self, *args, **kwargs)
        asked = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
        is_rank = int(os.environ.get("LOCAL_RANK", "-1")) != -1
        if backend is None and asked and is_rank:
            return "gloo", state.DistributedType.MULTI_CPU
        return backend, distributed_type

    _prepare_backend.__wrapped__ = prepare  # type: ignore[attr-defined]
    kind._prepare_backend = _prepare_backend


WATCHED: dict[str, Callable[[ModuleType], None]] = {"accelerate.state": give_gloo}
