"""The strategy of Fabric: `fabric.setup` makes an engine, and backward, clipping and checkpoints go through it.

`FabricStrategy` imports no Lightning. It becomes a strategy by inheriting from Fabric's `DDPStrategy` of a package as
well (`lightning.py`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import shardwell
from shardwell.engine import Engine
from shardwell.errors import CheckpointError, ShardwellError
from shardwell.integrations.lightning_checkpoint import TAG
from shardwell.integrations.lightning_config import StrategyArguments, for_evaluation, stage_of, with_precision
from shardwell.integrations.lightning_engine import make_engine, not_at_a_boundary, one_optimizer, parameters_of
from shardwell.integrations.lightning_trainer import check_ddp_arguments


class FabricStrategy:
    """Trains models with a shardwell engine each, at any ZeRO stage, on CPU or CUDA.

    The arguments are those of the Trainer's strategy; `exclude_frozen_parameters` leaves frozen parameters out of
    checkpoints.
    """

    names: Any  # what this package of Lightning calls things, see `lightning.py`
    root_device: torch.device

    def __init__(
        self,
        stage: int | None = None,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
        offload_optimizer_device: str = "cpu",
        offload_params_device: str = "cpu",
        nvme_path: str | os.PathLike[str] | None = None,
        config: Any = None,
        exclude_frozen_parameters: bool = False,
        **ddp: Any,
    ) -> None:
        if "precision" in ddp:
            ddp["precision_plugin"] = ddp.pop("precision")
        check_ddp_arguments(ddp)
        if "precision_plugin" in ddp:
            ddp["precision"] = ddp.pop("precision_plugin")
        self.config = StrategyArguments(
            stage,
            offload_optimizer,
            offload_parameters,
            offload_optimizer_device,
            offload_params_device,
            nvme_path,
            config,
        ).configuration()
        self.exclude_frozen_parameters = exclude_frozen_parameters
        self._clipped: dict[int, tuple[nn.Parameter, ...]] = {}  # by the id of an optimizer that an engine holds
        self._engines: list[Engine] = []
        super().__init__(**ddp)
        self._backward_sync_control = self.names.backward_sync_control

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of stage {stage_of(self.config)}, for Fabric of {self.names.package}>"

    @property
    def precision(self) -> Any:
        """The plugin that Fabric chose; the engine scales losses and clips."""
        return self._precision

    @precision.setter
    def precision(self, plugin: Any) -> None:
        around = self.names.fabric_precision
        self._precision: Any = plugin if isinstance(plugin, around) else around(plugin)

    # --------------------------------------------------------------------------------------------------- set-up

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Make an engine of a model and its optimizer; a schedule stays the loop's own."""
        optimizer = one_optimizer(optimizers)
        clipped = parameters_of(optimizer)
        engine = self._make_engine(module, optimizer)
        return engine, [self._own(engine, clipped)], scheduler

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Make an engine of a model, to evaluate it, or to give it an optimizer with `setup_optimizers`."""
        return self._make_engine(module, None)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Give an optimizer over the parameters of a model that was set up before to the model's engine."""
        optimizer = one_optimizer([optimizer])
        clipped = parameters_of(optimizer)
        theirs = {id(parameter) for parameter in clipped}
        for engine in self._engines:
            if any(id(parameter) in theirs for parameter in engine.parameters()):
                if engine.optimizer is not None:
                    one_optimizer([engine.optimizer, optimizer])  # which refuses several
                engine.adopt(optimizer, steps=False)
                return self._own(engine, clipped)
        raise ShardwellError(
            "this optimizer has no parameters of a model that Fabric has set up: call fabric.setup(model, optimizer), "
            "or fabric.setup_module(model) before the optimizer is made"
        )

    def _own(self, engine: Engine, clipped: tuple[nn.Parameter, ...]) -> Optimizer:
        """Return the engine's optimizer: Fabric's wrapper finds the methods of its class, not those of an object."""
        assert engine.optimizer is not None
        self._clipped[id(engine.optimizer)] = clipped
        return engine.optimizer

    def _make_engine(self, module: nn.Module, optimizer: Optimizer | None) -> Engine:
        config = with_precision(self.config, self.precision.precision, self.precision.scaler)
        before = len(self._engines)
        engine = make_engine(module, optimizer, config, self.root_device)
        self._engines = [one for one in self._engines if one.module is not module][:before]
        self._engines.append(engine)
        return engine

    def module_to_device(self, module: nn.Module) -> None:
        """Move nothing: the engine moves parameters, one unit after the other."""

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Return a context in which parameters are sharded as they are made, at stage 3."""
        stack = ExitStack()
        if stage_of(self.config) < 3:
            stack.enter_context(super().module_init_context(empty_init=empty_init))  # type: ignore[misc]
            return stack
        stack.enter_context(self.precision.module_init_context())
        stack.enter_context(self.module_sharded_context())
        return stack

    def module_sharded_context(self) -> AbstractContextManager[Any]:
        """Return a context in which parameters are sharded as they are made, at stage 3."""
        config = with_precision(self.config, self.precision.precision, self.precision.scaler)
        return shardwell.zero.Init(
            config_dict_or_path=for_evaluation(config), enabled=stage_of(config) == 3, device=self.root_device
        )

    # -------------------------------------------------------------------------------------------------- training

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Run backward through the engine of a model; without one, through the only engine or as a plain backward."""
        training = [engine for engine in self._engines if engine.optimizer is not None] or self._engines
        engine = module if isinstance(module, Engine) else training[0] if len(training) == 1 else None
        if engine is None or args or set(kwargs) - {"retain_graph", "create_graph"}:
            tensor.backward(*args, **kwargs)
        else:
            engine.backward(tensor, **kwargs)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step, which is the engine's step."""
        return optimizer.step(**kwargs)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip by the norm of all ranks' gradients, and return that norm."""
        return torch.nn.utils.clip_grad_norm_(
            self._parameters(module, optimizer), max_norm, norm_type, error_if_nonfinite=error_if_nonfinite
        )

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        """Clip each element of the averaged gradients."""
        torch.nn.utils.clip_grad_value_(self._parameters(module, optimizer), clip_val)

    def _parameters(self, module: nn.Module, optimizer: Optimizer) -> list[nn.Parameter]:
        found = self._clipped.get(id(optimizer), tuple(module.parameters()))
        return [parameter for parameter in found if parameter.grad is not None]

    # ----------------------------------------------------------------------------------------------- checkpoints

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the full state of a model. All ranks must call it."""
        return module.state_dict()

    def load_module_state_dict(self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load the full state of a model. All ranks must call it."""
        module.load_state_dict(state_dict, strict=strict)

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Save a folder: the shards of the one engine in `state`, and the rest of it. All ranks must call it."""
        if storage_options is not None or filter is not None:
            raise TypeError(
                "fabric.save with filter or storage_options: the engine writes its shards itself. Leave frozen "
                "weights out with exclude_frozen_parameters=True of the strategy."
            )
        engine, rest = _split(state, "save")
        rest = self._convert_stateful_objects_in_state(rest, filter={})  # type: ignore[attr-defined]
        engine.save_checkpoint(
            os.fspath(self.broadcast(path)),  # type: ignore[attr-defined]
            tag=TAG,
            client_state=rest,
            exclude_frozen_parameters=self.exclude_frozen_parameters,
        )

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a folder into the one engine in `state` and the rest of it; return what was saved besides."""
        path = os.fspath(self.broadcast(path))  # type: ignore[attr-defined]
        if isinstance(state, Engine) and os.path.isdir(path):  # fabric.load_raw
            state.load_model(path, strict=strict)
            return {}
        if isinstance(state, (nn.Module, Optimizer)) or os.path.isfile(path):
            found: dict[str, Any] = super().load_checkpoint(  # type: ignore[misc]
                path=path, state=state, strict=strict, weights_only=weights_only
            )
            return found
        if not state:
            raise CheckpointError(
                f"{path}: fabric.load needs the model that it loads into: fabric.load(path, {{'model': model, ...}})"
            )
        engine, rest = _split(state, "load")
        asks = any(isinstance(value, Optimizer) for value in state.values())
        _, client = engine.load_checkpoint(path, load_optimizer_states=asks, load_module_strict=strict, strict=True)
        client = dict(client or {})
        missing = sorted(set(rest) - set(client))
        if strict and missing:
            raise KeyError(f"{path}: holds nothing under {missing[0]!r}, which fabric.load was asked for")
        for key in set(rest) & set(client):
            value = client.pop(key)
            if hasattr(rest[key], "load_state_dict"):
                rest[key].load_state_dict(value)
            else:
                state[key] = value
        return client


