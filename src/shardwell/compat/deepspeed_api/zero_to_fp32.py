"""`deepspeed.utils.zero_to_fp32` on checkpoints of shardwell and of DeepSpeed.

Both kinds of folders are read: shardwell's own files, and DeepSpeed's as data, without running code from them. The
functions have DeepSpeed's signatures. What they write in DeepSpeed's way (`pytorch_model.bin`) is a pickle by nature,
made by `torch.save` of a dictionary of tensors; with `safe_serialization=True` it is a safetensors file.

    python zero_to_fp32.py . output_dir [--safe_serialization] [-t TAG] [--exclude_frozen_parameters]
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwell.checkpoint.export_deepspeed import Plan, client_state, model_values, optim_values, save
from shardwell.checkpoint.fp32_weights import StoredWeight, fp32_weights, write_weights
from shardwell.checkpoint.parsing import parse_byte_size
from shardwell.checkpoint.sources import Source, is_foreign, locate_own, open_source
from shardwell.checkpoint.sources.deepspeed import is_deepspeed
from shardwell.compat.deepspeed_api.logging import logger

__all__ = [
    "GatheredTensor",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "convert_zero_checkpoint_to_state_dict",
    "get_checkpoint_files",
    "get_fp32_state_dict_from_zero_checkpoint",
    "get_model_state_file",
    "get_model_state_files",
    "get_optim_files",
    "load_state_dict_from_zero_checkpoint",
    "to_torch_tensor",
]

_Path = str | os.PathLike[str]
GatheredTensor = StoredWeight
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
DTYPES |= {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_described: dict[str, str] = {}  # directories of shardwell's checkpoints, and the folders of files that describe them


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: _Path, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, Any]:
    """Return the weights of a checkpoint in fp32, by name, on the CPU.

    With `lazy_mode` the values are `GatheredTensor`s, which are read from the files by `contiguous()`.
    """
    source = _open(checkpoint_dir, tag)
    weights = fp32_weights(source, exclude_frozen=exclude_frozen_parameters)
    if lazy_mode:
        return dict(weights)
    with closing(source):
        return to_torch_tensor(weights)


def to_torch_tensor(
    state_dict: Mapping[str, Any], return_empty_tensor: bool = False, dtype: torch.dtype | str | None = None
) -> dict[str, Tensor]:
    """Read the tensors of a dictionary from `lazy_mode`; names of one parameter share one tensor."""
    kind = None if dtype is None else _dtype(dtype)
    found: dict[int, Tensor] = {}
    for one in state_dict.values():
        wanted = kind if kind is not None and one.dtype.is_floating_point else one.dtype
        if id(one) not in found and return_empty_tensor:
            found[id(one)] = torch.empty(one.shape, dtype=wanted)
        elif id(one) not in found:
            found[id(one)] = one.contiguous().to(wanted)
    return {name: found[id(one)] for name, one in state_dict.items()}


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: _Path,
    output_dir: _Path,
    dtype: torch.dtype | str = torch.float32,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the weights of a checkpoint to a folder, in files of at most `max_shard_size`, with an index if several."""
    limit = max_shard_size if max_shard_size is None or isinstance(max_shard_size, int) else None
    if isinstance(max_shard_size, str):
        limit = parse_byte_size(max_shard_size, "max_shard_size")
    kind = _dtype(dtype)
    with closing(_open(checkpoint_dir, tag)) as source:
        weights = fp32_weights(source, exclude_frozen=exclude_frozen_parameters, dtype=kind)
        write_weights(weights, output_dir, max_file_bytes=limit, as_safetensors=safe_serialization)


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: _Path,
    output_dir: _Path,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the weights of a checkpoint in fp32; see `convert_zero_checkpoint_to_state_dict`."""
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir,
        output_dir,
        torch.float32,
        max_shard_size=max_shard_size,
        safe_serialization=safe_serialization,
        tag=tag,
        exclude_frozen_parameters=exclude_frozen_parameters,
    )


def load_state_dict_from_zero_checkpoint(model: nn.Module, checkpoint_dir: _Path, tag: str | None = None) -> nn.Module:
    """Load the weights of a checkpoint into a model on the CPU, and return the model.

    As in DeepSpeed names may differ, but here a warning tells of them.
    """
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model = model.cpu()
    missing, unexpected = model.load_state_dict(state, strict=False)
    for names, words in ((missing, "is not in the checkpoint"), (unexpected, "is not in the model")):
        if names:
            warnings.warn(f"{checkpoint_dir}: '{names[0]}' (of {len(names)}) {words}", stacklevel=2)
    return model


# --- files ------------------------------------------------------------------------------------------------------


def get_model_state_file(checkpoint_dir: _Path, zero_stage: int) -> str:
    """Return the file of model states of a checkpoint's own directory.

    For a checkpoint of shardwell's own it is a file that describes it, with everything but the model's tensors.
    """
    name = "mp_rank_00_model_states.pt" if zero_stage <= 2 else "zero_pp_rank_0_mp_rank_00_model_states.pt"
    file = os.path.join(_files_of(checkpoint_dir), name)
    if not os.path.exists(file):
        raise FileNotFoundError(f"can't find model states file at '{file}'")
    return file


def get_checkpoint_files(checkpoint_dir: _Path, glob_pattern: str) -> list[str]:
    """Return the files of a checkpoint's own directory that a pattern matches, in natural order."""
    found = [str(path) for path in Path(_files_of(checkpoint_dir)).glob(glob_pattern)]
    if not found:
        raise FileNotFoundError(f"can't find {glob_pattern} files in directory '{checkpoint_dir}'")
    return sorted(found, key=lambda name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)])


