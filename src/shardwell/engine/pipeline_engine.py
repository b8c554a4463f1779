"""The engine of a pipeline: `train_batch` and `eval_batch` run this rank's stages over the micro-batches of a step.

`initialize` mixes `PipelinedEngine` into the engine's class where a model is divided into stages; an engine without a
pipeline knows nothing of it.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from shardwell.engine.carried_scale import carrying
from shardwell.engine.engine import Engine
from shardwell.engine.model_parts import StageOfModel
from shardwell.engine.pipeline_setup import PipelinePlan
from shardwell.errors import BackwardError, ShardwellError
from shardwell.memory.timing import Stopwatch
from shardwell.pipeline.batches import BatchReader, signature_of
from shardwell.pipeline.messages import HiddenForm, TensorForm
from shardwell.pipeline.operations import Operation, Pass
from shardwell.pipeline.runner import BatchRun, PipelineRunner
from shardwell.pipeline.schedules import Schedule, make_schedule, read_schedule
from shardwell.runtime.prefetch import ExecutionOrder
from shardwell.runtime.pytree import map_tensors
from shardwell.runtime.trace import TraceAction


@dataclass
class BatchLoss:
    """The loss of a batch: of this rank's micro-batches, and when it is summed over the ranks, the average of all."""

    value: Tensor  # 1D, fp64
    divisor: int  # of the sum
    whole_time: Stopwatch | None  # of a batch that is trained on, which ends when all ranks have ended theirs

    spans_stages = True  # the stages that are not last add zero

    def append_to(self, parts: list[Tensor]) -> None:
        """Append this rank's loss to what is summed."""
        parts.append(self.value)

    def take_sum(self, total: Tensor) -> None:
        """Take the sum over the ranks."""
        self.value.copy_(total / self.divisor)
        if self.whole_time is not None:
            self.whole_time.stop()


