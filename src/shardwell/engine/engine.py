"""The engine: an `nn.Module` that trains a wrapped model sharded, in an ordinary PyTorch loop."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwell.config import Config, OptimizerConfig
from shardwell.engine import exit_notice, unsupported_uses
from shardwell.engine.carried_scale import CARRIED, ModelPrecision, carrying
from shardwell.engine.checkpoints import EngineCheckpoints
from shardwell.engine.compilation import compile_units, uncompiled
from shardwell.engine.data_loader import ShardedLoader
from shardwell.engine.full_state import load_whole_state, snapshot, whole_state
from shardwell.engine.join import StepCount, UserLoop, joined
from shardwell.engine.monitor_setup import compared_with_plan, recording_with_times
from shardwell.engine.teardown import DESTROYED, Teardown, end_engine
from shardwell.engine.units import UnitInfo, describe_units
from shardwell.engine.user_data_loader import UserDataLoader
from shardwell.errors import BackwardError, ShardwellError
from shardwell.memory import Device, MemoryReport
from shardwell.optim import ShardedOptimizer
from shardwell.optim.factory import Factory, by_name
from shardwell.parallel import TrafficReport
from shardwell.runtime.aborted_forwards import undone_if_aborted
from shardwell.runtime.budget import frozen_budget
from shardwell.runtime.hooks import ModelFit
from shardwell.runtime.pytree import CopiedInputs, map_tensors
from shardwell.runtime.rebuild import UnitBuilder
from shardwell.runtime.scheduler import Scheduler
from shardwell.runtime.trace import Trace
from shardwell.sharding import EngineContext
from shardwell.sharding.model_states import OffloadPlan

if TYPE_CHECKING:
    from shardwell.monitor.monitor import Monitor


class Engine(nn.Module):
    """A module that wraps a model and shards its parameters, gradients and optimizer state over the ranks.

    `shardwell.initialize` creates it. It is called like the model; a plain `loss.backward()` works too:

        engine, optimizer, _, _ = shardwell.initialize(model=model, config=config)
        for batch, target in data:
            loss = loss_fn(engine(batch), target)
            engine.backward(loss)
            engine.step()

    The reduce-scatter of the gradients averages them over the ranks and over the gradient accumulation steps. The
    engine never changes the loss. An attribute that the engine does not have is looked up on the model.
    """

    plan = compared_with_plan
    optimizer: ShardedOptimizer | None
    optimizer_class = ShardedOptimizer
    pipeline_bases: tuple[type, ...] = ()  # of the class that it becomes in a pipeline
    _teardown: Teardown
    settings: Config
    startup_report: str = ""  # the text that `initialize` logs, see `startup_report.py`
    monitor: Monitor | None = None  # what prints and writes progress, on rank 0 if the configuration asks for it
    lr_scheduler: Any

    @staticmethod
    def optimizer_named(settings: Config, block: OptimizerConfig, device: Device) -> tuple[Factory, dict[str, Any]]:
        """Return the optimizer that a block of the configuration names, and its options."""
        return by_name(block, device)

    def __init__(
        self, model: nn.Module, config: Config, scheduler: Scheduler, context: EngineContext, builder: UnitBuilder
    ) -> None:
        super().__init__()
        self.module, self._loop = model, UserLoop()
        self.optimizer = self.lr_scheduler = None
        self._scheduler, self._context = scheduler, context
        self._fit = ModelFit(model, scheduler, builder, context.roles.agreement)
        self._precision = ModelPrecision(config, self.device, scheduler.reducer.meet_scale)
        scheduler.reducer.use_loss_scale(self._precision.loss_scale)
        self.use_config(config)
        self._checkpoints = EngineCheckpoints(self)
        exit_notice.watch(self)

    def use_config(self, config: Config) -> None:
        """Train with this configuration; what each step needs of it is computed here."""
        self.settings = config
        self._loop.counts.accumulation_steps = config.gradient_accumulation_steps or 1
        self._loop.counts.samples_per_step = self.train_batch_size()
        self._scheduler.reducer.accumulate_over(self._loop.counts.accumulation_steps)
        self._precision.use_config(config, self.device)
        self._loop.counts.is_managed = config.managed_gradient_accumulation
        if not self._loop.counts.is_managed:
            self._decide_boundary(False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model. Inputs are moved to the engine's device and, in mixed precision, to the compute dtype."""
        if torch.compiler.is_compiling() and any(unit.resharding_groups for unit in self._scheduler.units):
            return uncompiled(self, args, kwargs)
        if self._loop.join is not None and torch.is_grad_enabled():
            self._loop.join.begin(args, kwargs)
        with torch.inference_mode(False):  # a refit makes tensors that are trained
            self.fit_to_model()
        if self._loop.step_watch is not None:
            self._loop.step_watch = self._loop.step_watch.saw_forward(self)
        self._scheduler.reducer.set_boundary(self.is_gradient_accumulation_boundary())
        copies: list[tuple[Any, Any]] = []
        args, kwargs = map_tensors((args, kwargs), self._precision.move_input, copies)
        copied = CopiedInputs(copies) if copies else None
        try:
            running, autocast = self._scheduler.forward_scope((args, kwargs)), self._precision.autocast()
            roles, model = self._context.roles, cast(nn.Module, self._modules["module"])
            together = roles.agreement.failing_together("forward")
            undone = undone_if_aborted(model) if roles.grid.has_model_axes else contextlib.nullcontext()
            with together, undone, running, autocast:
                output = model(*args, **kwargs)
        finally:
            if copied is not None:
                copied.give_back()
        return output if self._precision.border is None else self._precision.border.on_output(output)

    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, create_graph: bool = False
    ) -> Tensor:
        """Run backward from `loss`, with the loss scale if there is one, and return `loss`.

        Pass `scale_wrt_gas=False` if the loop itself divides by the gradient accumulation steps.
        """
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            raise BackwardError(unsupported_uses.NO_GRADIENT)
        if retain_graph is not False or scale_wrt_gas is not True or create_graph is not False:
            flags = unsupported_uses.backward_flags(retain_graph, scale_wrt_gas, create_graph)
            retain_graph, scale_wrt_gas, create_graph = flags
        graph, reducer, scale = self._scheduler.graph, self._scheduler.reducer, self._precision.loss_scale
        if graph.loss is not None and graph.loss() is loss:
            raise BackwardError(unsupported_uses.SECOND_BACKWARD)
        if self.monitor is not None:
            self.monitor.backward_begins(loss, is_divided=not scale_wrt_gas)
        reducer.set_boundary(self.is_gradient_accumulation_boundary())  # again: `loss` may not come from `forward`
        reducer.has_met_scale = True
        self._loop.counts.num_backwards += 1
        scaled = contextlib.nullcontext() if CARRIED.scale == scale.value else carrying(scale)
        divided = contextlib.nullcontext() if scale_wrt_gas else reducer.without_division()
        try:
            with self._context.roles.agreement.failing_together("backward"), scaled, divided:
                reducer.views.detach()
                begin = loss if self._precision.border is None else loss.float() * scale.value
                begin.backward(retain_graph=retain_graph, create_graph=create_graph)
        except BaseException:
            reducer.views.attach()  # gradients computed so far can be dropped like any others
            raise
        if not retain_graph and not create_graph:
            graph.loss = weakref.ref(loss)
        if self.monitor is not None:
            self.monitor.backward_ends()
        return loss

    def step(self) -> None:
        """Apply the gradients at a gradient accumulation boundary; otherwise only count the micro-step."""
        if self.optimizer is None:
            raise ShardwellError(unsupported_uses.NO_OPTIMIZER)
        if not self._loop.counts.is_managed:
            self._decide_boundary(True)
        at_boundary = self.is_gradient_accumulation_boundary()
        self._loop.step_watch = self._loop.counts.boundary = None
        self._loop.counts.micro_steps += 1
        if at_boundary:
            self._apply_gradients()
        else:
            self._scheduler.end_retention()
        if not self._loop.counts.is_managed:
            self._decide_boundary(False)
        if self._checkpoints.saves_in_background:
            self._checkpoints.check()  # last, because ranks may learn of an error at different steps

    def step_now(self) -> None:
        """Apply the gradients regardless of the micro-step count, for a loop that calls `optimizer.step()` itself."""
        self._decide_boundary(True)
        with self._scheduler.reducer.spending():
            self.step()

    def adopt(self, optimizer: Optimizer, *, steps: bool = True) -> None:
        """Take over an optimizer that the user constructed over the model's parameters, and step."""
        self._checkpoints.meet(optimizer)
        self.optimizer = self._fit.builder.adopt(optimizer, self, self._scheduler.units)
        if steps:
            self.step_now()

    def _apply_gradients(self) -> None:
        assert self.optimizer is not None
        if self.monitor is not None:
            self.monitor.step_begins()
        try:
            with self._context.roles.agreement.failing_together("step"):
                self._scheduler.reducer.views.take_edits(at_step=True)
                self._fit.take_edits(self.optimizer.executor.slices.units)
                self.optimizer.apply_gradients()
        finally:
            self._scheduler.reducer.clear()
            self._scheduler.end_retention()
            roles = self._context.roles
            roles.all.end_step()
            if roles.grid.has_model_axes:
                roles.end_step_of_axes()
        self._loop.counts.end_boundary()
        if self._loop.counts.global_steps == 1:
            self._scheduler.keep_frozen(frozen_budget(self.settings, self._scheduler.units, self._context))
        if self.lr_scheduler is not None and not self.optimizer.overflow:
            self.lr_scheduler.step()
        if self.monitor is not None:
            self.monitor.step_ends()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the next `step` applies the gradients."""
        return self._loop.counts.at_boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set whether the next `step` applies the gradients, instead of deriving it from the micro-step count."""
        if not self._loop.counts.is_managed:
            raise ShardwellError(unsupported_uses.UNMANAGED)
        self._decide_boundary(unsupported_uses.flag(is_boundary, "set_gradient_accumulation_boundary"))

    def _decide_boundary(self, is_boundary: bool) -> None:
        self._loop.counts.boundary = is_boundary
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
        return self._context.roles.all.traffic.last

    def trim(self) -> None:
        """Release freed memory that the caching allocator holds, so that other processes can use it."""
        self._context.device.trim()

    @property
    def units(self) -> tuple[UnitInfo, ...]:
        """The units of the model: name, module, parameters, residency, tiers and bytes of each."""
        return describe_units(self._scheduler.units, self.memory())

    def record(self, timing: bool = False) -> contextlib.AbstractContextManager[Trace]:
        """Return a context that records the schedule as short tokens; with `timing`, also a `timeline` at its end."""
        return recording_with_times(self) if timing else self._scheduler.recording()

    @property
    def offload(self) -> OffloadPlan:
        """Which units are updated on the host, and when their updates are committed."""
        return self._fit.builder.plan

    @property
    def training_dataloader(self) -> ShardedLoader | UserDataLoader | None:
        """The loader of the data that `initialize` was given."""
        return self._loop.data_loader

    @training_dataloader.setter
    def training_dataloader(self, loader: ShardedLoader | UserDataLoader | None) -> None:
        self._loop.data_loader = loader

    global_steps = StepCount("The number of optimizer steps.")
    micro_steps = StepCount("The number of calls of `step`.")
    global_samples = StepCount("The number of samples that all ranks have trained with.")

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
    def data_size(self) -> int:
        """The number of ranks that train on rows of their own: all, unless some share a model or a sequence."""
        return self._context.roles.grid.num_batches

    @property
    def data_rank(self) -> int:
        """The share of the rows that this rank trains on, from 0 to `data_size` - 1."""
        return self._context.roles.grid.batch_rank(self.global_rank)

    @property
    def config(self) -> Any:
        """The configuration; a subclass may show the one that its user wrote. The engine itself reads `settings`."""
        return self.settings

    def train_batch_size(self) -> int:
        """Return the number of samples of one optimizer step over all ranks and micro-steps."""
        return self.train_micro_batch_size_per_gpu() * self.gradient_accumulation_steps() * self.data_size

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.settings.train_micro_batch_size_per_gpu or 1

    def gradient_accumulation_steps(self) -> int:
        return self.settings.gradient_accumulation_steps or 1

    @property
    def loss_scale(self) -> float:
        """The factor that losses are multiplied by; 1 without fp16."""
        return self._precision.loss_scale.value

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
        options = {"backend": backend, **(compile_kwargs or {}), **kwargs}
        compile_units(self._scheduler, self._teardown, options)

    @property
    def is_compiled(self) -> bool:
        return bool(self._teardown.compiled)

    def refit(self) -> None:
        """Rebuild the shards after parameters were resized, replaced, added, removed or unfrozen.

        All ranks must call it. `forward` calls it when it detects a change. Unchanged parameters keep their masters and
        optimizer state. An explicit call also frees the training state of parameters that are frozen now.
        """
        self._fit.refit(self.optimizer, keep_frozen_state=False)

    def fit_to_model(self) -> None:
        """Refit if the model has changed, and keep the optimizer state of parameters that are frozen now."""
        if self._teardown.has_begun:
            raise ShardwellError(DESTROYED)
        if not self._fit.is_current():
            self._fit.refit(self.optimizer, keep_frozen_state=True)

    def state_dict(self, *args: Any, rank0_only: bool = False, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the unsharded state of the model in host memory, by the model's own names. All ranks must call it.

        Parameters are all-gathered one unit at a time. With `rank0_only` the other ranks get an empty dictionary.
        """
        kwargs["keep_vars"] = True  # no values are read here
        with self._context.roles.agreement.failing_together("state_dict"):
            found = self.module.state_dict(*args, **kwargs)
            return whole_state(found, self._scheduler.units, keeps=not rank0_only or self.global_rank == 0)

    def parameters_snapshot(self, *, rank0_only: bool = False) -> dict[str, Tensor]:
        """Return the unsharded values of all parameters by name, in fp32, in host memory. All ranks must call it."""
        with self._context.roles.agreement.failing_together("parameters_snapshot"):
            return snapshot(self._scheduler.units, keeps=not rank0_only or self.global_rank == 0)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load full tensors, such as `state_dict` returns. All ranks must pass the same ones."""
        with self._context.roles.agreement.failing_together("load_state_dict", common=(ShardwellError,)):
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
        self._checkpoints.load_model(self, path, strict=strict)

    def finish_saving(self) -> None:
        """Wait for a checkpoint that is being written in the background, and raise its error if it failed."""
        self._checkpoints.wait()

    def destroy(self, *, whole: bool = True) -> None:
        """Turn the model back into an ordinary one with unsharded parameters; drop gradients and optimizer state.

        All ranks must call it. The model may be passed to `initialize` again. With `whole=False`, while an exception
        propagates, and after a failure that not all ranks had, nothing is all-gathered: parameters stay released.
        """
        if not self._teardown.has_begun:
            end_engine(self, lambda: self._teardown.end(self.optimizer, whole=whole))

    def hand_over(self) -> None:
        """End this engine for another one that gets its model. `initialize` calls it, on all ranks."""
        end_engine(self, lambda: self._teardown.hand_over(self.optimizer))

    _is_accelerate_prepared = unsupported_uses.prepared_by_accelerate
    __reduce_ex__ = unsupported_uses.refuse_pickling

    def __getattr__(self, name: str) -> Any:
        """Look up an attribute that the engine does not have on the model."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or name.startswith("__"):
                raise
            return getattr(module, name)
