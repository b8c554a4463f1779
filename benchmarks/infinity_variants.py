"""What the benchmark of host and disk runs: sizes, where their states rest, and the parts that a run is made of.

All three parts are lists of the same thing, a ``Run``: a decoder, an engine with a place for each state, and how many
steps are taken. Configurations are built by ``benchmarks.offload_variants`` from the variant.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from benchmarks.model import DEEP, DEEPEST, HUGE, LARGE, SEVEN, TALL, XLARGE, DecoderConfig
from benchmarks.offload_variants import CPU, EIGHT_BIT, SOME, Size, Variant
from benchmarks.offload_variants import SIZES as OFFLOAD_SIZES

DISK: dict[str, Any] = {"device": "nvme", "pin_memory": True}
TILES: dict[str, Any] = {**DISK, "buffer_count": 12}  # DeepSpeed's, four of them for each tile on its way
PIPELINED: dict[str, Any] = {**TILES, "pipeline_read": True, "pipeline_write": True}
PAGED: dict[str, Any] = {
    **DISK,
    "buffer_count": 64,
    "buffer_size": 100_000_000,
    "max_in_cpu": 0,
}  # 16 were too few for it
ALL: dict[str, Any] = {**DISK, "max_in_cpu": 0}
FEW: dict[str, Any] = {**DISK, "buffer_count": 3}  # what they take cannot hold states
AUTO: dict[str, Any] = {"placement": "auto", "memory": {"device": 0.9, "host": 0.95}}  # as high as there is room
SEQ, BATCH = 1024, 4


def _ours(offload: dict[str, Any] = DISK, commit: str = "at_once", **kwargs: Any) -> Variant:
    return Variant("shardwell", 3, offload=offload, own={"commit": commit, **kwargs.pop("own", {})}, **kwargs)


def _theirs(**kwargs: Any) -> Variant:
    return Variant("deepspeed", 3, **kwargs)


VARIANTS: dict[str, Variant] = {  # the first ones are what a run that ends early should have
    "shardwell3:disk": _ours(),
    "shardwell3:disk:parameters": _ours(parameters=ALL),
    "deepspeed3:disk:pipelined": _theirs(offload=PIPELINED),
    "shardwell3:disk:parameters:clip": _ours(commit="after_norm", clip=SOME, parameters=ALL),
    "shardwell3:host": _ours(CPU),
    "shardwell3:host:parameters": _ours(CPU, parameters=CPU),
    "deepspeed3:disk": _theirs(offload=TILES),
    "deepspeed3:disk:parameters": _theirs(offload=PIPELINED, parameters=PAGED),
    "shardwell3:disk:clip": _ours(commit="after_norm", clip=SOME),
    "shardwell3:disk:parameters-on-host": _ours(parameters=CPU),
    "shardwell3:host:clip": _ours(CPU, "after_norm", clip=SOME),
    "shardwell3:auto": _ours(FEW, parameters=FEW, own=AUTO, born_sharded=True),
    "shardwell3:auto:clip": _ours(FEW, "after_norm", clip=SOME, parameters=FEW, own=AUTO, born_sharded=True),
    "shardwell3:auto:8bit": _ours(FEW, parameters=FEW, own=AUTO | EIGHT_BIT, born_sharded=True),
}
COMPARED = tuple(name for name, variant in VARIANTS.items() if not variant.born_sharded)


def _grown(model: DecoderConfig) -> Size:
    return Size(replace(model, seq=SEQ), BATCH)


SIZES: dict[str, Size] = {
    "tiny": OFFLOAD_SIZES["tiny"],
    "1b": OFFLOAD_SIZES["1b"],
    "1.3b": _grown(LARGE),
    "3.1b": _grown(XLARGE),
    "6.7b": _grown(SEVEN),
    "13b": _grown(HUGE),
    "21b": _grown(TALL),
    "25b": _grown(DEEP),
    "40b": _grown(DEEPEST),
}
GROWTH = ("1.3b", "3.1b", "6.7b", "13b", "25b", "40b")
LARGEST = ("25b", "40b", "21b")
IN_EIGHT_BITS = ("40b",)  # fp32 moments would not fit
CLIPPED = ("21b",)  # gradients wait for their norm, 2 bytes more for each parameter
MOMENTS = {"fp32": 8.0, "8bit": 2 * (1 + 1 / 256)}  # bytes a parameter: Adam has two


@dataclass(frozen=True)
class Run:
    """One process: a variant of a size."""

    size: str
    variant: str
    warm_up: int
    steps: int
    limit: float  # seconds of the process


def placed(size: str) -> str:
    """The variant of a size that rests wherever there is room."""
    if size in CLIPPED:
        return "shardwell3:auto:clip"
    return "shardwell3:auto:8bit" if size in IN_EIGHT_BITS else "shardwell3:auto"


def runs_of(part: str, size: str, peer_limit: float) -> dict[str, Run]:
    """The runs of a part by name; ``size`` is that of all variants that are compared."""
    if part == "disk1b":
        found = {name: Run(size, name, warm_up=2, steps=3, limit=150.0) for name in COMPARED}
        theirs = {name: replace(run, warm_up=1, steps=2, limit=peer_limit) for name, run in found.items()}
        return {name: theirs[name] if VARIANTS[name].engine == "deepspeed" else found[name] for name in found}
    if part == "largest":
        return {name: Run(name, placed(name), warm_up=1, steps=3, limit=540.0) for name in LARGEST}
    return {name: Run(name, placed(name), warm_up=1, steps=2, limit=420.0) for name in GROWTH}


def located(variant: Variant, folder: str) -> Variant:
    """The variant with a folder for what rests on disk."""

    def put(block: dict[str, Any] | None) -> dict[str, Any] | None:
        return {**block, "nvme_path": folder} if block is not None and block["device"] == "nvme" else block

    return replace(variant, offload=put(variant.offload), parameters=put(variant.parameters))


def disk_bytes(optimizer: float, parameters: float) -> dict[str, float]:
    """What a step must read from disk and write there, for so many bytes of each state that rest there.

    State is read and written once. Parameters are read for the forward, for the backward and for the update, whose
    masters they are the upper halves of, and written by it.
    """
    return {"read": optimizer + 3 * parameters, "written": optimizer + parameters}


def disk_bytes_of(variant: Variant, parameters: int) -> dict[str, float]:
    """The same by the configuration, where it says what rests on disk: 24 bytes a parameter in all, or 28."""
    if variant.offload is None or variant.offload["device"] != "nvme":
        return disk_bytes(0, 0)
    moments = MOMENTS[variant.own.get("moments", "fp32")]
    if variant.parameters is not None and variant.parameters["device"] == "nvme":
        return disk_bytes((2 + moments) * parameters, 2 * parameters)
    return disk_bytes((4 + moments) * parameters, 0)


def disk_bytes_in_all(variant: Variant, parameters: int, steps: int) -> float:
    """What the first steps read and write together. Moments begin as zeros, which nobody reads."""
    each = disk_bytes_of(variant, parameters)
    unread = MOMENTS[variant.own.get("moments", "fp32")] * parameters if each["read"] else 0.0
    return steps * sum(each.values()) - unread
