"""The messages between pipeline stages: hidden states, and their gradients on the way back.

Only tensors travel. The receiver knows their shapes: all ranks of a pipeline read the same micro-batches, so both sides
know whether micro-batches of these shapes have passed before. The first time, the sender describes what it sends; after
that only the tensors themselves are sent. Gradients have the shapes of the hidden states that were sent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from shardwell.errors import ShardwellError
from shardwell.parallel import TrafficKind, Work
from shardwell.parallel.point_to_point import Channel, PointToPoint
from shardwell.pipeline.operations import Pass
from shardwell.pipeline.passage import Hidden

_DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.bool,
    torch.uint8,
]
_HEADER = 64  # numbers of a description
Signature = tuple[Any, ...]  # the shapes and dtypes of a micro-batch, and whether it is trained on


@dataclass(frozen=True)
class TensorForm:
    """The shape and dtype of a tensor, and whether its gradient comes back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorForm:
        """Return the form of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def numbers(self) -> list[int]:
        """Return the form as integers."""
        return [_DTYPES.index(self.dtype), int(self.requires_grad), len(self.shape), *self.shape]


@dataclass(frozen=True)
class HiddenForm:
    """The forms of the tensors of a hidden state."""

    tensors: tuple[TensorForm, ...]
    is_tuple: bool
    wraps: int = 0  # layers return tuples of this length, of which the model takes the first element

    @classmethod
    def of(cls, hidden: Hidden, stage: int, *, wraps: int = 0) -> HiddenForm:
        """Return the form of what a stage returned; raise if it cannot be sent."""
        tensors = (hidden,) if isinstance(hidden, Tensor) else hidden
        if not isinstance(tensors, tuple) or not all(isinstance(tensor, Tensor) for tensor in tensors):
            inside = f" of {', '.join(type(one).__name__ for one in tensors)}" if isinstance(tensors, tuple) else ""
            raise ShardwellError(
                f"stage {stage} of the pipeline returned a {type(hidden).__name__}{inside}; a tensor, or a tuple of "
                "tensors, can be sent to the next stage"
            )
        forms = tuple(TensorForm.of(tensor) for tensor in tensors)
        strange = [str(form.dtype) for form in forms if form.dtype not in _DTYPES]
        if strange or 2 + sum(3 + len(form.shape) for form in forms) > _HEADER:
            raise ShardwellError(
                f"stage {stage} of the pipeline returned {len(forms)} tensors of {', '.join(strange) or 'many'} "
                "dimensions, which cannot be sent to the next stage: return fewer, of usual dtypes"
            )
        return cls(forms, isinstance(hidden, tuple), wraps)

    def numbers(self) -> list[int]:
        """Return the form as integers, of which every message has the same number."""
        kind = self.is_tuple + 2 * self.wraps
        found = [len(self.tensors), kind, *chain.from_iterable(form.numbers() for form in self.tensors)]
        return found + [0] * (_HEADER - len(found))

    @classmethod
    def read(cls, numbers: Sequence[int]) -> HiddenForm:
        """Return the form that integers describe."""
        count, kind, *rest = numbers
        forms = []
        for _ in range(count):
            dtype, requires_grad, ndim, *rest = rest
            forms.append(TensorForm(tuple(rest[:ndim]), _DTYPES[dtype], bool(requires_grad)))
            rest = rest[ndim:]
        return cls(tuple(forms), bool(kind & 1), kind >> 1)

    @property
    def trains(self) -> bool:
        """Whether gradients come back."""
        return any(one.requires_grad for one in self.tensors)

    def without_gradients(self) -> HiddenForm:
        """Return the form of the same tensors where no gradients come back."""
        return replace(self, tensors=tuple(replace(one, requires_grad=False) for one in self.tensors))

    def empty(self, device: torch.device) -> list[Tensor]:
        """Return memory for the tensors."""
        return [torch.empty(form.shape, dtype=form.dtype, device=device) for form in self.tensors]

    def differentiable(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return those of the tensors whose gradients come back."""
        return [tensor for tensor, form in zip(tensors, self.tensors, strict=True) if form.requires_grad]


@dataclass
class Arrival:
    """Tensors that are being received."""

    form: HiddenForm
    tensors: list[Tensor]
    works: list[Work]

    def wait(self) -> list[Tensor]:
        """Wait for the tensors, and return them."""
        for work in self.works:
            work.wait()
        return self.tensors


