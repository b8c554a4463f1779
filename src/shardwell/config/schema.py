"""The configuration as frozen types: every key that has an effect, its default and its description.

The types know no files, no ranks, and "auto" only where it is a value of its own; `load` turns a user's file into them.
DeepSpeed's keys without effect are rows of `shardwell.config.deepspeed_keys`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal

from pydantic import Field, PrivateAttr, StrictStr

from shardwell.config.block import ConfigBlock, keys_set, leaves, plain_values
from shardwell.config.field_types import (
    AutocastDtype,
    Budget,
    CodecKind,
    Count,
    CountOrAuto,
    Device,
    Dtype,
    Flag,
    FlagOrAuto,
    Paths,
    PositiveCount,
    PositiveCountOrAuto,
    PositiveReal,
    Power,
    Real,
    ReduceOp,
    Schedule,
    ShareOrAuto,
    Size,
    Stage,
    StepsOrNever,
)
from shardwell.config.monitoring import (
    CometConfig,
    CommsLoggerConfig,
    CsvMonitorConfig,
    FlopsProfilerConfig,
    TensorBoardConfig,
    WandbConfig,
)
from shardwell.config.notes import Note


class OptimizerConfig(ConfigBlock):
    """The optimizer to build if the caller of `initialize` passes none."""

    type: StrictStr = Field(min_length=1, description="Name of the optimizer, such as AdamW.")
    params: dict[str, Any] = Field(
        default={}, description="Arguments of the optimizer; those left out have their defaults."
    )


class SchedulerConfig(ConfigBlock):
    """The learning-rate schedule to build if the caller of `initialize` passes none."""

    type: Schedule = Field(description="Name of the schedule, such as WarmupLR.")
    params: dict[str, Any] = Field(
        default={}, description="Arguments of the schedule; those left out have their defaults."
    )


class Bf16Config(ConfigBlock):
    """Compute in bfloat16 over fp32 master weights."""

    enabled: Flag = Field(default=False, description="Run forward and backward in bfloat16.")
    bf16_master_weights_and_grads: Flag = Field(
        default=False, description="Master weights and accumulated gradients are bfloat16, too; needs the next key."
    )
    bf16_optimizer_states: Flag = Field(default=False, description="Optimizer states are bfloat16; needs the last key.")


class Fp16Config(ConfigBlock):
    """Compute in float16 over fp32 master weights, with a loss scale."""

    enabled: Flag = Field(default=False, description="Run forward and backward in float16.")
    loss_scale: Real = Field(default=0.0, description="Fixed loss scale; 0 = dynamic.")
    initial_scale_power: Power = Field(default=16, description="The dynamic scale starts at 2**this.")
    loss_scale_window: PositiveCount = Field(
        default=1000, description="Steps without overflow before the dynamic scale doubles."
    )
    hysteresis: PositiveCount = Field(default=2, description="Overflows before the dynamic scale is halved.")
    consecutive_hysteresis: Flag = Field(
        default=False, description="Count hysteresis anew after each step without overflow."
    )
    min_loss_scale: Real = Field(default=1.0, description="Smallest dynamic scale.")


class AutocastConfig(ConfigBlock):
    """The settings of torch.autocast, which the engine enters for each forward."""

    enabled: Flag = Field(default=False, description="Run forward in torch.autocast over fp32 weights.")
    dtype: AutocastDtype = Field(default="bf16", description="Lower precision: bf16 or fp16; null means bf16.")


class DataTypesConfig(ConfigBlock):
    """Dtypes of values that the engine keeps between calls."""

    grad_accum_dtype: Dtype | None = Field(
        default=None, description="Dtype in which gradients accumulate; null means fp32."
    )


class ActivationCheckpointingConfig(ConfigBlock):
    """The storage of the inputs of recomputed blocks until backward."""

    partition_activations: Flag = Field(
        default=False,
        description="Store 1/N of a checkpointed input that N ranks hold alike, and all-gather it in backward.",
    )
    cpu_checkpointing: Flag = Field(default=False, description="Store checkpointed inputs in host memory.")


class CheckpointConfig(ConfigBlock):
    """DeepSpeed's block about checkpoints: its keys have no effect, and are rows of `config.deepspeed_keys`."""


