"""Learning-rate schedules by name, for a configuration that names one.

Each is a formula of one number, the optimizer steps taken so far. The constructor sets the rate of step 0, and each
`step` sets that of the next one. That number is the complete state: after a resume the arguments of the new run apply.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shardwell.config import SCHEDULERS, SchedulerConfig
from shardwell.config.arguments import show
from shardwell.config.schedules import checked
from shardwell.errors import ConfigError, ShardwellError

Rate = float | Sequence[float]  # one for all parameter groups, or one for each

_MOST_MOMENTUM = 0.999  # the limit of momentum that grows after the cycle: at 1 nothing is forgotten


def by_name(block: SchedulerConfig, optimizer: Optimizer) -> LRScheduler:
    """Return the schedule that a configuration block names, attached to the optimizer."""
    params, problems = checked(block.type, block.params)
    if problems:
        raise ConfigError("\n".join(f"{key}: {sentence}" for key, sentence in problems))
    return KINDS[block.type](optimizer, **params)


class LearningRateSchedule(LRScheduler):
    """The base class: a torch scheduler whose rates depend only on the step."""

    def __init__(self, optimizer: Optimizer, last_batch_iteration: int) -> None:
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", float(group["lr"]))  # torch requires it if the schedule does not start at 0
        super().__init__(optimizer, last_batch_iteration)

    @abstractmethod
    def rates(self, step: int) -> list[float]:
        """Return the learning rate of each parameter group after `step` optimizer steps."""

    def get_lr(self) -> list[float | Tensor]:
        """Return the current learning rates."""
        return list(self.rates(self.last_epoch))

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the schedule."""
        return {"last_batch_iteration": self.last_epoch - 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved position; its rates are set immediately."""
        if "last_batch_iteration" not in state_dict:
            raise ShardwellError(f"this is no state of {type(self).__name__}: it has no last_batch_iteration")
        self.last_epoch = int(state_dict["last_batch_iteration"])
        self._initial_step()


@dataclass(frozen=True)
class Warmup:
    """A rise from 0 at step 0 to 1 at `steps`; the logarithmic one reaches 1 one step earlier."""

    steps: int
    kind: str

    def at(self, step: int) -> float:
        if step >= self.steps:
            return 1.0
        return math.log(step + 1) / math.log(self.steps) if self.kind == "log" else step / self.steps


@dataclass(frozen=True)
class Cycle:
    """A rise from 0 to 1 and a fall back to 0; with a stair count, a half has equal stairs instead of a slope."""

    first: float  # steps of the rise
    second: float  # steps of the fall
    first_stairs: int = 0
    second_stairs: int = 0

    def at(self, step: int) -> float:
        if step <= self.first:
            done, size, stairs = float(step), self.first, self.first_stairs
        else:
            done, size, stairs = self.first + self.second - step, self.second, self.second_stairs
        return done * stairs // size / stairs if stairs else done / size


class WarmupLR(LearningRateSchedule):
    """A warm-up from `warmup_min_lr` to `warmup_max_lr` over `warmup_num_steps` steps, then a constant rate.

    `warmup_max_lr` None is each group's own rate. No warm-up is 0 steps; 1 counts as 2, as for DeepSpeed.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: Rate = 0.0,
        warmup_max_lr: Rate | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self._low = _per_group("warmup_min_lr", warmup_min_lr, optimizer)
        self._high = _initial_rates(optimizer)
        if warmup_max_lr is not None:
            self._high = _per_group("warmup_max_lr", warmup_max_lr, optimizer)
        self._warmup = _warmup(warmup_num_steps, warmup_type)
        super().__init__(optimizer, last_batch_iteration)

    def rates(self, step: int) -> list[float]:
        height = self.height(step)
        return [low + (high - low) * height for low, high in zip(self._low, self._high, strict=True)]

    def height(self, step: int) -> float:
        """Return the position between the lowest rate (0) and the highest (1)."""
        return self._warmup.at(step)


class WarmupDecayLR(WarmupLR):
    """The warm-up of `WarmupLR`, then a linear decay to `warmup_min_lr`, reached after `total_num_steps` steps."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: Rate = 0.0,
        warmup_max_lr: Rate | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self._total = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def height(self, step: int) -> float:
        if step < self._warmup.steps:
            return super().height(step)
        return max(0.0, (self._total - step) / max(1, self._total - self._warmup.steps))


class WarmupCosineLR(LearningRateSchedule):
    """A warm-up to each group's own rate, then half a cosine down to the share `cos_min_ratio` of it."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self._initial = _initial_rates(optimizer)
        self._first = warmup_min_ratio
        self._last = cos_min_ratio
        self._total = total_num_steps
        self._warmup = _warmup(warmup_num_steps, warmup_type)
        super().__init__(optimizer, last_batch_iteration)

    def rates(self, step: int) -> list[float]:
        ratio = self.ratio(step)
        return [rate * ratio for rate in self._initial]

    def ratio(self, step: int) -> float:
        """Return the share of each group's own rate."""
        if step < self._warmup.steps:
            return self._first + (1.0 - self._first) * self._warmup.at(step)
        progress = min(1.0, (step - self._warmup.steps) / max(1, self._total - self._warmup.steps))
        return self._last + (1.0 - self._last) * (1.0 + math.cos(math.pi * progress)) / 2


class OneCycle(LearningRateSchedule):
    """One cycle from `cycle_min_lr` up to `cycle_max_lr` and back, then a decay.

    Momentum (`betas[0]`, or `momentum` where it is not 0) moves in the opposite direction: it is lowest where the rate
    is highest. With a stair count, a half of the cycle has that many equal stairs instead of a slope. After the cycle,
    each `decay_step_size` steps add `decay_lr_rate` to the divisor of the rate, and `decay_mom_rate` to the factor of
    the momentum, which stays below 1.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: Rate,
        cycle_max_lr: Rate,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Rate = 0.8,
        cycle_max_mom: Rate = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        second_size = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        second_stairs = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self._low = _per_group("cycle_min_lr", cycle_min_lr, optimizer)
        self._high = _per_group("cycle_max_lr", cycle_max_lr, optimizer)
        self._first = cycle_first_step_size
        self._second = second_size
        self._cycle = Cycle(self._first, self._second, cycle_first_stair_count, second_stairs)
        self._decay_size = decay_step_size
        self._decay = decay_lr_rate
        self._momentum_decay = decay_mom_rate
        self._least_momentum = _per_group("cycle_min_mom", cycle_min_mom, optimizer)
        self._most_momentum = _per_group("cycle_max_mom", cycle_max_mom, optimizer)
        self._momentum_keys = [_momentum_key(group) if cycle_momentum else None for group in optimizer.param_groups]
        super().__init__(optimizer, last_batch_iteration)

    def step(self, epoch: int | None = None) -> None:
        """Set the next rates and the next momentum."""
        super().step(epoch)
        momenta = self.momenta(self.last_epoch)
        for group, key, momentum in zip(self.optimizer.param_groups, self._momentum_keys, momenta, strict=True):
            if key == "betas":
                group[key] = (momentum, *group[key][1:])
            elif key is not None:
                group[key] = momentum

    def rates(self, step: int) -> list[float]:
        if step > self._first + self._second:
            divisor = 1.0 + self._decay * self._intervals(step)
            return [low / divisor for low in self._low]
        height = self.height(step)
        return [low + (high - low) * height for low, high in zip(self._low, self._high, strict=True)]

    def momenta(self, step: int) -> list[float]:
        """Return the momentum of each parameter group that has one, after `step` optimizer steps."""
        if step > self._first + self._second:
            factor = 1.0 + self._momentum_decay * self._intervals(step)
            return [min(most * factor, max(most, _MOST_MOMENTUM)) for most in self._most_momentum]
        height = self.height(step)
        ends = zip(self._least_momentum, self._most_momentum, strict=True)
        return [most - (most - least) * height for least, most in ends]

    def height(self, step: int) -> float:
        """Return the position in the cycle: 0 at its ends, 1 in the middle."""
        return self._cycle.at(step)

    def _intervals(self, step: int) -> float:
        """Return the number of decay intervals since the end of the cycle."""
        return (step - self._first - self._second) / self._decay_size if self._decay_size else 0.0


class LRRangeTest(LearningRateSchedule):
    """A test with increasing rates, to find which are too high.

    Each interval adds `lr_range_test_step_rate` times the first rate.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: Rate = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self._low = _per_group("lr_range_test_min_lr", lr_range_test_min_lr, optimizer)
        self._size = lr_range_test_step_size
        self._rate = lr_range_test_step_rate
        self._stairs = lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def rates(self, step: int) -> list[float]:
        intervals = step // self._size if self._stairs else step / self._size
        return [low * (1.0 + self._rate * intervals) for low in self._low]


KINDS: dict[str, type[LearningRateSchedule]] = dict(
    zip(SCHEDULERS, (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest), strict=True)
)


# --- arguments --------------------------------------------------------------------------------------------------


def _per_group(key: str, value: Rate, optimizer: Optimizer) -> list[float]:
    count = len(optimizer.param_groups)
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise ConfigError(
            f"scheduler.params.{key}: expected one number, or one for each of {count} parameter groups, "
            f"found {show(value)}"
        )
    return list(value)


def _initial_rates(optimizer: Optimizer) -> list[float]:
    return [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]


def _warmup(steps: int, kind: str) -> Warmup:
    return Warmup(max(2, steps) if steps else 0, kind)


def _momentum_key(group: dict[str, Any]) -> str | None:
    if "betas" in group:
        return "betas"
    return "momentum" if group.get("momentum") else None
