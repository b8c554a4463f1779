"""Notes about a valid configuration: keys without effect, unfilled "auto", numbers that differ from DeepSpeed's.

Only notes that apply, and that follow from the file alone; `engine/startup_report.py` adds those about the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pydantic.fields import FieldInfo

from shardwell.config.block import ConfigBlock, leaves
from shardwell.config.deepspeed_keys import KEYS, Inert, Limited
from shardwell.config.notes import Note
from shardwell.config.schema import Config

_DEVICES = ("zero_optimization.offload_optimizer.device", "zero_optimization.offload_param.device")
# Defaults that a file leaves open, and that differ in DeepSpeed.
_SCHEDULES = {
    "WarmupLR": "warm-up is one step earlier than DeepSpeed's, whose first two steps have the rate of step 0",
    "WarmupDecayLR": "warm-up and decay are one step earlier than DeepSpeed's, whose first two steps have the rate of "
    "step 0; without warmup_max_lr the highest rate is the optimizer's own (DeepSpeed: 0.001)",
    "WarmupCosineLR": "warm-up and decay are one step earlier than DeepSpeed's, and the rate at step 0 is "
    "warmup_min_ratio (DeepSpeed: 0)",
    "OneCycle": "momentum begins at its highest and betas[1] stays (DeepSpeed: lowest, and 0.99)",
}


def remarks(config: Config) -> list[Note]:
    """Return all notes about a configuration; `told` sorts them."""
    return [
        *config.notes,
        *_inert(config),
        *(Note(f"{key} has no effect: {why}", unused=(key, why)) for key, why in _unused(config)),
        *_autos(config),
        *_differences(config),
    ]


def told(notes: Iterable[Note]) -> tuple[list[str], list[str]]:
    """Return the sentences of notes that hurt if they are not read, and of the others; unused keys share one."""
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


def _is_given(config: Config, key: str) -> bool:
    origin = config.origins.get(key, "default")
    return origin != "default" and not origin.startswith(("auto ->", "derived from"))


def _inert(config: Config) -> Iterator[Note]:
    """Yield a note for each key of DeepSpeed's in the file that has no effect, unless it says what holds anyway."""
    off = _blocks_off(config)
    for key, value in config.inert_keys.items():
        row = KEYS[key]
        if not isinstance(row, Inert | Limited) or not _is_given(config, key) or key.startswith(off):
            continue
        default = row.default if isinstance(row, Inert) else None
        if value != default or value:
            is_missed = isinstance(row, Inert) and row.promises_output and value is True
            yield Note(f"{key} has no effect: {row.reason}", is_missed, unused=(key, row.reason))


def _unused(config: Config) -> Iterator[tuple[str, str]]:
    """Yield keys in the file that change nothing together with its other values, and the reasons."""
    zero = config.zero_optimization
    off = _blocks_off(config)
    values = dict(leaves(config))
    for key, info in _fields(config, ""):
        if not _is_given(config, key) or key.startswith(off) or (values[key] == info.default and not values[key]):
            continue
        if key.rpartition(".")[2].startswith("stage3_") and zero.stage != 3:
            yield key, f"at stage {zero.stage}"
        elif key.startswith("aio.") and "nvme" not in (zero.offload_optimizer.device, zero.offload_param.device):
            yield key, "nothing is stored on NVMe"


def _blocks_off(config: Config) -> tuple[str, ...]:
    """Return the prefixes of the offload blocks that are off: of their other keys nothing is expected."""
    zero = config.zero_optimization
    devices = {"offload_optimizer": zero.offload_optimizer.device, "offload_param": zero.offload_param.device}
    return tuple(f"zero_optimization.{block}." for block, device in devices.items() if device == "none")


def _fields(block: ConfigBlock, prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, info in type(block).model_fields.items():
        value = getattr(block, name)
        if isinstance(value, ConfigBlock):
            yield from _fields(value, f"{prefix}{name}.")
        elif not isinstance(value, dict):
            yield prefix + name, info


def _autos(config: Config) -> Iterator[Note]:
    """Yield notes about values that an integration would have filled in, with what holds instead."""
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
    """Yield notes about numbers that differ from DeepSpeed's; they hurt if the file was written for DeepSpeed."""
    hurts = is_for_deepspeed(config)
    if config.origins.get("gradient_clipping", "default") == "default":
        yield Note(
            "nothing is clipped: gradient_clipping is not given (DeepSpeed since mid-2026 clips at 1.0 then)", hurts
        )
    if config.scheduler is not None and config.scheduler.type in _SCHEDULES:
        yield Note(f"{config.scheduler.type}: {_SCHEDULES[config.scheduler.type]}", hurts)
    narrow = config.bf16.enabled or config.fp16.enabled
    if narrow and (config.gradient_accumulation_steps or 1) > 1 and config.data_types.grad_accum_dtype is None:
        dtype = "bf16" if config.bf16.enabled else "fp16"
        yield Note(f"gradients add up over micro-steps in fp32 (DeepSpeed: {dtype} by default)")


def is_for_deepspeed(config: Config) -> bool:
    """Tell whether a file was written for DeepSpeed: it has keys that only DeepSpeed acts on."""
    return any(not note.is_own for note in config.notes) or any(_is_given(config, key) for key in config.inert_keys)
