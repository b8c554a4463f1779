"""The configuration as frozen types: every key, its default and what it does.

Knows nothing of files, of "auto" or of ranks; `load` turns a user's file into these types.
Types admit every value that a key can mean; `unsupported.ONLY` says which of them are built.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, StrictStr
from pydantic.fields import FieldInfo

from shardwell.config.field_types import (
    AutocastDtype,
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
    Schedule,
    Share,
    ShareOrAuto,
    Size,
    Stage,
    StepsOrNever,
    TagValidation,
)
from shardwell.config.notes import Note


class ConfigBlock(BaseModel):
    """One JSON object of the configuration; frozen, and closed to keys that it does not list."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class OptimizerConfig(ConfigBlock):
    """Which optimizer to build, for a caller that did not pass one."""

    type: StrictStr = Field(min_length=1, description="Name of the optimizer, such as AdamW.")
    params: dict[str, Any] = Field(default={}, description="Arguments of the optimizer; one left out has its default.")


class SchedulerConfig(ConfigBlock):
    """Which learning-rate schedule to build, for a caller that did not pass one."""

    type: Schedule = Field(description="Name of the schedule, such as WarmupLR.")
    params: dict[str, Any] = Field(default={}, description="Arguments of the schedule; one left out has its default.")


class Bf16Config(ConfigBlock):
    """Compute in bfloat16 over fp32 master weights."""

    enabled: Flag = Field(default=False, description="Run forward and backward in bfloat16.")


class Fp16Config(ConfigBlock):
    """Compute in float16 over fp32 master weights, with a loss scale."""

    enabled: Flag = Field(default=False, description="Run forward and backward in float16.")
    auto_cast: Flag = Field(default=False, description="No effect: floating inputs are always cast.")
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
    """torch.autocast, entered by the engine for each forward."""

    enabled: Flag = Field(default=False, description="Run forward in torch.autocast over fp32 weights.")
    dtype: AutocastDtype = Field(default="bf16", description="Lower precision: bf16 or fp16; null means bf16.")
    lower_precision_safe_modules: tuple[StrictStr, ...] | None = Field(
        default=None, description="Classes to run in lower precision; only null is built."
    )


class DataTypesConfig(ConfigBlock):
    """Dtypes of what the engine keeps between calls."""

    grad_accum_dtype: Dtype | None = Field(default=None, description="Dtype gradients add up in; null means fp32.")


class ActivationCheckpointingConfig(ConfigBlock):
    """How inputs of recomputed blocks are kept until backward."""

    partition_activations: Flag = Field(
        default=False,
        description="Keep 1/N of a checkpointed input that N ranks hold alike, and gather it in backward.",
    )
    cpu_checkpointing: Flag = Field(default=False, description="Keep checkpointed inputs in host memory.")
    contiguous_memory_optimization: Flag = Field(
        default=False, description="No effect: the allocator recycles checkpointed inputs."
    )
    number_checkpoints: Count | None = Field(default=None, description="No effect: nothing is reserved ahead.")
    synchronize_checkpoint_boundary: Flag = Field(default=False, description="No effect: order comes from streams.")
    profile: Flag = Field(default=False, description="No effect: use torch.profiler.")


class CheckpointConfig(ConfigBlock):
    """How checkpoints are saved and loaded."""

    tag_validation: TagValidation = Field(
        default="warn", description="No effect: ranks that save under different tags always raise."
    )
    load_universal: Flag = Field(default=False, description="No effect: every checkpoint loads at any number of ranks.")
    use_node_local_storage: Flag = Field(
        default=False, description="Checkpoints on disks of single nodes; only false is built."
    )
    parallel_write: dict[StrictStr, bool] = Field(
        default_factory=dict, description="No effect: all ranks always write in parallel."
    )


