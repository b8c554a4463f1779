"""Exports any source to DeepSpeed's files, as an engine of DeepSpeed at a stage and a number of ranks writes them.

    <out>/latest                                            the tag
    <out>/<tag>/mp_rank_00_model_states.pt                  stages 1 and 2: the model, counters, what the user saved
    <out>/<tag>/zero_pp_rank_<r>_mp_rank_00_model_states.pt stage 3: the same, with a rank's part of frozen parameters
    <out>/<tag>/zero_pp_rank_<r>_mp_rank_00_optim_states.pt a rank's part of masters and state; bf16_zero_... in bf16

These files are pickles by nature. They are made by `torch.save` of dictionaries, lists, numbers, strings and tensors,
and at stage 3 of DeepSpeed's loss scaler, which its reader demands there; its addresses of fragments are left out.
What belongs to one rank is in memory while its file is written.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwell.checkpoint.contents import (
    Contents,
    ParamGroup,
    compute_dtype,
    elements,
    param_groups,
    state_keys,
    step_of,
    value_of,
)
from shardwell.checkpoint.deepspeed_objects import PICKLING, loss_scaler
from shardwell.checkpoint.manifest import plain_name
from shardwell.checkpoint.parsing import failing
from shardwell.checkpoint.sources.base import MODEL, SCALAR, STATE, Source
from shardwell.checkpoint.sources.deepspeed import COUNTERS, LOSS_SCALE, OWN
from shardwell.checkpoint.sources.flat_parts import FlatSpan, cut_each, cut_together
from shardwell.checkpoint.sources.reading import Progress, read_full
from shardwell.errors import CheckpointError
from shardwell.version import __version__

LAYOUT = "0.19.8"  # the version of DeepSpeed whose files these are
MAX_RANKS = 2**16
SUB_GROUP_SIZE = 1_000_000_000  # DeepSpeed's default of that key; engines with another one refuse the files


@dataclass(frozen=True)
class Plan:
    """The plan of an export: the stage and the number of ranks, and the tensors in DeepSpeed's order."""

    stage: int
    ranks: int
    contents: Contents
    groups: tuple[ParamGroup, ...]  # of parameters with elements; DeepSpeed has no other in flat groups
    others: tuple[str, ...]  # parameters without masters
    dtype: torch.dtype | None  # of the parameters besides their masters

    @staticmethod
    def of(source: Source, stage: int | None, ranks: int | None) -> Plan:
        """Plan the files; the stage and the number of ranks are those of the run if they are not given."""
        ranks = ranks if ranks is not None else _saved_count(source, "world_size", 1)
        stage = stage if stage is not None else max(_saved_count(source, "stage", 2), 1)
        if stage not in (1, 2, 3) or not 1 <= ranks <= MAX_RANKS:
            raise CheckpointError(f"stage {stage}, {ranks} ranks: expected stage 1, 2 or 3 and 1 to {MAX_RANKS} ranks")
        contents = Contents.of(source)
        found = [
            ParamGroup(tuple(name for name in group.names if source.tensors[MODEL + name].numel), group.options)
            for group in param_groups(source, contents)
        ]
        groups = tuple(group for group in found if group.names) or (ParamGroup((), {}),)
        grouped = {name for group in groups for name in group.names}
        others = tuple(name for name in (*contents.trained, *contents.frozen) if name not in grouped)
        return Plan(stage, ranks, contents, groups, others, compute_dtype(source))

    def flat_groups(self, source: Source) -> list[tuple[int, tuple[str, ...]]]:
        """Return the parameters that are joined to one flat tensor, each with the number of its parameter group.

        They are the parameter groups; at stage 3 DeepSpeed ends one after `sub_group_size` elements of a rank.
        """
        if self.stage < 3:
            return [(index, group.names) for index, group in enumerate(self.groups)]
        found: list[tuple[int, tuple[str, ...]]] = []
        for index, group in enumerate(self.groups):
            begin, load = 0, 0
            for place, name in enumerate(group.names):
                load += -(-source.tensors[MODEL + name].numel // self.ranks)
                if load >= SUB_GROUP_SIZE or place == len(group.names) - 1:
                    found.append((index, group.names[begin : place + 1]))
                    begin, load = place + 1, 0
        return found or [(0, ())]

    def optim_file(self, rank: int) -> str:
        prefix = "bf16_" if self.dtype is torch.bfloat16 else ""
        return f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"

    def model_files(self) -> list[str]:
        """Return the names of the files of model states, by rank."""
        if self.stage < 3:
            return ["mp_rank_00_model_states.pt"]
        return [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(self.ranks)]


def write(
    source: Source, path: Path, ranks: int | None = None, stage: int | None = None, progress: Progress | None = None
) -> str:
    """Write a checkpoint to an empty directory; return its tag."""
    plan = Plan.of(source, stage, ranks)
    check_state(source, plan.groups)
    tag = tag_of(source)
    (path / tag).mkdir()
    for rank, file in enumerate(plan.model_files()):
        save(path / tag / file, model_states(source, plan, rank, progress))
    for rank in range(plan.ranks):
        save(path / tag / plan.optim_file(rank), optim_states(source, plan, rank, progress))
    with failing(f"{path / 'latest'}: cannot be written"):
        (path / "latest").write_text(tag, encoding="utf-8")
    return tag


def tag_of(source: Source) -> str:
    """Return the name of the checkpoint's directory, if it was one of a folder; else the name that its step gives."""
    counters = source.values.get("counters")
    if isinstance(counters, Mapping) and plain_name(Path(source.where).name):
        return Path(source.where).name
    return "global_step0"


def save(path: Path, content: Any) -> None:
    """Write a file of plain values and tensors."""
    with failing(f"{path}: cannot be written"), path.open("xb") as file:
        torch.save(content, file, pickle_module=PICKLING)
        file.flush()
        os.fsync(file.fileno())


# --- model states -----------------------------------------------------------------------------------------------


def model_states(source: Source, plan: Plan, rank: int, progress: Progress | None = None) -> dict[str, Any]:
    """Return the content of a file of model states."""
    module: dict[str, Tensor] = {name: read_full(source, MODEL + name, progress) for name in plan.contents.buffers}
    if plan.stage < 3:
        for name in (*(name for group in plan.groups for name in group.names), *plan.others):
            module[name] = _parameter(source, plan, name, progress)
        module |= {other: module[name] for other, name in plan.contents.aliases.items()}
        fragments = {name: module[name] for name in plan.others}
    else:
        dtype = plan.dtype or torch.float32
        names = [*(name for group in plan.groups for name in group.names), *plan.others, *plan.contents.aliases]
        module |= {name: torch.empty(0, dtype=dtype, device="cpu") for name in names}
        fragments = {name: _shard(source, MODEL + name, plan.ranks, rank, progress) for name in plan.others}
    excluded = bool(source.values.get("frozen_excluded"))
    states = {
        "module": module,
        "frozen_param_shapes": None if excluded else _shapes(source, plan.others),
        "frozen_param_fragments": None if excluded else fragments,
        **model_values(source, plan),
    }
    return {**states, **client_state(source)}


def model_values(source: Source, plan: Plan) -> dict[str, Any]:
    """Return what model states hold besides tensors."""
    counters = source.values.get("counters") or {}
    return {
        "buffer_names": list(plan.contents.buffers),
        "optimizer": None,
        "param_shapes": [_shapes(source, names) for _, names in plan.flat_groups(source)],
        "shared_params": dict(plan.contents.aliases),
        "lr_scheduler": value_of(source, "scheduler") or None,
        "data_sampler": None,
        "random_ltd": None,
        "sparse_tensor_module_names": [],
        **{key: int(counters.get(key, 0)) for key in COUNTERS},
        "dp_world_size": plan.ranks,
        "mp_world_size": 1,
        "ds_config": value_of(source, "config") or {},
        "ds_version": _version(),
    }


def client_state(source: Source) -> dict[str, Any]:
    """Return what the user has saved: entries beside DeepSpeed's own."""
    found = value_of(source, "client") or {}
    if not isinstance(found, dict):
        raise CheckpointError(f"{source.where}: values.client: expected an object")
    taken = sorted(OWN & found.keys())
    if taken:
        raise CheckpointError(
            f"{source.where}: client_state has {taken[0]!r}, which is an entry of DeepSpeed's own in its files: give "
            "it another name"
        )
    return found


def _parameter(source: Source, plan: Plan, name: str, progress: Progress | None) -> Tensor:
    tensor = read_full(source, MODEL + name, progress)
    is_cast = plan.dtype is not None and name not in plan.others and tensor.is_floating_point()
    return tensor.to(plan.dtype) if is_cast else tensor


def _shapes(source: Source, names: tuple[str, ...]) -> dict[str, torch.Size]:
    return {name: torch.Size(source.tensors[MODEL + name].shape) for name in names}


# --- optimizer states -------------------------------------------------------------------------------------------


def optim_states(source: Source, plan: Plan, rank: int, progress: Progress | None = None) -> dict[str, Any]:
    """Return the content of a rank's file of optimizer states."""
    content: dict[str, Any] = optim_values(source, plan)
    states, masters, paddings = {}, [], []
    for index, (_, names) in enumerate(plan.flat_groups(source)):
        numels = {name: source.tensors[MODEL + name].numel for name in names}
        if plan.stage == 3:
            (spans, _), size = cut_each(numels, plan.ranks), sum(-(-numel // plan.ranks) for numel in numels.values())
            lean = size
        else:
            spans, sizes = cut_together(numels, [0] * len(numels), plan.ranks)
            size, lean = max(sizes[0]), min(sizes[rank])
        mine = [(name, span) for name in names for span in spans[name] if span.rank == rank]
        masters.append(_Flat(source, names, MODEL, "").read(mine, size, progress)[:lean].clone())
        states[index] = _state(source, names, mine, size, progress)
        paddings.append(size - lean)
    optimizer = {"state": states, "param_groups": group_options(source, plan)}
    if plan.stage == 3:
        fp16 = (value_of(source, "config") or {}).get("fp16")
        scaler = loss_scaler(source.values.get("loss_scale"), fp16)
        content |= {"optimizer_state_dict": optimizer, "fp32_flat_groups": masters, "loss_scaler": scaler}
    else:
        content |= {
            "base_optimizer_state": optimizer,
            "single_partition_of_fp32_groups": masters,
            "group_paddings": paddings,
            "param_alignment_paddings": [[0] * len(group.names) for group in plan.groups],
        }
    config = value_of(source, "config") or {}
    return {"optimizer_state_dict": content, "ds_config": config, "ds_version": _version()}


def optim_values(source: Source, plan: Plan) -> dict[str, Any]:
    """Return what optimizer states hold besides tensors."""
    config, scale = source.values.get("config"), source.values.get("loss_scale")
    clip = config.get("gradient_clipping") if isinstance(config, Mapping) else None
    content = {
        "zero_stage": plan.stage,
        "partition_count": plan.ranks if plan.stage == 3 else [plan.ranks] * len(plan.groups),
        "dynamic_loss_scale": bool(scale),
        "overflow": False,
        "clip_grad": float(clip) if isinstance(clip, (int, float)) else 0.0,
        "ds_version": _version(),
    }
    return {**content, LOSS_SCALE: float(scale["value"])} if isinstance(scale, Mapping) else content


def group_options(source: Source, plan: Plan) -> list[dict[str, Any]]:
    """Return the parameter groups with the options that DeepSpeed's optimizers read besides torch's."""
    saved = source.values.get("optimizer")
    kind = saved.get("kind") if isinstance(saved, Mapping) else None
    more = {"bias_correction": True} if kind in ("Adam", "AdamW") else {}
    flat = [index for index, _ in plan.flat_groups(source)]
    numbers = [[place for place, owner in enumerate(flat) if owner == index] for index in range(len(plan.groups))]
    return [{**more, **group.options, "params": own} for group, own in zip(plan.groups, numbers, strict=True)]


def _state(
    source: Source, names: tuple[str, ...], mine: list[tuple[str, FlatSpan]], size: int, progress: Progress | None
) -> dict[str, Any]:
    """Return the optimizer's state of a rank's part of a group; what a parameter has none of is zero there."""
    found: dict[str, Any] = {}
    step = step_of(source, names)
    if step is not None:
        found["step"] = int(step) if step == int(step) else step
    for key in state_keys(source, names):
        found[key] = _Flat(source, names, STATE, f"/{key}").read(mine, size, progress)
    return found


def check_state(source: Source, groups: tuple[ParamGroup, ...]) -> None:
    """Warn about state that a flat group cannot hold: DeepSpeed has one step count for all parameters of a group."""
    for group in groups:
        steps = {source.values.get(f"{SCALAR}{name}/step") for name in group.names}
        if len({step for step in steps if isinstance(step, (int, float))}) > 1:
            words = "step counts differ in a parameter group; DeepSpeed has one for each group, here the greatest"
            warnings.warn(f"{source.where}: {words}", stacklevel=3)
    odd = [name for name, value in source.values.items() if name.startswith(SCALAR) and isinstance(value, dict)]
    if odd:
        warnings.warn(
            f"{source.where}: '{odd[0].removeprefix(SCALAR)}' (of {len(odd)}) has not the shape of its parameter and "
            "is left out: DeepSpeed's files cannot hold it",
            stacklevel=3,
        )


class _Flat:
    """The masters or a state of a group of parameters, joined in order."""

    def __init__(self, source: Source, names: tuple[str, ...], prefix: str, suffix: str) -> None:
        self._source = source
        self._full = {name: f"{prefix}{name}{suffix}" for name in names if f"{prefix}{name}{suffix}" in source.tensors}
        dtypes = {name: source.tensors[full].dtype for name, full in self._full.items()}
        if prefix == MODEL:  # masters have at least 32 bits
            dtypes = {name: torch.float32 if one.itemsize < 4 else one for name, one in dtypes.items()}
        self._dtype = next(iter(dtypes.values()), torch.float32)
        odd = [name for name, one in dtypes.items() if one != self._dtype]
        if odd:
            raise CheckpointError(
                f"{source.where}: {self._full[odd[0]]}: {dtypes[odd[0]]} in a group of {self._dtype}; a parameter "
                "group has one dtype in DeepSpeed's files"
            )

    def read(self, mine: list[tuple[str, FlatSpan]], size: int, progress: Progress | None) -> Tensor:
        """Return a rank's part, padded with zeros."""
        flat = torch.zeros(size, dtype=self._dtype, device="cpu")
        for name, span in mine:
            if name in self._full:
                part = elements(self._source, self._full[name], span.start, span.stop)
                flat[span.first : span.first + part.numel()] = part
                if progress is not None:
                    progress(part.nbytes)
        return flat


def _shard(source: Source, name: str, ranks: int, rank: int, progress: Progress | None) -> Tensor:
    """Return a rank's shard of one tensor, padded with zeros."""
    stored = source.tensors[name]
    size = -(-stored.numel // ranks)
    first, last = min(rank * size, stored.numel), min((rank + 1) * size, stored.numel)
    part = elements(source, name, first, last)
    if progress is not None:
        progress(part.nbytes)
    return torch.nn.functional.pad(part, (0, size - part.numel())).clone()


def _version() -> str:
    return f"{LAYOUT}+shardwell.{__version__}"


def _saved_count(source: Source, key: str, otherwise: int) -> int:
    found = source.values.get(key)
    return found if type(found) is int and 0 <= found <= MAX_RANKS else otherwise