class OffloadOptimizerConfig(ConfigBlock):
    """The storage of master weights and optimizer state below the device (ZeRO-Offload, ZeRO-Infinity)."""

    device: Device = Field(
        default="none", description="Where optimizer state is stored: none = GPU, cpu = host memory, nvme = disk."
    )
    nvme_path: Paths | None = Field(
        default=None, description="Folders for nvme, one on each local NVMe disk, with ',' between them."
    )
    buffer_count: PositiveCount = Field(
        default=4,
        description="Pinned buffers for gradients in flight to the host, as large as the largest unit; with nvme also "
        "the number of units whose state may be in host memory, at least 3.",
    )
    ratio: ShareOrAuto = Field(
        default=1.0,
        description="Share of the model that is offloaded, from its end; auto = what does not fit on the GPU, which "
        "is shardwell.placement auto. Left out, with cpu, state of the first units stays on a GPU that has room.",
    )


class OffloadParamConfig(ConfigBlock):
    """The storage of parameter shards below the device (ZeRO-Infinity)."""

    device: Device = Field(
        default="none", description="Where parameter shards are stored: none = GPU, cpu = host memory, nvme = disk."
    )
    nvme_path: Paths | None = Field(
        default=None, description="Folders for nvme, one on each local NVMe disk, with ',' between them."
    )
    buffer_count: PositiveCount = Field(
        default=5, description="Pinned buffers for shards in flight from disk, as large as the largest shard."
    )
    max_in_cpu: Size = Field(
        default=1_000_000_000,
        description="With nvme: elements of each rank that stay in host memory instead, from the first units on.",
    )


class AioConfig(ConfigBlock):
    """The settings of transfers between host memory and NVMe."""

    block_size: PositiveCount = Field(default=1_048_576, description="Bytes of one read or write, and of a stripe.")
    queue_depth: PositiveCount = Field(default=8, description="Blocks in flight for each path.")
    intra_op_parallelism: PositiveCount = Field(default=1, description="I/O queues of that depth for each path.")
    single_submit: Flag = Field(default=False, description="One system call for each block.")
    overlap_events: Flag = Field(
        default=True, description="A new block starts when one ends; false: when all have ended."
    )


class LeafModuleConfig(ConfigBlock):
    """Modules that are unsharded and resharded as one unit."""

    classes: tuple[StrictStr, ...] = Field(default=(), description="Class names whose instances are one unit each.")
    names: tuple[StrictStr, ...] = Field(default=(), description="Full names of modules that are one unit each.")
    name_suffixes: tuple[StrictStr, ...] = Field(
        default=(), description="Modules whose names end so are one unit each."
    )


class ZeroConfig(ConfigBlock):
    """The settings of ZeRO: what is sharded over the ranks, and how shards are communicated."""

    stage: Stage = Field(default=0, description="0 nothing, 1 optimizer state, 2 + gradients, 3 + parameters sharded.")
    offload_optimizer: OffloadOptimizerConfig = Field(
        default=OffloadOptimizerConfig(), description="Where optimizer state is stored."
    )
    offload_param: OffloadParamConfig = Field(
        default=OffloadParamConfig(), description="Where parameter shards are stored."
    )
    stage3_max_live_parameters: Size = Field(
        default=1_000_000_000, description="Elements that may be unsharded at the same time before prefetch waits."
    )
    stage3_max_reuse_distance: Size = Field(
        default=0,
        description="Keep a unit unsharded until backward if fewer elements run in between; 0 = always reshard.",
    )
    stage3_prefetch_bucket_size: Size = Field(
        default=50_000_000,
        description="0 = no prefetch; else the next unit is all-gathered while one runs, whatever its size, and with "
        "NCCL the one after it, if both have no more elements than this.",
    )
    stage3_param_persistence_threshold: CountOrAuto = Field(
        default="auto",
        description="Smaller parameters stay unsharded; auto = 100,000, and at most 1% of the model in all.",
    )
    stage3_model_persistence_threshold: Size | None = Field(
        default=None, description="Elements that may stay unsharded in total; null = no limit."
    )
    zero_hpz_partition_size: PositiveCountOrAuto = Field(
        default=1,
        description="hpZ: consecutive ranks that share secondary shards, usually those of a node; 1 = none; auto = the "
        "ranks of a node, if all-gathers are faster there.",
    )
    zero_quantized_weights: FlagOrAuto = Field(
        default=False,
        description="qwZ: quantise all-gathers as shardwell.codecs.weights says, stage 3; auto = if that is faster.",
    )
    zero_quantized_nontrainable_weights: Flag = Field(
        default=False, description="Store and all-gather frozen parameters as shardwell.codecs.frozen says, stage 3."
    )
    zero_quantized_gradients: FlagOrAuto = Field(
        default=False,
        description="qgZ: quantise reduce-scatters as shardwell.codecs.inside and between say, stages 2 and 3; auto = "
        "if that is faster.",
    )
    leaf_module: LeafModuleConfig = Field(default=LeafModuleConfig(), description="Modules that are one unit each.")


