"""A source that reads DeepSpeed's checkpoints: ZeRO stages 1 to 3, and stage 0 in fp32, without DeepSpeed.

    root/latest                                             the tag of the latest checkpoint
    root/<tag>/mp_rank_00_model_states.pt                   stages 0 to 2: the model, counters, what the user saved
    root/<tag>/zero_pp_rank_<r>_mp_rank_00_model_states.pt  stage 3: the same, with a rank's part of frozen parameters
    root/<tag>/zero_pp_rank_<r>_mp_rank_00_optim_states.pt  a rank's part of masters and state; may begin with bf16_
    root/<tag>/zero/<name>/fp32.pt, exp_avg.pt, ...         instead of these, in the universal format (`universal.py`)

No code from a file is run (`torch_files.py`). Files are memory-mapped, so that only the slices that are used are read.
`flat_parts.py` knows the position of elements. Names and sizes are checked when the source is opened.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from shardwell.checkpoint.folder import LATEST
from shardwell.checkpoint.manifest import MAX_NAME, plain_name
from shardwell.checkpoint.parsing import failing, is_size, parse_shape, show
from shardwell.checkpoint.sources import universal
from shardwell.checkpoint.sources.base import MODEL, StoredTensor
from shardwell.checkpoint.sources.flat_parts import FlatPart, FlatParts, Shapes, cut_each, cut_together
from shardwell.checkpoint.sources.torch_files import Stub, json_entries, load, number
from shardwell.errors import CheckpointError
from shardwell.sharding.layout import product

T = TypeVar("T")

STUBS = (
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "builtins.getattr",  # by which Python 3.11.0 to 3.11.3 pickle the stage; as a stub it looks nothing up
    "__builtin__.getattr",  # its name in protocol 2
)
STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3, "max_stage": 3}
LOSS_SCALE = "shardwell_loss_scale"
COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
OWN = {  # entries of the model states that are DeepSpeed's; all others are the user's
    *COUNTERS,
    *("module", "buffer_names", "optimizer", "param_shapes", "shared_params"),
    *("frozen_param_shapes", "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd"),
    *("dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions"),
    *("sparse_tensor_module_names", "csr_tensor_module_names", "ds_config", "ds_version"),
}

_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt")
_OPTIM_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt")
_REFUSED = {
    re.compile(r"layer_\d+-model_.*"): "layers of pipeline parallelism",
    re.compile(r"(?:layer_\d+_)?expert_.*|expp_rank_.*"): "experts that are split over ranks",
}
_SPLIT_MODEL = "tensor or pipeline parallelism splits this model; only data-parallel checkpoints can be read"


def is_deepspeed(path: str | os.PathLike[str]) -> bool:
    """Tell whether a path is a checkpoint of DeepSpeed, or a folder whose `latest` names one."""
    try:
        return any(_MODEL_FILE.fullmatch(name) for name in _list(_find(Path(path), None)))
    except CheckpointError:
        return False


class DeepSpeedSource:
    """A checkpoint of DeepSpeed: a folder and a tag in it (by default the latest), or the tag's own directory.

    A checkpoint with objects of unknown classes is refused, unless `ignore` names these classes.
    """

    tensors: Mapping[str, StoredTensor]
    values: Mapping[str, Any]

    def __init__(self, root: str | os.PathLike[str], tag: str | None = None, *, ignore: Collection[str] = ()) -> None:
        directory = _find(Path(root), tag)
        self.where, self.bytes_read = str(directory), 0
        self._parts = FlatParts()
        try:
            self.values = _read(_Files.find(directory, (*STUBS, *ignore)), self._parts)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise CheckpointError(f"{directory}: not as DeepSpeed writes it ({error!r})") from error
        self.tensors = self._parts.tensors

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements `start` to `stop` as a copy; see `Source`."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.where}: tensor {show(name)}: not in this checkpoint")
        stored = self.tensors[name]
        if not 0 <= start <= stop <= stored.numel:
            raise CheckpointError(
                f"{self.where}: tensor {show(name)}: has {stored.numel} elements, asked for {start} to {stop}"
            )
        self.bytes_read += (stop - start) * stored.dtype.itemsize
        return self._parts.read(name, start, stop)

    def close(self) -> None:
        self._parts = FlatParts()
        self.tensors = self._parts.tensors


# --- files ------------------------------------------------------------------------------------------------------


def _list(directory: Path) -> list[str]:
    with failing(f"{directory}: cannot be read"):
        return sorted(os.listdir(directory))


def _find(root: Path, tag: str | None) -> Path:
    """Return the directory of a tag; the root itself, if it is one and no tag is given."""
    if tag is None:
        if any(_MODEL_FILE.fullmatch(name) or _OPTIM_FILE.fullmatch(name) for name in _list(root)):
            return root
        latest = root / LATEST
        if not latest.is_file():
            raise CheckpointError(f"{latest}: missing; name the tag to read")
        with failing(f"{latest}: cannot be read"), latest.open("rb") as file:
            tag = file.read(2 * MAX_NAME).decode("utf-8", "replace").strip()
    if not plain_name(tag):
        raise CheckpointError(f"{root}: tag {show(tag)}: expected a plain name, without directories")
    return root / tag


class _File:
    """The content of a file; errors name the file and the missing entry."""

    def __init__(self, path: Path, stubs: Collection[str]) -> None:
        self.path = path
        self.content: dict[str, Any] = load(path, stubs)

    def take(self, kind: type[T], *keys: str) -> T:
        """Return the entry under nested keys; raise if it is missing or of another type."""
        value: Any = self.content
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        if not isinstance(value, kind):
            found = "nothing" if value is None else show(value)
            raise CheckpointError(f"{self.path}: {'.'.join(keys)}: expected {kind.__name__}, found {found}")
        return value


@dataclass(frozen=True)
class _Files:
    """The files of a checkpoint, by rank."""

    directory: Path
    model: dict[int, Path]
    optim: dict[int, Path]
    stubs: Collection[str]

    @staticmethod
    def find(directory: Path, stubs: Collection[str]) -> _Files:
        found = _Files(directory, {}, {}, stubs)
        for name in _list(directory):
            for pattern, what in _REFUSED.items():
                if pattern.fullmatch(name):
                    raise CheckpointError(f"{directory / name}: {what}; such checkpoints cannot be read")
            for pattern, files in ((_MODEL_FILE, found.model), (_OPTIM_FILE, found.optim)):
                match = pattern.fullmatch(name)
                if match is None:
                    continue
                rank = int(match["rank"] or 0)
                if int(match["mp"]):
                    raise CheckpointError(f"{directory / name}: {_SPLIT_MODEL}")
                if rank in files and not universal.is_universal(directory):
                    raise CheckpointError(f"{directory / name}: a second file of the same rank; remove the old one")
                files.setdefault(rank, directory / name)  # in order of names: that of the whole model comes first
        if 0 not in found.model:
            raise CheckpointError(f"{directory}: the model states of rank 0 are missing; is this from DeepSpeed?")
        return found

    def open(self, path: Path) -> _File:
        return _File(path, self.stubs)

    def of_all(self, files: dict[int, Path], kind: str, ranks: int) -> list[Path]:
        """Return one file for each rank, in order; raise if one is missing, or if there are others."""
        for rank in range(ranks):
            if rank not in files:
                raise CheckpointError(
                    f"{self.directory}: the {kind} states of rank {rank} are missing; {ranks} ranks wrote them"
                )
        if len(files) > ranks:
            raise CheckpointError(
                f"{files[max(files)]}: {ranks} ranks wrote this checkpoint; remove the files of another one"
            )
        return [files[rank] for rank in range(ranks)]


# --- contents of the files --------------------------------------------------------------------------------------


def _read(files: _Files, parts: FlatParts) -> dict[str, Any]:
    """Fill `parts` with tensors; return the other values."""
    main = files.open(files.model[0])
    if main.take(int, "mp_world_size") != 1:
        raise CheckpointError(f"{main.path}: mp_world_size is {main.content['mp_world_size']}: {_SPLIT_MODEL}")
    if universal.is_universal(files.directory):
        values = _read_universal(files, main, parts)
    elif main.content.get("param_shapes") is None:
        values = _read_plain(files, main, parts)
    else:
        values = _read_zero(files, main, parts)
    return {**parts.values, **values, **_values(main.content)}


def _read_plain(files: _Files, main: _File, parts: FlatParts) -> dict[str, Any]:
    """Read stage 0. The optimizer's state is read only if the optimizer was made with names."""
    saved: dict[str, Any] = main.content.get("optimizer") or {"state": {}, "param_groups": []}
    if files.optim or "param_groups" not in saved:
        raise CheckpointError(
            f"{main.path}: the masters of stage 0 in 16 bits have no names, so they cannot be read; "
            "load the checkpoint in DeepSpeed with stage 1 and save it again"
        )
    aliases = _same_storage(main.take(dict, "module"))
    _read_module(main, aliases, parts)
    for group in saved["param_groups"]:
        for name, owner in zip(group.get("param_names", ()), group["params"], strict=False):
            for key, value in saved["state"].get(owner, {}).items():
                parts.add_state(name, key, value, main.path)
    names = [[str(name) for name in group.get("param_names", ())] for group in saved["param_groups"]]
    return {"stage": 0, "aliases": aliases, "optimizer": _optimizer(main, saved, names if all(names) else None)}


