"""Loss scaling for fp16: it moves small gradients into the range of fp16, and finds a scale that is too large."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any


class LossScale:
    """The factor of the loss. This class never changes it; 1 means no scaling."""

    is_on = True  # losses are scaled, so overflows are expected

    def __init__(self, value: float = 1.0) -> None:
        self.value = value

    def update(self, overflow: bool) -> None:
        """Adapt the scale after a boundary whose gradients were finite or not."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`."""
        self.value = float(state["value"])


class NoScale(LossScale):
    """No loss scale."""

    is_on = False


@dataclass(frozen=True)
class ScaleRules:
    """The rules by which a dynamic loss scale changes."""

    window: int = 1000  # boundaries without overflow before it doubles
    hysteresis: int = 2  # overflows, the last one included, before it halves
    consecutive: bool = False  # any finite boundary resets the count of overflows
    smallest: float = 1.0
    settling: int = 0  # finite boundaries at the start and after an overflow that do not count for the window


class DynamicScale(LossScale):
    """A loss scale that halves when gradients overflow, and doubles after a window without overflow."""

    def __init__(self, value: float, rules: ScaleRules) -> None:
        super().__init__(value)
        self._warned = False
        self.num_updates = 0
        self.last_overflow = -1  # the number of the update that overflowed last, from 0
        self.use(rules)

    def use(self, rules: ScaleRules) -> None:
        """Follow these rules from now on; the value stays."""
        self.rules = rules
        self._left = rules.hysteresis
        self._clean = -rules.settling  # boundaries since the last overflow or growth

    @property
    def overflows_left(self) -> int:
        """The overflows, the last one included, until the scale halves."""
        return self._left

    def update(self, overflow: bool) -> None:
        self.num_updates += 1
        if overflow:
            self.last_overflow = self.num_updates - 1
            self._clean = -self.rules.settling
            if self._left > 1:
                self._left -= 1
            else:
                self._shrink()
            return
        self._clean += 1
        if self.rules.consecutive:
            self._left = self.rules.hysteresis
        if self._clean == self.rules.window:
            self._clean = 0
            self._left = self.rules.hysteresis
            self.value *= 2.0

    def _shrink(self) -> None:
        if self.value <= self.rules.smallest and not self._warned:
            self._warned = True
            warnings.warn(
                f"fp16 gradients overflow at the smallest loss scale ({self.rules.smallest:g}). Steps are skipped and "
                "training goes on; if this lasts, the loss or a gradient is not finite in itself, or fp16 is too "
                "narrow for this model: try bf16.",
                stacklevel=2,
            )
        self.value = max(self.value / 2.0, self.rules.smallest)

    def state_dict(self) -> dict[str, Any]:
        counts = {"left": self._left, "clean": self._clean, "updates": self.num_updates}
        return {"value": self.value, **counts, "last_overflow": self.last_overflow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._left = int(state.get("left", self.rules.hysteresis))
        self._clean = int(state.get("clean", 0))
        self.num_updates = int(state.get("updates", 0))
        self.last_overflow = int(state.get("last_overflow", -1))