class CodecsConfig(ConfigBlock):
    """Formats of quantised collectives (ZeRO++) and of quantised frozen parameters."""

    weights: CodecKind = Field(default="int8", description="Parameters, with zero_quantized_weights.")
    frozen: CodecKind = Field(
        default="int8",
        description="Frozen parameters, stored and all-gathered, with zero_quantized_nontrainable_weights.",
    )
    inside: CodecKind = Field(default="int8", description="Gradients inside a node, with zero_quantized_gradients.")
    between: CodecKind = Field(default="int4", description="Gradients between nodes, with zero_quantized_gradients.")
    feedback: Flag = Field(
        default=False,
        description="Keep the quantisation error of gradients between nodes, and add it to the next ones.",
    )


class MemoryConfig(ConfigBlock):
    """The part of each tier that `placement: "auto"` may fill: a share of the free bytes (up to 1), or bytes."""

    device: Budget = Field(
        default=0.75, description="On each GPU; the rest is left for activations, unsharded units and buffers."
    )
    host: Budget = Field(default=0.9, description="In the memory of each node, by all its ranks together.")
    disk: Budget = Field(default=0.95, description="Under nvme_path on each node, by all its ranks together.")


class TensorParallelConfig(ConfigBlock):
    """The ranks that hold parts of the same tensors, and the plan by which a model that comes whole is cut."""

    autotp_size: Count = Field(default=0, description="Ranks that share each tensor; 0 and 1 = none.")
    plan: Literal["auto", "none"] | dict[StrictStr, StrictStr] = Field(
        default="auto",
        description="How a whole model is cut: patterns of module names -> styles such as colwise and rowwise; auto = "
        "the model's own plan; none = it comes cut.",
    )
    partition_config: dict[str, Any] | None = Field(
        default=None, description="DeepSpeed's layer_specs, instead of a plan: patterns of parameters to be cut."
    )
    sequence_parallel: Flag = Field(
        default=False, description="Split activations between cut layers over the same ranks, along the sequence."
    )
    tp_overlap_comm: Flag = Field(
        default=False,
        description="Sum gradients of inputs of cut layers beside the products of their weights' gradients.",
    )

    @property
    def size(self) -> int:
        """The number of ranks that share each tensor, at least 1."""
        return max(self.autotp_size, 1)


class PipelineConfig(ConfigBlock):
    """The stages that a model is divided into, and the schedule in which ranks run them."""

    stages: PositiveCount = Field(default=1, description="Pipeline stages; 1 = no pipeline.")
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1"] = Field(
        default="1f1b", description="Order of forwards and backwards."
    )
    chunks: PositiveCount = Field(default=1, description="Parts of the model on each stage, for interleaved schedules.")
    partition: StrictStr = Field(default="best", description="How the layers are divided over the stages.")
    activation_checkpoint_interval: Count = Field(
        default=0, description="Recompute the activations of so many layers at a time; 0 = none."
    )


