"""The compiled library: its location, the check of its version, and its functions through ctypes.

The structures mirror native/shardwell_native.h. Calls release the GIL.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from shardwell.errors import ShardwellError
from shardwell.kernels.file_read import FileRead
from shardwell.kernels.rules import AdagradRule, AdamRule, LionRule, Rule, SgdRule
from shardwell.kernels.update_args import Moments8bitArgs, OutOfPlaceState, SplitMaster, UpdateArgs

ABI_VERSION = 8
NAME = "libshardwell_native.so"
ISAS = ("scalar", "avx2", "avx512")  # the index is the number in the library, the best last

_NUMBERS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
_FUNCTIONS: dict[type, str] = {
    AdamRule: "shardwell_adam",
    SgdRule: "shardwell_sgd",
    AdagradRule: "shardwell_adagrad",
    LionRule: "shardwell_lion",
}
_CODERS = {name: f"shardwell_{name}" for name in ("encode", "decode", "decode_sum")}
_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class _Slot(ctypes.Structure):
    _fields_: ClassVar = [
        ("master", _POINTER),
        ("high", _POINTER),
        ("low", _POINTER),
        ("state", _POINTER * 2),
        ("codes", _POINTER * 2),
        ("exponents", _POINTER * 2),
    ]


class _UpdateArgs(ctypes.Structure):
    _fields_: ClassVar = [
        ("numel", _SIZE),
        ("gradient", _POINTER),
        ("old", _Slot),
        ("now", _Slot),
        ("out", _POINTER),
        ("gradient_type", _INT),
        ("out_type", _INT),
        ("factor", ctypes.c_float),
        ("seed", ctypes.c_uint32),
    ]


class QuantizedRows(ctypes.Structure):
    """Rows of values and their codes, along two dimensions."""

    _fields_: ClassVar = [
        ("outer", _SIZE),
        ("inner", _SIZE),
        ("numel", _SIZE),
        ("values", _POINTER),
        ("value_strides", _SIZE * 2),
        ("data", _POINTER),
        ("data_strides", _SIZE * 2),
        ("num_messages", _SIZE),
        ("message_stride", _SIZE),
        ("number", _INT),
        ("kind", _INT),
        ("factor", ctypes.c_float),
        ("add", _INT),
    ]
    num_messages: int
    message_stride: int

    def take(self, values: Tensor, data: Tensor) -> None:
        """Set the tensors, which have three dimensions, the last of them contiguous."""
        self.outer, self.inner, self.numel = values.shape
        self.values, self.number = values.data_ptr(), _NUMBERS[values.dtype]
        self.data = data.data_ptr()
        self.value_strides[:] = values.stride()[:2]
        self.data_strides[:] = data.stride()[:2]


class UnusableLibraryError(ShardwellError):
    """Raised if there is no library, or its version does not fit."""


class Library:
    """The compiled backend."""

    def __init__(self, path: str | os.PathLike[str], isa: str | None = None) -> None:
        """`isa` is the best instruction set to use; sets that the machine lacks are not used."""
        try:
            self._library = ctypes.CDLL(os.fspath(path))
        except OSError as error:
            raise UnusableLibraryError(f"{NAME} cannot be loaded ({error})") from None
        version = self._library.shardwell_abi_version()
        if version != ABI_VERSION:
            raise UnusableLibraryError(
                f"{NAME} has interface {version}, expected {ABI_VERSION}: install shardwell again"
            )
        self._declare()
        best = self._library.shardwell_isa()
        self._isa = best if isa is None else min(best, ISAS.index(isa))

    def _declare(self) -> None:
        library = self._library
        for name in _FUNCTIONS.values():
            function = getattr(library, name)
            function.argtypes, function.restype = [_POINTER, _POINTER, _INT, _INT], None
        for name in _CODERS.values():
            function = getattr(library, name)
            function.argtypes, function.restype = [_POINTER, _INT, _INT], None
        library.shardwell_add.argtypes = [_POINTER, _POINTER, _INT, ctypes.c_float, _INT, _SIZE, _INT, _INT]
        library.shardwell_add.restype = None
        library.shardwell_sum_of_squares.argtypes = [_POINTER, _INT, _SIZE, _INT, _INT]
        library.shardwell_sum_of_squares.restype = ctypes.c_double
        library.shardwell_to_bf16.argtypes = [_POINTER, _POINTER, _SIZE, _INT, _INT]
        library.shardwell_to_bf16.restype = None
        library.shardwell_crc32.argtypes = [ctypes.c_uint32, _POINTER, _SIZE, _INT]
        library.shardwell_crc32.restype = ctypes.c_uint32
        library.shardwell_crc32_blocks.argtypes = [ctypes.c_uint32, _POINTER, _SIZE, _SIZE, _POINTER, _INT]
        library.shardwell_crc32_blocks.restype = ctypes.c_uint32
        library.shardwell_read_blocks.argtypes = [
            *(_INT, _SIZE, _SIZE, _POINTER, _SIZE, _SIZE, _SIZE),
            *(ctypes.c_uint32, _POINTER, _INT),
        ]
        library.shardwell_read_blocks.restype = ctypes.c_int64
        library.shardwell_crc32_combine.argtypes = [ctypes.c_uint32, ctypes.c_uint32, _SIZE]
        library.shardwell_crc32_combine.restype = ctypes.c_uint32
        library.shardwell_stream.argtypes = [_POINTER, _POINTER, _POINTER, _SIZE, _INT, _INT]
        library.shardwell_stream.restype = None

    @property
    def isa(self) -> str:
        return ISAS[self._isa]

    def update(self, rule: Rule, args: UpdateArgs, threads: int) -> None:
        function = getattr(self._library, _FUNCTIONS[type(rule)])
        call, numbers = _lowered(args), rule.numbers()
        function(ctypes.byref(call), ctypes.byref(numbers), self._isa, threads)

    def add(self, total: Tensor, gradient: Tensor, factor: float, fresh: bool, threads: int) -> None:
        number, numel = _NUMBERS[gradient.dtype], total.numel()
        self._library.shardwell_add(
            total.data_ptr(), gradient.data_ptr(), number, factor, int(fresh), numel, self._isa, threads
        )

    def sum_of_squares(self, data: Tensor, threads: int) -> float:
        number = _NUMBERS[data.dtype]
        return float(self._library.shardwell_sum_of_squares(data.data_ptr(), number, data.numel(), self._isa, threads))

    def to_bf16(self, source: Tensor, out: Tensor, threads: int) -> None:
        self._library.shardwell_to_bf16(source.data_ptr(), out.data_ptr(), source.numel(), self._isa, threads)

    def crc32(self, data: bytes | bytearray | memoryview, value: int) -> int:
        return int(self._library.shardwell_crc32(value, _address(data), memoryview(data).nbytes, self._isa))

    def crc32_blocks(self, data: bytes | bytearray | memoryview, block: int, value: int) -> tuple[int, bytes]:
        size = memoryview(data).nbytes
        sums = (ctypes.c_char * (-(-size // block) * 4))()
        value = self._library.shardwell_crc32_blocks(value, _address(data), size, block, sums, self._isa)
        return value, sums.raw

    def read_blocks(self, read: FileRead) -> bytes:
        sums = bytearray(max(read.num_blocks, 1) * 4)
        found = self._library.shardwell_read_blocks(
            *(read.file, read.offset, read.before, _address(read.data), len(read.data), read.after, read.block),
            *(read.value, _address(sums), self._isa),
        )
        if found < 0:
            raise OSError(-found, os.strerror(-found))
        if found < read.num_bytes:
            raise EOFError
        return bytes(sums[: read.num_blocks * 4])

    def crc32_combine(self, first: int, second: int, num_bytes: int) -> int:
        return int(self._library.shardwell_crc32_combine(first, second, num_bytes))

    def code(self, name: str, call: QuantizedRows, threads: int) -> None:
        """Quantise rows, dequantise them, or dequantise and sum them."""
        getattr(self._library, _CODERS[name])(ctypes.byref(call), self._isa, threads)

    def stream(self, out: Tensor, first: Tensor, second: Tensor | None, threads: int) -> None:
        """Measure memory: `out = first`, `out = first + 3 * second`, or, if they are the same, `out *= 3`."""
        other = None if second is None else second.data_ptr()
        self._library.shardwell_stream(out.data_ptr(), first.data_ptr(), other, out.numel(), self._isa, threads)


def find(folders: Iterable[str]) -> Path:
    """Return the library in a package's folders; an editable install has one for sources and one for build outputs."""
    for folder in folders:
        if (path := Path(folder, NAME)).is_file():
            return path
    raise UnusableLibraryError(f"{NAME} was not built: install shardwell again where there is a C++ compiler")