class OffloadOptimizerConfig(ConfigBlock):
    """Where the optimizer's state rests."""

    device: Device = Field(default="none", description="Where optimizer state rests: the GPU, the host, or disk.")
    nvme_path: Paths | None = Field(
        default=None, description="Folders for nvme, one on each local drive, with ',' between them."
    )
    pin_memory: Flag = Field(default=False, description="No effect: what travels is pinned, what rests is not.")
    buffer_count: PositiveCount = Field(
        default=4,
        description="Pinned slots for gradients on their way to the host, as large as the largest unit; with nvme also "
        "the units whose state may be in host memory at once, at least 3.",
    )
    pipeline_read: Flag = Field(default=False, description="No effect: the next unit is always read ahead.")
    pipeline_write: Flag = Field(default=False, description="No effect: the last unit is always written behind.")
    fast_init: Flag = Field(default=False, description="No effect: state is first written when it was first changed.")
    ratio: ShareOrAuto = Field(
        default=1.0, description="Share of the model whose state rests there, from its end; auto = what the GPU lacks."
    )


class OffloadParamConfig(ConfigBlock):
    """Where the parameters' shards rest."""

    device: Device = Field(default="none", description="Where parameter shards rest: the GPU, the host, or disk.")
    nvme_path: Paths | None = Field(
        default=None, description="Folders for nvme, one on each local drive, with ',' between them."
    )
    pin_memory: Flag = Field(default=False, description="No effect: shards on the host are always pinned.")
    buffer_count: PositiveCount = Field(
        default=5, description="Pinned slots for shards on their way from disk, as large as the largest."
    )
    buffer_size: Size = Field(default=100_000_000, description="No effect: slots are as large as they must be.")
    max_in_cpu: Size = Field(
        default=1_000_000_000,
        description="With nvme: elements of each rank that rest on the host instead, from the model's begin.",
    )


class AioConfig(ConfigBlock):
    """How bytes move between host memory and drives."""

    block_size: PositiveCount = Field(default=1_048_576, description="Bytes of one read or write, and of a stripe.")
    queue_depth: PositiveCount = Field(default=8, description="Blocks in flight at once, for each path.")
    intra_op_parallelism: PositiveCount = Field(default=1, description="Rings of that depth for each path.")
    single_submit: Flag = Field(default=False, description="A system call for each block.")
    overlap_events: Flag = Field(default=True, description="A new block starts when one ends; false: when all have.")
    use_gds: Flag = Field(default=False, description="From drives straight to the GPU; only false is built.")


class LeafModuleConfig(ConfigBlock):
    """Which modules are gathered and released as one unit."""

    classes: tuple[StrictStr, ...] = Field(default=(), description="Class names whose instances are one unit each.")
    names: tuple[StrictStr, ...] = Field(default=(), description="Full module names that are one unit each.")
    name_suffixes: tuple[StrictStr, ...] = Field(default=(), description="Modules whose name ends so are units.")