def _read_zero(files: _Files, main: _File, parts: FlatParts) -> dict[str, Any]:
    """Read stages 1 to 3."""
    ranks = main.take(int, "dp_world_size")
    optim = [files.open(path) for path in files.of_all(files.optim, "optimizer", ranks)]
    for file in optim:
        _check_count(file, ranks)
    groups = [_shapes(group, main.path) for group in main.take(list, "param_shapes")]
    content, shared = optim[0].take(dict, "optimizer_state_dict"), main.content.get("shared_params") or {}
    stage = _stage(content)
    if stage == 3:
        masters, state = "fp32_flat_groups", "optimizer_state_dict"
        _read_frozen(files, main, ranks, parts)
    else:
        masters, state = "single_partition_of_fp32_groups", "base_optimizer_state"
        _read_module(main, {*shared, *(name for shapes in groups for name in shapes)}, parts)
    held = [_held(file, masters, state, len(groups)) for file in optim]
    paddings = _paddings(optim[0], groups)
    for index, shapes in enumerate(groups):
        numels = {name: product(shape) for name, shape in shapes.items()}
        spans, sizes = cut_each(numels, ranks) if stage == 3 else cut_together(numels, paddings[index], ranks)
        parts.add_group(shapes, spans, [of_rank[index] for of_rank in held], sizes)
    return {
        "stage": stage,
        "aliases": _aliases(shared, parts),
        "optimizer": _optimizer(main, content.get(state), _names(content.get(state), groups)),
        "frozen": _not_trained(main, groups, parts),
        "frozen_excluded": stage > 1 and main.content.get("frozen_param_shapes", {}) is None,
        **_loss_scale(content),
    }


