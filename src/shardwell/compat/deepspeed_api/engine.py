"""`DeepSpeedEngine`: shardwell's engine with DeepSpeed's methods. `deepspeed.initialize` makes it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shardwell.compat.deepspeed_api import groups
from shardwell.compat.deepspeed_api.enums import offload_block
from shardwell.compat.deepspeed_api.files import EngineFiles
from shardwell.compat.deepspeed_api.fragments import GRADIENT_DTYPE
from shardwell.compat.deepspeed_api.getters import ConfigGetters
from shardwell.compat.deepspeed_api.module_moves import leave_shards_in_place
from shardwell.compat.deepspeed_api.monitor import SilentMonitor
from shardwell.compat.deepspeed_api.offload_states import StateMoves
from shardwell.compat.deepspeed_api.optimizer import DeepSpeedOptimizer
from shardwell.compat.deepspeed_api.optimizers import of_deepspeed
from shardwell.compat.deepspeed_api.parallel_grid import PipelineParallelGrid, topology_of
from shardwell.compat.deepspeed_api.parameters import label, unlabel
from shardwell.compat.deepspeed_api.pipeline_engine import PipelineMethods
from shardwell.compat.deepspeed_api.replacements import replacement_for
from shardwell.config import Config, OptimizerConfig
from shardwell.config.arguments import finite, integer
from shardwell.engine import Engine
from shardwell.engine.unsupported_uses import flag
from shardwell.errors import ShardwellError
from shardwell.memory import Device
from shardwell.optim.factory import Factory, by_name
from shardwell.zero import is_released

T = TypeVar("T")


class DeepSpeedEngine(ConfigGetters, EngineFiles, StateMoves, Engine):
    """An engine that answers to DeepSpeed's names; everything else is `shardwell.Engine`."""

    optimizer_class = DeepSpeedOptimizer
    pipeline_bases = (PipelineMethods,)
    _user_config: Any = None  # the dictionary that the user passed, or that the file holds
    _user_boundary: bool | None = None  # holds until it is set again
    _has_stepped = False  # the last `step` was at a boundary
    mpu: Any = None
    grid: PipelineParallelGrid | None = None  # of an engine with axes
    args: Any = None
    client_optimizer: Any = None
    client_lr_scheduler: Any = None
    training_data: Any = None
    collate_fn: Any = None
    has_moe_layers = False
    pipeline_parallelism = False
    enable_backward_allreduce = True
    inside_no_sync_ctxt = False
    mesh_device: Any = None
    sparse_tensor_module_names: frozenset[str] = frozenset()  # of embeddings whose gradients are sparse: none are
    csr_tensor_module_names = sparse_tensor_module_names

    @staticmethod
    def optimizer_named(settings: Config, block: OptimizerConfig, device: Device) -> tuple[Factory, dict[str, Any]]:
        """Return the optimizer that a block names, as the class that DeepSpeed makes of it."""
        factory, options = by_name(block, device)
        if device.is_meta or block.params.get("torch_adam"):
            return factory, options
        return of_deepspeed(factory, options, on_host=settings.zero_optimization.offload_optimizer.device != "none")

    def use_arguments(self, config: Any, **given: Any) -> None:
        """Keep what the user passed to `initialize`, and give the parameters DeepSpeed's attributes."""
        self._user_config = config
        self.monitor = self.monitor or SilentMonitor()  # type: ignore[assignment]
        for name, value in given.items():
            setattr(self, name, value)
        self._answer_for_axes()
        self.label_parameters()
        if isinstance(self.optimizer, DeepSpeedOptimizer):
            self.optimizer.zero_stage = self.zero_optimization_stage()

    def _answer_for_axes(self) -> None:
        """Let `deepspeed.utils.groups` answer by the axes of this engine, or by the `mpu` that the user passed."""
        roles = self._context.roles
        if roles.grid.has_model_axes:
            self.grid = PipelineParallelGrid(topology_of(roles.grid), roles=roles)
            self.mpu = self.mpu or self.grid
            groups.mpu = self.mpu

    def label_parameters(self) -> None:
        """Give the parameters `ds_id` and the others at stage 3, and take them off below it."""
        for parameter in self.module.parameters():
            setattr(parameter, GRADIENT_DTYPE, self.get_data_types()[1])
        if self.zero_optimization_stage() == 3:
            label(self.module.parameters(), self.world_size, self._persistent())
            leave_shards_in_place(self.module)
        else:
            unlabel(self.module.parameters())

    def _persistent(self) -> list[nn.Parameter]:
        """Return the small parameters that stay whole on every rank: those that a new engine has not released."""
        return [parameter for parameter in self.module.parameters() if not is_released(parameter)]

    # ------------------------------------------------------------------------------------------------------- loop

    def backward(  # type: ignore[override]
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> Tensor:
        """Run backward from `loss`, and return it divided by the gradient accumulation steps, as DeepSpeed does.

        With `scale_wrt_gas=False` neither gradients nor the returned value are divided.
        """
        if self.optimizer is None:
            raise _UsageError("this engine has no optimizer: pass one to initialize, or name one in the configuration")
        super().backward(loss, retain_graph=retain_graph, scale_wrt_gas=scale_wrt_gas)
        return loss / self.gradient_accumulation_steps() if scale_wrt_gas else loss

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Apply the gradients at a boundary; `lr_kwargs` are handed to the schedule's `step`."""
        if self.optimizer is None:
            raise _UsageError("this engine has no optimizer: pass one to initialize, or name one in the configuration")
        if self.inside_no_sync_ctxt:
            raise _UsageError(
                "It is illegal to call Engine.step() inside no_sync context manager: gradients are held back there. "
                "Call it after the context"
            )
        before, schedule = self.global_steps, self.lr_scheduler
        if lr_kwargs:
            self.lr_scheduler = None
        try:
            super().step()
        finally:
            self.lr_scheduler = schedule
        self._has_stepped = self.global_steps > before
        if self._has_stepped and self.monitor is not None:
            self.monitor.write_steps()  # scripts read the files while they train
        if lr_kwargs and schedule is not None and self.was_step_applied():
            schedule.step(**lr_kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Hold gradients back on this rank, at any stage; a step inside is an error, as in DeepSpeed."""
        if self.inside_no_sync_ctxt:
            raise _UsageError("no_sync context manager reentry is unsupported: leave it before it is entered again")
        self.inside_no_sync_ctxt = True
        try:
            with super().no_sync():
                yield
        finally:
            self.inside_no_sync_ctxt = False

    def step_now(self) -> None:
        """Apply the gradients because the user's own optimizer was stepped; a boundary that was set stays set."""
        kept, self._user_boundary = self._user_boundary, None
        try:
            super().step_now()
        finally:
            self._user_boundary = kept

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the next `step` applies the gradients."""
        if self._user_boundary is not None:
            return self._user_boundary
        return super().is_gradient_accumulation_boundary()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set whether each `step` applies the gradients, until this is called again."""
        self._check_managed("set_gradient_accumulation_boundary()")
        is_boundary = self._user_boundary = flag(is_boundary, "set_gradient_accumulation_boundary")
        super().set_gradient_accumulation_boundary(is_boundary)

    def was_step_applied(self) -> bool:
        """Return whether the last `step` changed the parameters: it was at a boundary, with finite gradients."""
        return self._has_stepped and self.optimizer is not None and not self.optimizer.has_overflowed()

    def scale(self, loss: Tensor, retain_graph: bool = False) -> Tensor:
        """Return the loss for a plain `backward()`. Gradients of a model's outputs carry the loss scale already.

        A graph that is kept needs nothing: parameters are gathered again for a second backward.
        """
        if loss.numel() != 1:
            raise _UsageError(f"scale expects a scalar tensor, the loss; its shape is {tuple(loss.shape)}")
        return loss

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """Do nothing: gradients are averaged during backward, and those that wait at the next step."""

    @contextlib.contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Hold the gradients of several backwards back, and average them together at the next step."""
        self._check_managed("coalesce_grad_reduction")
        with self.no_sync():
            yield

    def _check_managed(self, name: str) -> None:
        if not self.settings.managed_gradient_accumulation:
            raise _UsageError(
                f"{name} is not supported with managed_gradient_accumulation=False: every step() is a boundary there"
            )

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return the batch size of a step, that of a micro-batch on one rank, and the accumulation steps."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the batch size of a step by other accumulation steps; micro-batches keep their size."""
        train_batch_size = _taken(integer, train_batch_size, "set_train_batch_size")
        per_micro_step = self.train_micro_batch_size_per_gpu() * self.data_size
        steps, rest = divmod(train_batch_size, per_micro_step)
        if rest or steps < 1:
            raise ValueError(
                f"set_train_batch_size({train_batch_size}): expected a multiple of {per_micro_step}, the micro-batch "
                f"size {self.train_micro_batch_size_per_gpu()} times {self.data_size} rank(s)"
            )
        self._use_sizes(self.train_micro_batch_size_per_gpu(), steps)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the size of micro-batches; accumulation steps stay."""
        micro_batch_size = _taken(integer, micro_batch_size, "set_train_micro_batch_size")
        if micro_batch_size < 1:
            raise ValueError(f"set_train_micro_batch_size({micro_batch_size}): expected at least 1")
        self._use_sizes(micro_batch_size, self.gradient_accumulation_steps())

    def _use_sizes(self, micro: int, steps: int) -> None:
        sizes = {
            "train_batch_size": micro * steps * self.data_size,
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": steps,
        }
        self.use_config(self.settings.with_origins(self.settings.origins, sizes))

    # ---------------------------------------------------------------------------------------------------- answers

    @property
    def config(self) -> Any:
        """The configuration as the user wrote it."""
        return self._user_config if self._user_config is not None else self.settings

    @property
    def local_rank(self) -> int:
        """The number of this rank on its node."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def dp_world_size(self) -> int:
        """The number of ranks that gradients are averaged over."""
        return self._context.roles.averaged.rank_group.size

    @property
    def mp_world_size(self) -> int:
        """The number of ranks that share each tensor."""
        return self._context.roles.grid.tensor

    @property
    def data_parallel_group(self) -> Any:
        """The process group of the ranks that gradients are averaged over; None if the engine made it itself."""
        if self._context.roles.grid.has_model_axes:
            return self._context.roles.averaged.rank_group.group
        return torch.distributed.group.WORLD if torch.distributed.is_initialized() else None

    @property
    def basic_optimizer(self) -> Any:
        """The torch optimizer that steps this rank's shards."""
        return None if self.optimizer is None else self.optimizer.inner

    def loss_scale(self) -> float:  # type: ignore[override]
        """Return `fp16.loss_scale` of the configuration; the scale in force is `optimizer.cur_scale`."""
        return float(self.settings.fp16.loss_scale)

    def dynamic_loss_scale(self) -> bool:
        """Return whether the loss scale follows overflows."""
        return bool(self.settings.fp16.enabled and self.settings.fp16.loss_scale == 0)

    def postscale_gradients(self) -> bool:
        """Return whether gradients are divided after they were summed."""
        return not self.settings.prescale_gradients

    def zero_optimization(self) -> bool:
        """Return whether anything is sharded."""
        return self.zero_optimization_stage() > 0

    def zero_optimization_partition_gradients(self) -> bool:
        """Return whether gradients are sharded."""
        return self.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Return whether parameters are sharded."""
        return self.zero_optimization_stage() >= 3

    def zero_offload_optimizer(self) -> Any:
        """Return the block `offload_optimizer`, or None if optimizer state stays on the device."""
        return offload_block(self.settings.zero_optimization.offload_optimizer)

    def zero_offload_param(self) -> Any:
        """Return the block `offload_param`, or None if parameters stay on the device."""
        return offload_block(self.settings.zero_optimization.offload_param)

    def zero_use_cpu_optimizer(self) -> bool:
        """Return whether the optimizer steps on the host."""
        return self.zero_offload_optimizer() is not None

    def zero_cpu_offload(self) -> bool:
        """Return whether optimizer state is in host memory."""
        return self.settings.zero_optimization.offload_optimizer.device == "cpu"

    def zero_nvme_offload_optimizer(self) -> bool:
        """Return whether optimizer state is on NVMe."""
        return self.settings.zero_optimization.offload_optimizer.device == "nvme"

    def zero_partial_offload(self) -> Any:
        """Return the share of the optimizer state that is offloaded."""
        return self.settings.zero_optimization.offload_optimizer.ratio

    @property
    def communication_data_type(self) -> torch.dtype | None:
        """The dtype in which gradients are communicated, if the configuration names one."""
        name = self.settings.communication_data_type
        return None if name is None else {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[name]

    def optimizer_name(self) -> str | None:
        """Return the name of the optimizer in the configuration, or of the one that was passed."""
        if self.client_optimizer is not None:
            return type(self.client_optimizer).__name__
        return self.settings.optimizer.type if self.settings.optimizer is not None else None

    def optimizer_params(self) -> dict[str, Any] | None:
        """Return the arguments of the optimizer in the configuration."""
        return self.settings.optimizer.params if self.settings.optimizer is not None else None

    def scheduler_name(self) -> str | None:
        """Return the name of the schedule in the configuration."""
        return self._schedule_block().get("type")

    def scheduler_params(self) -> dict[str, Any] | None:
        """Return the arguments of the schedule in the configuration."""
        return self._schedule_block().get("params")

    def _schedule_block(self) -> Mapping[str, Any]:
        block = self.config.get("scheduler") if isinstance(self.config, Mapping) else None
        return block if isinstance(block, Mapping) else {}

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtype of the model and that of accumulated gradients."""
        names = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
        model = torch.float32
        if self.settings.fp16.enabled or self.settings.bf16.enabled:
            model = torch.float16 if self.settings.fp16.enabled else torch.bfloat16
        asked = self.settings.data_types.grad_accum_dtype
        return model, names[asked] if asked is not None else model

    def get_data_parallel_rank(self) -> int:
        """Return which share of the rows this rank trains on."""
        return self.data_rank

    def get_model_parallel_rank(self) -> int:
        """Return this rank's index among those that hold one model: of stages and of shared tensors."""
        return 0 if self.grid is None else self.grid.get_model_parallel_rank()

    def get_tensor_parallel_rank(self) -> int:
        """Return this rank's index among those that share each tensor."""
        return 0 if self.grid is None else self.grid.get_slice_parallel_rank()

    def get_sequence_parallel_group(self) -> Any:
        """Return the group of ranks that share sequences; None if there is none."""
        roles = self._context.roles
        return None if roles.sequence is None else roles.sequence.rank_group.group

    def get_type(self) -> list[Any]:
        """Return the entry `type` of each parameter group."""
        return self._of_groups("type")

    def get_mom(self) -> list[Any]:
        """Return the momentum of each parameter group, or its betas."""
        return self._of_groups("momentum" if self.optimizer_name() in ("SGD", "RMSprop") else "betas")

    def set_lr(self, lr: float | Tensor) -> None:
        """Set the learning rate of all parameter groups."""
        if not isinstance(lr, Tensor):
            lr = _taken(finite, lr, "set_lr")
        for group in self.optimizer.param_groups if self.optimizer is not None else ():
            group["lr"] = lr

    def _of_groups(self, name: str) -> list[Any]:
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        return [group.get(name, 0.0) for group in groups]

    def empty_partition_cache(self) -> None:
        """Release freed memory: units are resharded as soon as they were used."""
        self.trim()

    def destroy(self, *, whole: bool = True) -> None:
        """End the engine, as `shardwell.Engine.destroy` does, and take DeepSpeed's attributes off the parameters."""
        super().destroy(whole=whole)
        unlabel(self.module.parameters())
        if groups.mpu is not None and groups.mpu is self.grid:
            groups.mpu = None

    def __getattr__(self, name: str) -> Any:
        """Look an attribute up on the model; an unknown one is reported in the engine's name."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(f"'DeepSpeedEngine' object has no attribute '{name}'{replacement_for(name)}") from None


def _taken(rule: Callable[[Any], T], value: Any, where: str) -> T:
    """Return what a setter was given, by a rule of the configuration; the error names the setter."""
    try:
        return rule(value)
    except ValueError as error:
        raise ValueError(f"{where}({str(value)[:80]}): {error}") from None


class _UsageError(ShardwellError, AssertionError):
    """An error that DeepSpeed raises as an AssertionError."""
