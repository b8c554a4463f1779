"""The speeds of a machine: figures of its devices, links, host and drives, by which a simulation prices work."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwell.errors import ShardwellError

DTYPES = ("bf16", "fp16", "fp32", "fp64")


@dataclass(frozen=True)
class MatmulRates:
    """FLOP/s of matrix products in one dtype, by their size in FLOPs; between sizes they are interpolated."""

    points: tuple[tuple[float, float], ...]  # (FLOPs of one product, FLOP/s), by size
    peak: float = 0.0  # FLOP/s that the vendor states, for MFU; 0: not known

    def __post_init__(self) -> None:
        if not self.points or any(size <= 0 or rate <= 0 for size, rate in self.points):
            raise ShardwellError(f"rates of matrix products: found {self.points}, expected sizes and rates above 0")

    def at(self, flops: float) -> float:
        """Return the FLOP/s of a product of so many FLOPs."""
        sizes = [size for size, _ in self.points]
        place = bisect_left(sizes, flops)
        if place == 0:
            return self.points[0][1]
        if place == len(sizes):
            return self.points[-1][1]
        (one, slow), (other, fast) = self.points[place - 1], self.points[place]
        share = math.log(flops / one) / math.log(other / one)
        return math.exp(math.log(slow) + share * math.log(fast / slow))


@dataclass(frozen=True)
class Speeds:
    """The speeds of one rank's device and links, and those of a node's host and drives for all its ranks together.

    Rates are bytes per second unless they say otherwise, times are seconds.
    """

    matmul: Mapping[str, MatmulRates]  # by dtype, one of DTYPES
    device_memory: float  # that kernels read and write
    # elements a second of kernels over tensors with gaps, or whose elements are in different orders, for each byte a
    # second of device_memory
    strided_share: float = 0.055
    copy_up: float = 25e9  # from host memory to the device
    copy_down: float = 25e9
    inside: float = 100e9  # that a rank receives from ranks of its node
    two_communicators: float = 1.0  # rate of collectives on two communicators at once inside a node, over that of one
    between: float = 25e9  # that a rank receives from other nodes
    host_update: float = 50e9  # of a node: what optimizer steps in host memory read and write
    out_of_place_share: float = 0.7  # of `host_update`, where the update writes to other memory than it reads
    eight_bit_share: float = 0.7  # of `host_update`, with moments in 8 bits (beside an H200: 0.61, 0.73)
    disk_read: float = 6e9  # of a node
    disk_write: float = 4e9  # of a node
    kernel_seconds: float = 3e-6  # that a kernel takes at least
    launch_seconds: float = 6e-6  # that the host takes to start an operation
    inside_seconds: float = 10e-6  # of a collective without bytes, inside a node
    between_seconds: float = 20e-6  # of a collective without bytes, for each doubling of the nodes
    attention_share: float = 0.5  # of the matmul rate that fused attention has
    origins: Mapping[str, str] = field(default_factory=dict)  # by figure: what it is and where it is from, in words

    def __post_init__(self) -> None:
        for name in (
            *("device_memory", "copy_up", "copy_down", "inside", "between", "host_update", "disk_read", "disk_write"),
            *("attention_share", "strided_share", "out_of_place_share", "eight_bit_share", "two_communicators"),
        ):
            if not getattr(self, name) > 0:
                raise ShardwellError(f"the speed {name} is {getattr(self, name)}: expected more than 0")
        for name in ("kernel_seconds", "launch_seconds", "inside_seconds", "between_seconds"):
            if not getattr(self, name) >= 0:
                raise ShardwellError(f"{name} is {getattr(self, name)}: expected 0 or more")
        if not self.matmul or not set(self.matmul) <= set(DTYPES):
            raise ShardwellError(f"rates of matrix products in {', '.join(self.matmul)}: expected {', '.join(DTYPES)}")

    def matmul_in(self, dtype: str) -> MatmulRates:
        """Return the rates in a dtype; where they are not known, those of the nearest one that is slower or equal."""
        near = {"fp16": ("bf16", "fp32"), "bf16": ("fp16", "fp32"), "fp32": ("fp64", "bf16")}.get(dtype, ("fp32",))
        for one in (dtype, *near, *self.matmul):
            if one in self.matmul:
                return self.matmul[one]
        raise ShardwellError("a machine without rates of matrix products")  # __post_init__ refuses it
