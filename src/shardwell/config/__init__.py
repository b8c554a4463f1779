"""The configuration: read once at the edge into frozen types, every value with its origin."""

from shardwell.config.block import ConfigBlock
from shardwell.config.explain import ExplainLine, explain, table
from shardwell.config.field_types import SCHEDULERS
from shardwell.config.load import PLACEMENT, RATIO, leaves_open, load, stage_is_open, with_stage
from shardwell.config.notes import Note
from shardwell.config.remarks import remarks, told
from shardwell.config.schema import (
    ActivationCheckpointingConfig,
    AioConfig,
    AutocastConfig,
    Bf16Config,
    Config,
    DataTypesConfig,
    Fp16Config,
    LeafModuleConfig,
    MemoryConfig,
    OffloadOptimizerConfig,
    OffloadParamConfig,
    OptimizerConfig,
    SchedulerConfig,
    ShardwellConfig,
    ZeroConfig,
)

__all__ = [
    "PLACEMENT",
    "RATIO",
    "SCHEDULERS",
    "ActivationCheckpointingConfig",
    "AioConfig",
    "AutocastConfig",
    "Bf16Config",
    "Config",
    "ConfigBlock",
    "DataTypesConfig",
    "ExplainLine",
    "Fp16Config",
    "LeafModuleConfig",
    "MemoryConfig",
    "Note",
    "OffloadOptimizerConfig",
    "OffloadParamConfig",
    "OptimizerConfig",
    "SchedulerConfig",
    "ShardwellConfig",
    "ZeroConfig",
    "explain",
    "leaves_open",
    "load",
    "remarks",
    "stage_is_open",
    "table",
    "told",
    "with_stage",
]
