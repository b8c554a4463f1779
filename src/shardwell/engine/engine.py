"""The engine: an `nn.Module` that trains a wrapped model sharded, in an ordinary PyTorch loop."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwell.config import Config, OptimizerConfig
from shardwell.engine import exit_notice
from shardwell.engine.carried_scale import CARRIED, ModelScale, carrying
from shardwell.engine.checkpoints import EngineCheckpoints
from shardwell.engine.compilation import compile_units, uncompiled
from shardwell.engine.data_loader import ShardedLoader
from shardwell.engine.full_state import load_whole_state, snapshot, whole_state
from shardwell.engine.join import Join, joined
from shardwell.engine.offload_setup import STEPS_UNTIL_KNOWN, move_up
from shardwell.engine.startup_report import print_progress
from shardwell.engine.teardown import DESTROYED, Teardown
from shardwell.engine.units import UnitInfo, describe_units
from shardwell.engine.unsupported_uses import StepCallWatch, prepared_by_accelerate, refuse_pickling
from shardwell.engine.user_data_loader import UserDataLoader
from shardwell.errors import BackwardError, ShardwellError
from shardwell.memory import Device, MemoryReport
from shardwell.optim import ShardedOptimizer
from shardwell.optim.factory import Factory, by_name
from shardwell.parallel import Agreement, TrafficReport, TrafficStats
from shardwell.runtime.budget import frozen_budget
from shardwell.runtime.hooks import ModelFingerprint, UnitHooks
from shardwell.runtime.precision import autocast_of, loss_scale_of, mixed_dtype
from shardwell.runtime.pytree import CopiedInputs, map_tensors, mover
from shardwell.runtime.rebuild import UnitBuilder, refit
from shardwell.runtime.scheduler import Scheduler
from shardwell.runtime.trace import Trace
from shardwell.sharding import EngineContext
from shardwell.sharding.edits import take_edits_closely
from shardwell.sharding.model_states import OffloadPlan


class Engine(nn.Module):
    """A module that wraps a model and shards its parameters, gradients and optimizer state over the ranks.

    `shardwell.initialize` creates it. It is called like the model; a plain `loss.backward()` works too::

        engine, optimizer, _, _ = shardwell.initialize(model=model, config=config)
        for batch, target in data:
            loss = loss_fn(engine(batch), target)
            engine.backward(loss)
            engine.step()

    The reduce-scatter of the gradients averages them over the ranks and over the gradient accumulation steps. The
    engine never changes the loss. An attribute that the engine does not have is looked up on the model.
    """

    optimizer: ShardedOptimizer | None
    optimizer_class = ShardedOptimizer
    _teardown: Teardown
    offload: OffloadPlan  # which units are updated on the host, and when their updates are committed
    settings: Config
    startup_report: str = ""  # the text that `initialize` logs, see `startup_report.py`
    lr_scheduler: Any

    @staticmethod
    def optimizer_named(settings: Config, block: OptimizerConfig, device: Device) -> tuple[Factory, dict[str, Any]]:
        """Return the optimizer that a block of the configuration names, and its options."""
        return by_name(block, device)

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        scheduler: Scheduler,
        context: EngineContext,
        traffic_stats: TrafficStats,
        agreement: Agreement,
        builder: UnitBuilder,
    ) -> None:
        super().__init__()
        self.module = model
        self.optimizer = None
        self.lr_scheduler = None
        self.global_steps = self.micro_steps = self.global_samples = 0
        self.training_dataloader: ShardedLoader | UserDataLoader | None = None
        self._scheduler, self._context = scheduler, context
        self._traffic_stats, self._agreement = traffic_stats, agreement
        self._builder = builder
        self._fingerprint = ModelFingerprint(model)
        self._hooks = UnitHooks(scheduler, scheduler.units)
        self._spent: weakref.ref[Tensor] | None = None
        self._boundary_override: bool | None = None
        self._watch: StepCallWatch | None = StepCallWatch()
        self._scale = loss_scale_of(config)
        self._model_scale = ModelScale(self._scale, scheduler.reducer.meet_scale) if self._scale.is_on else None
        scheduler.reducer.use_loss_scale(self._scale)
        self.use_config(config)
        self._compiled: dict[nn.Module, Callable[..., Any]] = {}  # the forwards before they were compiled
        self._checkpoints, self._is_destroyed = EngineCheckpoints(self), False
        self._join: Join | None = None  # set inside `join()`
        exit_notice.watch(self)

    def use_config(self, config: Config) -> None:
        """Train with this configuration; what each step needs of it is computed here."""
        self.settings = config
        self._accumulation_steps = config.gradient_accumulation_steps or 1
        self._scheduler.reducer.accumulate_over(self._accumulation_steps)
        self._samples_per_step = self.train_batch_size()
        self._autocast = autocast_of(config, self.device)
        move = mover(self.device, mixed_dtype(config))
        self._move_input = move if self._model_scale is None else self._model_scale.on_input(move)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model. Inputs are moved to the engine's device and, in mixed precision, to the compute dtype."""
        if torch.compiler.is_compiling() and any(unit.resharding_groups for unit in self._scheduler.units):
            return uncompiled(self, args, kwargs)
        if self._join is not None and torch.is_grad_enabled():
            self._join.begin(args, kwargs)
        with torch.inference_mode(False):  # a refit makes tensors that are trained
            self.fit_to_model()
        if self._watch is not None:
            self._watch = self._watch.saw_forward(self)
        self._scheduler.reducer.set_boundary(self.is_gradient_accumulation_boundary())
        copies: list[tuple[Any, Any]] = []
        args, kwargs = map_tensors((args, kwargs), self._move_input, copies)
        copied = CopiedInputs(copies) if copies else None
        try:
            running = self._scheduler.forward_scope((args, kwargs))
            with self._agreement.failing_together("forward"), running, self._autocast():
                output = self._modules["module"](*args, **kwargs)  # type: ignore[misc]
        finally:
            if copied is not None:
                copied.give_back()
        return output if self._model_scale is None else self._model_scale.on_output(output)

    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, create_graph: bool = False
    ) -> Tensor:
        """Run backward from `loss`, with the loss scale if there is one, and return `loss`.

        Pass `scale_wrt_gas=False` if the loop itself divides by the gradient accumulation steps.
        """
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            raise BackwardError(
                "backward needs a tensor that depends on trainable parameters; this loss does not require a gradient. "
                "Was the model run under torch.no_grad(), or are all its parameters frozen?"
            )
        if self._spent is not None and self._spent() is loss:
            raise BackwardError(
                "backward was called twice on the same loss. Run the forward again, or pass retain_graph=True the "
                "first time if the gradients are meant to be added twice."
            )
        reducer, scale = self._scheduler.reducer, self._scale
        # Set here as well, because `loss` may not come from `forward`.
        reducer.set_boundary(self.is_gradient_accumulation_boundary())
        reducer.has_met_scale = True
        scaled = contextlib.nullcontext() if CARRIED.scale == scale.value else carrying(scale)
        divided = contextlib.nullcontext() if scale_wrt_gas else reducer.without_division()
        try:
            with self._agreement.failing_together("backward"), scaled, divided:
                reducer.views.detach()
                begin = loss if self._model_scale is None else loss.float() * scale.value
                begin.backward(retain_graph=retain_graph, create_graph=create_graph)
        except BaseException:
            reducer.views.attach()  # gradients computed so far can be dropped like any others
            raise
        if not retain_graph and not create_graph:
            self._spent = weakref.ref(loss)
        return loss

    def step(self) -> None:
        """Apply the gradients at a gradient accumulation boundary; otherwise only count the micro-step."""
        if self.optimizer is None:
            raise ShardwellError(
                "this engine has no optimizer: pass one to initialize, or name one in the configuration"
            )
        at_boundary = self.is_gradient_accumulation_boundary()
        self._watch = None
        self.micro_steps += 1
        self._boundary_override = None
        if at_boundary:
            self._apply_gradients()
        else:
            self._scheduler.end_retention()
        if self._checkpoints.saves_in_background:
            self._checkpoints.check()  # last, because ranks may learn of an error at different steps

    def step_now(self) -> None:
        """Apply the gradients regardless of the micro-step count, for a loop that calls `optimizer.step()` itself."""
        self.set_gradient_accumulation_boundary(True)
        with self._scheduler.reducer.spending():
            self.step()

    def adopt(self, optimizer: Optimizer, *, steps: bool = True) -> None:
        """Take over an optimizer that the user constructed over the model's parameters, and step."""
        self._checkpoints.meet(optimizer)
        self.optimizer = self._builder.adopt(optimizer, self, self._scheduler.units)
        if steps:
            self.step_now()

    def _apply_gradients(self) -> None:
        assert self.optimizer is not None
        try:
            with self._agreement.failing_together("step"):
                self._scheduler.reducer.views.take_edits(at_step=True)
                self.optimizer.apply_gradients()
        finally:
            self._scheduler.reducer.clear()
            self._scheduler.end_retention()
            self._context.roles.all.end_step()
        self.global_steps += 1
        self.global_samples += self._samples_per_step
        if self.global_steps == 1:
            self._scheduler.keep_frozen(frozen_budget(self.settings, self._scheduler.units, self._context))
        if self.global_steps == STEPS_UNTIL_KNOWN and self.settings.zero_optimization.offload_optimizer.ratio == "auto":
            self.offload = move_up(self.offload, self.optimizer, self._context)
        if self.lr_scheduler is not None and not self.optimizer.overflow:
            self.lr_scheduler.step()
        if self.settings.steps_per_print and self.global_steps % self.settings.steps_per_print == 0:
            print_progress(self)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the next `step` applies the gradients."""
        if self._boundary_override is not None:
            return self._boundary_override
        return (self.micro_steps + 1) % self._accumulation_steps == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set whether the next `step` applies the gradients, instead of deriving it from the micro-step count."""
        self._boundary_override = is_boundary
        self._scheduler.reducer.set_boundary(is_boundary)
        if not is_boundary:
            self._scheduler.reducer.defer_reduction()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which gradients accumulate on this rank, unsharded and not reduced, at any ZeRO stage.

        The next backward outside reduces them. Costs a full gradient buffer in the accumulation dtype, see `memory()`.
        """
        return self._scheduler.reducer.without_reduction()

    def join(self, divide_by_initial_world_size: bool = True) -> contextlib.AbstractContextManager[None]:
        """Return a context for uneven data: a rank that is out of batches takes part until no rank has one.

        Each batch takes one forward, backward and step. The average is over all ranks, or over those that have data.
        """
        return joined(self, divide_by_initial_world_size)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of this boundary.

        Updates that the commit policy "at_once" has applied are not undone; under "auto" that is an error.
        """
        if self.optimizer is not None:
            self.optimizer.executor.gradients_dropped("gradients were dropped by zero_grad()")
        if not set_to_none and self._scheduler.reducer.views.zero():
            return
        self._scheduler.discard_backward()
        if self.optimizer is not None:
            self.optimizer.forget_gradients()
        self._scheduler.reducer.forget()

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the averaged gradients at the last step, before clipping. This waits for the device."""
        norm = self.optimizer.global_norm() if self.optimizer is not None else None
        return None if norm is None or norm.is_meta else float(norm)

    def memory(self) -> MemoryReport:
        """Return the bytes that this rank holds, now and at the peak, by state, unit and tier."""
        return self._context.memory_stats.report()

    def traffic(self) -> TrafficReport:
        """Return the bytes that this rank received during the last optimizer step, by collective."""
        return self._traffic_stats.last

    def trim(self) -> None:
        """Release freed memory that the caching allocator holds, so that other processes can use it."""
        self._context.device.trim()

    @property
    def units(self) -> tuple[UnitInfo, ...]:
        """The units of the model: name, module, parameters, residency, tiers and bytes of each."""
        return describe_units(self._scheduler.units, self.memory())

    def record(self) -> contextlib.AbstractContextManager[Trace]:
        """Return a context that records the events of the schedule (all-gather, reshard and so on) as short tokens."""
        return self._scheduler.recording()

    @property
    def skipped_steps(self) -> int:
        """The number of optimizer steps that were skipped because gradients overflowed."""
        return self.optimizer.skipped_steps if self.optimizer is not None else 0

    @property
    def device(self) -> torch.device:
        return self._context.device.torch_device

    @property
    def world_size(self) -> int:
        return self._context.roles.all.rank_group.size

    @property
    def global_rank(self) -> int:
        return self._context.roles.all.rank_group.rank

    @property
    def config(self) -> Any:
        """The configuration; a subclass may show the one that its user wrote. The engine itself reads `settings`."""
        return self.settings

    def train_batch_size(self) -> int:
        """Return the number of samples of one optimizer step over all ranks and micro-steps."""
        return self.train_micro_batch_size_per_gpu() * self.gradient_accumulation_steps() * self.world_size

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.settings.train_micro_batch_size_per_gpu or 1

    def gradient_accumulation_steps(self) -> int:
        return self.settings.gradient_accumulation_steps or 1

    @property
    def loss_scale(self) -> float:
        """The factor that losses are multiplied by; 1 without fp16."""
        return self._scale.value

    def gradient_clipping(self) -> float:
        return self.settings.gradient_clipping

    def zero_optimization_stage(self) -> int:
        return self.settings.zero_optimization.stage

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups] if self.optimizer is not None else []

    def compile(self, backend: Any = "inductor", compile_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Compile the forward of each unit with `torch.compile`. Unshard and reshard stay outside and break no graph.

        Units that contain other units (usually the root) are not compiled. Blocks of one class share one graph.
        """
        compile_units(self._scheduler.units, self._compiled, {"backend": backend, **(compile_kwargs or {}), **kwargs})

    @property
    def is_compiled(self) -> bool:
        return bool(self._compiled)

    def refit(self) -> None:
        """Rebuild the shards after parameters were resized, replaced, added, removed or unfrozen.

        All ranks must call it. `forward` calls it when it detects a change. Master weights and optimizer state of
        unchanged parameters are kept. An explicit call also frees the training state of parameters that are frozen now.
        """
        self._refit(keep_frozen_state=False)

    def fit_to_model(self) -> None:
        """Refit if the model has changed, and keep the optimizer state of parameters that are frozen now."""
        if self._is_destroyed:
            raise ShardwellError(DESTROYED)
        self._hooks.restore()
        units = self._scheduler.units
        for unit in units:
            if unit.has_replaced_parameters(quickly=True):
                take_edits_closely(units)
                break
        has_changed = not self._fingerprint.matches()
        for unit in units:
            has_changed = has_changed or unit.changes.needs_rebuild
        if has_changed:
            self._refit(keep_frozen_state=True)

    def _refit(self, *, keep_frozen_state: bool) -> None:
        self._scheduler.end_passes()
        self._scheduler.end_retention()
        with self._agreement.failing_together("refit"):
            self._scheduler.reducer.views.take_edits()
            units = refit(list(self._scheduler.units), self._builder, self.optimizer, keep_frozen_state)
        self._scheduler.adopt_units(units)
        self._hooks.follow(units)
        self._fingerprint = ModelFingerprint(self.module)
        if self.optimizer is not None:
            self.optimizer.count_states()

    def state_dict(self, *args: Any, rank0_only: bool = False, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the unsharded state of the model in host memory, by the model's own names. All ranks must call it.

        Parameters are all-gathered one unit at a time. With `rank0_only` the other ranks get an empty dictionary.
        """
        kwargs["keep_vars"] = True  # no values are read here
        with self._agreement.failing_together("state_dict"):
            found = self.module.state_dict(*args, **kwargs)
            return whole_state(found, self._scheduler.units, keeps=not rank0_only or self.global_rank == 0)

    def parameters_snapshot(self, *, rank0_only: bool = False) -> dict[str, Tensor]:
        """Return the unsharded values of all parameters by name, in fp32, in host memory. All ranks must call it."""
        with self._agreement.failing_together("parameters_snapshot"):
            return snapshot(self._scheduler.units, keeps=not rank0_only or self.global_rank == 0)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load full tensors, such as `state_dict` returns. All ranks must pass the same ones."""
        with self._agreement.failing_together("load_state_dict", common=(ShardwellError,)):
            return load_whole_state(self.module.state_dict(keep_vars=True), state_dict, strict=strict)

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        asynchronous: bool | None = None,
    ) -> bool:
        """Save the state of training under `save_dir`, to resume on any number of ranks. All ranks must call it.

        The tag defaults to `global_step<N>`. `client_state` is taken from rank 0: numbers, strings, tensors and
        containers of them. With `asynchronous` the call returns after a copy to host memory, and the next `step` raises
        errors of the writing. A checkpoint exists completely or not at all.
        """
        name = f"global_step{self.global_steps}" if tag is None else str(tag)
        self._checkpoints.save(
            self,
            save_dir,
            name,
            client_state,
            exclude_frozen=exclude_frozen_parameters,
            asynchronous=self.settings.shardwell.async_save if asynchronous is None else asynchronous,
            is_latest=save_latest,
        )
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        *,
        strict: bool = False,
    ) -> tuple[str | None, Any]:
        """Resume from the latest checkpoint under `load_dir`, or from the one with this tag. All ranks must call it.

        Returns the path and the client state. Without a checkpoint it warns and returns (None, None); with `strict` it
        raises. If loading fails, the engine keeps its state. The checkpoint may come from any stage, precision and
        number of ranks; checkpoints of DeepSpeed and of torch.distributed.checkpoint can be loaded too.
        """
        return self._checkpoints.load(
            self,
            load_dir,
            None if tag is None else str(tag),
            must_exist=strict,
            strict=load_module_strict,
            with_optimizer=load_optimizer_states,
            with_scheduler=load_lr_scheduler_states,
            module_only=load_module_only,
        )

    def load_model(self, path: str | os.PathLike[str], strict: bool = True) -> None:
        """Load the model's weights from a Hugging Face directory, a safetensors file or any checkpoint.

        All ranks must call it. Each rank reads only its own slices.
        """
        self._checkpoints.load_model(self, os.fspath(path), strict=strict)

    def finish_saving(self) -> None:
        """Wait for a checkpoint that is being written in the background, and raise its error if it failed."""
        self._checkpoints.wait()

    def destroy(self, *, whole: bool = True) -> None:
        """Turn the model back into an ordinary one with unsharded parameters; drop gradients and optimizer state.

        All ranks must call it, since it all-gathers. The model may be passed to `initialize` again. With `whole=False`,
        while an exception propagates, and after a failure that not all ranks had, nothing is all-gathered and released
        parameters stay released.
        """
        if not self._is_destroyed:
            self._end(lambda: self._teardown.end(self.optimizer, whole=whole))

    def hand_over(self) -> None:
        """End this engine for another one that gets its model. `initialize` calls it, on all ranks."""
        self._end(lambda: self._teardown.hand_over(self.optimizer))

    def _end(self, end: Callable[[], None]) -> None:
        if not self._is_destroyed:
            self._is_destroyed = True
            self.finish_saving()
        end()
        exit_notice.tell(self._agreement, self.micro_steps)
        self.trim()

    _is_accelerate_prepared = prepared_by_accelerate
    __reduce_ex__ = refuse_pickling

    def __getattr__(self, name: str) -> Any:
        """Look up an attribute that the engine does not have on the model."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or name.startswith("__"):
                raise
            return getattr(module, name)
