"""Exports any source to DeepSpeed's universal format, which an engine of DeepSpeed loads at any number of ranks.

`sources/universal.py` describes the files, and reads them. One tensor is in memory at a time, and at the end the model.
"""

from __future__ import annotations

import os
from pathlib import Path

from torch import Tensor

from shardwell.checkpoint.contents import state_keys, step_of
from shardwell.checkpoint.export_deepspeed import (
    Plan,
    check_state,
    group_options,
    model_states,
    model_values,
    optim_values,
    save,
)
from shardwell.checkpoint.manifest import plain_name
from shardwell.checkpoint.parsing import failing, show
from shardwell.checkpoint.sources.base import MODEL, SCALAR, STATE, Source
from shardwell.checkpoint.sources.reading import Progress, read_full
from shardwell.checkpoint.sources.universal import FOLDER, LATEST, MASTER, OPTIMIZER, PARAM, STEP, SUFFIX
from shardwell.errors import CheckpointError


def write(source: Source, path: Path, progress: Progress | None = None) -> None:
    """Write a checkpoint to an empty directory."""
    plan = Plan.of(source, None, None)
    check_state(source, plan.groups)
    zero = path / FOLDER
    zero.mkdir()
    for group in plan.groups:
        keys = state_keys(source, group.names)
        for name in group.names:
            folder = _folder(zero, name)
            _save_tensor(folder / f"{MASTER}{SUFFIX}", read_full(source, MODEL + name, progress), wide=True)
            for key in keys:
                if f"{STATE}{name}/{key}" in source.tensors:
                    tensor = read_full(source, f"{STATE}{name}/{key}", progress)
                    _save_tensor(folder / f"{key}{SUFFIX}", tensor, wide=False)
            if isinstance(source.values.get(f"{SCALAR}{name}/step"), (int, float)):
                save(folder / f"{STEP}{SUFFIX}", source.values[f"{SCALAR}{name}/step"])
    for name in plan.others:
        _save_tensor(_folder(zero, name) / f"{MASTER}{SUFFIX}", read_full(source, MODEL + name, progress), wide=True)
    complete = Plan(2, plan.ranks, plan.contents, plan.groups, plan.others, plan.dtype)
    options = group_options(source, complete)
    steps = {index: {"step": step_of(source, group.names) or 0} for index, group in enumerate(plan.groups)}
    save(
        zero / OPTIMIZER,
        {
            **optim_values(source, plan),
            "param_groups": options,
            "optimizer_state_dict": {"state": steps, "param_groups": options},  # where engines at stage 3 look
        },
    )
    save(path / complete.model_files()[0], model_states(source, complete, 0, progress))
    if plan.stage == 3:  # an engine at stage 3 opens a file of its own rank, and takes no parameters from it
        values = {"module": {}, "frozen_param_shapes": {}, "frozen_param_fragments": {}, **model_values(source, plan)}
        for file in plan.model_files():
            save(path / file, values)


def name_latest(out_dir: Path) -> None:
    """Let `latest_universal` beside a checkpoint name it."""
    path = out_dir.parent / LATEST
    with failing(f"{path}: cannot be written"):
        partial = path.with_name(f".{LATEST}.{os.getpid()}")
        partial.write_text(out_dir.name, encoding="utf-8")
        os.replace(partial, path)


def _folder(zero: Path, name: str) -> Path:
    if not plain_name(name):
        raise CheckpointError(f"parameter {show(name)}: the universal format needs a folder of that name")
    with failing(f"{zero / name}: cannot be made"):
        (zero / name).mkdir()
    return zero / name


def _save_tensor(path: Path, tensor: Tensor, *, wide: bool) -> None:
    """Write a tensor as it would be merged from ranks; masters are in fp32 or more."""
    if wide and tensor.is_floating_point() and tensor.dtype.itemsize < 4:
        tensor = tensor.float()
    save(path, {"cat_dim": 0, PARAM: tensor})
