"""Values of steps that wait, on the device, until a line is due; then all are read at once and written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwell.monitor.display import Display
from shardwell.monitor.writers import MetricEvent, MetricWriter

PREFIX = "Train/Samples/"  # as DeepSpeed names its metrics: their x-axis is the number of samples


@dataclass(slots=True)
class StepRecord:
    """One optimizer step: numbers that the host knows, and tensors that it has not read yet."""

    step: int
    samples: int
    losses: Sequence[Tensor]  # of the micro-steps on this rank
    sums_losses: bool  # the loop divides by the accumulation steps itself
    norm: Tensor | None
    rate: float | None
    loss_scale: float | None


@dataclass(frozen=True)
class StepValues:
    """The numbers of a step; the loss is NaN if nobody showed it."""

    record: StepRecord
    loss: float | None
    norm: float | None

    def events(self) -> Iterator[MetricEvent]:
        """Yield the metrics of the step."""
        found = {
            "train_loss": self.loss,
            "lr": self.record.rate,
            "grad_norm": self.norm,
            "loss_scale": self.record.loss_scale,
        }
        yield from ((PREFIX + name, value, self.record.samples) for name, value in found.items() if value is not None)


@dataclass
class Output:
    """The places that a monitor writes to, and the steps that are not written yet. It does not know the engine."""

    display: Display
    writers: list[MetricWriter]
    waiting: list[StepRecord] = field(default_factory=list)

    def read(self) -> list[StepValues]:
        """Read all waiting steps in one copy, and write their metrics. This waits for the device."""
        records, self.waiting = self.waiting, []
        tensors = [tensor for one in records for tensor in (*one.losses, *([] if one.norm is None else [one.norm]))]
        numbers = iter(_numbers(tensors))
        values = []
        for one in records:
            losses = [next(numbers) for _ in one.losses]
            loss = None if not losses else sum(losses) / (1 if one.sums_losses else len(losses))
            values.append(StepValues(one, loss, None if one.norm is None else next(numbers)))
        if self.writers:
            self.write([event for one in values for event in one.events()])
        return values

    def write(self, events: Iterable[MetricEvent]) -> None:
        """Hand events to all writers."""
        every = list(events)
        for writer in self.writers:
            writer.write(every)

    def close(self) -> None:
        """Write what waits, and close all places."""
        if self.writers and self.waiting:
            self.read()
        self.waiting.clear()
        for writer in self.writers:
            writer.close()
        self.writers.clear()
        self.display.close()


def _numbers(tensors: list[Tensor]) -> list[float]:
    """Return the values of scalars of any dtype: those of one GPU in one copy, others one by one."""
    if len(tensors) > 1 and tensors[0].device.type != "cpu" and len({tensor.device for tensor in tensors}) == 1:
        return [float(value) for value in torch.stack([tensor.float() for tensor in tensors]).tolist()]
    return [float(tensor) for tensor in tensors]
