"""What single operations take in virtual time: nothing, their bytes, or their elements one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shardwell.memory import Device
from shardwell.memory.machine import SimulatedMachine, simulated
from shardwell.plan.devices import gpu, speeds_of
from shardwell.plan.kernel_times import TimedKernels, counted
from shardwell.virtual_time.virtual_clock import VirtualClock

SPEEDS = replace(speeds_of(gpu("h200")), device_memory=1.0, strided_share=0.1, kernel_seconds=0.0, launch_seconds=0.0)


def seconds(work: Callable[[Tensor], object]) -> float:
    """Return the time of work on a bf16 tensor of 2 x 4 x 6, in which a byte takes a second and an element ten."""
    with simulated(SimulatedMachine(80e9)):
        clock = VirtualClock(SPEEDS)
        x = torch.empty(2, 4, 6, dtype=torch.bfloat16, device="meta")
        with TimedKernels(clock, Device("meta")):
            work(x)
    return clock.compute.at


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x.transpose(1, 2),
        lambda x: x.flatten(),
        lambda x: torch.empty_like(x),
        lambda x: torch.ops.aten._unsafe_view(x, [8, 6]),  # what a product of matrices ends with
    ],
)
def test_views_and_empty_memory_take_nothing(work: Callable[[Tensor], object]) -> None:
    assert seconds(work) == 0


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (lambda x: x + x, 2 * 96),  # of one tensor, read once and written
        (lambda x: x.transpose(1, 2) * x.transpose(1, 2), 3 * 96),  # in another order, but all in the same
        (lambda x: x.transpose(1, 2).contiguous(), 480),
        (lambda x: x * x[0, 0], 480),  # repeated along other dimensions
        (lambda x: x * x[0, 0, 0], 2 * 96 + 2),  # one number
        (lambda x: x[..., :3] * 2, 240),  # with gaps
        (lambda x: torch.cat((x, x)), 96 + 192),
        (lambda x: torch.cat((x[..., :3], x[..., 3:]), -1), 480),
        (lambda x: torch.empty_like(x).copy_(x), 2 * 96),
        (lambda x: torch.empty(2, 6, 4, dtype=x.dtype, device="meta").copy_(x.transpose(1, 2)), 480),
    ],
)
def test_kernels_take_their_bytes_or_where_memory_has_another_order_their_elements(
    work: Callable[[Tensor], object], expected: float
) -> None:
    assert seconds(work) == pytest.approx(expected)


def test_kernels_of_some_work_are_counted_as_plans_count_them() -> None:
    """A product with a turned tensor writes its elements one by one; a sum of two of one order moves bytes."""
    turned, straight = torch.empty(8, 6, device="meta").t(), torch.empty(6, 8, device="meta")
    count = counted(lambda: (turned * straight, straight + 1, turned + turned))
    assert (count.num_strided, count.num_bytes) == (48, 4 * 48 * 4)
