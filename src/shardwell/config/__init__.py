"""The configuration: read once at the edge into frozen types, every value with its origin."""

from shardwell.config.explain import Line, explain, table
from shardwell.config.load import load
from shardwell.config.schema import (
    AutocastConfig,
    Bf16Config,
    Block,
    Config,
    DataTypesConfig,
    Fp16Config,
    LeafModuleConfig,
    OffloadOptimizerConfig,
    OffloadParamConfig,
    OptimizerConfig,
    ShardwellConfig,
    ZeroConfig,
)

__all__ = [
    "AutocastConfig",
    "Bf16Config",
    "Block",
    "Config",
    "DataTypesConfig",
    "Fp16Config",
    "LeafModuleConfig",
    "Line",
    "OffloadOptimizerConfig",
    "OffloadParamConfig",
    "OptimizerConfig",
    "ShardwellConfig",
    "ZeroConfig",
    "explain",
    "load",
    "table",
]
