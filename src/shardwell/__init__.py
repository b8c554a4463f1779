"""shardwell: the Zero Redundancy Optimizer as one small engine on PyTorch."""

from shardwell import zero
from shardwell.config import Config
from shardwell.engine import Engine, Initialized, Trace, initialize
from shardwell.errors import (
    BackwardError,
    ConfigError,
    DivergenceError,
    ModelChangedError,
    NonFiniteError,
    PeerError,
    ReleasedParameterError,
    ShardwellError,
)
from shardwell.version import __version__

__all__ = [
    "BackwardError",
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
    "__version__",
    "initialize",
    "zero",
]
