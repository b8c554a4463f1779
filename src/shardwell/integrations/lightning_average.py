"""A callback that averages the weights over training steps, in shards, which Lightning's own callbacks cannot do."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from shardwell.utils import ExponentialMovingAverage


class MovingAverageCallback:
    """Keeps an exponential moving average of the weights, validates with it, and ends training with it.

    The average follows every `update_every_n_steps`-th step from `update_starting_at_step` on. It is a part of
    checkpoints, beside the weights that are trained, and a resumed run goes on with both at any number of ranks.

    Args:
        decay: How much of the average each update keeps.
        update_every_n_steps: How many steps lie between updates.
        update_starting_at_step: The first step that is averaged.
        device: Where averages are kept: "cpu" for host memory; by default where the master weights are.
    """

    def __init__(
        self,
        decay: float = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.decay, self.update_every_n_steps = decay, update_every_n_steps
        self.update_starting_at_step, self._device = update_starting_at_step, device
        self.average: ExponentialMovingAverage | None = None
        self._last_step = 0
        self._saved: dict[str, Any] | None = None
        self._swapped: AbstractContextManager[None] | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin with the present weights, or with the averages of a checkpoint."""
        self.average = ExponentialMovingAverage(trainer.strategy.engine, self.decay, self._device)
        if self._saved is not None:
            self.average.load_state_dict(self._saved)
            self._saved = None
        self._last_step = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        """Follow a step that was taken."""
        step = trainer.global_step
        is_due = (step - 1) % self.update_every_n_steps == 0 and step - 1 >= self.update_starting_at_step
        if self.average is not None and step > self._last_step and is_due:
            self.average.update()
        self._last_step = step

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Validate with the averages."""
        if self.average is not None and self.average.num_updates and self._swapped is None:
            self._swapped = self.average.swapped()
            self._swapped.__enter__()

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Train on with the weights."""
        if self._swapped is not None:
            swapped, self._swapped = self._swapped, None
            swapped.__exit__(None, None, None)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Make the averages the model's weights."""
        if self.average is not None and self.average.num_updates:
            found = self.average.state_dict()["parameters"]
            trainer.strategy.engine.load_state_dict(found, strict=False)
        self.average = None

    def state_dict(self) -> dict[str, Any]:
        """Return the averages, for a checkpoint. All ranks must call it."""
        return {} if self.average is None else self.average.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the averages of a checkpoint, which are used when training starts."""
        self._saved = dict(state_dict) or None
