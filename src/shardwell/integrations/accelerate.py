"""Accelerate's `Accelerator` over engines: `prepare` shards the model, and the usual loop trains it.

    from shardwell.integrations.accelerate import Accelerator

    accelerator = Accelerator(config={"zero_optimization": {"stage": 3}}, gradient_accumulation_steps=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

Everything else is Accelerate's: data loaders, schedulers, trackers, `gather`, `accelerate launch`. This module knows
the public API of engines and of Accelerate only, and pretends to be no other backend.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

import shardwell
from shardwell.errors import ConfigError, ShardwellError

__all__ = ["Accelerator", "EngineOptimizer"]

_PRECISIONS = {"bf16": "bf16", "fp16": "fp16"}  # of Accelerate, and the block of the configuration
_OTHER_BACKENDS = ("deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin", "parallelism_config")
_FOLDER = "shardwell_model"  # of an engine's checkpoint inside that of `save_state`


class EngineOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """The optimizer that `prepare` returns: a step is the engine's, which counts micro-steps between boundaries."""

    def __init__(self, engine: shardwell.Engine) -> None:
        super().__init__(engine.optimizer, device_placement=False, scaler=None)
        self.engine = engine

    def step(self, closure: Any = None) -> None:
        """Apply the gradients where `accelerator.accumulate` ends, and count the micro-step elsewhere."""
        if closure is not None:
            raise ShardwellError(
                "a prepared optimizer takes no closure: run the forward and the backward before step()"
            )
        if self.gradient_state.sync_gradients:
            self.optimizer.step()
        else:
            self.engine.set_gradient_accumulation_boundary(False)
            self.engine.step()

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was not applied, because gradients were not finite."""
        return bool(self.optimizer.overflow)


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """An `accelerate.Accelerator` that trains with engines.

    `config` is shardwell's configuration: a path or a dictionary. What Accelerate knows is filled in: the micro-batch
    size of the data loader, the accumulation steps, the precision. A model and its optimizer are prepared in one call.
    """

    _models: list[Any]
    _optimizers: list[Any]

    def __init__(self, *, config: Any = None, mixed_precision: str | None = None, **options: Any) -> None:
        _check_backends(options)
        self._config = _read(config)
        asked = mixed_precision if mixed_precision is not None else os.environ.get("ACCELERATE_MIXED_PRECISION")
        self._precision = _settle_precision(self._config, asked)
        if "cpu" not in options and not torch.cuda.is_available():
            options["cpu"] = True  # otherwise Accelerate finds no backend, and each rank takes itself for the only one
        super().__init__(mixed_precision="no", **options)  # the engine computes in 16 bits, not autocast
        self._is_saving = False
        self.register_save_state_pre_hook(self._save_engines)
        self.register_load_state_pre_hook(self._load_engines)

    @property
    def mixed_precision(self) -> str:
        """The precision that engines compute in."""
        return self._precision

    @property
    def engines(self) -> list[shardwell.Engine]:
        """The engines that `prepare` has made."""
        return [model for model in self._models if isinstance(model, shardwell.Engine)]

    # ------------------------------------------------------------------------------------------------------- preparing

    def prepare(self, *objects: Any, device_placement: Any = None) -> Any:
        """Return the objects in the same order: an engine for each model, and the others as Accelerate prepares them.

        The optimizer of a model must be in the same call as the model, unless the configuration names one.
        """
        if device_placement is not None:
            raise ShardwellError("device_placement: an engine places its model itself. Leave it out.")
        first = [self._prepare_one(one, first_pass=True) if isinstance(one, DataLoader) else one for one in objects]
        optimizers = [
            one for one in objects if isinstance(one, Optimizer) and not isinstance(one, AcceleratedOptimizer)
        ]
        made: dict[int, Any] = {}
        for model in (one for one in objects if isinstance(one, nn.Module)):
            own = [one for one in optimizers if _is_over(one, model)]
            if len(own) > 1:
                raise ShardwellError(f"{len(own)} optimizers have parameters of one model; an engine has one optimizer")
            made[id(model)] = self._engine(model, own[0] if own else None, first)
            if own:
                made[id(own[0])] = self._wrap_optimizer(made[id(model)])
        second = [made.get(id(one), ready) for one, ready in zip(objects, first, strict=True)]
        third = [self.prepare_optimizer(o) if isinstance(o, Optimizer) else self._prepare_one(o) for o in second]
        return tuple(third) if len(third) > 1 else third[0]

    def prepare_model(self, model: nn.Module, device_placement: Any = None, evaluation_mode: bool = False) -> Any:
        """Return an engine for the model; without an optimizer it evaluates."""
        return self._engine(model, None, [])

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: Any = None) -> Any:
        """Return the optimizer of a model that was prepared earlier: its engine takes it over at its first step."""
        return super().prepare_optimizer(optimizer, device_placement=False)

    def _engine(self, model: nn.Module, optimizer: Optimizer | None, others: list[Any]) -> shardwell.Engine:
        if isinstance(model, shardwell.Engine):
            if model not in self._models:
                raise ShardwellError(
                    "this is an engine already: hand the model and its optimizer to prepare(), and the configuration "
                    "to Accelerator(config=...)"
                )
            return model
        loader = next((one for one in others if isinstance(one, DataLoader)), None)
        config = self._complete_config(loader)
        engine = shardwell.initialize(model=model, optimizer=optimizer, config=config, device=self.device).engine
        engine._is_accelerate_prepared = True
        self._models.append(engine)
        return engine

    def _wrap_optimizer(self, engine: shardwell.Engine) -> EngineOptimizer:
        wrapped = EngineOptimizer(engine)
        wrapped._is_accelerate_prepared = True
        self._optimizers.append(wrapped)
        return wrapped

    def _complete_config(self, loader: DataLoader[Any] | None) -> dict[str, Any]:
        """Return the configuration with what Accelerate knows."""
        config, steps = dict(self._config), self.gradient_accumulation_steps
        asked = config.get("gradient_accumulation_steps", "auto")
        if asked not in ("auto", steps):
            raise ConfigError(
                f"gradient_accumulation_steps: {asked} in the configuration, {steps} in Accelerator(...). Leave it out "
                "of the configuration."
            )
        config["gradient_accumulation_steps"] = steps
        if config.get("train_batch_size") == "auto":
            del config["train_batch_size"]
        if config.get("train_micro_batch_size_per_gpu", "auto") == "auto":
            config.pop("train_micro_batch_size_per_gpu", None)
            rows = getattr(loader, "total_batch_size", 0) // self.num_processes
            if rows and "train_batch_size" not in config:
                config["train_micro_batch_size_per_gpu"] = rows
        if self._precision in _PRECISIONS:
            block = config.get(self._precision) or {}
            config[self._precision] = {**block, "enabled": True}
        return config

    # ----------------------------------------------------------------------------------------------- the training loop

    @contextlib.contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Return a context for one micro-batch. Engines average gradients when the sharding stage says so."""
        self._do_sync()
        for model in models:
            if isinstance(model, shardwell.Engine):
                model.set_gradient_accumulation_boundary(self.sync_gradients)
        yield

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run backward from `loss`. It is divided by the accumulation steps, as Accelerate does."""
        engines = self.engines
        if not engines:
            super().backward(loss, **kwargs)
            return
        made_for = engines[0].gradient_accumulation_steps()
        if made_for != self.gradient_accumulation_steps:  # set anew since: engines divide by what they were made for
            loss = loss * (made_for / self.gradient_accumulation_steps)
        if len(engines) == 1:
            engines[0].backward(loss, **kwargs)
        else:
            loss.backward(**kwargs)

    def join_uneven_inputs(self, joinables: Any, even_batches: Any = None) -> NoReturn:
        """Refuse: engines have a context of their own for uneven inputs."""
        raise ShardwellError("engines join uneven inputs themselves: write `with model.join():` around the loop")

    # ----------------------------------------------------------------------------------------------- models and states

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return the model of an engine."""
        return super().unwrap_model(model.module if isinstance(model, shardwell.Engine) else model, *args, **kwargs)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Return the unsharded state of a model on the main process, and an empty dictionary on others.

        All ranks must call it.
        """
        engine = next((one for one in self.engines if model is one or model is one.module), None)
        if engine is None:
            return super().get_state_dict(model, unwrap=unwrap)
        return {} if self._is_saving else engine.state_dict(rank0_only=True)

    def save_state(self, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Save what Accelerate saves, and a sharded checkpoint of each engine with its optimizer in the same folder."""
        with self._without_engines():
            return super().save_state(output_dir, *args, **kwargs)

    def load_state(self, input_dir: Any = None, *args: Any, **kwargs: Any) -> None:
        """Load what `save_state` has saved, on any number of processes."""
        with self._without_engines():
            super().load_state(input_dir, *args, **kwargs)

    @contextlib.contextmanager
    def _without_engines(self) -> Iterator[None]:
        """Keep weights and optimizers of engines out of what Accelerate itself saves and loads."""
        kept, self._is_saving = self._optimizers, True
        self._optimizers = [one for one in kept if not isinstance(one, EngineOptimizer)]
        try:
            yield
        finally:
            self._optimizers, self._is_saving = kept, False

    def _save_engines(self, models: list[Any], weights: list[Any], output_dir: str) -> None:
        for number, engine in enumerate(self.engines):
            engine.save_checkpoint(output_dir, _tag(number), save_latest=False)
        weights[:] = [state for model, state in zip(models, weights, strict=True) if model not in self.engines]

    def _load_engines(self, models: list[Any], input_dir: str) -> None:
        for number, engine in enumerate(self.engines):
            engine.load_checkpoint(input_dir, _tag(number), strict=True)
        models[:] = [model for model in models if model not in self.engines]

    def free_memory(self, *objects: Any) -> Any:
        """End the engines, whose models are ordinary ones then, and forget all objects."""
        for engine in self.engines:
            engine.destroy()
        return super().free_memory(*objects)


