"""Wall-clock timers by name, as training loops use them beside the engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from shardwell.compat.deepspeed_api.logging import print_dist


def _wait_for_device() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


class _Timer:
    """One timer that can be started and stopped repeatedly."""

    def __init__(self, name: str) -> None:
        self.name_, self.started_ = name, False
        self._began, self._total, self._count = 0.0, 0.0, 0

    def start(self) -> None:
        """Start the timer, after the device has finished its work."""
        if self.started_:
            raise AssertionError(f"timer '{self.name_}' is running already")
        _wait_for_device()
        self._began, self.started_ = time.perf_counter(), True

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """Stop the timer, after the device has finished its work."""
        if not self.started_:
            raise AssertionError(f"timer '{self.name_}' is not running")
        _wait_for_device()
        if reset:
            self._total = 0.0
        self._total += time.perf_counter() - self._began
        self._count, self.started_ = self._count + 1, False

    def reset(self) -> None:
        """Forget the time."""
        self.started_, self._total, self._count = False, 0.0, 0

    def elapsed(self, reset: bool = True) -> float:
        """Return the milliseconds so far."""
        found = self._total * 1000.0
        if reset:
            self.reset()
        return found

    def mean(self) -> float:
        """Return the mean milliseconds of an interval."""
        return self._total * 1000.0 / max(self._count, 1)


class SynchronizedWallClockTimer:
    """Timers by name, for which the device is waited for."""

    def __init__(self) -> None:
        self.timers: dict[str, _Timer] = {}

    def __call__(self, name: str) -> _Timer:
        return self.timers.setdefault(name, _Timer(name))

    def has_timer(self, name: str) -> bool:
        """Return whether there is a timer of this name."""
        return name in self.timers

    def get_timers(self) -> dict[str, _Timer]:
        """Return the timers by name."""
        return self.timers

    def log(
        self,
        names: Sequence[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: list[int] | None = None,
    ) -> None:
        """Print the milliseconds of these timers, divided by `normalizer`, on some ranks; by default on rank 0."""
        known = [name for name in names if name in self.timers]
        times = [f" | {name}: {self.timers[name].elapsed(reset=reset) / normalizer:.2f}" for name in known]
        print_dist("time (ms)" + "".join(times), ranks=ranks or [0])

    def get_mean(self, names: list[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Return the mean milliseconds of these timers."""
        found = {name: self.timers[name].mean() / normalizer for name in names if name in self.timers}
        for name in found if reset else ():
            self.timers[name].reset()
        return found


class NoopTimer:
    """Timers that measure nothing."""

    def __call__(self, name: str) -> NoopTimer:
        return self

    def start(self) -> None:
        """Do nothing."""

    def stop(self, **kwargs: Any) -> None:
        """Do nothing."""

    def reset(self) -> None:
        """Do nothing."""

    def elapsed(self, **kwargs: Any) -> float:
        """Return 0."""
        return 0.0

    def has_timer(self, name: str) -> bool:
        """Return True."""
        return True

    def get_timers(self) -> dict[str, Any]:
        """Return no timers."""
        return {}

    def mean(self) -> float:
        """Return 0."""
        return 0.0

    def log(self, names: Sequence[str], *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def get_mean(self, names: Sequence[str], *args: Any, **kwargs: Any) -> None:
        """Do nothing."""


class ThroughputTimer:
    """Samples per second over the steps after the first ones."""

    def __init__(
        self,
        config: Any = None,
        batch_size: int = 1,
        start_step: int = 2,
        steps_per_output: int | None = None,
        **_: Any,
    ) -> None:
        self.batch_size, self.start_step = max(batch_size, 1), start_step
        self.steps_per_output = _checked(steps_per_output)
        self.global_step_count, self.total_elapsed_time = 0, 0.0
        self._began: float | None = None

    def start(self) -> None:
        """Begin a step."""
        self._began = time.perf_counter()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """End a step, or a micro-step of it."""
        if self._began is None:
            return
        self.global_step_count += global_step
        if self.global_step_count >= self.start_step:
            self.total_elapsed_time += time.perf_counter() - self._began
        self._began = None

    def _is_report_boundary(self) -> bool:
        every = _checked(self.steps_per_output)
        return every is not None and self.global_step_count % every == 0

    def avg_samples_per_sec(self) -> float:
        """Return the samples per second, or -inf before there is a measurement."""
        steps = self.global_step_count - self.start_step + 1
        return self.batch_size * steps / self.total_elapsed_time if self.total_elapsed_time else float("-inf")


def _checked(steps: Any) -> int | None:
    """Return the steps between two reports; None is never."""
    if steps is None:
        return None
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise ValueError(f"steps_per_output must be a positive integer or None, found {steps!r}")
    if steps <= 0:
        raise ValueError(f"steps_per_output must be greater than 0, a positive integer or None, found {steps}")
    return steps


def trim_mean(data: Sequence[float], trim_percent: float) -> float:
    """Return the mean without this share of the smallest and of the largest numbers; 0 of nothing."""
    if not 0.0 <= trim_percent <= 1.0:
        raise AssertionError(f"trim_percent must be between 0 and 1, found {trim_percent}")
    ordered = sorted(data)
    left_out = round(trim_percent * len(ordered))
    kept = ordered[left_out : len(ordered) - left_out]
    return sum(kept) / len(kept) if kept else 0.0