class StageMessages:
    """The messages that one rank of a pipeline sends and receives."""

    def __init__(self, links: PointToPoint, num_ranks: int, device: torch.device) -> None:
        self._links, self._num_ranks, self._device = links, num_ranks, device
        self._forms: dict[tuple[int, Signature], HiddenForm] = {}  # by the stage that receives
        self.expected: HiddenForm | None = None  # what is received on the meta device, where nothing arrives

    @property
    def wait_on_device(self) -> bool:
        """Whether messages that have not come yet keep the device from loading kernels."""
        return self._links.waits_on_device

    def through_host(self) -> contextlib.AbstractContextManager[None]:
        """Send and receive through host memory inside, on all ranks of the pipeline."""
        return self._links.through_host()

    def note(self, operation: str) -> None:
        """Remember which operation receives next, for errors."""
        self._links.operation = operation

    def _channel(self, source: int, target: int) -> Channel:
        """Return the channel between two neighbouring stages."""
        way = Pass.FORWARD if target > source else Pass.BACKWARD
        return source % self._num_ranks, target % self._num_ranks, way.value

    def send_hidden(self, hidden: Hidden, stage: int, signature: Signature, *, wraps: int = 0) -> HiddenForm:
        """Start to send what a stage returned to the next one, which is told whether layers return tuples."""
        form, known = HiddenForm.of(hidden, stage, wraps=wraps), self._forms.get((stage + 1, signature))
        channel = self._channel(stage, stage + 1)
        if known is None:
            self._forms[stage + 1, signature] = form
            header = torch.tensor(form.numbers(), dtype=torch.int64, device=self._device)
            self._links.send(header, channel)
        elif known != form:
            if known.without_gradients() == form.without_gradients():
                raise ShardwellError(
                    f"stage {stage} of the pipeline {'trains nothing any more' if known.trains else 'trains now'}, and "
                    "the next stage does not know: call engine.refit() on all ranks after freezing or unfreezing "
                    "everything up to the end of a stage"
                )
            raise ShardwellError(
                f"stage {stage} of the pipeline returned {_shown(form)} for a micro-batch of shapes for which it "
                f"returned {_shown(known)} before: what travels between stages may depend on shapes only"
            )
        for tensor in [hidden] if isinstance(hidden, Tensor) else hidden:
            self._links.send(tensor.detach().contiguous(), channel)
        return form

    def knows(self, stage: int, signature: Signature) -> bool:
        """Return whether the shapes that a stage receives are known, so that it may receive ahead of time."""
        return (stage, signature) in self._forms

    def receive_hidden(self, stage: int, signature: Signature) -> Arrival:
        """Start to receive what the stage before this one returned."""
        channel = self._channel(stage - 1, stage)
        form = self._forms.get((stage, signature))
        if form is None and self._device.type == "meta":
            form = self._forms[stage, signature] = self._assumed()
        if form is None:
            header = torch.empty(_HEADER, dtype=torch.int64, device=self._device)
            self._links.receive(header, channel, TrafficKind.CONTROL).wait()
            form = self._forms[stage, signature] = HiddenForm.read(header.tolist())
        tensors = form.empty(self._device)
        return Arrival(form, tensors, [self._links.receive(tensor, channel) for tensor in tensors])

    def _assumed(self) -> HiddenForm:
        """Return the form of what a stage receives on the meta device."""
        if self.expected is None:
            raise ShardwellError(
                "on the meta device nothing arrives from the stage before: say what it sends by "
                "engine.expect_hidden(tensor), with a tensor of that shape and dtype"
            )
        return self.expected

    def send_gradients(self, gradients: Iterable[Tensor], stage: int) -> None:
        """Start to send the gradients of what a stage received to the stage before it."""
        for gradient in gradients:
            self._links.send(gradient.contiguous(), self._channel(stage, stage - 1))

    def receive_gradients(self, form: HiddenForm, stage: int) -> Arrival:
        """Start to receive the gradients of what a stage sent."""
        channel = self._channel(stage + 1, stage)
        tensors = form.differentiable(form.empty(self._device))
        return Arrival(form, tensors, [self._links.receive(tensor, channel) for tensor in tensors])

    def forget_forms(self) -> None:
        """Let senders describe what they send again; all ranks must do so."""
        self._forms.clear()

    def finish(self) -> None:
        """Wait until everything is sent."""
        self._links.finish_sends()


def channels(num_ranks: int, num_chunks: int) -> list[Channel]:
    """Return all channels of a pipeline, in the same order on all ranks."""
    pairs = [(rank, rank + 1) for rank in range(num_ranks - 1)]
    pairs += [(num_ranks - 1, 0)] if num_chunks > 1 else []
    forward, backward = Pass.FORWARD.value, Pass.BACKWARD.value
    return [*((a, b, forward) for a, b in pairs), *((b, a, backward) for a, b in pairs)]


def _shown(form: HiddenForm) -> str:
    return ", ".join(f"{str(one.dtype).removeprefix('torch.')} {list(one.shape)}" for one in form.tensors)
