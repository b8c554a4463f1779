"""DeepSpeed's names of the engine's optimizer. One class serves all stages and precisions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwell.compat.deepspeed_api.fragments import safe_get_local_grad
from shardwell.compat.deepspeed_api.loss_scaler import SETTLING
from shardwell.compat.deepspeed_api.names_refused import ONE_OPTIMIZER
from shardwell.compat.deepspeed_api.refusal import UnsupportedNameError
from shardwell.compat.deepspeed_api.replacements import replacement_for
from shardwell.engine import Engine
from shardwell.optim import ShardedOptimizer
from shardwell.optim.factory import NO_LABEL
from shardwell.optim.loss_scale import DynamicScale
from shardwell.utils import get_z3_leaf_modules, safe_get_local_fp32_param


class _NoModule(nn.Module):
    """A module without parameters: what there is to hook outside of the engine's own hooks, which stay."""

    def ds_external_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return no parameters: a use outside their module is caught by the parameters themselves."""
        return []


class ParameterOffload:
    """An object that libraries take hooks from before they generate, and give them back to: there are none to take.

    The engine's hooks must stay while a model generates, because they gather its parameters.
    """

    def __init__(self) -> None:
        self.module = _NoModule()
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """Accept the module: its hooks were never removed."""


class DeepSpeedOptimizer(ShardedOptimizer):
    """The optimizer of a `DeepSpeedEngine`, with the names that DeepSpeed's optimizers have."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parameter_offload = ParameterOffload()
        self.custom_loss_scaler = False
        self.external_loss_scale: float | None = None
        self.zero_stage = 0  # the engine sets it, for `isinstance` against the classes of the stages
        if isinstance(self.scale, DynamicScale):
            self.scale.use(replace(self.scale.rules, settling=SETTLING))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"'DeepSpeedOptimizer' object has no attribute '{name}'{replacement_for(name)}")

    def needs_scaler(self) -> bool:
        """Return whether losses have a scale, as with fp16."""
        return self.scale.is_on

    @property
    def leaf_parameters(self) -> dict[nn.Module, list[nn.Parameter]]:
        """The parameters of each leaf module of the model."""
        engine: Any = self.trainer()
        leaves = get_z3_leaf_modules(engine.module) if engine is not None else []
        return {module: list(module.parameters()) for module in leaves}

    @property
    def averaged_gradients(self) -> dict[int, list[Tensor]]:
        """This rank's parts of the averaged gradients (1D), by parameter group, to read."""
        return {index: list(parts.values()) for index, parts in self.get_fp32_grad_partitions().items()}

    def get_fp32_grad_partitions(self) -> dict[int, dict[int, Tensor]]:
        """Return this rank's parts of the averaged gradients (1D) in fp32, by parameter group and number in it."""
        engine: Any = self.trainer()
        found: dict[int, dict[int, Tensor]] = {}
        for parameter in engine.module.parameters() if engine is not None else ():
            group, part = self._factory.label(parameter), None
            if group != NO_LABEL and parameter.requires_grad:
                numbers = found.setdefault(group, {})
                part = safe_get_local_grad(parameter)
            if part is not None:
                numbers[len(numbers)] = part.float()
        return found

    @property
    def cur_scale(self) -> float:
        """The loss scale; 1 without fp16."""
        return self.scale.value

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale follows overflows."""
        return self.scale.is_on and hasattr(self.scale, "rules")

    @property
    def loss_scaler(self) -> Any:
        """The loss scale as an object, with `cur_scale`, `loss_scale` and `dynamic`."""
        return _LossScaler(self)

    @property
    def loss_scale_config(self) -> Any:
        """The loss scale and its rules, as `loss_scaler`."""
        return _LossScaler(self)

    def get_global_norm(self) -> float | None:
        """Return the norm of the gradients at the last step, before clipping."""
        norm = self.global_norm()
        return None if norm is None else float(norm)

    @property
    def _global_grad_norm(self) -> float | None:
        return self.get_global_norm()

    @property
    def fp32_partitioned_groups_flat(self) -> list[Tensor]:
        """Copies of this rank's part of the master weights, flat, one for each parameter group."""
        engine, labels = self.trainer(), self.shards.labels
        found: list[list[Tensor]] = [[] for _ in self.param_groups]
        for name, parameter in engine.module.named_parameters() if isinstance(engine, Engine) else ():
            part = safe_get_local_fp32_param(parameter) if labels.get(name, NO_LABEL) != NO_LABEL else None
            if part is not None:
                found[labels[name]].append(part.detach().reshape(-1).float())
        return [torch.cat(parts) if parts else torch.zeros(0) for parts in found]

    @property
    def single_partition_of_fp32_groups(self) -> list[Tensor]:
        """The name that `fp32_partitioned_groups_flat` has at stages 1 and 2."""
        return self.fp32_partitioned_groups_flat

    def _set_fp32_optimizer_param_groups(self) -> None:
        """Do nothing: the inner optimizer's groups always hold this rank's master weights."""

    def _clear_fp32_optimizer_param_groups(self) -> None:
        """Do nothing: see `_set_fp32_optimizer_param_groups`."""

    def refresh_fp32_params(self) -> None:
        """Do nothing: a change of a parameter reaches its master weights by itself."""

    def empty_partition_cache(self) -> None:
        """Do nothing: units are resharded as soon as they were used."""

    def destroy(self) -> None:
        """Do nothing: the engine frees its optimizer's state when it is destroyed."""


class _LossScaler:
    """A look at the loss scale of an optimizer."""

    def __init__(self, optimizer: DeepSpeedOptimizer) -> None:
        self._optimizer = optimizer

    @property
    def cur_scale(self) -> float:
        return self._optimizer.cur_scale

    @property
    def loss_scale(self) -> float:
        return self._optimizer.cur_scale

    @property
    def dynamic(self) -> bool:
        return self._optimizer.dynamic_loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        return self._optimizer.dynamic_loss_scale

    @property
    def cur_iter(self) -> int:
        return getattr(self._optimizer.scale, "num_updates", 0)

    @property
    def last_overflow_iter(self) -> int:
        return getattr(self._optimizer.scale, "last_overflow", -1)

    @property
    def cur_hysteresis(self) -> int:
        return getattr(self._optimizer.scale, "overflows_left", 1)

    @property
    def scale_window(self) -> int:
        return int(self._rule("window", 1000))

    @property
    def min_loss_scale(self) -> float:
        return float(self._rule("smallest", 1.0))

    @property
    def scale_factor(self) -> float:
        return 2.0

    def _rule(self, name: str, default: float) -> float:
        return float(getattr(getattr(self._optimizer.scale, "rules", None), name, default))


ZeROOptimizer = DeepSpeedOptimizer


class _OfStages(type):
    """The class of DeepSpeed's optimizers by stage: an engine's optimizer is an instance of the one of its stage."""

    stages: tuple[int, ...]

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, DeepSpeedOptimizer) and instance.zero_stage in cls.stages

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedNameError(f"{cls.__name__} cannot be made by itself: {ONE_OPTIMIZER}")


class DeepSpeedZeroOptimizer(metaclass=_OfStages):
    """The class that the optimizer of an engine at stage 1 or 2 is an instance of."""

    stages = (1, 2)


class DeepSpeedZeroOptimizer_Stage3(metaclass=_OfStages):  # noqa: N801 - DeepSpeed's name
    """The class that the optimizer of an engine at stage 3 is an instance of."""

    stages = (3,)
