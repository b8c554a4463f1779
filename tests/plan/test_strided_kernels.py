"""Kernels over tensors that are not in one order are priced by their elements, and views not at all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwell.plan import MatmulRates, Speeds
from shardwell.plan.kernel_times import _is_free
from shardwell.plan.strided_kernels import strided_elements
from shardwell.virtual_time.virtual_clock import VirtualClock

HEADS = (2, 8, 4, 6)  # rows, positions, heads, width


class Noted(TorchDispatchMode):
    """Keeps what the pricing says of each operation that starts a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, bool]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if not _is_free(func):
            flat = [one for value in args for one in (value if isinstance(value, list | tuple) else [value])]
            self.found.append(strided_elements(func, [one for one in flat if isinstance(one, Tensor)], [result]))
        return result


def priced(work) -> list[tuple[int, bool]]:  # type: ignore[no-untyped-def]
    tensors = torch.empty(HEADS, device="meta"), torch.empty(HEADS, device="meta").transpose(1, 2)
    with Noted() as noted:
        work(*tensors)
    return noted.found


@pytest.mark.parametrize(
    ("work", "found"),
    [
        (lambda plain, turned: plain * plain, (0, False)),
        (lambda plain, turned: plain * 2.0, (0, False)),
        (lambda plain, turned: turned[..., :3] * turned[..., 3:], (192, False)),
        (lambda plain, turned: plain * torch.empty(6, device="meta"), (384, False)),  # broadcast
        (lambda plain, turned: plain * torch.empty((), device="meta"), (0, False)),  # one factor for all
        (lambda plain, turned: turned.contiguous(), (384, True)),
        (lambda plain, turned: torch.cat((turned, turned), -1), (768, True)),
        (lambda plain, turned: torch.cat((plain, plain), -1), (0, False)),
        (lambda plain, turned: plain.clone(), (0, False)),
        (lambda plain, turned: plain.softmax(-1), (0, False)),
    ],
)
def test_only_tensors_that_are_not_in_one_order_are_strided(work, found) -> None:  # type: ignore[no-untyped-def]
    assert priced(work)[-1] == found


def test_a_product_of_more_dimensions_is_one_kernel() -> None:
    weight = torch.empty(6, 6, device="meta")
    assert len(priced(lambda plain, turned: plain @ weight)) == 1  # `_unsafe_view` beside it is none


def test_a_range_of_the_profiler_is_no_kernel() -> None:
    with Noted() as noted, torch.profiler.record_function("range"):
        torch.empty(3, device="meta")
    assert not noted.found


def seconds(speeds: Speeds, strided: tuple[int, bool], *, has_gpus: bool = True) -> float:
    clock = VirtualClock(speeds, has_gpus=has_gpus)
    clock.kernel(1000, strided=strided)
    return clock.stream.at if has_gpus else clock.thread.at


def test_elements_take_longer_than_their_bytes_on_a_gpu_alone() -> None:
    rates = {"bf16": MatmulRates(((1.0, 1e12),))}
    speeds = Speeds(rates, 1e3, strided_elements=10.0, joined_elements=5.0, kernel_seconds=0.0, launch_seconds=0.0)
    assert seconds(speeds, (0, False)) == 1.0
    assert seconds(speeds, (5, False)) == 1.0  # the bytes take longer
    assert seconds(speeds, (100, False)) == 10.0
    assert seconds(speeds, (100, True)) == 20.0
    assert seconds(speeds, (100, True), has_gpus=False) == 1.0
