"""`deepspeed.runtime.lr_schedules`: its schedules as classes, with DeepSpeed's numbers.

They differ from the engine's own of the same names: a schedule counts the steps that are done from -1, so the first two
steps have the rate of step 0. The curves are those of `optim/lr_schedules.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from shardwell.compat.deepspeed_api.logging import logger
from shardwell.compat.deepspeed_api.lr_arguments import (
    COS_MIN_RATIO,
    CYCLE_FIRST_STAIR_COUNT,
    CYCLE_FIRST_STEP_SIZE,
    CYCLE_MAX_LR,
    CYCLE_MAX_MOM,
    CYCLE_MIN_LR,
    CYCLE_MIN_MOM,
    CYCLE_MOMENTUM,
    CYCLE_SECOND_STAIR_COUNT,
    CYCLE_SECOND_STEP_SIZE,
    DECAY_LR_RATE,
    DECAY_MOM_RATE,
    DECAY_STEP_SIZE,
    EDGE_VALUE,
    LR_RANGE_TEST,
    LR_RANGE_TEST_MIN_LR,
    LR_RANGE_TEST_STAIRCASE,
    LR_RANGE_TEST_STEP_RATE,
    LR_RANGE_TEST_STEP_SIZE,
    LR_SCHEDULE,
    MID_VALUE,
    ONE_CYCLE,
    TOTAL_NUM_STEPS,
    VALID_LR_SCHEDULES,
    WARMUP_COSINE_LR,
    WARMUP_DECAY_LR,
    WARMUP_LINEAR_RATE,
    WARMUP_LOG_RATE,
    WARMUP_LR,
    WARMUP_MAX_LR,
    WARMUP_MIN_LR,
    WARMUP_MIN_RATIO,
    WARMUP_NUM_STEPS,
    WARMUP_TYPE,
    add_tuning_arguments,
    get_config_from_args,
    get_lr_from_config,
    override_1cycle_params,
    override_lr_range_test_params,
    override_params,
    override_warmupCosineLR_params,
    override_warmupLR_params,
    parse_arguments,
)
from shardwell.errors import ConfigError
from shardwell.optim.lr_schedules import Cycle, Warmup

Rate = float | Sequence[float]  # one for all parameter groups, or one for each

__all__ = [  # noqa: RUF022 - the names of `lr_arguments`, then those of this module
    "COS_MIN_RATIO",
    "CYCLE_FIRST_STAIR_COUNT",
    "CYCLE_FIRST_STEP_SIZE",
    "CYCLE_MAX_LR",
    "CYCLE_MAX_MOM",
    "CYCLE_MIN_LR",
    "CYCLE_MIN_MOM",
    "CYCLE_MOMENTUM",
    "CYCLE_SECOND_STAIR_COUNT",
    "CYCLE_SECOND_STEP_SIZE",
    "DECAY_LR_RATE",
    "DECAY_MOM_RATE",
    "DECAY_STEP_SIZE",
    "EDGE_VALUE",
    "LR_RANGE_TEST",
    "LR_RANGE_TEST_MIN_LR",
    "LR_RANGE_TEST_STAIRCASE",
    "LR_RANGE_TEST_STEP_RATE",
    "LR_RANGE_TEST_STEP_SIZE",
    "LR_SCHEDULE",
    "MID_VALUE",
    "ONE_CYCLE",
    "TOTAL_NUM_STEPS",
    "VALID_LR_SCHEDULES",
    "WARMUP_COSINE_LR",
    "WARMUP_DECAY_LR",
    "WARMUP_LINEAR_RATE",
    "WARMUP_LOG_RATE",
    "WARMUP_LR",
    "WARMUP_MAX_LR",
    "WARMUP_MIN_LR",
    "WARMUP_MIN_RATIO",
    "WARMUP_NUM_STEPS",
    "WARMUP_TYPE",
    "add_tuning_arguments",
    "get_config_from_args",
    "get_lr_from_config",
    "override_1cycle_params",
    "override_lr_range_test_params",
    "override_params",
    "override_warmupCosineLR_params",
    "override_warmupLR_params",
    "parse_arguments",
    "LRRangeTest",
    "OneCycle",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "from_config",
    "get_torch_optimizer",
    "update_lr",
]

_SECOND_BETA = 0.99  # what DeepSpeed's OneCycle sets betas[1] to


def get_torch_optimizer(optimizer: Any) -> Optimizer:
    """Return the torch optimizer that an object is or wraps."""
    if isinstance(optimizer, Optimizer):
        return optimizer
    if isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        return inner
    raise TypeError(f"a learning-rate schedule needs a torch.optim.Optimizer, not a {type(optimizer).__name__}")


def update_lr(param_groups: Sequence[dict[str, Any]], lrs: Sequence[Any]) -> list[Any]:
    """Set the rate of each group; one that is a tensor stays the same tensor."""
    for group, rate in zip(param_groups, lrs, strict=False):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate.squeeze() if isinstance(rate, Tensor) else rate)
        else:
            group["lr"] = rate
    return [group["lr"] for group in param_groups]


class _Schedule:
    """The base of all schedules: the number of the last step, and the rates that follow from it."""

    def __init__(self, optimizer: Any, last_batch_iteration: int) -> None:
        self.optimizer = get_torch_optimizer(optimizer)
        self.last_batch_iteration = last_batch_iteration
        self._last_lr: list[Any] | None = None

    def get_lr(self) -> list[Any]:
        """Return the rates of the next step."""
        raise NotImplementedError

    def get_last_lr(self) -> list[Any]:
        """Return the rates that were set last."""
        if self._last_lr is None:
            raise AssertionError("no rate was set yet: call step() first")
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Set the rates after one more step, or after this one."""
        before = self.last_batch_iteration
        self.last_batch_iteration = before + 1 if last_batch_iteration is None else last_batch_iteration
        self._set()

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: Mapping[str, Any]) -> None:
        """Continue after a saved step; its rates are set immediately."""
        self.last_batch_iteration = int(sd["last_batch_iteration"])
        self._set()

    def _set(self) -> None:
        self._last_lr = update_lr(self.optimizer.param_groups, self.get_lr())

    def _each(self, value: Any, name: str) -> list[Any]:
        """Return one value for each parameter group."""
        count = len(self.optimizer.param_groups)
        if not isinstance(value, list | tuple):
            return [value] * count
        if len(value) != count:
            raise ConfigError(f"{name}: expected one number, or one for each of {count} parameter groups: {value!r}")
        return list(value)