def _tag(number: int) -> str:
    return _FOLDER if number == 0 else f"{_FOLDER}_{number}"


def _is_over(optimizer: Optimizer, model: nn.Module) -> bool:
    """Return whether an optimizer has parameters of a model; raise if it has others, too."""
    mine = {id(parameter) for parameter in model.parameters()}
    found = [id(tensor) in mine for group in optimizer.param_groups for tensor in group["params"]]
    if any(found) and not all(found):
        raise ShardwellError(
            f"this {type(optimizer).__name__} has parameters of a model and others: make one optimizer for each model"
        )
    return any(found)


def _check_backends(options: Mapping[str, Any]) -> None:
    """Raise if another backend is asked for, by an argument or by `accelerate launch`."""
    for name in _OTHER_BACKENDS:
        if options.get(name) is not None:
            raise ShardwellError(f"{name}: this Accelerator trains with shardwell's engines. Leave it out.")
    for name in ("DEEPSPEED", "FSDP", "MEGATRON_LM"):
        if os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() == "true":
            raise ShardwellError(
                f"accelerate launch was told to use {name}, but this Accelerator trains with shardwell's engines. "
                "Launch it without that (--multi_gpu, or --cpu)."
            )


def _read(config: Any) -> dict[str, Any]:
    """Return the configuration as a dictionary."""
    if isinstance(config, str | os.PathLike):
        config = json.loads(Path(config).read_text())
    if config is not None and not isinstance(config, Mapping):
        raise ConfigError(f"Accelerator(config=...): expected a path or a dictionary, found a {type(config).__name__}")
    return dict(config or {})


def _settle_precision(config: dict[str, Any], asked: str | None) -> str:
    """Return the precision that the configuration and Accelerate ask for, and resolve "auto" in the configuration."""
    if asked not in (None, "no", *_PRECISIONS):
        raise ConfigError(f"mixed_precision: engines compute in 'no', 'bf16' or 'fp16', not in '{asked}'")
    on = []
    for name in _PRECISIONS:
        block = dict(config.get(name) or {})
        if block.get("enabled") == "auto":
            block["enabled"] = asked == name
            config[name] = block
        if block.get("enabled"):
            on.append(name)
    if asked is not None and on and on != [asked]:
        raise ConfigError(f"mixed_precision='{asked}', but the configuration enables {on[0]}: say it in one place")
    return on[0] if on else asked or "no"
