"""Pipeline parallelism: models are divided into stages, and schedules say which stage does what when."""

from shardwell.pipeline.layers import LayerSpec, TiedLayerSpec
from shardwell.pipeline.module import PipelineModule
from shardwell.pipeline.schedules import Schedule, make_schedule, read_schedule
from shardwell.pipeline.simulation import Costs, simulate
from shardwell.pipeline.split import SplitModel, split

__all__ = [
    "Costs",
    "LayerSpec",
    "PipelineModule",
    "Schedule",
    "SplitModel",
    "TiedLayerSpec",
    "make_schedule",
    "read_schedule",
    "simulate",
    "split",
]