def _read_universal(files: _Files, main: _File, parts: FlatParts) -> dict[str, Any]:
    """Read the universal format: a file for each parameter and state, and model states of any stage."""
    groups = [_shapes(group, main.path) for group in main.take(list, "param_shapes")]
    shared = main.content.get("shared_params") or {}
    trained = {name: shape for shapes in groups for name, shape in shapes.items()}
    if main.path.name.startswith("zero_pp_rank"):
        _read_frozen(files, main, main.take(int, "dp_world_size"), parts)
    else:
        _read_module(main, {*shared, *trained}, parts)
    universal.add_parameters(files.directory, trained, parts, files.stubs)
    content = universal.optimizer_values(files.directory, files.stubs)
    return {
        "stage": _stage(content),
        "aliases": _aliases(shared, parts),
        "optimizer": _optimizer(main, content, _names(content, groups)),
        "frozen": _not_trained(main, groups, parts),
        "frozen_excluded": main.content.get("frozen_param_shapes", {}) is None,
        **_loss_scale(content),
    }


def _aliases(shared: Mapping[str, Any], parts: FlatParts) -> dict[str, Any]:
    return json_entries({key: name for key, name in shared.items() if f"{MODEL}{name}" in parts.tensors})


def _not_trained(main: _File, groups: list[Shapes], parts: FlatParts) -> list[str]:
    """Return the names of parameters that have no masters."""
    others = {*(main.content.get("buffer_names") or ()), *(name for shapes in groups for name in shapes)}
    names = [name.removeprefix(MODEL) for name in parts.tensors if name.startswith(MODEL)]
    return [name for name in names if name not in others]