def _split(state: Mapping[str, Any], what: str) -> tuple[Engine, dict[str, Any]]:
    """Return the one engine in a state and what does not belong to it."""
    engines = [value for value in state.values() if isinstance(value, Engine)]
    if len(engines) != 1:
        raise CheckpointError(
            f"fabric.{what} takes one model that Fabric has set up with this strategy, and found {len(engines)}: "
            f"fabric.{what}(path, {{'model': model, ...}}), with a folder for each model"
        )
    optimizers = [value for value in state.values() if isinstance(value, Optimizer)]
    own = engines[0].optimizer
    for optimizer in optimizers:
        if own is None or (optimizer is not own and optimizer is not own.inner):
            raise CheckpointError(
                f"fabric.{what}: this {type(optimizer).__name__} is not the one that the model was set up with"
            )
    return engines[0], {
        key: value for key, value in state.items() if value is not engines[0] and not isinstance(value, Optimizer)
    }


class BackwardSync:
    """Fabric's `no_backward_sync`: the micro-batch inside is not the last one of its step."""

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[None]:
        """Return a context for a micro-batch that accumulates."""
        if not enabled:
            return nullcontext()
        if not isinstance(module, Engine):
            raise TypeError("fabric.no_backward_sync takes a model that Fabric has set up with this strategy")
        return not_at_a_boundary(module)
