"""Quantisation in host memory, by the compiled library of `shardwell.kernels`, which must be there."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwell import kernels
from shardwell.kernels.library import Library, QuantizedRows
from shardwell.kernels.quantized_format import Kind, rows_of

KINDS: tuple[Kind, ...] = ("int8", "int4", "fp8")  # with a kernel; the index is the number in native/shardwell_native.h


def encode(kind: Kind, source: Tensor, out: Tensor) -> None:
    run("encode", kind, source, out)


def decode(kind: Kind, data: Tensor, out: Tensor) -> None:
    run("decode", kind, out, data)


def decode_sum(kind: Kind, data: Tensor, out: Tensor, factor: float, add: bool) -> None:
    run("decode_sum", kind, out, data[0], messages=(data.shape[0], data.stride(0)), factor=factor, add=add)


def run(
    name: str,
    kind: Kind,
    values: Tensor,
    data: Tensor,
    *,
    messages: tuple[int, int] = (1, 0),
    factor: float = 1.0,
    add: bool = False,
    library: Library | None = None,
    threads: int | None = None,
) -> None:
    """Call a function of the library for all rows; `messages` is their number, and the bytes from each to the next."""
    library = library or kernels.compiled()
    assert library is not None
    for rows in rows_of(values, data):
        call = QuantizedRows(kind=KINDS.index(kind), factor=factor, add=add)
        call.take(rows.values, rows.data)
        call.num_messages, call.message_stride = messages
        library.code(name, call, threads or torch.get_num_threads())
