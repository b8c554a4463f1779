"""The file of a calibration: what was measured of a machine, when, and how.

    {"format": "shardwell machine", "version": 1, "measured": "2026-11-18T04:00:00+00:00", "device": "NVIDIA H200",
     "ranks": 2, "figures": {"device_memory": {"value": 3.9e12, "kind": "measured", "date": "...", "how": "..."},
                             "matmul bf16": {"value": [[6.9e10, 5.1e14], ...], ...}}}

Figures have the names of the fields of `Speeds`; those of matrix products are lists of sizes in FLOPs and of FLOP/s.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from shardwell.config.source import read
from shardwell.errors import ConfigError
from shardwell.virtual_time.speeds import DTYPES, MatmulRates, Speeds

FORMAT, VERSION = "shardwell machine", 1
_LEAST, _MOST = 1e-12, 1e21  # seconds and shares, and rates, beyond which a file is damaged
MATMUL = "matmul "  # before the dtype
_KEYS = {one.name for one in fields(Speeds)} - {"matmul", "origins"}


@dataclass(frozen=True)
class MeasuredFigure:
    """One figure: a rate, a time, or rates of matrix products by their size."""

    value: float | list[tuple[float, float]]
    how: str  # in words
    date: str


@dataclass(frozen=True)
class Calibration:
    """The figures that were measured of a machine."""

    device: str
    has_gpus: bool
    ranks: int
    measured: str  # when
    figures: Mapping[str, MeasuredFigure]

    def as_dict(self) -> dict[str, Any]:
        """Return the contents of the file."""
        figures = {
            name: {"value": one.value, "kind": "measured", "date": one.date, "how": one.how}
            for name, one in self.figures.items()
        }
        about = {"measured": self.measured, "device": self.device, "has_gpus": self.has_gpus, "ranks": self.ranks}
        return {"format": FORMAT, "version": VERSION, **about, "figures": figures}

    def write(self, path: Path) -> None:
        """Write the file."""
        try:
            path.write_text(json.dumps(self.as_dict(), indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written ({error.strerror})") from None

    def speeds(self, stated: Speeds | None = None) -> Speeds:
        """Return the speeds, with `stated` ones where nothing was measured."""
        given: dict[str, Any] = {}
        rates: dict[str, MatmulRates] = {}
        origins = {} if stated is None else dict(stated.origins)
        for name, one in self.figures.items():
            origins[name] = f"{name.replace('_', ' ')}: measured {one.date}: {one.how}"
            if isinstance(one.value, list):
                dtype = name.removeprefix(MATMUL)
                peak = stated.matmul[dtype].peak if stated is not None and dtype in stated.matmul else 0.0
                rates[dtype] = MatmulRates(tuple(one.value), peak)
            else:
                given[name] = one.value
        if stated is None:
            if not rates or "device_memory" not in given:
                raise ConfigError("a calibration without matrix products or without device_memory says too little")
            return Speeds(rates, **given, origins=origins)
        return replace(stated, matmul={**stated.matmul, **rates}, **given, origins=origins)


def read_calibration(path: Path) -> Calibration:
    """Return what a file holds; raise if it is not one of `shardwell calibrate`."""
    found = read(path)[2]
    if found.get("format") != FORMAT:
        raise ConfigError(f'{path}: is no file of `shardwell calibrate`: expected "format": "{FORMAT}"')
    if found.get("version") != VERSION or isinstance(found["version"], bool):
        raise ConfigError(f"{path}: has version {_shown(found.get('version'))}, expected {VERSION}; measure again")
    figures = found.get("figures")
    if not isinstance(figures, dict) or not figures:
        raise ConfigError(f"{path}: has no figures")
    if twice := next(iter(getattr(figures, "repeated", {})), None):
        raise ConfigError(f"{path}: figure {_shown(twice)} is written several times; keep one")
    ranks = found.get("ranks")
    if isinstance(ranks, bool) or not isinstance(ranks, int) or not 1 <= ranks <= _MOST:
        raise ConfigError(f"{path}: ranks is {_shown(ranks)}, expected a whole number of 1 or more")
    has_gpus = found.get("has_gpus", True)
    if not isinstance(has_gpus, bool):
        raise ConfigError(f"{path}: has_gpus is {_shown(has_gpus)}, expected true or false")
    return Calibration(
        str(found.get("device", "")),
        has_gpus,
        ranks,
        str(found.get("measured", "")),
        {str(name): _figure(path, str(name), one) for name, one in figures.items()},
    )


def _figure(path: Path, name: str, found: Any) -> MeasuredFigure:
    is_matmul = name.startswith(MATMUL) and name.removeprefix(MATMUL) in DTYPES
    if not is_matmul and name not in _KEYS:
        known = f"expected {', '.join(sorted(_KEYS))} or matmul DTYPE"
        raise ConfigError(f"{path}: figure {_shown(name)} is not known; {known}")
    has = f"{path}: figure {_shown(name)} has the value"
    value: Any = found.get("value") if isinstance(found, dict) else None
    how, date = (str(found.get(key, "")) for key in ("how", "date")) if isinstance(found, dict) else ("", "")
    if not is_matmul:
        if not _is_number(value):
            raise ConfigError(f"{has} {_shown(value)}, expected a number from {_LEAST:g} to {_MOST:g}")
        return MeasuredFigure(float(value), how, date)
    if not isinstance(value, list) or not value or not all(_is_pair(one) for one in value):
        raise ConfigError(f"{has} {_shown(value)}, expected pairs of FLOPs and FLOP/s")
    return MeasuredFigure(sorted((float(size), float(rate)) for size, rate in value), how, date)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def _is_number(value: Any) -> bool:
    """Return whether a value is a number with which speeds can be computed: 10**400 and 1e-320 are none."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return _LEAST <= value <= _MOST


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))
