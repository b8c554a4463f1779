"""What the user holds: a module that trains sharded, in a plain PyTorch loop."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwell.config import Config
from shardwell.engine import exit_notice
from shardwell.engine.carried_scale import carrying, scaled_output, unscaled_input
from shardwell.engine.checkpoints import EngineCheckpoints
from shardwell.engine.compilation import compile_units, uncompiled
from shardwell.engine.data_loader import ShardedLoader
from shardwell.engine.full_state import load_whole_state, snapshot, whole_state
from shardwell.engine.join import Join, joined
from shardwell.engine.precision import autocast_of, mixed_dtype
from shardwell.engine.startup_report import print_progress
from shardwell.engine.teardown import DESTROYED, ModelBefore
from shardwell.engine.units import UnitInfo, describe_units
from shardwell.engine.unsupported_uses import StepCallWatch, ready_for_accelerate, refuse_pickling
from shardwell.engine.user_data_loader import UserDataLoader
from shardwell.errors import BackwardError, ShardwellError
from shardwell.memory import MemoryReport
from shardwell.offload.plan import STEPS_UNTIL_KNOWN, OffloadPlan
from shardwell.optim import ShardedOptimizer
from shardwell.optim.loss_scale import LossScale, NoScale
from shardwell.parallel import Agreement, TrafficReport, TrafficStats
from shardwell.runtime.budget import frozen_budget
from shardwell.runtime.fingerprint import ModelFingerprint
from shardwell.runtime.hooks import attach, remove
from shardwell.runtime.inputs import Inputs, mover
from shardwell.runtime.pytree import map_tensors
from shardwell.runtime.rebuild import UnitBuilder, refit
from shardwell.runtime.scheduler import Scheduler
from shardwell.runtime.trace import Trace
from shardwell.sharding import EngineContext
from shardwell.sharding.edits import look


class Engine(nn.Module):
    """Wraps a model whose parameters, gradients and optimizer state are split over the ranks.

    Call it like the model, call `backward` on the loss (or the loss' own), then `step`. Averaging over ranks and
    accumulation steps happens where gradients are reduced; the loss is never touched.
    """

    module: nn.Module
    optimizer: ShardedOptimizer | None
    _before: ModelBefore
    offload: OffloadPlan  # what is updated on the host, and when that commits
    startup_report: str = ""  # what `initialize` had to say: see `report.py`
    lr_scheduler: Any
    _scheduler: Scheduler
    _context: EngineContext
    _ledger: TrafficStats
    _agreement: Agreement

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        scheduler: Scheduler,
        context: EngineContext,
        ledger: TrafficStats,
        agreement: Agreement,
        builder: UnitBuilder,
    ) -> None:
        super().__init__()
        self.module = model
        self.config = config
        self.optimizer = None
        self.lr_scheduler = None
        self.global_steps = 0
        self.micro_steps = 0
        self.global_samples = 0
        self.training_dataloader: ShardedLoader | UserDataLoader | None = None
        self._scheduler, self._context, self._ledger, self._agreement = scheduler, context, ledger, agreement
        self._builder = builder
        self._fingerprint = ModelFingerprint(model)
        self._handles = {unit: attach(scheduler, unit) for unit in scheduler.units}
        self._spent: weakref.ref[Tensor] | None = None
        self._boundary_override: bool | None = None
        self._watch: StepCallWatch | None = StepCallWatch()
        self._scale: LossScale = NoScale()
        self._compiled: dict[nn.Module, Callable[..., Any]] = {}  # their own forward
        self._checkpoints = EngineCheckpoints(self)
        self._is_destroyed = False
        self._join: Join | None = None  # a loop over uneven data
        exit_notice.watch(self)

    # ------------------------------------------------------------------------------------------------ the loop

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; inputs are moved to the engine's device and, under mixed precision, to its dtype."""
        if torch.compiler.is_compiling() and any(unit.releasable for unit in self._scheduler.units):
            return uncompiled(self, args, kwargs)
        if self._join is not None and torch.is_grad_enabled():
            self._join.begin(args, kwargs)
        with torch.inference_mode(False):  # what a refit makes is trained
            self.fit_to_model()
        if self._watch is not None:
            self._watch = self._watch.saw_forward(self)
        self._scheduler.reducer.is_boundary = self.is_gradient_accumulation_boundary()
        inputs = Inputs(args, kwargs, self._input_change())
        try:
            running = self._scheduler.forward_scope((inputs.args, inputs.kwargs))
            with self._context.failing_together("forward"), autocast_of(self.config, self.device), running:
                output = self.module(*inputs.args, **inputs.kwargs)
        finally:
            inputs.give_back()
        if self._scale.is_on and torch.is_grad_enabled():
            met = self._scheduler.reducer.meet_scale
            output = map_tensors(output, lambda tensor: scaled_output(tensor, self._scale, met))
        self._scheduler.end_forward()
        self._scheduler.drop_unused()
        return output

    def _input_change(self) -> Callable[[Tensor], Tensor]:
        """What becomes of a tensor on its way into the model."""
        move = mover(self.device, self._compute_dtype)
        scaled = self._scale.is_on and torch.is_grad_enabled()
        return (lambda tensor: move(unscaled_input(tensor, self._scale))) if scaled else move

    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, create_graph: bool = False
    ) -> Tensor:
        """Run the loss' backward. `scale_wrt_gas=False` is for loops that divide by the accumulation steps by hand."""
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
        self._scheduler.reducer.is_boundary = (
            self.is_gradient_accumulation_boundary()
        )  # the loss may not come from `forward`
        self._scheduler.reducer.divide_by_steps = scale_wrt_gas
        self._scheduler.reducer.meet_scale()
        try:
            with self._context.failing_together("backward"), carrying(self._scale):
                scaled = loss.float() * self._scale.value if self._scale.is_on else loss
                self._scheduler.reducer.begin_backward()
                scaled.backward(retain_graph=retain_graph, create_graph=create_graph)
        except BaseException:
            self._scheduler.reducer.hang()  # those that had come can be dropped like any others
            raise
        finally:
            self._scheduler.reducer.divide_by_steps = True
        if not retain_graph and not create_graph:
            self._spent = weakref.ref(loss)
        return loss

    def step(self) -> None:
        """At a boundary apply the gradients, otherwise only count the micro-step."""
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
        self._checkpoints.check()  # last: ranks may hear of it at different steps

    def step_now(self) -> None:
        """Apply the gradients, whatever the count of micro-steps says: a loop that calls its optimizer's own `step`."""
        self.set_gradient_accumulation_boundary(True)
        with self._scheduler.reducer.spending():
            self.step()

    def adopt(self, optimizer: Optimizer) -> None:
        """Take over an optimizer that the user made, and step."""
        self._checkpoints.meet(optimizer)
        self.optimizer = self._builder.adopt(optimizer, self, self._scheduler.units)
        self.step_now()

    def _apply_gradients(self) -> None:
        assert self.optimizer is not None
        try:
            with self._context.failing_together("step"):
                self._scheduler.reducer.take_edits(at_step=True)
                self.optimizer.apply_gradients()
        finally:
            self._scheduler.reducer.clear()
            self._scheduler.end_retention()
            self._ledger.end_step()
            self._agreement.begin_step()
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        if self.global_steps == 1:
            self._scheduler.keep_frozen(frozen_budget(self.config, self._scheduler.units, self._context))
        if self.global_steps == STEPS_UNTIL_KNOWN and self.config.zero_optimization.offload_optimizer.ratio == "auto":
            self.offload = self.offload.fill_device(self.optimizer, self._context)
        if self.lr_scheduler is not None and not self.optimizer.overflow:
            self.lr_scheduler.step()
        if self.config.steps_per_print and self.global_steps % self.config.steps_per_print == 0:
            print_progress(self)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the coming `step` applies the gradients."""
        if self._boundary_override is not None:
            return self._boundary_override
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Decide for the coming micro-step, instead of counting."""
        self._boundary_override = is_boundary
        self._scheduler.reducer.is_boundary = is_boundary
        if not is_boundary:
            self._scheduler.reducer.defer_reduction()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients on this rank, in full, until the next backward outside; legal at every stage.

        Costs one gradient buffer of the whole model in the accumulation dtype; `memory()` shows it.
        """
        self._scheduler.reducer.sync = False
        self._scheduler.reducer.defer_reduction()
        try:
            yield
        finally:
            self._scheduler.reducer.sync = True

    def join(self, divide_by_initial_world_size: bool = True) -> contextlib.AbstractContextManager[None]:
        """A context for a loop over uneven data: ranks that are out of batches stand in until all are.

        One forward, backward and step for each batch. The average is over all ranks, or over those that have data.
        """
        return joined(self, divide_by_initial_world_size)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of this boundary.

        Units that were updated at once during backward stay updated, where `commit` is "at_once"; by "auto" that is an
        error.
        """
        if self.optimizer is not None:
            self.optimizer.habit.meet("gradients were dropped by zero_grad()")
        if not set_to_none and self._scheduler.reducer.zero():
            return
        self._scheduler.discard_backward()
        if self.optimizer is not None:
            self.optimizer.forget_gradients()
        self._scheduler.reducer.forget()

    # ------------------------------------------------------------------------------------------------- readings

    def get_global_grad_norm(self) -> float | None:
        """The norm of the averaged gradient at the last step, before clipping. Waits for the device."""
        norm = self.optimizer.global_norm() if self.optimizer is not None else None
        return None if norm is None or norm.is_meta else float(norm)

    def memory(self) -> MemoryReport:
        """Bytes on this rank by state, unit and tier, now and at the peak."""
        return self._context.account.report()

    def traffic(self) -> TrafficReport:
        """Bytes that this rank received during the last optimizer step, by collective."""
        return self._ledger.last

    def trim(self) -> None:
        """Give freed memory that the allocator keeps back to the system."""
        self._context.device.trim()

    @property
    def units(self) -> tuple[UnitInfo, ...]:
        """The units of the model: name, module, parameters, residency, tiers and bytes of each."""
        return describe_units(self._scheduler.units, self.memory())

    def record(self) -> contextlib.AbstractContextManager[Trace]:
        """Record what happens as short tokens."""
        return self._scheduler.recording()

    @property
    def skipped_steps(self) -> int:
        return self.optimizer.skipped_steps if self.optimizer is not None else 0

    @property
    def device(self) -> torch.device:
        return self._context.device.torch_device

    @property
    def world_size(self) -> int:
        return self._context.world.mesh.size

    @property
    def global_rank(self) -> int:
        return self._context.world.mesh.rank

    @property
    def _compute_dtype(self) -> torch.dtype | None:
        return mixed_dtype(self.config)

    def train_batch_size(self) -> int:
        return self.train_micro_batch_size_per_gpu() * self.gradient_accumulation_steps() * self.world_size

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.config.train_micro_batch_size_per_gpu or 1

    def gradient_accumulation_steps(self) -> int:
        return self.config.gradient_accumulation_steps or 1

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by; 1 without fp16."""
        return self._scale.value

    def gradient_clipping(self) -> float:
        return self.config.gradient_clipping

    def zero_optimization_stage(self) -> int:
        return self.config.zero_optimization.stage

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups] if self.optimizer is not None else []

    def compile(self, backend: Any = "inductor", compile_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Compile each unit's forward with torch.compile; gathers and releases stay outside, so no graph breaks there.

        Units that contain others (usually the root) stay as they are. Blocks of one class share one graph.
        """
        compile_units(self._scheduler.units, self._compiled, {"backend": backend, **(compile_kwargs or {}), **kwargs})

    @property
    def is_compiled(self) -> bool:
        return bool(self._compiled)

    # ------------------------------------------------------------------------------------------ the model's state

    def refit(self) -> None:
        """Fit the shards to the model as it is now: parameters that were resized, replaced, added, removed or thawed.

        `forward` calls it by itself when it finds a change. Masters and optimizer state of unchanged parameters stay.
        Called by hand it also gives back what frozen parameters hold for training. All ranks must call it.
        """
        self._refit(keep_frozen_state=False)

    def fit_to_model(self) -> None:
        """Refit if the model was changed, and keep the state of what is only frozen for now."""
        if self._is_destroyed:
            raise ShardwellError(DESTROYED)
        look(self._scheduler.units)
        if not self._fingerprint.still_fits() or any(unit.misfit for unit in self._scheduler.units):
            self._refit(keep_frozen_state=True)

    def _refit(self, *, keep_frozen_state: bool) -> None:
        self._scheduler.end_passes()
        self._scheduler.end_retention()
        with self._context.failing_together("refit"):
            self._scheduler.reducer.take_edits()
            units = refit(list(self._scheduler.units), self._builder, self.optimizer, keep_frozen_state)
        for unit in set(self._handles) - set(units):
            remove(self._handles.pop(unit))
        self._scheduler.adopt_units(units)
        for unit in units:
            if unit not in self._handles:
                self._handles[unit] = attach(self._scheduler, unit)
        self._fingerprint = ModelFingerprint(self.module)
        if self.optimizer is not None:
            self.optimizer.count_states()

    def state_dict(self, *args: Any, rank0_only: bool = False, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The model's state, whole, in host memory, by the model's own names. All ranks must call it.

        One unit is whole at a time. With `rank0_only` the other ranks get an empty dictionary.
        """
        kwargs["keep_vars"] = True  # no values are read
        with self._context.failing_together("state_dict"):
            found = self.module.state_dict(*args, **kwargs)
            return whole_state(found, self._scheduler.units, keeps=not rank0_only or self.global_rank == 0)

    def parameters_snapshot(self, *, rank0_only: bool = False) -> dict[str, Tensor]:
        """Whole values of all parameters by name, in fp32, in host memory. All ranks must call it."""
        with self._context.failing_together("parameters_snapshot"):
            return snapshot(self._scheduler.units, keeps=not rank0_only or self.global_rank == 0)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Set the model's state from whole tensors, such as `state_dict` gives. All ranks pass the same ones."""
        with self._context.failing_together("load_state_dict", common=(ShardwellError,)):
            return load_whole_state(self.module.state_dict(keep_vars=True), state_dict, strict=strict)

    # ---------------------------------------------------------------------------------------------- checkpoints

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
        """Save everything that training needs to go on under `save_dir`, at this or any other number of ranks.

        All ranks must call it. The tag is `global_step<N>` if none is given. `client_state` is rank 0's: numbers,
        strings, tensors, and containers of them. With `asynchronous` only a copy to host memory is made before it
        returns; what goes wrong later is raised by the next `step`. A checkpoint is there whole or not at all.
        """
        name = f"global_step{self.global_steps}" if tag is None else str(tag)
        self._checkpoints.save(
            self,
            save_dir,
            name,
            client_state,
            exclude_frozen=exclude_frozen_parameters,
            asynchronous=self.config.shardwell.async_save if asynchronous is None else asynchronous,
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
        """Go on from a checkpoint: the latest under `load_dir`, or the one with that tag. All ranks must call it.

        Returns its path and the client's state. If there is none yet it warns and returns (None, None), or raises with
        `strict`. If it cannot be loaded, the engine's state is as before. It may have been saved at any stage,
        precision and number of ranks; checkpoints of DeepSpeed and of torch.distributed.checkpoint are read too.
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
        """Take the model's weights from a Hugging Face directory, a safetensors file or any checkpoint.

        All ranks must call it; each reads only its own slices.
        """
        self._checkpoints.load_model(self, os.fspath(path), strict=strict)

    def finish_saving(self) -> None:
        """Wait for a checkpoint that is being written in the background; raises what went wrong with it."""
        self._checkpoints.wait()

    # ---------------------------------------------------------------------------------------------------- the end

    def destroy(self, *, whole: bool = True) -> None:
        """Give the model back as an ordinary one with whole parameters, and drop gradients and optimizer state.

        All ranks must call it: they gather. It may be handed to `initialize` again. With `whole=False`, and while an
        error is on its way or a rank has failed, nothing is gathered, and parameters of released units stay away.
        """
        if not self._is_destroyed:
            self._is_destroyed = True
            self.finish_saving()
            for handles in self._handles.values():
                remove(handles)
            self._handles.clear()
            for module in self._compiled:
                module.__dict__.pop("forward", None)
            self._before.end(self.module, self._scheduler, self.optimizer, self._context, whole=whole)
            exit_notice.tell(self._agreement, self.micro_steps)
            self.trim()

    _is_accelerate_prepared = ready_for_accelerate
    __reduce_ex__ = refuse_pickling

    def __getattr__(self, name: str) -> Any:
        """What the engine does not have, the model may have."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or name.startswith("__"):
                raise
            return getattr(module, name)
