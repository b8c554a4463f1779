"""DeepSpeed's universal format: a directory for each parameter, with a file for its master and for each of its states.

    <tag>/zero/<name>/fp32.pt        the master: a tensor, or {"param": tensor}
    <tag>/zero/<name>/exp_avg.pt     a state of the optimizer, in the same form
    <tag>/zero/<name>/step.pt        a number
    <tag>/zero/optimizer_state.pt    options of the parameter groups, and other values of the optimizer

`deepspeed.py` reads the model states beside them. No code from a file is run.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from shardwell.checkpoint.manifest import plain_name
from shardwell.checkpoint.parsing import failing, show
from shardwell.checkpoint.sources.base import MODEL, SCALAR, STATE
from shardwell.checkpoint.sources.flat_parts import FlatParts, FlatSpan
from shardwell.checkpoint.sources.torch_files import load, number
from shardwell.errors import CheckpointError
from shardwell.sharding.layout import product

FOLDER, MASTER, STEP, SUFFIX, OPTIMIZER, PARAM = "zero", "fp32", "step", ".pt", "optimizer_state.pt", "param"
LATEST = "latest_universal"


def is_universal(directory: Path) -> bool:
    """Tell whether a checkpoint of DeepSpeed is in the universal format."""
    return (directory / FOLDER).is_dir()


def add_parameters(
    directory: Path, shapes: Mapping[str, tuple[int, ...]], parts: FlatParts, stubs: Collection[str]
) -> None:
    """Add the masters and the states of the trained parameters."""
    for name, shape in shapes.items():
        if not plain_name(name):
            raise CheckpointError(f"{directory}: parameter {show(name)}: not the name of a folder")
        folder = directory / FOLDER / name
        with failing(f"{folder}: cannot be read"):
            keys = sorted(file.removesuffix(SUFFIX) for file in os.listdir(folder) if file.endswith(SUFFIX))
        if MASTER not in keys:
            raise CheckpointError(f"{folder / MASTER}{SUFFIX}: missing")
        for key in keys:
            path = folder / f"{key}{SUFFIX}"
            value = load(path, stubs)
            if key == STEP:
                count = number(value)
                if count is not None:
                    parts.values[f"{SCALAR}{name}/{key}"] = count
                continue
            tensor = value.get(PARAM) if isinstance(value, dict) else value
            if not isinstance(tensor, Tensor) or tensor.numel() != product(shape):
                raise CheckpointError(f"{path}: expected a tensor of {product(shape)} elements, found {_words(tensor)}")
            if tensor.dim() > 1 and tuple(tensor.shape) != tuple(shape):
                raise CheckpointError(
                    f"{path}: has the shape {show(tuple(tensor.shape))}, and {show(name)} has {show(tuple(shape))}; "
                    "is it the file of another parameter?"
                )
            full = MODEL + name if key == MASTER else f"{STATE}{name}/{key}"
            flat = tensor.detach().reshape(-1)
            if flat.nbytes > path.stat().st_size:
                raise CheckpointError(f"{path}: has more elements than bytes")
            parts.add(full, shape, [FlatSpan(0, 0, 0, flat.numel())], [flat], path)


def optimizer_values(directory: Path, stubs: Collection[str]) -> dict[str, Any]:
    """Return the values of the optimizer besides tensors."""
    path = directory / FOLDER / OPTIMIZER
    found = load(path, stubs)
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: expected a dictionary")
    return found


def latest_universal(folder: str | os.PathLike[str]) -> str | None:
    """Return the tag of the latest checkpoint in the universal format; None if no file names one."""
    path = Path(folder) / LATEST
    if not path.is_file():
        return None
    with failing(f"{path}: cannot be read"):
        tag = path.read_text(encoding="utf-8", errors="replace").strip()
    if not plain_name(tag):
        raise CheckpointError(f"{path}: tag {show(tag)}: expected a plain name, without directories")
    return tag


def _words(value: Any) -> str:
    return show(tuple(value.shape)) if isinstance(value, Tensor) else show(value)
