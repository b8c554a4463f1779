"""What the kernels of a training step take on the device: a part of `shardwell calibrate`.

A GPU that is kept busy with products lowers its clock, and the kernels between the products then take longer, too. So
the kernels that fill a step are measured in rounds of all of them, in about the shares of the time that they have in a
step of a decoder, with events between them. What is left over are small kernels, which are measured alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwell.plan.calibration import MATMUL
from shardwell.plan.kernel_times import counted
from shardwell.virtual_time.speeds import MatmulRates

if TYPE_CHECKING:
    from shardwell.cli.calibrate_rank import Probe

Work = Callable[[], object]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_SIZES = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
_IN_TURNS = (4096, 8192)  # products that fill a GPU
_LONGEST = 0.3  # seconds of one matrix product, beyond which larger ones are not measured
_HEADS, _HEAD_DIM = 16, 128
_ON_GPU, _ON_CPU = 1 << 26, 1 << 24  # elements that a pass over memory reads of each tensor
_SHARES = {"product": 0.5, "attention": 0.1, "rotation": 0.2, "memory": 0.2}  # of the time of a step
_TURNS = 1.0  # seconds of rounds, of which the second half counts


def kernel_figures(probe: Probe, beside: str) -> Iterator[tuple[str, Any, str]]:
    """Yield the name, the value and the origin of each figure."""
    main = "bf16" if probe.on_gpu else "fp32"
    found = {name: _Kernels(probe, name) for name in (("bf16", "fp16", "fp32") if probe.on_gpu else ("bf16", "fp32"))}
    in_turns = ", the large ones in turns with the other kernels of a step" if probe.on_gpu else ""
    for name, kernels in found.items():
        words = f"products of square matrices and of a layer with {name}{in_turns}{beside}"
        yield f"{MATMUL}{name}", kernels.points, words
    kernels = found[main]
    words = f"causal attention of {_HEADS} heads of {_HEAD_DIM}, both passes{beside}"
    yield "attention_share", kernels.attention_share(), words
    memory = kernels.memory_rate()
    yield "device_memory", memory, f"sums of two large tensors{beside}"
    words = f"rotations of heads, both passes, elements a byte{beside}"
    yield "strided_share", kernels.strided_rate(memory) / memory, words


class _Kernels:
    """The kernels of a step in one dtype, and the seconds of each."""

    def __init__(self, probe: Probe, name: str) -> None:
        self._dtype, self._on_gpu = _DTYPES[name], probe.on_gpu
        self.points: list[tuple[float, float]] = []  # FLOPs and FLOP/s of products, from small ones up
        works: dict[str, Work] = {}
        for size in _SIZES:
            rows, inner, columns = (size, size, size) if size < 512 else (size, size, 2 * size)
            count = max(1, int(2e7 // (rows * inner * columns)))
            multiply = _products(
                probe.numbers(rows, inner, dtype=self._dtype), probe.numbers(columns, inner, dtype=self._dtype), count
            )
            if self._on_gpu and size in _IN_TURNS:
                works[f"product {size}"] = multiply
                continue
            seconds = probe.lasting_seconds(multiply) / count
            self.points.append((2.0 * rows * inner * columns, 2.0 * rows * inner * columns / seconds))
            if seconds > _LONGEST:
                break
        elements = _ON_GPU if self._on_gpu else _ON_CPU
        one, other = (probe.numbers(elements, dtype=self._dtype) for _ in range(2))
        sums = torch.empty_like(one)
        works["memory"] = lambda: torch.add(one, other, out=sums)
        self._memory_bytes = 3 * one.nbytes
        if name == "bf16" or not self._on_gpu:  # of one dtype is enough
            works |= {"attention": self._attention(probe), "rotation": self._rotation(probe)}
        self._seconds = seconds_in_turns(probe, works)
        for size in _IN_TURNS if self._on_gpu else ():
            flops = 4.0 * size**3
            self.points.append((flops, flops / self._seconds[f"product {size}"]))

    def attention_share(self) -> float:
        """Return which share of the rate of products causal attention has, forward and backward together."""
        return 3.5 * self._flops / self._seconds["attention"] / MatmulRates(tuple(self.points)).at(self._flops)

    def memory_rate(self) -> float:
        """Return the bytes a second that kernels read and write."""
        return self._memory_bytes / self._seconds["memory"]

    def strided_rate(self, memory: float) -> float:
        """Return the elements a second of kernels over tensors with gaps, which plans count apart.

        The time of the kernels of a rotation whose tensors have no gaps is taken off, by their bytes.
        """
        seconds, count = self._seconds["rotation"], self._count
        return count.num_strided / max(seconds - count.num_bytes / memory, 0.1 * seconds)

    def _attention(self, probe: Probe) -> Work:
        length, rows = (2048, 4) if self._on_gpu else (128, 1)
        self._flops = 0.5 * 4 * rows * _HEADS * length * length * _HEAD_DIM  # of a forward
        shape = (rows, _HEADS, length, _HEAD_DIM)
        query, key, value = (probe.numbers(*shape, dtype=self._dtype).requires_grad_() for _ in range(3))

        def attend() -> object:
            attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            return torch.autograd.grad(attended, (query, key, value), attended.detach())

        return attend

    def _rotation(self, probe: Probe) -> Work:
        length, rows = (2048, 8) if self._on_gpu else (128, 1)
        values = [probe.numbers(rows, length, _HEADS, _HEAD_DIM, dtype=self._dtype) for _ in range(2)]
        angles = [probe.numbers(length, _HEAD_DIM // 2, dtype=self._dtype) for _ in range(2)]
        self._count = counted(rotation(*(one.to("meta") for one in (*values, *angles))))
        return rotation(*values, *angles)


def seconds_in_turns(probe: Probe, works: Mapping[str, Work]) -> dict[str, float]:
    """Return the seconds of each work while all take turns: on a GPU in rounds without a pause, else one by one."""
    alone = {name: probe.lasting_seconds(work) for name, work in works.items()}
    if not probe.on_gpu:
        return alone
    products = [name for name in works if name.startswith("product")]
    shares = {name: _SHARES["product"] / len(products) if name in products else _SHARES[name] for name in works}
    round_seconds = max(alone[name] / shares[name] for name in works)
    calls = {name: max(1, round(shares[name] * round_seconds / alone[name])) for name in works}
    rounds = max(4, round(_TURNS / round_seconds))
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(len(works) + 1)] for _ in range(rounds)]
    probe.meet()
    for row in events:
        row[0].record()
        for event, (name, work) in zip(row[1:], works.items(), strict=True):
            for _ in range(calls[name]):
                work()
            event.record()
    events[-1][-1].synchronize()
    found: dict[str, float] = {}
    for place, name in enumerate(works):
        times = [row[place].elapsed_time(row[place + 1]) / 1000 for row in events[rounds // 2 :]]
        found[name] = probe.slowest(statistics.median(times) / calls[name])
    return found


def rotation(values: Tensor, gradient: Tensor, cos: Tensor, sin: Tensor) -> Work:
    """Return the rotation of heads of shape (batch, tokens, heads, width), which attention wants before the tokens."""
    leaf, towards = values.requires_grad_(), gradient.transpose(1, 2).contiguous()

    def rotate() -> object:
        first, second = leaf.transpose(1, 2).chunk(2, dim=-1)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return torch.autograd.grad(rotated, leaf, towards)

    return rotate


def _products(one: Tensor, other: Tensor, count: int) -> Work:
    def multiply() -> None:
        for _ in range(count):
            F.linear(one, other)

    return multiply