class ZeroConfig(ConfigBlock):
    """What is sharded over the ranks, and how its pieces move."""

    stage: Stage = Field(default=0, description="0 nothing, 1 optimizer state, 2 + gradients, 3 + parameters sharded.")
    contiguous_gradients: Flag = Field(default=True, description="No effect: gradients are always contiguous.")
    reduce_scatter: Flag = Field(default=True, description="No effect: gradients are always reduced by scatter.")
    allgather_partitions: Flag = Field(default=True, description="No effect: parameters are always all-gathered.")
    reduce_bucket_size: Size = Field(default=500_000_000, description="No effect: one reduction per unit.")
    allgather_bucket_size: Size = Field(default=500_000_000, description="No effect: one gather per unit.")
    overlap_comm: Flag | None = Field(default=None, description="No effect: communication always overlaps compute.")
    round_robin_gradients: Flag = Field(default=False, description="No effect: every rank's share is equal already.")
    ignore_unused_parameters: Flag = Field(default=True, description="No effect: unused parameters are never an error.")
    sub_group_size: Size = Field(default=1_000_000_000, description="No effect: the step runs unit by unit.")
    offload_optimizer: OffloadOptimizerConfig = Field(
        default=OffloadOptimizerConfig(), description="Where the optimizer's state rests."
    )
    offload_param: OffloadParamConfig = Field(default=OffloadParamConfig(), description="Where parameter shards rest.")
    stage3_max_live_parameters: Size = Field(
        default=1_000_000_000, description="Parameters that may be whole at once before prefetch waits."
    )
    stage3_max_reuse_distance: Size = Field(
        default=0,
        description="Keep a unit whole until backward if fewer parameters run in between; 0 = release always.",
    )
    stage3_prefetch_bucket_size: Size = Field(
        default=50_000_000,
        description="0 = no prefetch; else the next unit is gathered while one runs, whatever its size.",
    )
    stage3_param_persistence_threshold: CountOrAuto = Field(
        default="auto",
        description="Smaller parameters stay whole on every rank; auto = 100,000, and 1% of the model in all.",
    )
    stage3_model_persistence_threshold: Size | None = Field(
        default=None, description="Most parameters that may stay whole in total; null = no limit."
    )
    stage3_gather_16bit_weights_on_model_save: Flag = Field(
        default=False, description="No effect: `shardwell checkpoint export` makes whole weights from any checkpoint."
    )
    stage3_module_granularity_threshold: Count = Field(
        default=0, description="No effect: name modules that are to be one unit in leaf_module."
    )
    zero_hpz_partition_size: PositiveCountOrAuto = Field(
        default=1,
        description="Consecutive ranks that split a second copy of the parameters, usually those of a node; 1 = none; "
        "auto = a node's, if gathers are faster there.",
    )
    zero_quantized_weights: FlagOrAuto = Field(
        default=False,
        description="Parameters travel as shardwell.codecs.weights says, stage 3; auto = if that is faster.",
    )
    zero_quantized_nontrainable_weights: Flag = Field(
        default=False, description="Frozen parameters rest and travel as shardwell.codecs.frozen says, stage 3."
    )
    zero_quantized_gradients: FlagOrAuto = Field(
        default=False,
        description="Gradients travel as shardwell.codecs.inside and between say, stages 2 and 3; auto = if that is "
        "faster.",
    )
    leaf_module: LeafModuleConfig = Field(default=LeafModuleConfig(), description="Which modules are one unit.")


class CodecsConfig(ConfigBlock):
    """How what travels, or rests frozen, is encoded."""

    weights: CodecKind = Field(default="int8", description="Parameters, with zero_quantized_weights.")
    frozen: CodecKind = Field(
        default="int8", description="Frozen parameters, also at rest, with zero_quantized_nontrainable_weights."
    )
    inside: CodecKind = Field(default="int8", description="Gradients inside a node, with zero_quantized_gradients.")
    between: CodecKind = Field(default="int4", description="Gradients between nodes, with zero_quantized_gradients.")
    feedback: Flag = Field(
        default=False, description="Keep what gradients lose between nodes, and send it with the next ones."
    )


