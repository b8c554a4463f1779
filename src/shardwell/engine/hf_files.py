"""The contents of the files of Hugging Face's libraries besides weights, from the model when it is saved.

Exports write them: config.json, generation_config.json and, for adapters of peft, adapter_config.json with the names
that peft gives to their weights. Neither library is imported unless the model uses it.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwell.sharding import released

_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initialisations that change the base model


def model_config(model: nn.Module) -> dict[str, Any] | None:
    """Return the configuration of a Hugging Face model, with its class; None for other models."""
    base = _base(model)
    found = _json_of(getattr(base, "config", None))
    if found is not None and not found.get("architectures"):
        found["architectures"] = [type(base).__name__]
    return found


def generation_config(model: nn.Module) -> dict[str, Any] | None:
    """Return the generation configuration, if the model has one."""
    return _json_of(getattr(_base(model), "generation_config", None))


def name_or_path(model: nn.Module) -> str | None:
    """Return where the model was loaded from: its tokenizer may be there."""
    base = _base(model)
    found = getattr(base, "name_or_path", None) or getattr(getattr(base, "config", None), "name_or_path", None)
    return os.path.abspath(found) if isinstance(found, str) and os.path.isdir(found) else found or None


def adapters(model: nn.Module) -> dict[str, Any] | None:
    """Return the adapters of a peft model: their configurations and the names of their tensors. None for other models.

    `missing` says why the tensors of an adapter cannot be separated from those of the model.
    """
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, dict) or not configs or "peft" not in sys.modules:
        return None
    state = model.state_dict(keep_vars=True)
    names = {id(value): name for name, value in reversed(list(state.items()))}
    found: dict[str, Any] = {}
    covered: set[int] = set()
    for adapter, config in configs.items():
        try:
            tensors, problem = _tensors_of(model, adapter, config, state)
        except Exception as error:  # for example another version of peft; a checkpoint is worth more than its export
            tensors, problem = {}, f"peft raised {type(error).__name__}: {error}"
        lost = [key for key, value in tensors.items() if id(value) not in names]
        problem = problem or (f"peft computes {lost[0]!r} when it saves" if lost else "")
        covered |= {id(value) for value in tensors.values()}
        found[adapter] = {
            "config": _adapter_config(model, config),
            "names": {key: names[id(value)] for key, value in tensors.items() if id(value) in names},
            "missing": problem or None,
        }
    others = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in covered]
    active = getattr(model, "active_adapters", None)
    active = active() if callable(active) else active
    return {"of": found, "active": list(active or found), "trained_beside": others}


def _tensors_of(model: nn.Module, adapter: str, config: Any, state: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the tensors of an adapter by peft's names, and the reason if they are not known."""
    import peft

    if config.is_prompt_learning:
        if config.peft_type != "PROMPT_TUNING":
            return {}, f"peft computes the prompt of {config.peft_type.value} when it saves"
        return {"prompt_embeddings": model.get_parameter(f"prompt_encoder.{adapter}.embedding.weight")}, ""
    start = str(getattr(config, "init_lora_weights", "")).lower()
    if start.startswith(_CHANGE_THE_BASE):
        return {}, f"init_lora_weights={start!r} has changed the weights of the base model"
    with _NamesOnly():
        tensors = peft.get_peft_model_state_dict(
            model, state, adapter, save_embedding_layers=_is_resized(model, config.base_model_name_or_path)
        )
    prefix = "" if isinstance(model, peft.PeftModel) else "base_model.model."  # the prefix of adapters in Transformers
    return {prefix + key: value for key, value in tensors.items()}, ""


class _NamesOnly(TorchFunctionMode):
    """A mode in which state dictionaries give names only, so that released parameters may be in them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.detach and isinstance(args[0], nn.Parameter) and released.is_owned(args[0]):
            return args[0]
        return func(*args, **(kwargs or {}))


def _is_resized(model: nn.Module, path: str | None) -> bool:
    """Return whether the vocabulary differs from that of the base model, as far as this machine knows."""
    file = Path(path or ".") / "config.json"
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    if not path or size is None or not file.is_file():
        return False
    before = json.loads(file.read_text(encoding="utf-8")).get("vocab_size")
    return before is not None and before != size


def _adapter_config(model: nn.Module, config: Any) -> dict[str, Any]:
    """Return what peft would write to adapter_config.json."""
    config = copy.deepcopy(config)
    base = _base(model)
    config.inference_mode = True
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = name_or_path(model)
    mapping = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder, auto_mapping_dict=mapping if config.task_type is None else None)
        found: dict[str, Any] = json.loads((Path(folder) / "adapter_config.json").read_text(encoding="utf-8"))
    return found


def _base(model: Any) -> Any:
    """Return the model without peft's wrapper."""
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def _json_of(config: Any) -> dict[str, Any] | None:
    text = getattr(config, "to_json_string", None)
    found = json.loads(text()) if callable(text) else None
    return found if isinstance(found, dict) else None
