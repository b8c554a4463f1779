"""Blocks of the configuration about what rank 0 prints, profiles and writes for people; they change no number."""

from __future__ import annotations

from pydantic import Field, StrictStr

from shardwell.config.block import ConfigBlock
from shardwell.config.field_types import Depth, Flag, Paths, PositiveCount, Real


class FlopsProfilerConfig(ConfigBlock):
    """A count of floating-point operations by module, in one step."""

    enabled: Flag = Field(default=False, description="Count the FLOPs of one forward by module, and print a table.")
    profile_step: PositiveCount = Field(default=1, description="The step whose first forward is profiled.")
    module_depth: Depth = Field(default=-1, description="How deep the table goes; -1 = down to the last module.")
    top_modules: PositiveCount = Field(default=1, description="Modules with the most FLOPs to name at each depth.")
    detailed: Flag = Field(default=True, description="Print a row for every module; false: only the summary.")
    output_file: Paths | None = Field(default=None, description="File to write the table to; null = standard output.")
    recompute_fwd_factor: Real = Field(
        default=0.0, description="Forwards that are recomputed in backward, for the FLOPs that the hardware performs."
    )


class CommsLoggerConfig(ConfigBlock):
    """A log of collectives: calls, bytes, time and bandwidth."""

    enabled: Flag = Field(default=False, description="Time every collective; print a table with each progress line.")
    verbose: Flag = Field(default=False, description="Print each collective when it has ended, too.")
    prof_all: Flag = Field(default=True, description="Log all collectives; false: only those of prof_ops.")
    prof_ops: tuple[StrictStr, ...] = Field(
        default=(), description="Collectives to log if prof_all is false: all_gather, reduce_scatter, publish."
    )
    debug: Flag = Field(default=False, description="Name the unit in each line of verbose.")


class TensorBoardConfig(ConfigBlock):
    """Event files for TensorBoard."""

    enabled: Flag = Field(default=False, description="Write loss, rates and speed of every step for TensorBoard.")
    output_path: Paths = Field(default="", description="Folder for event files; empty = ./runs.")
    job_name: StrictStr = Field(default="shardwell", description="Folder of this run inside output_path.")


class CsvMonitorConfig(ConfigBlock):
    """Files of comma-separated values."""

    enabled: Flag = Field(default=False, description="Write loss, rates and speed of every step as CSV files.")
    output_path: Paths = Field(default="", description="Folder for the files; empty = ./csv_monitor.")
    job_name: StrictStr = Field(default="shardwell", description="Folder of this run inside output_path.")


class WandbConfig(ConfigBlock):
    """Weights & Biases."""

    enabled: Flag = Field(default=False, description="Send loss, rates and speed of every step to Weights & Biases.")
    project: StrictStr = Field(default="shardwell", description="Name of the project.")
    group: StrictStr | None = Field(default=None, description="Name of the group of runs.")
    team: StrictStr | None = Field(default=None, description="Name of the entity that owns the project.")


class CometConfig(ConfigBlock):
    """Comet."""

    enabled: Flag = Field(default=False, description="Send loss, rates and speed to Comet.")
    samples_log_interval: PositiveCount = Field(default=100, description="Samples between two values of a metric.")
    project: StrictStr | None = Field(default=None, description="Name of the project.")
    workspace: StrictStr | None = Field(default=None, description="Name of the workspace.")
    api_key: StrictStr | None = Field(default=None, description="Key of the account; null = Comet's own settings.")
    experiment_name: StrictStr | None = Field(default=None, description="Name of the experiment.")
    experiment_key: StrictStr | None = Field(default=None, description="Key of an experiment to go on with.")
    online: Flag | None = Field(default=None, description="Send values at once; false: write an archive.")
    mode: StrictStr | None = Field(default=None, description="get, create or get_or_create an experiment.")