class ShardwellConfig(ConfigBlock):
    """Keys that only shardwell has."""

    divergence_timeout: PositiveReal = Field(
        default=60.0, description="Seconds after which the log names a rank that others wait for, and its collective."
    )
    find_unused_parameters: Flag = Field(
        default=False,
        description="Ranks may run different modules, at stages 0 to 2: gradients are averaged after backward.",
    )
    expert_parallel_size: PositiveCount = Field(
        default=1, description="Ranks that share the experts of each layer, and send tokens to each other; 1 = none."
    )
    nonfinite: Literal["auto", "error", "skip"] = Field(
        default="auto",
        description="On inf or NaN gradients: raise, or skip the step; auto = raise in the first 10 steps, then skip; "
        "raise if 50 follow one another.",
    )
    shard_at_world_one: Flag = Field(
        default=False,
        description="With one rank, all-gather and reshard as with several, instead of staying unsharded.",
    )
    commit: Literal["auto", "after_norm", "at_once", "shadow"] = Field(
        default="auto",
        description="When a host update becomes valid: after the norm, immediately (at_once) or by speculation (shadow)"
        "; auto = the fastest that gives the same numbers.",
    )
    moments: Literal["fp32", "8bit"] = Field(
        default="fp32",
        description="Format of Adam's moments in host memory and on disk.",
    )
    gradients: Literal["auto", "host", "disk"] = Field(
        default="auto",
        description="Where gradients wait for the norm, or for more micro-steps, if optimizer state is on disk; auto = "
        "in host memory as far as it suffices, then on disk.",
    )
    placement: Literal["asked", "auto"] = Field(
        default="asked",
        description="Where units are stored: asked = where the offload blocks say; auto = on the fastest tier that has "
        "room, and on none below those in the offload blocks.",
    )
    memory: MemoryConfig = Field(default=MemoryConfig(), description="How much of each tier placement may fill.")
    codecs: CodecsConfig = Field(default=CodecsConfig(), description="Formats of quantised values.")
    keep_last: PositiveCount | None = Field(
        default=None, description="Checkpoints to keep in a folder; older ones are removed after a save; null = all."
    )
    async_save: Flag = Field(default=False, description="save_checkpoint writes in the background by default.")
    keep_fp32_buffers: tuple[StrictStr, ...] = Field(
        default=("rotary_emb.inv_freq", "rotary_emb.original_inv_freq"),
        description="Buffers whose names end so keep their dtype under bf16 and fp16; other floating ones are cast.",
    )
    keep_pages: Flag = Field(default=True, description="CPU malloc keeps freed pages instead of returning them.")
    bundle_size: CountOrAuto = Field(
        default="auto",
        description="Elements up to which small neighbouring blocks form one unit; 0 = each is a unit; auto = 4,194,304"
        ", at most 1/32 of the model and a quarter of stage3_max_live_parameters; in pipelines at stages 0, 1: 2^26.",
    )
    gathers_take_turns: Flag = Field(
        default=False,
        description="With NCCL, every other all-gather is on the communicator of reductions while that is idle, and a "
        "trained forward gathers two units ahead: for links that one communicator does not fill (sockets).",
    )
    keep_frozen: CountOrAuto = Field(
        default="auto",
        description="Elements of frozen parameters that may stay unsharded at stage 3; auto = as many as fit into half "
        "of the GPU memory that is free at the first step, 0 on CPU.",
    )


