"""The runner of a pipeline: it executes this rank's list of operations.

It knows stages, messages and micro-batches. The engine runs the passes (`StageWorker`), with everything that ZeRO does
around them. A message is received one operation ahead of its use, where its shapes are known.

With NCCL, a message that has not come yet is a kernel that runs. CUDA loads a kernel when it is first launched, and may
wait for the device to be idle before it does: the first stage would wait for gradients of micro-batch 0 before it loads
what micro-batch 1 needs, and the last stage for micro-batch 1 before it loads what the backward of micro-batch 0 needs.
So the messages of the first batch of its shapes go through the host. What else occupies a device then are collectives
of ranks that run the same list of operations. These cannot wait in a circle: a rank waits for others that are behind it
in the same list, or for a message of an operation that comes earlier in any order in which the schedule can run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwell.errors import ShardwellError
from shardwell.memory.timing import Stopwatch
from shardwell.pipeline.batches import BatchReader, signature_of
from shardwell.pipeline.messages import Arrival, HiddenForm, Signature, StageMessages
from shardwell.pipeline.operations import Operation, Pass
from shardwell.pipeline.passage import BESIDE, Hidden
from shardwell.pipeline.schedules import Schedule
from shardwell.pipeline.stage_modules import StageModules
from shardwell.pipeline.stand_ins import StandIns


class StageWorker(Protocol):
    """The engine, which runs the passes of the stages."""

    def stage_forward(self, stage: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model, which is this stage now."""

    def stage_backward(self, operation: Operation, outputs: list[Tensor], gradients: list[Tensor] | None) -> None:
        """Run the backward of outputs with these gradients; without gradients the output is the loss."""

    def stage_weights(self, operation: Operation) -> None:
        """Compute the weight gradients that the backward of an input has left."""

    def note(self, operation: Operation) -> None:
        """Add an operation to the trace, if one is recorded."""


