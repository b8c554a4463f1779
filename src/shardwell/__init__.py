"""shardwell: the Zero Redundancy Optimizer as one engine on PyTorch.

Public names are loaded when they are first used, so that the command line does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardwell.errors import (
    BackwardError,
    CheckpointError,
    ConfigError,
    DivergenceError,
    ModelChangedError,
    NonFiniteError,
    PeerError,
    ReleasedParameterError,
    ShardwellError,
)
from shardwell.version import __version__

if TYPE_CHECKING:
    from shardwell import checkpointing, pipeline, sequence_parallel, utils, zero
    from shardwell.cli.notebook import notebook_launcher
    from shardwell.config import Config
    from shardwell.engine import Engine, Initialized, Trace, UnitInfo, initialize

__all__ = [
    "BackwardError",
    "CheckpointError",
    "Config",
    "ConfigError",
    "DivergenceError",
    "Engine",
    "Initialized",
    "ModelChangedError",
    "NonFiniteError",
    "PeerError",
    "ReleasedParameterError",
    "ShardwellError",
    "Trace",
    "UnitInfo",
    "__version__",
    "checkpointing",
    "initialize",
    "notebook_launcher",
    "pipeline",
    "sequence_parallel",
    "utils",
    "zero",
]

_ROOMS = ("checkpointing", "pipeline", "sequence_parallel", "utils", "zero")
_HOME = {
    "Config": "shardwell.config",
    "notebook_launcher": "shardwell.cli.notebook",
    **dict.fromkeys(("Engine", "Initialized", "Trace", "UnitInfo", "initialize"), "shardwell.engine"),
}


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"shardwell.{name}")
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'shardwell' has no attribute '{name}'")


def __dir__() -> list[str]:
    """Return the public names, also those that are not loaded yet, for tab completion."""
    return sorted(__all__)
