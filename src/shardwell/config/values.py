"""What values keys may have: numbers, flags, names and the word "auto", with one sentence for what is none of them."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field


def _whole(value: Any) -> Any:
    """5e8 is a whole number; 1.5, true and "1e5" are not."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("expected a whole number")
    return value


def _real(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError("expected a finite number")
    return value


def _flag(value: Any) -> Any:
    if not isinstance(value, bool):
        raise ValueError("expected true or false")
    return value


def _at_least(least: int, value: Any) -> Any:
    """The word "auto" as a value of its own, not as "absent"."""
    if value == "auto":
        return value
    try:
        count = _whole(value)
    except ValueError:
        raise ValueError('expected a whole number or "auto"') from None
    if count < least:
        raise ValueError(f"expected at least {least}")
    return count


def _count_or_auto(value: Any) -> Any:
    return _at_least(0, value)


def _positive_count_or_auto(value: Any) -> Any:
    return _at_least(1, value)


def _flag_or_auto(value: Any) -> Any:
    if value != "auto" and not isinstance(value, bool):
        raise ValueError('expected true, false or "auto"')
    return value


def _dtype(value: Any) -> Any:
    """The short name of a dtype; what is no dtype is left for the type to refuse."""
    return _DTYPES.get(value, value) if isinstance(value, str) else value


def _share_or_auto(value: Any) -> Any:
    if value == "auto":
        return value
    share = _real(value)
    if isinstance(share, float) and not 0 <= share <= 1:
        raise ValueError('expected a number from 0 to 1, or "auto"')
    return share


def _autocast_dtype(value: Any) -> Any:
    if value is None:
        return "bf16"
    return value if _dtype(value) == "fp32" else _dtype(value)


def _scheduler(value: Any) -> Any:
    """The name of a schedule as it is written here, whatever its case."""
    names = {name.lower(): name for name in SCHEDULERS}
    if not isinstance(value, str) or value.lower() not in names:
        raise ValueError(f"expected {', '.join(SCHEDULERS[:-1])} or {SCHEDULERS[-1]}")
    return names[value.lower()]


def _lowered(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


SCHEDULERS = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest")
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "bfp16": "bf16", "float16": "fp16"}  # other spelling -> ours


Count = Annotated[int, BeforeValidator(_whole), Field(ge=0)]
PositiveCount = Annotated[int, BeforeValidator(_whole), Field(ge=1)]
Real = Annotated[float, BeforeValidator(_real), Field(ge=0)]
PositiveReal = Annotated[float, BeforeValidator(_real), Field(gt=0)]
Share = Annotated[float, BeforeValidator(_real), Field(ge=0, lt=1)]
Flag = Annotated[bool, BeforeValidator(_flag)]
CodecKind = Literal["int8", "int4", "fp8"]
Stage = Annotated[Literal[0, 1, 2, 3], BeforeValidator(_whole)]
Dtype = Annotated[Literal["fp32", "bf16", "fp16"], BeforeValidator(_dtype)]
AutocastDtype = Annotated[Literal["bf16", "fp16"], BeforeValidator(_autocast_dtype)]
ShareOrAuto = Annotated[float | Literal["auto"], BeforeValidator(_share_or_auto)]
CountOrAuto = Annotated[int | Literal["auto"], BeforeValidator(_count_or_auto)]
PositiveCountOrAuto = Annotated[int | Literal["auto"], BeforeValidator(_positive_count_or_auto)]
FlagOrAuto = Annotated[bool | Literal["auto"], BeforeValidator(_flag_or_auto)]
Device = Literal["none", "cpu", "nvme"]
Schedule = Annotated[str, BeforeValidator(_scheduler)]
TagValidation = Annotated[Literal["ignore", "warn", "fail"], BeforeValidator(_lowered)]
