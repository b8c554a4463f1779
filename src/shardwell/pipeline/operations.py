"""The operations of a pipeline: one pass of one stage over one micro-batch, as data that can be read and written.

`2F0` is the forward of micro-batch 0 on stage 2. `B` is a backward. Zero-bubble schedules split it into `I`, which
computes the gradient of the stage's input, and `W`, which computes the gradients of its weights.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from typing import NamedTuple

from shardwell.errors import ShardwellError


class Pass(enum.Enum):
    """The computation of an operation."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"

    __hash__ = object.__hash__  # each member is one object; Enum's own hash is slow

    @property
    def sends_gradient(self) -> bool:
        """Whether the gradient of the stage's input is known after it."""
        return self in (Pass.BACKWARD, Pass.BACKWARD_INPUT)


_FORM = re.compile(r"(\d+)([FBIW])(\d+)")
# What torch's lists contain besides: sends, receives and ZeRO's own collectives are derived or made by the engine.
_DERIVED = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)\d*")


class Operation(NamedTuple):
    """One pass of one stage over one micro-batch."""

    stage: int
    kind: Pass
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Operation:
        """Return the operation that a text such as `2F0` names."""
        found = _FORM.fullmatch(text.strip())
        if found is None:
            raise ShardwellError(
                f"'{text}' is no operation of a pipeline: expected a stage, one of F, B, I and W, and a micro-batch, "
                "as in 2F0."
            )
        return cls(int(found[1]), Pass(found[2]), int(found[3]))


def parse_operations(entries: Iterable[object]) -> list[Operation]:
    """Return the operations of one rank's list: texts, operations, or actions of torch's schedules.

    Idle slots (None, empty texts) and the communication in torch's lists are left out.
    """
    operations = []
    for entry in entries:
        if isinstance(entry, Operation):
            operations.append(entry)
            continue
        text = "" if entry is None else str(entry).strip()
        if text.startswith("("):  # torch's pair of a forward and a backward that overlap
            inside, _, _ = text[1:].partition(")")
            operations += parse_operations(inside.split(";"))
        elif text and _DERIVED.fullmatch(text) is None:
            operations.append(Operation.parse(text))
    return operations