class PipelinedEngine(Engine):
    """An engine whose model is divided into pipeline stages, of which this rank has some.

    All ranks call `train_batch` with an iterator over the same micro-batches, as far as they train on the same rows:

        engine, *_ = shardwell.initialize(model=shardwell.pipeline.split(model, loss_fn=loss_fn), config=config)
        for _ in range(steps):
            loss = engine.train_batch(iterator)
    """

    _plan: PipelinePlan
    _runner: PipelineRunner
    _schedule: Schedule | None = None  # that the user gave
    _whole_time: Stopwatch  # of the last batch, up to where all ranks know its loss and the norm
    _in_batch = False
    data_iterator: Iterator[Any] | None = None
    batch_fn: Callable[[Any], Any] | None = None

    def use_pipeline(self, plan: PipelinePlan) -> None:
        """Run the stages of `plan`."""
        self._plan, self._loop.step_watch = plan, None
        device = self._context.device
        reader = BatchReader(self.module, plan.loss_fn, is_chain=plan.modules.layers.is_chain)
        move = partial(map_tensors, change=lambda tensor: tensor.to(self.device))
        self._runner = PipelineRunner(
            plan.modules, reader, plan.messages, self, Stopwatch(on_cuda=device.has_streams), move
        )
        self._whole_time = Stopwatch(on_cuda=device.has_streams)
        self._orders: dict[int, tuple[ExecutionOrder, ExecutionOrder]] = {}  # by stage
        if plan.messages is not None:
            names = [name for stage in plan.modules.stages for name in plan.modules.layer_names(stage)]
            self._checkpoints.parts = StageOfModel(self._context.roles, names)
        self.schedule  # noqa: B018 (a schedule that does not fit the micro-batches is an error here)

    # ------------------------------------------------------------------------------------------------------- steps

    @property
    def schedule(self) -> Schedule:
        """The operations of all ranks of the pipeline in one step."""
        if self._schedule is not None:
            given, steps = self._schedule.num_micro_batches, self.gradient_accumulation_steps()
            if given != steps:
                raise ShardwellError(
                    f"the schedule that use_schedule was given has {given} micro-batches, and a step has {steps} since "
                    "gradient_accumulation_steps was changed: give it a schedule of as many"
                )
            return self._schedule
        block = self.settings.pipeline
        return _made(block.schedule, self._plan.num_ranks, self.gradient_accumulation_steps(), block.chunks)

    def use_schedule(self, lists: Schedule | Mapping[int, Iterable[object]] | Sequence[Iterable[object]]) -> None:
        """Run this schedule from now on: a list of operations for each rank, as texts (`2F0`) or as torch has them."""
        schedule = lists if isinstance(lists, Schedule) else read_schedule(lists)
        found = schedule.num_ranks, schedule.num_stages, schedule.num_micro_batches
        wanted = self._plan.num_ranks, self._plan.modules.num_stages, self.gradient_accumulation_steps()
        if found != wanted:
            raise ShardwellError(
                f"the schedule has {found[0]} ranks, {found[1]} stages and {found[2]} micro-batches; this pipeline has "
                f"{wanted[0]}, {wanted[1]} and {wanted[2]} (gradient_accumulation_steps)"
            )
        if schedule.splits_backward and not self._plan.has_late_weights:
            raise ShardwellError(
                "the schedule splits backwards (I and W), for which weight gradients must be computed late: set "
                '"pipeline": {"schedule": "zb-h1"}, and pass the schedule then'
            )
        self._schedule = schedule

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Train on the next micro-batches of an iterator, one step, and return the loss, averaged over all of them.

        All ranks of the job call it; those that train on the same rows pass iterators over the same micro-batches. By
        default these are the ones of the data that `initialize` was given.
        """
        if self.optimizer is None:
            raise ShardwellError(
                "this engine has no optimizer: pass one to initialize, or name one in the configuration"
            )
        with self._context.roles.agreement.failing_together("train_batch"):
            loss, _ = self._run_batch(data_iter, self.schedule, trains=True)
        self.micro_steps += self.gradient_accumulation_steps()
        self.optimizer.sum_with_norm(loss)
        self._apply_gradients()
        if self._checkpoints.saves_in_background:
            self._checkpoints.check()
        return loss.value.squeeze(0)

    def eval_batch(
        self,
        data_iter: Iterator[Any] | None = None,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Return the loss of the next micro-batches, averaged over all of them, without training; all ranks call it.

        Args:
            return_logits: Return a pair, with the model's output for the last micro-batch on the last stage, and None
                on the others.
            compute_loss: Without it the micro-batches need no labels, and `reduce_output` must be None.
            reduce_output: With None, the last stage gets a list of what it computed for each micro-batch on this rank,
                losses or outputs, and the others None.
            bcast_loss: Without it stages that are not last get None.
            num_micro_batches: As many as in a step by default.
        """
        if reduce_output not in ("avg", None) or (reduce_output is not None and not compute_loss):
            raise ShardwellError(
                f"eval_batch(reduce_output={reduce_output!r}, compute_loss={compute_loss}): losses are averaged "
                '("avg"), outputs of the model are not: pass reduce_output=None for a list of one per micro-batch'
            )
        was_training = self.module.training
        self.module.eval()
        try:
            with self._context.roles.agreement.failing_together("eval_batch"), torch.no_grad():
                schedule = self._schedule_of(num_micro_batches)
                loss, run = self._run_batch(data_iter, schedule, trains=False, computes_loss=compute_loss)
                found: Any = run.losses if compute_loss else run.outputs
                if reduce_output is not None:
                    self._context.roles.all.all_reduce_sum(loss.value, "LOSS")
                    loss.take_sum(loss.value)
                    found = loss.value.squeeze(0)
        finally:
            self.module.train(was_training)
        if not self.is_last_stage() and (reduce_output is None or not bcast_loss):
            found = None
        return (found, run.outputs[-1] if run.outputs else None) if return_logits else found

    def _schedule_of(self, num_micro_batches: int | None) -> Schedule:
        """Return the schedule of an evaluation, of which forwards count only."""
        if num_micro_batches in (None, self.schedule.num_micro_batches):
            return self.schedule
        if num_micro_batches is None or num_micro_batches < 1:
            raise ShardwellError(f"eval_batch(num_micro_batches={num_micro_batches}): expected at least 1")
        block = self.settings.pipeline
        return _made(block.schedule, self._plan.num_ranks, num_micro_batches, block.chunks)

    def expect_hidden(self, hidden: Tensor | tuple[Tensor, ...]) -> None:
        """Take tensors of these shapes and dtypes for what the stage before sends, on the meta device."""
        if self._plan.messages is not None:
            tensors = (hidden,) if isinstance(hidden, Tensor) else hidden
            forms = tuple(TensorForm(tuple(one.shape), one.dtype, one.is_floating_point()) for one in tensors)
            self._plan.messages.expected = HiddenForm(forms, isinstance(hidden, tuple))

    @property
    def stage_id(self) -> int:
        """This rank's index along the pipeline."""
        return self._plan.rank

    def is_first_stage(self) -> bool:
        """Return whether this rank has the first layers."""
        return self._plan.rank == 0

    def is_last_stage(self) -> bool:
        """Return whether this rank has the last layers, and computes losses."""
        return self._plan.rank == self._plan.num_ranks - 1

    def bubble(self) -> float | None:
        """Return the share of the last `train_batch` in which this rank's device was idle; None before the first."""
        total = self._whole_time.seconds()
        return 1.0 - self._runner.stopwatch.seconds() / total if total else None

    def _run_batch(
        self, data_iter: Iterator[Any] | None, schedule: Schedule, *, trains: bool, computes_loss: bool = True
    ) -> tuple[BatchLoss, BatchRun]:
        """Run this rank's operations; return the loss of its micro-batches, to be summed over ranks, and the run."""
        with torch.inference_mode(False):
            self.fit_to_model()
        roles = self._context.roles
        batches = self._next_batches(data_iter, schedule.num_micro_batches)
        number = schedule.num_micro_batches
        roles.agreement.announce(f"BATCH {'trains' if trains else 'evaluates'} {number} {computes_loss}")
        if roles.pipe is not None and roles.pipe.agreement is not None:
            # Stages that read micro-batches of other shapes would wait for messages that are never sent.
            shapes = [signature_of(batch, trains=trains) for batch in batches]
            roles.pipe.agreement.announce(f"BATCH {zlib.crc32(repr(shapes).encode()):x}")
        if trains:
            self._runner.stopwatch.reset()
            self._whole_time.reset()
            self._whole_time.start()
        self._in_batch = True
        try:
            run = self._runner.run(schedule, self._plan.rank, batches, trains=trains, computes_loss=computes_loss)
        finally:
            self._in_batch, self._loop.counts.boundary = False, None
        total = self._context.device.scalar(0.0, torch.float64).view(1)
        for one in run.losses:
            total += one.double()
        copies = self.world_size // (self.data_size * self._plan.num_ranks)  # ranks with the same rows and stage
        number = schedule.num_micro_batches * self.data_size * copies
        loss = BatchLoss(total, number, self._whole_time if trains else None)
        if trains and self.monitor is not None:
            self.monitor.batch_ends(batches, loss.value)  # which it reads when the step has ended
        return loss, run

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """Take the micro-batches of steps from a loader, of which an iterator is made now."""
        self.set_dataiterator(iter(loader))

    def set_dataiterator(self, iterator: Iterator[Any] | None) -> None:
        """Take the micro-batches of steps from an iterator, where `train_batch` gets none."""
        self.data_iterator = iterator

    def set_batch_fn(self, fn: Callable[[Any], Any] | None) -> None:
        """Apply a function to each micro-batch that is read."""
        self.batch_fn = fn

    def _next_batches(self, data_iter: Iterator[Any] | None, number: int) -> list[Any]:
        data_iter = self.data_iterator if data_iter is None else data_iter
        if data_iter is None and self.training_dataloader is not None:
            data_iter = self._own_batches()
        if data_iter is None:
            raise ShardwellError(
                "train_batch needs an iterator over micro-batches on every rank, also on those of other stages: they "
                "compute masks and shapes from them. Pass one, or training_data to initialize."
            )
        if not isinstance(data_iter, Iterator):
            raise ShardwellError(
                f"train_batch takes the next micro-batches of an iterator, and got a {type(data_iter).__name__}: make "
                "one by iter(...), once for all steps that read on in it"
            )
        batches: list[Any] = []
        for _ in range(number):
            try:
                batch = next(data_iter)
            except StopIteration:
                raise ShardwellError(
                    f"the iterator ended after {len(batches)} of the {number} micro-batches of a step "
                    "(gradient_accumulation_steps): give it a multiple of that number"
                ) from None
            batches.append(batch if self.batch_fn is None else self.batch_fn(batch))
        return batches

    def _own_batches(self) -> Iterator[Any]:
        """Return an iterator over the epochs of the data that `initialize` was given."""
        if "_epochs" not in self.__dict__:
            loader = self.training_dataloader
            assert loader is not None
            self.__dict__["_epochs"] = (batch for _ in iter(int, 1) for batch in loader)
        found: Iterator[Any] = self.__dict__["_epochs"]
        return found

    # -------------------------------------------------------------------------------------- what the runner asks for

    def fit_to_model(self) -> None:
        """Refit if the model has changed; while a stage runs, other modules stand in the places of its neighbours."""
        if not self._in_batch:
            super().fit_to_model()

    def refit(self) -> None:
        """Rebuild the shards, see `Engine.refit`, and let stages describe again what they send."""
        super().refit()
        if self._plan.messages is not None:
            self._plan.messages.forget_forms()

    def stage_forward(self, stage: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model, which is this stage now."""
        self._use_order(stage)
        return super().forward(*args, **kwargs)

    def stage_backward(self, operation: Operation, outputs: list[Tensor], gradients: list[Tensor] | None) -> None:
        """Run a backward of a stage; the one after which no more gradients come is the stage's boundary."""
        self._use_order(operation.stage)
        self._set_boundary(operation)
        reducer, scale = self._scheduler.reducer, self._precision.loss_scale
        reducer.has_met_scale = True
        is_late = operation.kind is Pass.BACKWARD_INPUT
        later = reducer.without_reduction() if is_late else contextlib.nullcontext()
        late = self._plan.late.collecting(operation) if is_late and self._plan.late else contextlib.nullcontext()
        trained = [tensor for tensor in outputs if tensor.requires_grad]
        if gradients is None and not trained:
            raise BackwardError(
                "the loss of the last pipeline stage does not require a gradient. Are all its parameters frozen?"
            )
        try:
            with carrying(scale), later, late:
                reducer.views.detach()
                if gradients is None:
                    begin = trained[0] if self._precision.border is None else trained[0].float() * scale.value
                    begin.backward()
                elif trained:
                    torch.autograd.backward(trained, gradients)
        except BaseException:
            reducer.views.attach()
            raise

    def stage_weights(self, operation: Operation) -> None:
        """Compute the weight gradients that a backward has left, and reduce the stage's gradients."""
        self._set_boundary(operation)
        assert self._plan.late is not None
        self._plan.late.finish(operation, self._scheduler)

    def note(self, operation: Operation) -> None:
        """Add an operation to the trace, if one is recorded."""
        if (trace := self._scheduler.trace) is not None:
            trace.add(TraceAction.OPERATION, operation.stage, str(operation))

    def _set_boundary(self, operation: Operation) -> None:
        self._loop.counts.boundary = is_boundary = operation in self.schedule.last_gradients
        self._scheduler.reducer.set_boundary(is_boundary)

    def _use_order(self, stage: int) -> None:
        """Expect the units of this stage next: with several stages, each has an order of its own."""
        if len(self._plan.modules.stages) > 1:
            prefetch = self._scheduler.prefetch
            if stage not in self._orders:
                self._orders[stage] = ExecutionOrder(()), ExecutionOrder((), is_backward=True)
            prefetch.forward, prefetch.backward = self._orders[stage]

    # ------------------------------------------------------------------------------------- what a pipeline cannot do

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: a rank has only a part of the model."""
        _refuse("engine(...)")

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: `train_batch` runs backward."""
        _refuse("engine.backward")

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Refuse: `train_batch` steps."""
        _refuse("engine.step")

    def join(self, divide_by_initial_world_size: bool = True) -> NoReturn:
        """Refuse: the ranks of a pipeline take part in every micro-batch."""
        _refuse("engine.join")


def _refuse(what: str) -> NoReturn:
    raise ShardwellError(
        f"{what} does not exist in a pipeline, where each rank has a part of the model: call "
        "engine.train_batch(iterator), which runs all micro-batches of a step, or engine.eval_batch(iterator)."
    )


@cache
def _made(name: str, num_ranks: int, num_micro_batches: int, num_chunks: int) -> Schedule:
    return make_schedule(name, num_ranks, num_micro_batches, num_chunks)


def pipelined(engine_class: type[Engine]) -> type[PipelinedEngine]:
    """Return the class of an engine with a pipeline that is otherwise an `engine_class`."""
    if issubclass(engine_class, PipelinedEngine):
        return engine_class
    if engine_class is Engine:
        return PipelinedEngine
    bases = (*engine_class.pipeline_bases, PipelinedEngine, engine_class)
    return type(f"Pipelined{engine_class.__name__}", bases, {})
