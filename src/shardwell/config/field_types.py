"""Types of the values of keys: numbers, flags, names and "auto"; each has a sentence for values that it refuses."""

from __future__ import annotations

import math
import os
from enum import Enum
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Strict


def plain(value: Any) -> Any:
    """Return a value as JSON would have it, also for numpy scalars, paths, dtypes and enumeration members."""
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if type(value).__name__ == "dtype" and str(value).startswith("torch."):
        return str(value)
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value


def number(value: Any) -> Any:
    """Return the number that a string such as "1e-3" or "5e8" stands for; return anything else unchanged."""
    if not isinstance(value, str):
        return value
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


LARGEST = (1 << 63) - 1
_LARGEST_POWER = 127
_LARGE = 1000  # from here on a fraction of an element is a rounding error
_WORDS = {"true": True, "false": False, "yes": True, "no": False, "on": True, "off": False, "1": True, "0": False}


def flag(value: Any) -> Any:
    """Return True or False for 0, 1 and words such as "on"; return anything else unchanged."""
    if isinstance(value, str):
        return _WORDS.get(value.strip().lower(), value)
    return bool(value) if isinstance(value, (int, float)) and value in (0, 1) else value


def _integer(value: Any) -> Any:
    """Return an integer; 5e8 and "5e8" are integers, 1.5 and true are not."""
    value = number(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("expected a whole number")
    if abs(value) > LARGEST:
        raise ValueError("expected a whole number below 2**63")
    return value


def _size(value: Any) -> Any:
    """Return an integer; a large computed number, such as 0.9 times a product, may have a fraction."""
    value = number(value)
    return _integer(float(int(value)) if isinstance(value, float) and _LARGE <= value < math.inf else value)


def real(value: Any) -> Any:
    value = number(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not is_finite(value):
        raise ValueError("expected a finite number")
    return value


def is_finite(value: int | float) -> bool:
    """Tell whether a number is finite, also an integer of any size."""
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False


_LONGEST_NAME, _LONGEST_PATH = 255, 4095  # Linux' NAME_MAX and PATH_MAX, which counts its last NUL


def _power(value: Any) -> Any:
    """Return an exponent of two whose power a float can hold."""
    value = _integer(value)
    if value > _LARGEST_POWER:
        raise ValueError(f"expected at most {_LARGEST_POWER}, as 2**{_LARGEST_POWER} is the largest scale of a float")
    return value


def _paths(value: Any) -> Any:
    """Return a path that a file system can have."""
    if isinstance(value, str) and "\0" in value:
        raise ValueError("expected a path without a NUL character")
    if isinstance(value, str) and any("\ud800" <= letter <= "\udbff" for letter in value):
        raise ValueError("expected a path without lone surrogates")
    if isinstance(value, str) and any(len(os.fsencode(name)) > _LONGEST_NAME for name in value.split("/")):
        raise ValueError(f"expected a path whose names have at most {_LONGEST_NAME} bytes each")
    if isinstance(value, str) and any(len(os.fsencode(path)) > _LONGEST_PATH for path in value.split(",")):
        raise ValueError(f"expected a path of at most {_LONGEST_PATH} bytes")
    return value


def _flag(value: Any) -> Any:
    value = flag(value)
    if not isinstance(value, bool):
        raise ValueError("expected true or false")
    return value


def _steps(value: Any) -> Any:
    """Return None for 0 and for infinity, which Accelerate writes for "never"."""
    value = number(value)
    return (
        None
        if (isinstance(value, float) and value == math.inf) or (value == 0 and not isinstance(value, bool))
        else value
    )


def is_auto(value: Any) -> bool:
    """Return whether a value is "auto"; a configuration made in code may hold arrays, which compare by element."""
    return isinstance(value, str) and value == "auto"


def _at_least(least: int, value: Any) -> Any:
    """Return an integer of at least `least`, or "auto", which is a value of its own here."""
    if is_auto(value):
        return value
    try:
        count = _integer(value)
    except ValueError:
        raise ValueError('expected a whole number or "auto"') from None
    if count < least:
        raise ValueError(f"expected at least {least}")
    return count


def count_or_auto(value: Any) -> Any:
    return _at_least(0, value)


def _positive_count_or_auto(value: Any) -> Any:
    return _at_least(1, value)


def _flag_or_auto(value: Any) -> Any:
    value = flag(value)
    if value != "auto" and not isinstance(value, bool):
        raise ValueError('expected true, false or "auto"')
    return value


def _dtype(value: Any) -> Any:
    """Return the short name of a dtype; leave anything else for the type to refuse."""
    if not isinstance(value, str):
        return value
    name = value.strip().lower().removeprefix("torch.")
    return _DTYPES.get(name, name if name in _DTYPES.values() else value)


def _share_or_auto(value: Any) -> Any:
    if is_auto(value):
        return value
    share = real(value)
    if not 0 <= share <= 1:
        raise ValueError('expected a number from 0 to 1, or "auto"')
    return share


def _autocast_dtype(value: Any) -> Any:
    if value is None:
        return "bf16"
    return value if _dtype(value) == "fp32" else _dtype(value)


def _budget(value: Any) -> Any:
    """Read a memory budget: a share of the free bytes, as a float up to 1, or else a whole number of bytes."""
    value = number(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and is_finite(value) and value >= 0
    if is_number and 0 < value <= 1:
        return float(value)
    if not is_number or value != value // 1:
        raise ValueError("expected a share from 0 to 1, or a whole number of bytes")
    return _integer(value)


def _scheduler(value: Any) -> Any:
    """Return the name of a schedule, read in any case."""
    names = {name.lower(): name for name in SCHEDULERS}
    if not isinstance(value, str) or value.lower() not in names:
        raise ValueError(f"expected {', '.join(SCHEDULERS[:-1])} or {SCHEDULERS[-1]}")
    return names[value.lower()]


def _lowered(value: Any) -> Any:
    return value.strip().lower() if isinstance(value, str) else value


SCHEDULERS = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest")
_DTYPES = {  # other spelling -> ours
    "float32": "fp32",
    "float": "fp32",
    "bfloat16": "bf16",
    "bfp16": "bf16",
    "float16": "fp16",
    "half": "fp16",
}


Count = Annotated[int, BeforeValidator(_integer), Field(ge=0)]
Depth = Annotated[int, BeforeValidator(_integer), Field(ge=-1)]
Power = Annotated[int, BeforeValidator(_power), Field(ge=0)]
Paths = Annotated[str, Strict(), BeforeValidator(_paths)]
Size = Annotated[int, BeforeValidator(_size), Field(ge=0)]
PositiveCount = Annotated[int, BeforeValidator(_integer), Field(ge=1)]
Real = Annotated[float, BeforeValidator(real), Field(ge=0)]
PositiveReal = Annotated[float, BeforeValidator(real), Field(gt=0)]
Budget = Annotated[int | float, BeforeValidator(_budget)]
Flag = Annotated[bool, BeforeValidator(_flag)]
CodecKind = Literal["int8", "int4", "fp8"]
Stage = Annotated[Literal[0, 1, 2, 3], BeforeValidator(_integer)]
Dtype = Annotated[Literal["fp32", "bf16", "fp16"], BeforeValidator(_dtype)]
AutocastDtype = Annotated[Literal["bf16", "fp16"], BeforeValidator(_autocast_dtype)]
ShareOrAuto = Annotated[float | Literal["auto"], BeforeValidator(_share_or_auto)]
CountOrAuto = Annotated[int | Literal["auto"], BeforeValidator(count_or_auto)]
PositiveCountOrAuto = Annotated[int | Literal["auto"], BeforeValidator(_positive_count_or_auto)]
FlagOrAuto = Annotated[bool | Literal["auto"], BeforeValidator(_flag_or_auto)]
Device = Annotated[Literal["none", "cpu", "nvme"], BeforeValidator(_lowered)]
ReduceOp = Annotated[Literal["mean", "sum"], BeforeValidator(_lowered)]
StepsOrNever = Annotated[PositiveCount | None, BeforeValidator(_steps)]
Schedule = Annotated[str, BeforeValidator(_scheduler)]
TagValidation = Annotated[Literal["ignore", "warn", "fail"], BeforeValidator(_lowered)]