class ShardwellConfig(ConfigBlock):
    """What only shardwell has."""

    divergence_timeout: PositiveReal = Field(
        default=60.0, description="Seconds after which a rank that is waited for is named, with what it does."
    )
    find_unused_parameters: Flag = Field(
        default=False,
        description="Ranks may run different modules, at stages 0 to 2: gradients are averaged when backward is over.",
    )
    nonfinite: Literal["auto", "error", "skip"] = Field(
        default="auto",
        description="On inf or NaN gradients: raise, or skip the step; auto = raise in the first 10 steps, then skip; "
        "raise if 50 follow one another.",
    )
    shard_at_world_one: Flag = Field(
        default=False, description="With one rank, keep stage 3's gather and release instead of resting whole."
    )
    commit: Literal["auto", "after_norm", "at_once", "shadow"] = Field(
        default="auto",
        description="When an update on the host becomes the truth; auto = after the norm, or at once while nothing is "
        "clipped, scaled or skipped and nothing comes between a backward and its step.",
    )
    moments: Literal["fp32", "8bit"] = Field(
        default="fp32",
        description="How Adam's moments rest on the host: in fp32, or in 8 bits each.",
    )
    gradients: Literal["auto", "host", "disk"] = Field(
        default="auto",
        description="Where gradients wait for their norm, or for more micro-steps, if optimizer state rests on disk; "
        "auto = on the host as far as there is room, then on disk.",
    )
    placement: Literal["asked", "auto"] = Field(
        default="asked",
        description="Where units rest at stage 3: asked = where the offload blocks say; auto = as high as there is "
        "room, and no deeper than they say.",
    )
    device_room: Share = Field(
        default=0.25, description="Share of the GPU's free memory that placement leaves for activations and buffers."
    )
    host_room: Share = Field(default=0.1, description="Share of the host's free memory that placement leaves alone.")
    device_memory: CountOrAuto = Field(
        default="auto", description="Bytes that placement may fill on each GPU; auto = what is free, less the room."
    )
    host_memory: CountOrAuto = Field(
        default="auto", description="Bytes that placement may fill on each host; auto = what is free, less the room."
    )
    disk_memory: CountOrAuto = Field(
        default="auto",
        description="Bytes that placement may fill under nvme_path on each node; auto = 95% of it.",
    )
    codecs: CodecsConfig = Field(default=CodecsConfig(), description="How what travels, or rests frozen, is encoded.")
    keep_last: PositiveCount | None = Field(
        default=None, description="Checkpoints to keep in a folder: older ones are removed after a save; null = all."
    )
    async_save: Flag = Field(
        default=False, description="save_checkpoint writes in the background unless it is told otherwise."
    )
    keep_fp32_buffers: tuple[StrictStr, ...] = Field(
        default=("rotary_emb.inv_freq", "rotary_emb.original_inv_freq"),
        description="Buffers whose name ends so keep their dtype under bf16 and fp16; other floating ones are cast.",
    )
    keep_pages: Flag = Field(default=True, description="CPU malloc keeps freed pages instead of returning them.")
    keep_frozen: CountOrAuto = Field(
        default="auto",
        description="Elements of frozen parameters that may stay whole at stage 3 instead of being gathered again; "
        "auto = half of what the GPU had free at the first step, 0 on CPU.",
    )