def _names(saved: Any, groups: list[Shapes]) -> list[list[str]] | None:
    """Return the names of the parameters of each parameter group, which at stage 3 may have several flat groups."""
    if not isinstance(saved, dict) or not isinstance(saved.get("param_groups"), list):
        return None
    counts = [len(group["params"]) for group in saved["param_groups"]]
    if sum(counts) != len(groups):
        return None
    flat = iter(groups)
    return [[str(name) for _ in range(count) for name in next(flat)] for count in counts]


def _read_module(main: _File, others: Collection[str], parts: FlatParts) -> None:
    """Read the full tensors of the model states (stages 0 to 2), except those that are found elsewhere."""
    for name, tensor in main.take(dict, "module").items():
        if isinstance(tensor, Tensor) and name not in others:
            parts.add_full(f"{MODEL}{name}", tensor, main.path)


def _read_frozen(files: _Files, main: _File, ranks: int, parts: FlatParts) -> None:
    """Read the tensors without masters (stage 3): full buffers, and frozen parameters in shards."""
    paths = files.of_all(files.model, "model", ranks)
    module = main.take(dict, "module")
    for name in main.take(list, "buffer_names"):
        if name in module:
            parts.add_full(f"{MODEL}{name}", module[name], main.path)
    shapes = _shapes(main.content.get("frozen_param_shapes") or {}, main.path)
    opened = [main, *(files.open(path) for path in paths[1:])] if shapes else []
    for name, shape in shapes.items():
        spans, sizes = cut_each({name: product(shape)}, ranks)
        held = [FlatPart(file.path, file.take(dict, "frozen_param_fragments").get(name), {}) for file in opened]
        parts.add_group({name: shape}, spans, held, sizes)


def _held(file: _File, masters: str, state: str, count: int) -> list[FlatPart]:
    """Return the number of elements of each group that a rank holds."""
    content = file.take(dict, "optimizer_state_dict")
    flats, saved = file.take(list, "optimizer_state_dict", masters), content.get(state)
    if isinstance(saved, dict):
        owners = [(group.get("step"), owner) for group in saved["param_groups"] for owner in group["params"]]
        states = [(step, saved["state"].get(owner, {})) for step, owner in owners]
    else:  # of an elastic checkpoint, or left out
        states = [(content.get("base_optimizer_state_step"), one) for one in saved or [{}] * count]
    if len(flats) != count or len(states) != count:
        raise CheckpointError(f"{file.path}: {len(flats)} groups of masters, {len(states)} of state; expected {count}")
    return [
        FlatPart(file.path, flat, one if step is None else {"step": step, **one})
        for flat, (step, one) in zip(flats, states, strict=True)
    ]