class LRRangeTest(_Schedule):
    """A test with increasing rates, to find which are too high."""

    def __init__(
        self,
        optimizer: Any,
        lr_range_test_min_lr: Rate = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.min_lr = self._each(lr_range_test_min_lr, LR_RANGE_TEST_MIN_LR)
        if not isinstance(lr_range_test_step_size, int) or lr_range_test_step_size <= 0:
            raise ConfigError(f"lr_range_test_step_size: expected a whole number above 0: {lr_range_test_step_size!r}")
        self.step_size, self.step_rate = lr_range_test_step_size, lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        if last_batch_iteration == -1:
            self._set()

    def get_lr(self) -> list[Any]:
        done = self.last_batch_iteration + 1
        intervals = done // self.step_size if self.staircase else done / self.step_size
        return [low * (1 + self.step_rate * intervals) for low in self.min_lr]


class WarmupLR(_Schedule):
    """A warm-up from `warmup_min_lr` to `warmup_max_lr`, by default each group's own rate, then a constant rate."""

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: Rate = 0.0,
        warmup_max_lr: Rate | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = WARMUP_LOG_RATE,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.warmup_num_steps, self.warmup_type = _warmup_steps(warmup_num_steps), _warmup_type(warmup_type)
        own = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.min_lrs = self._each(warmup_min_lr, WARMUP_MIN_LR)
        self.max_lrs = self._each(own if warmup_max_lr is None else warmup_max_lr, WARMUP_MAX_LR)
        self.delta_lrs = [high - low for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]
        self._warmup = Warmup(self.warmup_num_steps, self.warmup_type)
        if last_batch_iteration == -1:
            self._set()

    def get_lr(self) -> list[Any]:
        if self.last_batch_iteration < 0:
            return list(self.min_lrs)
        height = self._get_gamma()
        return [low + delta * height for low, delta in zip(self.min_lrs, self.delta_lrs, strict=True)]

    def _get_gamma(self) -> float:
        """Return the position between the lowest rate (0) and the highest (1)."""
        return self._warmup.at(self.last_batch_iteration)


class WarmupDecayLR(WarmupLR):
    """The warm-up of `WarmupLR`, then a linear decay to the lowest rate at `total_num_steps`."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: Rate = 0.0,
        warmup_max_lr: Rate | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = WARMUP_LOG_RATE,
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)
        _warn_if_short(total_num_steps, self.warmup_num_steps)

    def _get_gamma(self) -> float:
        if self.last_batch_iteration < self.warmup_num_steps:
            return super()._get_gamma()
        left = self.total_num_steps - self.last_batch_iteration
        return max(0.0, left / max(1.0, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(_Schedule):
    """A warm-up to each group's own rate, then half a cosine down to the share `cos_min_ratio` of it."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = WARMUP_LOG_RATE,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.warmup_num_steps, self.warmup_type = _warmup_steps(warmup_num_steps), _warmup_type(warmup_type)
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        self._warmup = Warmup(self.warmup_num_steps, self.warmup_type)
        self.org_lrs = [float(group["lr"]) for group in self.optimizer.param_groups]
        _warn_if_short(total_num_steps, self.warmup_num_steps)
        if last_batch_iteration == -1:
            self._set()

    def get_lr_ratio(self) -> float:
        """Return the share of each group's own rate."""
        done = self.last_batch_iteration
        if done < 0:
            return 0.0
        if done < self.warmup_num_steps:
            return self.warmup_min_ratio + (1.0 - self.warmup_min_ratio) * self._warmup.at(done)
        decay = max(1, self.total_num_steps - self.warmup_num_steps)
        progress = min(1.0, (done - self.warmup_num_steps + 1) / decay)
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * (1 + math.cos(math.pi * progress)) / 2)

    def get_lr(self) -> list[Any]:
        ratio = self.get_lr_ratio()
        return [rate * ratio for rate in self.org_lrs]


