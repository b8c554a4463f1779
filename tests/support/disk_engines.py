"""The queues that run on this machine, as parameters of tests; one that never ends, and drives that go wrong."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import pytest
import torch

from shardwell.kernels.io import IoOutcome, IoPart
from shardwell.offload.disk import AioSettings, DiskTier, aligned
from shardwell.offload.disk_queue import ENGINES, unusable
from tests.support.internals import files_of

BLOCK = 16384
_REASONS = unusable()
EACH = pytest.mark.parametrize(
    "engine",
    [pytest.param(e, marks=pytest.mark.skipif(e in _REASONS, reason=_REASONS.get(e, ""))) for e in ENGINES],
)


def settings(engine: str = "python", **others: object) -> AioSettings:
    return AioSettings(engine=engine, block_size=BLOCK, queue_depth=3, **others)  # type: ignore[arg-type]


def noise(num_bytes: int, seed: int = 0) -> torch.Tensor:
    """Aligned, and never the same as another seed's."""
    return aligned(num_bytes).random_(generator=torch.Generator().manual_seed(seed))


class Stuck:
    """A queue whose requests are done when it is told so."""

    is_done = False
    is_closed = False

    def submit(self, is_write: bool, parts: Sequence[IoPart], *, urgent: bool = False) -> Stuck:
        return self

    def wait(self, milliseconds: int) -> IoOutcome:
        time.sleep(0 if self.is_done else milliseconds / 1000)
        return IoOutcome(self.is_done, 0)

    def close(self) -> None:
        self.is_closed = True


def replace_file(tier: DiskTier, target: str, flags: int = os.O_RDWR) -> None:
    """Something else behind the descriptor of the tier's file, as if the drive had turned into it."""
    other = os.open(target, flags)
    os.dup2(other, files_of(tier)[0].descriptor)
    os.close(other)
