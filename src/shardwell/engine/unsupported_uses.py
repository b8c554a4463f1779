"""Uses that an engine is not made for: each works, or raises an error of one sentence."""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from shardwell.errors import ShardwellError

if TYPE_CHECKING:
    from shardwell.engine.engine import Engine

NO_GRADIENT = (
    "backward needs a tensor that depends on trainable parameters; this loss does not require a gradient. Was the "
    "model run under torch.no_grad(), or are all its parameters frozen?"
)
SECOND_BACKWARD = (
    "backward was called twice on the same loss. Run the forward again, or pass retain_graph=True the first time if "
    "the gradients are meant to be added twice."
)
UNMANAGED = "managed_gradient_accumulation is false: every step() is a boundary; call step() where one is meant"
NO_OPTIMIZER = "this engine has no optimizer: pass one to initialize, or name one in the configuration"

_MOST_BOUNDARIES = 3  # boundaries without a step


def flag(value: Any, name: str) -> bool:
    """Return a flag that a method was given: a bool, 0 or 1, also as a tensor of one element."""
    if value is True or value is False:
        return bool(value)
    if not isinstance(value, str | bytes):
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            if value == 0 or value == 1:
                return bool(value)
    found = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)[:80]
    raise ShardwellError(f"{name}: expected True or False, found {found}")


def backward_flags(retain_graph: Any, scale_wrt_gas: Any, create_graph: Any) -> tuple[bool, bool, bool]:
    """Return the flags of `backward`; as in torch, a graph is kept by default if another one is made of it."""
    create_graph = flag(create_graph, "backward(create_graph=...)")
    retain_graph = create_graph if retain_graph is None else flag(retain_graph, "backward(retain_graph=...)")
    return retain_graph, flag(scale_wrt_gas, "backward(scale_wrt_gas=...)"), create_graph


def _is_prepared(engine: Engine) -> bool:
    """Answer `accelerator.prepare`, which would wrap an engine again, unless Accelerate knows that it is prepared."""
    if not engine.__dict__.get("_was_prepared", False):
        raise ShardwellError(
            "accelerator.prepare was given a shardwell engine, which it would wrap in DDP. Use "
            "`from shardwell.integrations.accelerate import Accelerator`, and hand the model and its optimizer to its "
            "prepare(); or use the engine without an accelerator: engine.backward(loss), engine.step()."
        )
    return True


def _note_prepared(engine: Engine, value: bool) -> None:
    """Note that Accelerate made the engine itself."""
    engine.__dict__["_was_prepared"] = value


prepared_by_accelerate = property(_is_prepared, _note_prepared)


def refuse_pickling(engine: Engine, protocol: Any = None) -> NoReturn:
    """Raise an error that says why an engine cannot be copied or pickled: its other parts are in other processes."""
    raise ShardwellError(
        "an engine cannot be pickled or copied (torch.save, copy.deepcopy, multiprocessing): it is one rank's part. "
        "Use engine.save_checkpoint(folder), torch.save(engine.state_dict(), file) for the model's weights alone, or "
        "shardwell.utils.ExponentialMovingAverage(engine) for averages of them."
    )


class StepCallWatch:
    """Warns, until the first step, of a training loop that never calls `step`, so that nothing is trained."""

    def __init__(self) -> None:
        self._num_waiting = 0  # consecutive forwards that found gradients waiting

    def saw_forward(self, engine: Engine) -> StepCallWatch | None:
        """Note a forward that begins; return None when there is nothing left to watch for. It warns once."""
        optimizer = engine.optimizer
        if optimizer is None or getattr(optimizer.inner, "_opt_called", False):
            return None
        if not torch.is_grad_enabled() or not engine._scheduler.reducer.micro_step.syncs:
            return self
        groups = (group for unit in engine._scheduler.units for group in unit.trainable)
        self._num_waiting = self._num_waiting + 1 if any(group.gradients.has_any for group in groups) else 0
        if self._num_waiting < _MOST_BOUNDARIES * engine.gradient_accumulation_steps():
            return self
        warnings.warn(
            f"gradients have been waiting for {self._num_waiting} forwards, and engine.step() was never called: "
            "nothing is trained. Call it after each backward; it applies gradients every gradient_accumulation_steps "
            f"({engine.gradient_accumulation_steps()}). Gradients of a trial are dropped by engine.zero_grad().",
            stacklevel=5,
        )
        return None
