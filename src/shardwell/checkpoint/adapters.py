"""Exports adapters of peft from a checkpoint: as files that peft reads, or merged into their base model.

The checkpoint records which weights belong to adapters, and under which names. Merging is left to peft: the full model
is built in host memory, and peft and Transformers are needed.
"""

from __future__ import annotations

import importlib
import json
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwell.checkpoint.manifest import plain_name
from shardwell.checkpoint.parsing import show
from shardwell.checkpoint.sources.base import MODEL, Source, StoredTensor
from shardwell.checkpoint.sources.reading import Progress, read_full
from shardwell.checkpoint.transformers_models import build_model
from shardwell.errors import CheckpointError

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_MARKS = (".lora_A.", ".lora_B.", ".lora_embedding_A.", ".base_layer.", ".ia3_l.", "prompt_encoder.")
_PREFIX = "base_model.model."
_MAIN = "default"  # the adapter that peft writes to the folder itself


def adapters_of(source: Source) -> Mapping[str, Any] | None:
    """Return the adapters of a checkpoint. Raise if it has weights of adapters that it does not describe."""
    found: Mapping[str, Any] | None = source.values.get("adapters")
    if found:
        return found
    marked = [name for name in source.tensors if name.startswith(MODEL) and any(mark in name for mark in _MARKS)]
    if marked and source.values.get("model_config"):
        raise CheckpointError(
            f"{source.where}: {marked[0]!r} is an adapter's, but the checkpoint does not say how peft describes it, so "
            "the export would load without it. Load it into an engine of the same model and save it again."
        )
    return None


def files_of(source: Source, adapters: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, str], dict[str, Any]]]:
    """Return, for each adapter, the folder that peft expects it in, {peft's name: tensor}, and its configuration."""
    stored_under = source.values.get("aliases", {})
    for adapter, one in adapters["of"].items():
        if not plain_name(adapter):
            raise CheckpointError(f"{source.where}: adapter {show(adapter)}: peft reads it from a folder of that name")
        if one.get("missing"):
            raise CheckpointError(
                f"{source.where}: adapter {adapter!r} cannot be written by itself: {one['missing']}. Use --merge."
            )
        beside = adapters.get("trained_beside") or []
        if beside:
            raise CheckpointError(
                f"{source.where}: '{beside[0]}' (of {len(beside)}) was trained besides the adapters and would be lost: "
                "export with --merge, or name its module in modules_to_save of the adapter"
            )
        names = {key: MODEL + stored_under.get(name, name) for key, name in one["names"].items()}
        lost = [name for name in names.values() if name not in source.tensors]
        if lost or not names:
            raise CheckpointError(f"{source.where}: adapter {adapter!r}: {(lost or ['all of it'])[0]!r} is not there")
        yield ("" if adapter == _MAIN else adapter), names, one["config"]


class Merged:
    """A source that reads a model into which adapters were merged."""

    def __init__(self, where: str, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        self.where, self.values, self.bytes_read = where, values, 0
        self._tensors = {MODEL + name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        self.tensors = {name: StoredTensor(tensor.dtype, tuple(tensor.shape)) for name, tensor in self._tensors.items()}

    def read(self, name: str, start: int, stop: int) -> Tensor:
        return self._tensors[name].view(-1)[start:stop]

    def close(self) -> None:
        pass


def merge(source: Source, progress: Progress | None = None) -> Merged:
    """Return the base model with the active adapters merged in; each weight keeps its stored dtype."""
    adapters = adapters_of(source)
    if adapters is None:
        raise CheckpointError(f"{source.where}: holds no adapters that could be merged")
    if source.values.get("frozen_excluded"):
        raise CheckpointError(f"{source.where}: was saved without its frozen weights, into which adapters merge")
    config = source.values.get("model_config")
    if not config:
        raise CheckpointError(f"{source.where}: merging needs a model of Transformers; this one has no configuration")
    wide = torch.float64 if any(one.dtype is torch.float64 for one in source.tensors.values()) else torch.float32
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            model = _build(config, adapters).to(wide)
            dtypes = _fill(model, source, progress)
            base = model.merge_and_unload(adapter_names=list(adapters["active"]))
    except CheckpointError:
        raise
    except Exception as error:  # whatever peft and Transformers raise about their own files
        raise CheckpointError(f"{source.where}: cannot be merged ({type(error).__name__}: {error})") from error
    tensors: dict[str, Tensor] = {}
    seen: set[tuple[int, torch.Size]] = set()
    for name, tensor in base.state_dict().items():
        if (tensor.data_ptr(), tensor.shape) not in seen:  # a tied weight is written once
            seen.add((tensor.data_ptr(), tensor.shape))
            tensors[name] = tensor.to(dtypes.get(name, tensor.dtype))
    kept = ("model_config", "generation_config", "name_or_path")
    return Merged(source.where, tensors, {key: source.values.get(key) for key in kept})


def _build(config: Mapping[str, Any], adapters: Mapping[str, Any]) -> Any:
    """Return the model with its adapters and arbitrary values."""
    try:
        peft = importlib.import_module("peft")
    except ImportError as error:
        raise CheckpointError(f"merging needs peft and transformers: {error}") from None
    model = build_model(config, "merging")
    with tempfile.TemporaryDirectory() as folder:
        for adapter, one in adapters["of"].items():
            if one["config"].get("megatron_config"):
                raise CheckpointError(f"adapter {show(adapter)}: megatron_core names modules that peft would import")
            (Path(folder) / CONFIG).write_text(json.dumps(one["config"]), encoding="utf-8")
            settings = peft.PeftConfig.from_pretrained(folder)
            if hasattr(settings, "init_lora_weights"):
                settings.init_lora_weights = True  # the values come from the checkpoint, however they were initialised
            if isinstance(model, peft.PeftModel):
                model.add_adapter(adapter, settings)
            else:
                model = peft.get_peft_model(model, settings, adapter_name=adapter)
    if not hasattr(model, "merge_and_unload"):
        raise CheckpointError(f"adapters of kind {settings.peft_type.value} cannot be merged into weights")
    return model


@torch.no_grad()
def _fill(model: Any, source: Source, progress: Progress | None) -> dict[str, torch.dtype]:
    """Load the values of a model; return the stored dtypes, by the names of the weights without adapters."""
    stored_under = source.values.get("aliases", {})
    dtypes: dict[str, torch.dtype] = {}
    filled: set[int] = set()
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        for candidate in (name, name.removeprefix(_PREFIX)):
            entry = MODEL + stored_under.get(candidate, candidate)
            if entry in source.tensors:
                tensor.copy_(read_full(source, entry, progress))
                filled.add(id(tensor))
                plain = name.removeprefix(_PREFIX).replace(".base_layer.", ".")
                dtypes[plain.replace(".original_module.", ".")] = source.tensors[entry].dtype
                break
    missing = [name for name, tensor in state.items() if id(tensor) not in filled]
    if missing:
        raise CheckpointError(f"{source.where}: lacks '{missing[0]}' (of {len(missing)}) of the model it describes")
    return dtypes