class Config(ConfigBlock):
    """The whole effective configuration."""

    train_batch_size: PositiveCount | None = Field(
        default=None, description="Samples per optimizer step over all ranks: micro x accumulation x ranks."
    )
    train_micro_batch_size_per_gpu: PositiveCount | None = Field(
        default=None, description="Samples per rank in one forward and backward."
    )
    gradient_accumulation_steps: PositiveCount | None = Field(
        default=None, description="Micro-batches per optimizer step."
    )
    gradient_clipping: Real = Field(default=0.0, description="Largest global gradient norm; 0 = no clipping.")
    prescale_gradients: Flag = Field(
        default=False, description="Divide gradients by the number of ranks before they are summed, not after."
    )
    gradient_predivide_factor: PositiveReal = Field(
        default=1.0, description="Divide gradients by this before they are summed, and by the rest after."
    )
    communication_data_type: Dtype | None = Field(
        default=None, description="Dtype gradients are reduced in; null = the gradients' own."
    )
    steps_per_print: StepsOrNever = Field(default=None, description="Print progress so often; null, 0 = never.")
    wall_clock_breakdown: Flag = Field(
        default=False, description="No effect: use torch.profiler, where gathers and reduces have names."
    )
    zero_allow_untested_optimizer: Flag = Field(
        default=False, description="No effect: every torch optimizer is allowed."
    )
    zero_force_ds_cpu_optimizer: Flag = Field(
        default=True, description="No effect: no optimizer is ever replaced by another."
    )
    optimizer: OptimizerConfig | None = Field(default=None, description="Optimizer to build if none is passed.")
    scheduler: SchedulerConfig | None = Field(default=None, description="Schedule to build if none is passed.")
    bf16: Bf16Config = Field(default=Bf16Config(), description="bfloat16 training.")
    fp16: Fp16Config = Field(default=Fp16Config(), description="float16 training.")
    torch_autocast: AutocastConfig = Field(default=AutocastConfig(), description="torch.autocast by the engine.")
    data_types: DataTypesConfig = Field(default=DataTypesConfig(), description="Dtypes kept between calls.")
    activation_checkpointing: ActivationCheckpointingConfig = Field(
        default=ActivationCheckpointingConfig(), description="How checkpointed inputs are kept."
    )
    checkpoint: CheckpointConfig = Field(
        default=CheckpointConfig(), description="How checkpoints are saved and loaded."
    )
    aio: AioConfig = Field(default=AioConfig(), description="How bytes move to and from drives.")
    zero_optimization: ZeroConfig = Field(default=ZeroConfig(), description="What is sharded, and how it moves.")
    shardwell: ShardwellConfig = Field(default=ShardwellConfig(), description="What only shardwell has.")

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)
    _notes: tuple[Note, ...] = PrivateAttr(default=())

    def model_post_init(self, _context: Any) -> None:
        given = _set_in_python(self)
        self._origins = {key: "python" if key in given else "default" for key, _ in leaves(self)}

    @property
    def origins(self) -> Mapping[str, str]:
        """Dotted key -> where its value came from."""
        return MappingProxyType(self._origins)

    def with_origins(self, origins: Mapping[str, str], values: Mapping[str, Any] | None = None) -> Config:
        """A copy with some top-level `values` replaced, that tells these `origins` for its values."""
        copy = self.model_copy(update=dict(values or {}))
        copy._origins = dict(origins)
        return copy

    def with_block(self, name: str, block: ConfigBlock) -> Config:
        """A copy with another block of this name; values keep their origins."""
        copy = self.model_copy(update={name: block})
        copy._origins, copy._notes = dict(self._origins), self._notes
        return copy

    @property
    def notes(self) -> tuple[Note, ...]:
        """What was found in the source that is not part of the values: meanings chosen, keys of others."""
        return self._notes

    def with_notes(self, notes: Iterable[Note]) -> Config:
        copy = self.model_copy()
        copy._notes = tuple(notes)
        return copy

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain JSON-able values; `load` reads it back."""
        plain: dict[str, Any] = _plain(self)
        return plain


def block_of(field: FieldInfo) -> type[ConfigBlock] | None:
    """The block class that a field holds, or None for a field that holds a plain value."""
    for candidate in (field.annotation, *get_args(field.annotation)):
        if isinstance(candidate, type) and issubclass(candidate, ConfigBlock):
            return candidate
    return None


def admits_auto(field: FieldInfo) -> bool:
    """Whether "auto" is a value of the field itself."""
    candidates = (field.annotation, *get_args(field.annotation))
    return any("auto" in get_args(candidate) for candidate in candidates)


def may_be_absent(field: FieldInfo) -> bool:
    """Whether null means that the field is not there: it has a default, and null is no value of its own."""
    return not field.is_required() and type(None) not in get_args(field.annotation)


def leaves(block: ConfigBlock, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every (dotted key, value) of the block, in the order of the classes; arguments in params are keys too."""
    for name in type(block).model_fields:
        key, value = prefix + name, getattr(block, name)
        if isinstance(value, ConfigBlock):
            yield from leaves(value, f"{key}.")
        elif isinstance(value, dict):
            yield from ((f"{key}.{inner}", item) for inner, item in value.items())
        else:
            yield key, value


def _set_in_python(block: ConfigBlock, prefix: str = "") -> set[str]:
    keys: set[str] = set()
    for name in block.model_fields_set:
        value = getattr(block, name)
        if isinstance(value, ConfigBlock):
            keys |= _set_in_python(value, f"{prefix}{name}.")
        elif isinstance(value, dict):
            keys |= {f"{prefix}{name}.{inner}" for inner in value}
        else:
            keys.add(prefix + name)
    return keys


def _plain(value: Any) -> Any:
    if isinstance(value, ConfigBlock):
        return {name: _plain(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)