class Config(ConfigBlock):
    """The effective configuration."""

    train_batch_size: PositiveCount | None = Field(
        default=None, description="Samples per optimizer step: micro x accumulation x ranks that train on other rows."
    )
    train_micro_batch_size_per_gpu: PositiveCount | None = Field(
        default=None, description="Samples per rank in one forward and backward."
    )
    gradient_accumulation_steps: PositiveCount | None = Field(
        default=None, description="Micro-batches per optimizer step."
    )
    gradient_clipping: Real = Field(default=0.0, description="Largest global gradient norm; 0 = no clipping.")
    managed_gradient_accumulation: Flag = Field(
        default=True, description="step() applies gradients at counted boundaries; false = at each call."
    )
    gradient_allreduce_op: ReduceOp = Field(
        default="mean", description="Gradients of the ranks are averaged (mean) or summed (sum)."
    )
    prescale_gradients: Flag = Field(
        default=False, description="Divide gradients by the number of ranks before they are summed, not after."
    )
    gradient_predivide_factor: PositiveReal = Field(
        default=1.0, description="Divide gradients by this before they are summed, and by the rest after."
    )
    communication_data_type: Dtype | None = Field(
        default=None, description="Dtype of gradient reduction; null = the gradients' own."
    )
    steps_per_print: StepsOrNever = Field(
        default=None, description="Steps between two lines of progress; null, 0 = none."
    )
    wall_clock_breakdown: Flag = Field(
        default=False, description="Add the time of forward, backward and step to the lines of progress."
    )
    memory_breakdown: Flag = Field(
        default=False, description="Add the bytes of each state and tier to the lines of progress."
    )
    flops_profiler: FlopsProfilerConfig = Field(
        default=FlopsProfilerConfig(), description="A count of FLOPs by module, in one step."
    )
    comms_logger: CommsLoggerConfig = Field(
        default=CommsLoggerConfig(), description="Calls, bytes, time and bandwidth of collectives."
    )
    tensorboard: TensorBoardConfig = Field(default=TensorBoardConfig(), description="Event files for TensorBoard.")
    csv_monitor: CsvMonitorConfig = Field(default=CsvMonitorConfig(), description="Files of comma-separated values.")
    wandb: WandbConfig = Field(default=WandbConfig(), description="Metrics for Weights & Biases.")
    comet: CometConfig = Field(default=CometConfig(), description="Metrics for Comet.")
    optimizer: OptimizerConfig | None = Field(default=None, description="Optimizer to build if none is passed.")
    scheduler: SchedulerConfig | None = Field(default=None, description="Schedule to build if none is passed.")
    bf16: Bf16Config = Field(default=Bf16Config(), description="bfloat16 training.")
    fp16: Fp16Config = Field(default=Fp16Config(), description="float16 training.")
    torch_autocast: AutocastConfig = Field(default=AutocastConfig(), description="torch.autocast by the engine.")
    data_types: DataTypesConfig = Field(default=DataTypesConfig(), description="Dtypes of values kept between calls.")
    activation_checkpointing: ActivationCheckpointingConfig = Field(
        default=ActivationCheckpointingConfig(), description="How checkpointed inputs are stored."
    )
    checkpoint: CheckpointConfig = Field(
        default=CheckpointConfig(), description="DeepSpeed's keys about checkpoints, which have no effect."
    )
    tensor_parallel: TensorParallelConfig = Field(
        default=TensorParallelConfig(), description="Ranks that hold parts of the same tensors."
    )
    pipeline: PipelineConfig = Field(default=PipelineConfig(), description="Ranks that run different modules.")
    sequence_parallel_size: PositiveCount = Field(
        default=1, description="Ranks that train on parts of the same sequences; 1 = none."
    )
    aio: AioConfig = Field(default=AioConfig(), description="How bytes move to and from NVMe.")
    zero_optimization: ZeroConfig = Field(default=ZeroConfig(), description="What is sharded, and where it is stored.")
    shardwell: ShardwellConfig = Field(default=ShardwellConfig(), description="Keys that only shardwell has.")

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)
    _notes: tuple[Note, ...] = PrivateAttr(default=())
    _inert_keys: dict[str, Any] = PrivateAttr(default_factory=dict)

    def model_post_init(self, _context: Any) -> None:
        given = keys_set(self)
        self._origins = {key: "python" if key in given else "default" for key, _ in leaves(self)}

    @property
    def origins(self) -> Mapping[str, str]:
        """The origin of every value, by dotted key."""
        return MappingProxyType(self._origins)

    def with_origins(self, origins: Mapping[str, str], values: Mapping[str, Any] | None = None) -> Config:
        """Return a copy with other `origins`, and with some top-level `values` replaced."""
        copy = self.model_copy(update=dict(values or {}))
        copy._origins = dict(origins)
        return copy

    def with_block(self, name: str, block: ConfigBlock) -> Config:
        """Return a copy with another block of this name; values keep their origins."""
        copy = self.model_copy(update={name: block})
        copy._origins, copy._notes, copy._inert_keys = dict(self._origins), self._notes, self._inert_keys
        return copy

    @property
    def notes(self) -> tuple[Note, ...]:
        """Notes about the source, such as old names that were translated."""
        return self._notes

    @property
    def inert_keys(self) -> Mapping[str, Any]:
        """The keys of the source that have no effect, with their values."""
        return MappingProxyType(self._inert_keys)

    def with_notes(self, notes: Iterable[Note], inert_keys: Mapping[str, Any]) -> Config:
        """Return a copy with notes about its source, and with the keys there that have no effect."""
        copy = self.model_copy()
        copy._notes, copy._inert_keys = tuple(notes), dict(inert_keys)
        return copy

    def to_dict(self) -> dict[str, Any]:
        """Return all values in force as plain JSON values; `load` reads them back."""
        plain: dict[str, Any] = plain_values(self)
        return plain
