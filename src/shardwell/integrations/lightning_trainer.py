"""The strategy of Lightning's Trainer: an engine around the LightningModule, and checkpoints that are folders.

`TrainerStrategy` imports no Lightning. It becomes a strategy by inheriting from `DDPStrategy` of a package as well
(`lightning.py`): launching, ranks and collectives of metrics are those of DDP.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

import shardwell
from shardwell.engine import Engine
from shardwell.errors import CheckpointError, ShardwellError
from shardwell.integrations.lightning_checkpoint import TAG, StateOnRead, client_state_of
from shardwell.integrations.lightning_config import (
    StrategyArguments,
    for_evaluation,
    stage_of,
    with_clipping,
    with_precision,
)
from shardwell.integrations.lightning_engine import (
    engine_of,
    load_full_state,
    make_engine,
    not_at_a_boundary,
    one_optimizer,
    parameters_of,
    release,
)

_FROM_DDP = {
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "checkpoint_io",
    "precision_plugin",
    "process_group_backend",
    "timeout",
    "start_method",
}
_AVERAGING = ("WeightAveraging", "EMAWeightAveraging", "StochasticWeightAveraging")


def check_ddp_arguments(given: Mapping[str, Any]) -> None:
    """Refuse arguments that only DistributedDataParallel has."""
    unknown = sorted(set(given) - _FROM_DDP)
    if unknown:
        raise TypeError(
            f"ShardwellStrategy got an unexpected keyword argument '{unknown[0]}'. Keys of the configuration go into "
            "config={...}; arguments of DistributedDataParallel have no meaning here (unused parameters need none)."
        )


class StepThroughEngine:
    """Calls a step of the LightningModule inside of the engine's forward.

    Under autocast the engine gets no inputs, because it would round them to 16 bits: targets, too.
    """

    def __init__(self, strategy: TrainerStrategy) -> None:
        self._strategy = strategy

    def __call__(self, wrapper: nn.Module, original: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        forward = original.forward
        hides = self._strategy.precision_plugin.is_mixed

        def run(*inner: Any, **named: Any) -> Any:
            original.forward = forward  # at once, because the step may call the real one
            if hides:
                return getattr(original, method)(*args, **kwargs)
            return getattr(original, method)(*inner, **named)

        original.forward = run
        try:
            return wrapper() if hides else wrapper(*args, **kwargs)
        finally:
            original.forward = forward


class TrainerStrategy:
    """Trains a LightningModule with a shardwell engine, at any ZeRO stage, on CPU or CUDA.

    Args:
        stage: The ZeRO stage, 0 to 3; 2 if neither it nor the configuration says otherwise.
        offload_optimizer: Keep optimizer state, and update parameters, in host memory.
        offload_parameters: Keep parameters in host memory (stage 3).
        offload_optimizer_device: "cpu" or "nvme".
        offload_params_device: "cpu" or "nvme".
        nvme_path: The folder for "nvme"; by default SHARDWELL_NVME_PATH, or the folder for temporary files.
        config: A path or dictionary in the format of DeepSpeed, to which the other arguments are added.
        exclude_frozen_parameters: Leave frozen parameters out of checkpoints.
        ddp: Arguments of Lightning's DDPStrategy about devices and processes.
    """

    names: Any  # what this package of Lightning calls things, see `lightning.py`
    lightning_module: Any
    accelerator: Any
    root_device: torch.device
    cluster_environment: Any
    checkpoint_io: Any
    barrier: Any
    is_global_zero: bool
    broadcast: Any
    optimizers: list[Any]
    lr_scheduler_configs: list[Any]
    _lightning_optimizers: list[Any]
    _layer_sync: Any
    _checkpoint_io: Any
    _start_method: str

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
        check_ddp_arguments(ddp)
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
        super().__init__(**ddp)
        self._forward_redirection = StepThroughEngine(self)
        self._loaded_file = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of stage {stage_of(self.config)}, for the Trainer of {self.names.package}>"

    @property
    def engine(self) -> Engine:
        """The engine of the model, from `fit` (or `test` and others) on, also after it has ended."""
        found = engine_of(self.lightning_module) if self.lightning_module is not None else None
        if found is None:
            raise ShardwellError("there is no engine yet: trainer.fit, validate, test or predict makes it")
        return found

    @property
    def precision_plugin(self) -> Any:
        """The plugin that Lightning chose, with the engine's backward, step and clipping."""
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        around = self.names.trainer_precision
        self._precision_plugin: Any = plugin if isinstance(plugin, around) else around(plugin)

    # --------------------------------------------------------------------------------------------------- set-up

    def setup(self, trainer: Any) -> None:
        """Make an engine to fit; to evaluate, use the one that is there, or make one without an optimizer."""
        self.accelerator.setup(trainer)
        is_fitting = trainer.state.fn == self.names.TrainerFn.FITTING
        self._refuse_what_cannot_work(trainer)
        model = self.lightning_module
        engine = engine_of(model)
        if not is_fitting and engine is not None and stage_of(self.config) == engine.zero_optimization_stage():
            engine.zero_grad()
        else:
            release(model)
            engine = self._make_engine(trainer, model) if is_fitting else self._engine_to_evaluate(model)
        self.model = engine
        self.precision_plugin.engine = engine
        self.barrier()

    def _make_engine(self, trainer: Any, model: Any) -> Engine:
        if self._layer_sync:
            model = self._layer_sync.apply(model)
        model = self.precision_plugin.convert_module(model)
        optimizers, schedules = self.names.init_optimizers_and_lr_schedulers(model)
        optimizer = one_optimizer(optimizers)
        clipped = parameters_of(optimizer)
        config = with_precision(self.config, self.precision_plugin.precision, self.precision_plugin.scaler)
        if self._clips_by_norm(trainer, model, clipped):
            config = with_clipping(config, trainer.gradient_clip_val)
        if schedules and config.get("scheduler"):
            raise ShardwellError(
                "there is a scheduler in the configuration and one from configure_optimizers; keep one of them"
            )
        engine = make_engine(model, optimizer, config, self.root_device)
        self.precision_plugin.clipped = clipped
        self.optimizers = [optimizer]
        for wrapper in self._lightning_optimizers:  # a class of torch's, whose methods would be found before these
            for name in ("zero_grad", "add_param_group", "state_dict", "load_state_dict"):
                setattr(wrapper, name, getattr(optimizer, name))
        self.lr_scheduler_configs = schedules
        return engine

    def _engine_to_evaluate(self, model: Any) -> Engine:
        model = self.precision_plugin.convert_module(model)
        config = with_precision(self.config, self.precision_plugin.precision, self.precision_plugin.scaler)
        return make_engine(model, None, for_evaluation(config), self.root_device)

    def _clips_by_norm(self, trainer: Any, model: Any, clipped: tuple[nn.Parameter, ...]) -> bool:
        """Return whether the engine's own clipping does exactly what Lightning would do."""
        algorithm = trainer.gradient_clip_algorithm
        trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
        return (
            (algorithm is None or algorithm == self.names.GradClipAlgorithmType.NORM)
            and not self.names.is_overridden("configure_gradient_clipping", model)
            and trained <= {id(parameter) for parameter in clipped}
        )

    def _refuse_what_cannot_work(self, trainer: Any) -> None:
        for callback in trainer.callbacks:
            if any(base.__name__ in _AVERAGING for base in type(callback).__mro__):
                raise ShardwellError(
                    f"{type(callback).__name__} copies the model and exchanges its parameters, which are split over "
                    "the ranks. Use shardwell.integrations.lightning.MovingAverage, whose averages are split, too."
                )
            if any(base.__name__ == "BaseFinetuning" for base in type(callback).__mro__):
                raise ShardwellError(
                    f"{type(callback).__name__} looks for the module's parameters in the optimizer's groups, which "
                    "hold this rank's shards. In on_train_epoch_start of the module, set requires_grad and call "
                    'trainer.optimizers[0].add_param_group({"params": list(...), "lr": ...}).'
                )
        plugin = self._checkpoint_io
        if plugin is not None and type(plugin).__name__ != "TorchCheckpointIO":
            raise ShardwellError(
                f"{type(plugin).__name__} cannot write the folders that the engine saves; leave it out. To save in the "
                'background, set {"shardwell": {"async_save": true}} in the configuration.'
            )

    def configure_ddp(self) -> None:
        """Wrap nothing: the engine is made in `setup`."""

    def model_to_device(self) -> None:
        """Move nothing: the engine moves parameters, one unit after the other."""

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Create tensors of `configure_model` on the device, in the dtype of the precision."""
        if stage_of(self.config) == 3 and empty_init:
            raise ShardwellError("empty_init=True has no use at stage 3, where parameters are split when they are made")
        with super().tensor_init_context(empty_init=empty_init):  # type: ignore[misc]
            yield

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Shard the parameters that `configure_model` makes as they are made, at stage 3."""
        with self._sharded_construction():
            yield

    def _sharded_construction(self) -> AbstractContextManager[Any]:
        config = with_precision(self.config, self.precision_plugin.precision, self.precision_plugin.scaler)
        return shardwell.zero.Init(
            config_dict_or_path=for_evaluation(config), enabled=stage_of(config) == 3, device=self.root_device
        )

    # -------------------------------------------------------------------------------------------------- training

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the training step; with manual optimization outside of the engine's forward, as it contains backwards."""
        if self.lightning_module.automatic_optimization:
            return super().training_step(*args, **kwargs)  # type: ignore[misc]
        with self.precision_plugin.train_step_context():
            return self.lightning_module.training_step(*args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate: the micro-batch inside is not the last one of its step."""
        with not_at_a_boundary(self.engine):
            yield

    def pre_backward(self, closure_loss: Any) -> None:
        """Prepare nothing: gradients are reduced by the engine."""

    def post_backward(self, closure_loss: Any) -> None:
        """Finish nothing: gradients are reduced by the engine."""

    def on_exception(self, exception: BaseException) -> None:
        """Add nothing: the engine's errors say what to do."""

    def teardown(self) -> None:
        """End a run, but keep the engine: the model can be tested, saved and trained on.

        Processes that were spawned or forked end here, and give their weights to the one that started them.
        """
        model = self.lightning_module
        engine = engine_of(model) if model is not None else None
        if engine is not None:
            engine.finish_saving()
            if self._start_method != "popen":
                release(model)
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # ----------------------------------------------------------------------------------------------- checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether the engine must be there to load a checkpoint."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether Lightning restores the optimizer's state: only what a file of Lightning's holds."""
        return self._loaded_file

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the full state of the model, which is all-gathered when it is read; all ranks must read it then."""
        return StateOnRead(self.engine.state_dict)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return nothing for a checkpoint dictionary: the engine saves this state as shards."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save a folder: the engine's shards, and what Lightning adds. All ranks must call it.

        With save_weights_only=True it is Lightning's own file, as in DDP, which load_from_checkpoint reads.
        """
        if storage_options is not None:
            raise TypeError("storage_options: the engine writes the checkpoint, and a CheckpointIO is not used")
        path = os.fspath(self.broadcast(filepath))
        if "://" in path:
            raise CheckpointError(f"{path}: the engine writes to file systems that are mounted; give such a path")
        if "optimizer_states" not in checkpoint:
            self._save_weights(checkpoint, path)
            return
        self.engine.save_checkpoint(
            path,
            tag=TAG,
            client_state=client_state_of(checkpoint),
            exclude_frozen_parameters=self.exclude_frozen_parameters,
        )

    def _save_weights(self, checkpoint: dict[str, Any], path: str) -> None:
        """Write a file with the full weights, which every rank gathers for that."""
        state = dict(checkpoint["state_dict"].items())  # all ranks read it: it is all-gathered
        if self.exclude_frozen_parameters:
            frozen = {name for name, value in self.lightning_module.named_parameters() if not value.requires_grad}
            state = {name: value for name, value in state.items() if name not in frozen}
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint({**checkpoint, "state_dict": state}, path)
        self.barrier()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a folder into the engine, or read a file that another strategy saved."""
        path = os.fspath(checkpoint_path)
        self._loaded_file = os.path.isfile(path)
        if self._loaded_file:
            found: dict[str, Any] = super().load_checkpoint(path, weights_only)  # type: ignore[misc]
            return found
        model = self.lightning_module
        is_fitting = model.trainer.state.fn == self.names.TrainerFn.FITTING
        engine = self.engine
        _, client = engine.load_checkpoint(
            path, load_module_strict=model.strict_loading, load_optimizer_states=is_fitting, strict=True
        )
        client = dict(client or {})
        if "pytorch-lightning_version" not in client:
            if is_fitting:
                raise CheckpointError(
                    f"{path}: was not saved by a Trainer, so it does not say where the loops are. Call "
                    "trainer.strategy.engine.load_checkpoint(...) in on_fit_start to load it into a new fit."
                )
            client["pytorch-lightning_version"] = self.names.version
        return {**client, "state_dict": StateOnRead(engine.state_dict)}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load full weights, from a file or changed by an on_load_checkpoint hook; a folder's are loaded already."""
        state = checkpoint["state_dict"]
        if not isinstance(state, StateOnRead) or state.is_changed:
            self.engine.load_state_dict(state, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizer state of a file that another strategy saved: that of unsharded parameters."""
        (saved,) = checkpoint["optimizer_states"]
        load_full_state(self.engine, self.precision_plugin.clipped, saved)