class OneCycle(_Schedule):
    """One cycle from `cycle_min_lr` up to `cycle_max_lr` and back, then a decay; momentum moves the other way.

    As DeepSpeed does, it begins with the lowest momentum, and sets the second beta to 0.99.
    """

    def __init__(
        self,
        optimizer: Any,
        cycle_min_lr: Rate,
        cycle_max_lr: Rate,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: float = 2000,
        cycle_second_step_size: float | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Rate = 0.8,
        cycle_max_mom: Rate = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.first_step_size = float(cycle_first_step_size)
        self.second_step_size = float(
            cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        )
        if self.first_step_size <= 0 or self.second_step_size < 0:
            raise ConfigError(
                f"the halves of a cycle have {self.first_step_size:g} and {self.second_step_size:g} steps: "
                "cycle_first_step_size must be above 0, and cycle_second_step_size not below"
            )
        self.total_size = self.first_step_size + self.second_step_size
        self.step_ratio = self.first_step_size / self.total_size
        self.first_stair_count, second = cycle_first_stair_count, cycle_second_stair_count
        self.second_stair_count = cycle_first_stair_count if second is None else second
        stairs = max(0, self.first_stair_count), max(0, self.second_stair_count)
        self._cycle = Cycle(self.first_step_size, self.second_step_size, *stairs)
        self.decay_step_size, self.decay_lr_rate, self.decay_mom_rate = decay_step_size, decay_lr_rate, decay_mom_rate
        self.min_lrs = self._each(cycle_min_lr, CYCLE_MIN_LR)
        self.max_lrs = self._each(cycle_max_lr, CYCLE_MAX_LR)
        self.min_moms = [(one, _SECOND_BETA) for one in self._each(cycle_min_mom, CYCLE_MIN_MOM)]
        self.max_moms = [(one, _SECOND_BETA) for one in self._each(cycle_max_mom, CYCLE_MAX_MOM)]
        self.cycle_momentum = cycle_momentum and self._has_betas()
        if last_batch_iteration == -1:
            self._last_lr = update_lr(self.optimizer.param_groups, self.min_lrs)
            self._set_momenta(self.min_moms)

    def _has_betas(self) -> bool:
        found = all("betas" in group for group in self.optimizer.param_groups)
        if not found:
            logger.warning("cycle_momentum has no effect: %s has no betas", type(self.optimizer).__name__)
        return found

    def _set_momenta(self, momenta: Sequence[tuple[float, float]]) -> None:
        if self.cycle_momentum:
            for group, momentum in zip(self.optimizer.param_groups, momenta, strict=True):
                group["betas"] = momentum

    def _set(self) -> None:
        super()._set()
        self._set_momenta(self.get_mom() or ())

    def _height(self) -> float:
        """Return the position in the cycle: 0 at its ends, 1 in the middle."""
        done = self.last_batch_iteration + 1
        return 0.0 if done >= self.total_size else self._cycle.at(done)

    def _intervals(self, rate: float) -> float:
        """Return how often a decay of this rate was applied after the cycle."""
        over = self.last_batch_iteration - self.total_size + 1
        return rate * over / self.decay_step_size if self.decay_step_size else 0.0

    def get_lr(self) -> list[Any]:
        if self.last_batch_iteration >= self.total_size:
            divisor = 1 + self._intervals(self.decay_lr_rate)
            return [low / divisor for low in self.min_lrs]
        height = self._height()
        return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the betas of each group for the next step; None if momentum does not move."""
        if not self.cycle_momentum:
            return None
        if self.last_batch_iteration >= self.total_size:
            factor = 1 + self._intervals(self.decay_mom_rate)
            return [(most * factor, beta) for most, beta in self.max_moms]
        height = self._height()
        ends = zip(self.min_moms, self.max_moms, strict=True)
        return [(most - (most - least) * height, beta) for (least, beta), (most, _) in ends]


KINDS: dict[str, type[_Schedule]] = {
    LR_RANGE_TEST: LRRangeTest,
    ONE_CYCLE: OneCycle,
    WARMUP_LR: WarmupLR,
    WARMUP_DECAY_LR: WarmupDecayLR,
    WARMUP_COSINE_LR: WarmupCosineLR,
}


def from_config(kind: str, params: Mapping[str, Any], optimizer: Any) -> Any:
    """Return the schedule that a configuration names, attached to the optimizer."""
    return KINDS[kind](optimizer, **params)


def _warmup_steps(steps: Any) -> int:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise ConfigError(f"warmup_num_steps: expected a whole number of at least 0, found {steps!r}")
    return max(2, steps)


def _warmup_type(kind: str) -> str:
    if kind in (WARMUP_LOG_RATE, WARMUP_LINEAR_RATE):
        return kind
    logger.warning("warmup_type %r is not known: %r is used; known are log and linear", kind, WARMUP_LOG_RATE)
    return WARMUP_LOG_RATE


def _warn_if_short(total: int, warmup: int) -> None:
    if total < warmup:
        logger.warning("total_num_steps %s is less than warmup_num_steps %s: the warm-up does not end", total, warmup)