def _address(data: bytes | bytearray | memoryview) -> int:
    """Return where bytes are in memory. numpy also takes those that are empty or read-only, but is slower."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(data))
    except (TypeError, ValueError):
        return int(np.frombuffer(data, np.uint8).ctypes.data)


def _lowered(args: UpdateArgs) -> _UpdateArgs:
    call = _UpdateArgs(numel=args.numel, factor=args.factor, seed=args.seed & 0xFFFFFFFF)
    call.gradient, call.gradient_type = args.gradient.data_ptr(), _NUMBERS[args.gradient.dtype]
    in_place = OutOfPlaceState(args.master, args.state)
    call.old, call.now = _slot(in_place), _slot(args.new or in_place)
    if args.out is not None:
        call.out, call.out_type = args.out.data_ptr(), _NUMBERS[args.out.dtype]
    return call


def _slot(held: OutOfPlaceState) -> _Slot:
    slot = _Slot()
    if isinstance(held.master, SplitMaster):
        slot.high, slot.low = held.master.high.data_ptr(), held.master.low.data_ptr()
    else:
        slot.master = held.master.data_ptr()
    if isinstance(held.state, Moments8bitArgs):
        for index in range(2):
            slot.codes[index] = held.state.codes[index].data_ptr()
            slot.exponents[index] = held.state.exponents[index].data_ptr()
    else:
        for index, state in enumerate(held.state):
            slot.state[index] = state.data_ptr()
    return slot
