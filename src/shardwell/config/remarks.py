"""What is to be said of a configuration that is right: keys without effect, "auto" that nobody fills in, other numbers.

Only what applies, and only what follows from the file. What depends on the model is said by the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pydantic.fields import FieldInfo

from shardwell.config.notes import Note
from shardwell.config.schema import Config, ConfigBlock, leaves

_NO_EFFECT = "No effect: "
_DEVICES = ("zero_optimization.offload_optimizer.device", "zero_optimization.offload_param.device")
_PREFETCH = "zero_optimization.stage3_prefetch_bucket_size"
# Who asks for these waits for output that does not come.
_LOST = ("wall_clock_breakdown", "activation_checkpointing.profile")
# Numbers that a file of DeepSpeed's leaves open, and that are others there.
_SCHEDULES = {
    "WarmupLR": "warm-up is one step earlier than DeepSpeed's, whose first two steps have the rate of step 0",
    "WarmupDecayLR": "warm-up and decay are one step earlier than DeepSpeed's, whose first two steps have the rate of "
    "step 0; without warmup_max_lr the highest rate is the optimizer's own (DeepSpeed: 0.001)",
    "WarmupCosineLR": "warm-up and decay are one step earlier than DeepSpeed's, and the rate at step 0 is "
    "warmup_min_ratio (DeepSpeed: 0)",
    "OneCycle": "momentum begins at its highest and betas[1] stays (DeepSpeed: lowest, and 0.99)",
}


def remarks(config: Config) -> list[Note]:
    """All that there is to say; `told` sorts it."""
    return [
        *config.notes,
        *(Note(f"{key} has no effect: {why}", _is_lost(config, key), (key, why)) for key, why in _unused(config)),
        *_autos(config),
        *_differences(config),
    ]


def told(notes: Iterable[Note]) -> tuple[list[str], list[str]]:
    """Sentences for what hurts if it is not heard, and for the rest; keys without effect are one sentence."""
    every = list(dict.fromkeys(notes))
    hurting = [note.text for note in every if note.hurts]
    rest = [note.text for note in every if not note.hurts and note.unused is None]
    reasons: dict[str, list[str]] = {}
    for note in every:
        if note.unused is not None and not note.hurts:
            reasons.setdefault(note.unused[1], []).append(note.unused[0])
    if reasons:
        listed = "; ".join(f"{', '.join(keys)} ({why})" for why, keys in reasons.items())
        rest.append(f"without effect: {listed}")
    return hurting, rest


def _is_lost(config: Config, key: str) -> bool:
    return key in _LOST and dict(leaves(config))[key] is True


def _is_given(config: Config, key: str) -> bool:
    origin = config.origins.get(key, "default")
    return origin != "default" and not origin.startswith(("auto ->", "derived from"))


def _unused(config: Config) -> Iterator[tuple[str, str]]:
    """Keys that the user wrote and that change nothing, and why."""
    zero = config.zero_optimization
    devices = {"offload_optimizer": zero.offload_optimizer.device, "offload_param": zero.offload_param.device}
    off = [f".{block}." for block, device in devices.items() if device == "none"]
    values = dict(leaves(config))
    for key, info in _fields(config, ""):
        name = key.rpartition(".")[2]
        asks = _is_given(config, key) and not any(block in key for block in off)  # a block that is off says so itself
        if not asks or (values[key] == info.default and not values[key]):
            continue
        description = info.description or ""
        if description.startswith(_NO_EFFECT):
            yield key, description.removeprefix(_NO_EFFECT).rstrip(".").replace("`", "")
        elif name.startswith("stage3_") and zero.stage != 3:
            yield key, f"at stage {zero.stage}"
        elif key == _PREFETCH and zero.stage3_prefetch_bucket_size > 0:
            yield key, "the next unit is gathered ahead whatever its size; 0 turns that off"
        elif key.startswith("aio.") and "nvme" not in devices.values():
            yield key, "nothing rests on disk"


def _fields(block: ConfigBlock, prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, info in type(block).model_fields.items():
        value = getattr(block, name)
        if isinstance(value, ConfigBlock):
            yield from _fields(value, f"{prefix}{name}.")
        elif not isinstance(value, dict):
            yield prefix + name, info


def _autos(config: Config) -> Iterator[Note]:
    """What an integration would have filled in, and what holds instead."""
    autos = {key for key, origin in config.origins.items() if origin.startswith("auto ->")}
    for block in ("optimizer", "scheduler"):
        names = sorted(key.rpartition(".")[2] for key in autos if key.startswith(f"{block}.params."))
        if names:
            kind = getattr(config, block).type if getattr(config, block) is not None else block
            yield Note(
                f'{block}.params: {", ".join(names)} "auto": nothing fills that in here; the defaults of {kind} hold. '
                "Write numbers",
                hurts=True,
            )
    if "gradient_clipping" in autos:
        yield Note('gradient_clipping "auto": nothing fills it in here, and nothing is clipped; write a number', True)
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    if autos.intersection(sizes):
        found = ", ".join(f"{key} {getattr(config, key)}" for key in sizes)
        yield Note(f'batch sizes "auto": nothing fills them in here, so {found}', hurts=True)
    precisions = [key for key in ("bf16.enabled", "fp16.enabled") if key in autos]
    if precisions:
        became = ", ".join(f"{key} {config.origins[key].removeprefix('auto -> ')}" for key in precisions)
        yield Note(f'precision "auto": nothing fills it in here; {became}. Write true or false', hurts=True)
    for key in _DEVICES:
        if key in autos:
            yield Note(f'{key} "auto": nothing fills it in here, and nothing is offloaded', hurts=True)


def _differences(config: Config) -> Iterator[Note]:
    """Where the same file means other numbers for DeepSpeed; that hurts whoever brings such a file."""
    hurts = is_deepspeeds(config)
    if config.origins.get("gradient_clipping", "default") == "default":
        yield Note(
            "nothing is clipped: gradient_clipping is not given (DeepSpeed since mid-2026 clips at 1.0 then)", hurts
        )
    if config.scheduler is not None and config.scheduler.type in _SCHEDULES:
        yield Note(f"{config.scheduler.type}: {_SCHEDULES[config.scheduler.type]}", hurts)
    narrow = config.bf16.enabled or config.fp16.enabled
    if narrow and (config.gradient_accumulation_steps or 1) > 1 and config.data_types.grad_accum_dtype is None:
        dtype = "bf16" if config.bf16.enabled else "fp16"
        yield Note(f"gradients add up over micro-steps in fp32 (DeepSpeed: {dtype}, unless it is told)")


def is_deepspeeds(config: Config) -> bool:
    """Whether a file was made for DeepSpeed: it has keys that only DeepSpeed acts on."""
    described = (info.description or "" for key, info in _fields(config, "") if _is_given(config, key))
    return bool(config.notes) or any(text.startswith(_NO_EFFECT) for text in described)
