"""Models of Transformers, built from the configuration that a checkpoint holds, for exports that need their classes.

Whoever wrote the checkpoint chose that configuration, so nothing that it names is imported or called but a model class
of Transformers. Code of its own (`auto_map`) and kernels by name are left out of it.
"""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwell.errors import CheckpointError

# keys that name code: of the model, or of kernels that Transformers would download
_CODE = ("auto_map", "attn_implementation", "_attn_implementation", "experts_implementation", "custom_pipelines")


def build_model(config: Any, what_for: str) -> Any:
    """Return the model that a configuration describes; `what_for` begins the messages of errors."""
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise CheckpointError(f"{what_for} needs transformers, which knows the model's layers: {error}") from None
    names = config.get("architectures") if isinstance(config, Mapping) else None
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    kind = getattr(transformers, name, None) if name.isidentifier() else None
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise CheckpointError(f"{what_for} needs a model of Transformers; it has no {str(names)[:100]}")
    plain = {key: value for key, value in config.items() if key not in _CODE}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(plain), encoding="utf-8")
        return kind(transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False))
