"""Whether a step counts: its norm is finite. Where kernels can be told on the device, the host hears of it later."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardwell.errors import NonFiniteError
from shardwell.memory.device import Later
from shardwell.optim.norms import Aftermath, Norm
from shardwell.optim.scale import LossScale
from shardwell.optim.shards import Shard, Shards
from shardwell.unit import Context, Unit


class Verdict:
    """Asked for at each step, and heard there or at the next one: fixed places, so that all ranks act on it alike."""

    def __init__(self, context: Context, shards: Shards, scale: LossScale, *, raises: bool) -> None:
        """`raises`: a step that does not count is an error, unless losses are scaled; otherwise it is left out."""
        self._device = context.device
        self._shards, self._scale, self._raises = shards, scale, raises
        self._aftermath = Aftermath(context, shards)
        self._units: Sequence[Unit] = ()
        self._norm: Later | None = None
        self.overflow = False  # the last one did not count
        self.num_skipped = 0

    @property
    def is_open(self) -> bool:
        """It was asked for, and nobody has heard it yet."""
        return self._norm is not None

    def ask(
        self, units: Sequence[Unit], norm: Tensor, norms_at_once: Callable[[Unit, Shard], list[Norm] | None]
    ) -> None:
        """Begin to read the norm; see `Aftermath.note` for what was updated at once."""
        self._units = units
        self._aftermath.note(units, norms_at_once)
        if not self._device.is_virtual:
            self._norm = self._device.read_later(norm)

    def hear(self, *, is_late: bool = True) -> bool:
        """Learn whether the norm that was last asked about is finite; raises or counts a skipped step if not."""
        if self._norm is None:
            return True
        norm, self._norm = float(self._norm.get()), None
        self.overflow = not math.isfinite(norm)
        if not self.overflow:
            return True
        self.num_skipped += 1
        if self._raises and not self._scale.is_on:
            raise NonFiniteError(
                f"the gradients are not finite (their global norm is {norm})"
                f"{', at the last step' if is_late else self._first()}; {self._aftermath(is_late=is_late)}. "
                "Check the loss and the learning rate, or set "
                '"shardwell": {"nonfinite": "skip"} to leave such steps out.'
            )
        return False

    def _first(self) -> str:
        for shard in (shard for unit in self._units for shard in self._shards.of(unit)):
            if shard.gradient is not None and not bool(torch.isfinite(shard.gradient).all()):
                return f", first in unit '{shard.group.unit}'"
        return ""
