"""What DeepSpeed's `PipelineEngine` has beside the methods of shardwell's: a loop over one iterator, and names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardwell.compat.deepspeed_api.parallel_grid import PipelineParallelGrid
from shardwell.errors import ShardwellError

if TYPE_CHECKING:
    from shardwell.engine.pipeline_engine import PipelinedEngine as _Base
else:
    _Base = object


class _NoGradientsError(ShardwellError, RuntimeError):
    """A step where gradients are off."""


class PipelineMethods(_Base):
    """DeepSpeed's names in an engine with a pipeline."""

    grid: PipelineParallelGrid  # of the engine
    pipeline_parallelism = True
    agg_train_loss: Tensor | None = None
    total_loss: Tensor | None = None
    has_bool_tensors = has_attention_mask = False
    agg_additional_losses: None = None

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Train as `shardwell`'s engine does, in `module.train()`; the iterator is kept for calls without one."""
        if not torch.is_grad_enabled():
            raise _NoGradientsError("train_batch() requires gradients enabled. Use eval_batch() instead.")
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        self.module.train()
        self.agg_train_loss = self.total_loss = super().train_batch()
        return self.agg_train_loss

    # ---------------------------------------------------------------------------------------------------------- names

    @property
    def num_stages(self) -> int:
        """The number of ranks along the pipeline."""
        return self._plan.num_ranks

    @property
    def prev_stage(self) -> int:
        """The stage before this one; -1 on the first."""
        return self.stage_id - 1

    @property
    def next_stage(self) -> int:
        """The stage behind this one."""
        return self.stage_id + 1

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches in a step."""
        return self.gradient_accumulation_steps()

    @property
    def micro_batch_size(self) -> int:
        """The number of rows of a micro-batch."""
        return self.train_micro_batch_size_per_gpu()

    @property
    def is_pipe_parallel(self) -> bool:
        return self.grid.get_pipe_parallel_world_size() > 1

    @property
    def is_data_parallel(self) -> bool:
        return self.grid.get_data_parallel_world_size() > 1

    @property
    def is_model_parallel(self) -> bool:
        return self.grid.get_slice_parallel_world_size() > 1

    @property
    def dynamic_shape(self) -> bool:
        """Whether micro-batches may have other shapes than those before: they always may."""
        return True

    def get_pipeline_parallel_rank(self) -> int:
        return self.stage_id

    def get_additional_losses(self) -> None:
        """Return that there are no losses beside the one that is trained on."""

    def reset_activation_shape(self) -> None:
        """Do nothing: stages tell each other the shapes of micro-batches that are new."""

    def set_has_attention_mask(self, value: bool) -> None:
        """Do nothing: what has no gradients is sent as it is."""

    def log_for_device(self, *msg: Any) -> None:
        """Do nothing: DeepSpeed's own debugging, which is off there, too."""

    def tput_log(self, *msg: Any) -> None:
        """Print on the first rank, at the steps that are reported."""
        every = self.settings.steps_per_print
        if self.global_rank == 0 and every and self.global_steps % every == 0:
            print(*msg)