class _Beginning(torch.autograd.Function):
    """Hands on what a stage received: its first layer may change it in place, which torch allows with no leaf."""

    @staticmethod
    def forward(ctx: Any, received: Tensor) -> Tensor:
        """Return the same memory. Nothing else reads it, so changes of it need not be counted."""
        return received.data

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Return the gradient as it is."""
        return gradients[0]


def _begun(received: Tensor) -> Tensor:
    found: Tensor = _Beginning.apply(received)  # type: ignore[no-untyped-call]
    return found


@dataclass
class PassState:
    """A forward of a stage, until its backward."""

    received: list[Tensor]  # of the stage before
    outputs: list[Tensor]  # what was sent and has gradients, or the loss
    form: HiddenForm | None  # of what was sent


@dataclass
class BatchRun:
    """The micro-batches of one step, and what is known of them so far."""

    schedule: Schedule
    batches: Sequence[Any]
    signatures: Sequence[Signature]
    states: dict[tuple[int, int], PassState] = field(default_factory=dict)
    arrivals: dict[Operation, Arrival] = field(default_factory=dict)
    local: dict[tuple[int, int, bool], list[Tensor]] = field(default_factory=dict)  # between stages of this rank
    losses: list[Tensor] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)  # of the last stage, in evaluation
    computes_loss: bool = True


class PipelineRunner:
    """Runs the stages of this rank over micro-batches."""

    def __init__(
        self,
        modules: StageModules,
        reader: BatchReader,
        messages: StageMessages | None,
        worker: StageWorker,
        stopwatch: Stopwatch,
        move: Callable[[Any], Any],
    ) -> None:
        """Run the stages of `modules`; without `messages` they are all on this rank."""
        self.modules, self._reader, self._messages = modules, reader, messages
        self._worker, self.stopwatch, self._move = worker, stopwatch, move
        self._last = modules.num_stages - 1
        self._loaded: set[tuple[bool, Signature]] = set()  # what backwards are, and shapes, whose kernels have run

    def run(
        self, schedule: Schedule, rank: int, batches: Sequence[Any], *, trains: bool = True, computes_loss: bool = True
    ) -> BatchRun:
        """Run the operations of a rank; without `trains` only the forwards, and then perhaps without losses."""
        signatures = [signature_of(batch, trains=trains) for batch in batches]
        kernels = {(schedule.splits_backward, signature) for signature in signatures}
        run = BatchRun(schedule, batches, signatures, computes_loss=computes_loss)
        operations = [one for one in schedule.ranks[rank] if trains or one.kind is Pass.FORWARD]
        with self._messages_of(kernels):
            for number, one in enumerate(operations):
                if one not in run.arrivals:
                    self._receive(run, one)
                if number + 1 < len(operations):
                    self._receive_ahead(run, operations[number + 1])
                self._worker.note(one)
                self._execute(run, one, trains=trains)
            if self._messages is not None:
                self._messages.finish()
        self._loaded |= kernels
        return run

    def _messages_of(self, kernels: set[tuple[bool, Signature]]) -> contextlib.AbstractContextManager[None]:
        """Return a context in which messages may wait while operations launch kernels, perhaps for the first time.

        As far as shapes decide it, which all ranks of a pipeline know alike.
        """
        messages = self._messages
        if messages is None or not messages.wait_on_device or kernels <= self._loaded:
            return contextlib.nullcontext()
        return messages.through_host()

    def _execute(self, run: BatchRun, one: Operation, *, trains: bool) -> None:
        if one.kind is Pass.FORWARD:
            self._forward(run, one, trains=trains)
        elif one.kind is Pass.BACKWARD_WEIGHT:
            with self.stopwatch:
                self._worker.stage_weights(one)
        else:
            self._backward(run, one)

    # --------------------------------------------------------------------------------------------------- messages

    def _receive(self, run: BatchRun, one: Operation) -> None:
        """Start to receive what an operation reads, if it is sent by another rank."""
        if self._messages is None or one.kind is Pass.BACKWARD_WEIGHT:
            return
        self._messages.note(str(one))
        if one.kind is Pass.FORWARD and one.stage > 0:
            run.arrivals[one] = self._messages.receive_hidden(one.stage, run.signatures[one.micro_batch])
        elif one.kind.sends_gradient and one.stage < self._last:
            form = run.states[one.stage, one.micro_batch].form
            assert form is not None
            run.arrivals[one] = self._messages.receive_gradients(form, one.stage)

    def _receive_ahead(self, run: BatchRun, one: Operation) -> None:
        """Start to receive what the next operation reads, if its shapes are known."""
        if self._messages is None:
            return
        if one.kind is Pass.FORWARD:
            is_known = self._messages.knows(one.stage, run.signatures[one.micro_batch])
        else:
            is_known = (one.stage, one.micro_batch) in run.states
        if is_known:
            self._receive(run, one)

    # ----------------------------------------------------------------------------------------------------- passes

    def _forward(self, run: BatchRun, one: Operation, *, trains: bool) -> None:
        stage, batch = one.stage, run.batches[one.micro_batch]
        received, hidden = self._received(run, one, trains=trains)
        is_last = stage == self._last
        with self.stopwatch if trains else contextlib.nullcontext():
            args, kwargs = self._reader.arguments(batch, hidden, is_last=is_last)
            with self.modules.running(stage, hidden) as stand_ins:
                output = self._worker.stage_forward(stage, args, kwargs)
            loss = self._loss(run, output, batch, stand_ins) if is_last else None
        form: HiddenForm | None = None
        outputs: list[Tensor] = []
        if loss is not None:
            run.losses.append(loss.detach())
            outputs = [loss]
        elif not is_last:
            outputs, form = self._send(run, one, output)
        if is_last and not trains:
            run.outputs.append(output)
        if trains:
            run.states[stage, one.micro_batch] = PassState(received, outputs, form)

    def _loss(self, run: BatchRun, output: Any, batch: Any, stand_ins: StandIns | None) -> Tensor | None:
        """Return the loss of a micro-batch, if one is asked for; raise if it is made of values of other stages."""
        with contextlib.nullcontext() if stand_ins is None else stand_ins.following():
            found = self._reader.loss(output, batch, self._move) if run.computes_loss else None
        if stand_ins is not None and stand_ins.are_in(output if found is None else found):
            raise ShardwellError(BESIDE)
        if stand_ins is not None and found is not None and torch.is_grad_enabled():
            self.modules.check_loss(found, stand_ins)
        return found

    def _received(self, run: BatchRun, one: Operation, *, trains: bool) -> tuple[list[Tensor], Hidden]:
        """Return the tensors that a stage got, which are leaves of its graph, and the hidden state they form."""
        if one.stage == 0:
            return [], None
        key = one.stage, one.micro_batch, True
        if self._messages is None:
            tensors = run.local.pop(key)
            form = HiddenForm.of(tuple(tensors), one.stage)
            is_tuple = len(tensors) > 1
        else:
            arrival = run.arrivals.pop(one)
            tensors, form = arrival.wait(), arrival.form
            self.modules.passage.wraps = form.wraps
            is_tuple = form.is_tuple
        if not trains:
            return tensors, tuple(tensors) if is_tuple else tensors[0]
        for tensor in form.differentiable(tensors):
            tensor.requires_grad_(True)
        begun = tuple(_begun(tensor) if tensor.requires_grad else tensor for tensor in tensors)
        return tensors, begun if is_tuple else begun[0]

    def _send(self, run: BatchRun, one: Operation, output: Hidden) -> tuple[list[Tensor], HiddenForm]:
        """Send the hidden state to the next stage; return its tensors that have gradients, and its form."""
        tensors = [output] if isinstance(output, Tensor) else list(output)
        if self._messages is None:
            form = HiddenForm.of(output, one.stage)
            ahead = [tensor.detach().clone() for tensor in tensors]  # which the next stage may change in place
            for tensor, single in zip(ahead, form.tensors, strict=True):
                tensor.requires_grad_(single.requires_grad)
            run.local[one.stage + 1, one.micro_batch, True] = ahead
        else:
            wraps = self.modules.passage.wraps
            form = self._messages.send_hidden(output, one.stage, run.signatures[one.micro_batch], wraps=wraps)
        return form.differentiable(tensors), form

    def _backward(self, run: BatchRun, one: Operation) -> None:
        state = run.states.pop((one.stage, one.micro_batch))
        gradients: list[Tensor] | None = None
        if one.stage < self._last:
            if self._messages is None:
                gradients = run.local.pop((one.stage, one.micro_batch, False))
            else:
                gradients = run.arrivals.pop(one).wait()
        with self.stopwatch:
            self._worker.stage_backward(one, state.outputs, gradients)
        if one.stage == 0:
            return
        back = [
            torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for tensor in state.received
            if tensor.requires_grad
        ]
        if self._messages is None:
            run.local[one.stage - 1, one.micro_batch, False] = back
        else:
            self._messages.send_gradients(back, one.stage)