def _paddings(file: _File, groups: list[Shapes]) -> list[list[int]]:
    """Return the padding after each parameter of each group; stages 1 and 2 can align parameters."""
    none = [[0] * len(shapes) for shapes in groups]
    found: list[list[int]] = file.content["optimizer_state_dict"].get("param_alignment_paddings") or none
    if list(map(len, found)) != list(map(len, none)) or not all(is_size(one) for group in found for one in group):
        raise CheckpointError(f"{file.path}: param_alignment_paddings: expected one size for each parameter")
    return found


def _stage(content: Mapping[str, Any]) -> int:
    """Return the stage of a rank's optimizer states; an optimizer that does not say it is one of stage 1."""
    stage = content.get("zero_stage", 1)
    said = stage.arguments[-1] if isinstance(stage, Stub) and stage.arguments else stage
    return STAGES[said] if isinstance(said, str) and said in STAGES else int(said)


def _shapes(group: Mapping[str, Any], file: Path) -> Shapes:
    return {name: parse_shape(list(shape), f"{file}: {MODEL}{name}") for name, shape in group.items()}


def _check_count(file: _File, ranks: int) -> None:
    """Raise unless every group is sharded over all ranks."""
    count = file.take(dict, "optimizer_state_dict").get("partition_count")
    if any(one != ranks for one in (count if isinstance(count, list) else [count])):
        raise CheckpointError(
            f"{file.path}: partition_count: expected {ranks}, the number of ranks, found {show(count)}; "
            "checkpoints of MiCS and of experts cannot be read"
        )


def _same_storage(module: Mapping[str, Any]) -> dict[str, str]:
    """Return {other name: name} of tensors that share elements in a model."""
    first: dict[tuple[Any, ...], str] = {}
    tensors = {name: tensor for name, tensor in module.items() if isinstance(tensor, Tensor) and tensor.numel()}
    places = {name: (t.data_ptr(), t.dtype, tuple(t.shape), t.stride()) for name, t in tensors.items()}
    return {name: first[place] for name, place in places.items() if first.setdefault(place, name) != name}


# --- values -----------------------------------------------------------------------------------------------------


def _values(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the model states that are not tensors, as far as JSON can hold them."""
    values: dict[str, Any] = {
        "counters": {key: content[key] for key in COUNTERS if type(content.get(key)) is int},
        "client": json_entries({key: value for key, value in content.items() if key not in OWN}),
        "buffers": list(content.get("buffer_names") or ()),
        "config": json_entries(content.get("ds_config") or {}),
        "versions": json_entries({"deepspeed": content.get("ds_version")}),
        "world_size": content.get("dp_world_size"),
        "scheduler": content.get("lr_scheduler"),
    }
    return {key: value for key, value in json_entries(values).items() if value is not None}


def _optimizer(main: _File, saved: Any, names: list[list[str]] | None) -> dict[str, Any]:
    """Return the optimizer's class, if the configuration names it, and the hyperparameters and names of its groups."""
    block = (main.content.get("ds_config") or {}).get("optimizer")
    found = json_entries({"kind": block["type"]}) if isinstance(block, dict) and "type" in block else {}
    if isinstance(saved, dict):
        groups = [
            {key: group[key] for key in group if key not in ("params", "param_names")}
            for group in saved["param_groups"]
        ]
        found["param_groups"] = [json_entries(group) for group in groups]
        for group, members in zip(found["param_groups"], names or (), strict=False):
            group["params"] = members
    return found


def _loss_scale(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the loss scale, if losses were scaled. shardwell writes it as a number beside DeepSpeed's entries."""
    scaler = content.get("loss_scaler")
    state = scaler.state if isinstance(scaler, Stub) and isinstance(scaler.state, dict) else {}
    value = number(state.get("cur_scale"))
    if scaler is None and number(content.get(LOSS_SCALE)) is not None:
        return {"loss_scale": {"value": number(content[LOSS_SCALE])}}
    return {"loss_scale": {"value": value}} if value is not None and (state.get("dynamic") or value != 1) else {}