def get_optim_files(checkpoint_dir: _Path) -> list[str]:
    """Return the files of optimizer states, by rank; for shardwell's own checkpoints see `get_model_state_file`."""
    return get_checkpoint_files(checkpoint_dir, "*_optim_states.pt")


def get_model_state_files(checkpoint_dir: _Path) -> list[str]:
    """Return the files of model states."""
    return get_checkpoint_files(checkpoint_dir, "*_model_states.pt")


def _files_of(checkpoint_dir: _Path) -> str:
    """Return a directory with files in DeepSpeed's layout: the given one, or one that describes it."""
    if not os.path.isdir(checkpoint_dir):
        raise FileNotFoundError(f"Directory '{checkpoint_dir}' doesn't exist")
    if is_deepspeed(checkpoint_dir) or locate_own(checkpoint_dir) is None:
        return os.fspath(checkpoint_dir)
    where = os.path.realpath(checkpoint_dir)
    if where not in _described or not os.path.isdir(_described[where]):
        with closing(open_source(checkpoint_dir)) as source:
            _described[where] = _describe(source)
    return _described[where]


def _describe(source: Source) -> str:
    """Write what DeepSpeed's files of a checkpoint would hold besides tensors to a folder that ends with the process.

    Clients look there for the stage and for what they have saved themselves: Lightning's converter does.
    """
    folder = tempfile.mkdtemp(prefix="shardwell-checkpoint-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    plan = Plan.of(source, None, 1)
    save(Path(folder) / plan.model_files()[0], {**model_values(source, plan), **client_state(source)})
    save(Path(folder) / plan.optim_file(0), {"optimizer_state_dict": optim_values(source, plan)})
    return folder


def _open(checkpoint_dir: _Path, tag: str | None) -> Source:
    """Open a checkpoint; what is missing is an error of the class that callers of DeepSpeed expect."""
    latest = os.path.join(checkpoint_dir, "latest")
    if not os.path.isdir(checkpoint_dir):
        raise FileNotFoundError(f"Directory '{checkpoint_dir}' doesn't exist")
    if tag is not None and not os.path.isdir(os.path.join(checkpoint_dir, tag)):
        raise FileNotFoundError(f"Directory '{os.path.join(checkpoint_dir, tag)}' doesn't exist")
    is_known = os.path.isfile(latest) or locate_own(checkpoint_dir) is not None or is_foreign(checkpoint_dir)
    if tag is None and not is_known:
        raise ValueError(f"Unable to find 'latest' file at {latest}")
    return open_source(checkpoint_dir, tag)


def _dtype(given: torch.dtype | str) -> torch.dtype:
    found = DTYPES.get(given.removeprefix("torch.").lower()) if isinstance(given, str) else given
    if found is None or found not in DTYPES.values():
        raise ValueError(f"Unsupported output dtype {given!r}: expected one of {', '.join(sorted(DTYPES))}")
    return found


# --- the script -------------------------------------------------------------------------------------------------


_SCRIPT = '''\
#!/usr/bin/env python
"""Writes the weights of the checkpoints in this folder {what}, for use without shardwell or DeepSpeed.

    python {file} . output_dir {options}[--safe_serialization] [-t TAG] [--exclude_frozen_parameters]

It is the same as `python {command}`, which needs shardwell in this Python.
"""

import importlib.util
import subprocess
import sys

if __name__ == "__main__":
    if importlib.util.find_spec("shardwell") is None:
        sys.exit(f"{file}: {{sys.executable}} has no shardwell; run this with a Python that has it")
    sys.exit(subprocess.call([sys.executable, *{command!r}.split(), *sys.argv[1:]]))
'''
_SCRIPTS = {
    "zero_to_fp32.py": ("in fp32", "", "-m shardwell checkpoint zero-to-fp32"),
    "zero_to_torch.py": ("in a dtype", "--dtype bf16 ", "-m shardwell.compat.deepspeed_api.zero_to_torch"),
}
SCRIPTS = {
    file: _SCRIPT.format(file=file, what=what, options=options, command=command)
    for file, (what, options, command) in _SCRIPTS.items()
}


def write_scripts(folder: _Path) -> None:
    """Put the scripts into a folder of checkpoints, unless they are there."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for file, text in SCRIPTS.items():
        path = Path(folder) / file
        if path.is_file() and path.read_text(encoding="utf-8", errors="replace") == text:
            continue
        partial = path.with_name(f".{path.stem}.{os.getpid()}.py")
        partial.write_text(text, encoding="utf-8")
        make_executable(partial)
        os.replace(partial, path)


def make_executable(path: _Path) -> None:
    """Let everyone execute a script; where the storage knows no permissions, say so and go on."""
    try:
        os.chmod(path, 0o755)
    except OSError as error:
        logger.info("%s: cannot be made executable: %s", path, error)
