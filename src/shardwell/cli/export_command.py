"""`shardwell checkpoint export`, `zero-to-fp32` and `ds-to-universal`: checkpoints in other formats."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwell.cli.checkpoint_console import (
    CheckpointPath,
    CheckpointTag,
    bar,
    check_own,
    console_of_stdout,
    num_bytes,
    opened,
    printing_warnings,
    shown,
)
from shardwell.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    from shardwell.checkpoint.quantized_weights import Quantizer


class ExportFormat(str, Enum):
    """The formats that checkpoints are exported to."""

    safetensors = "safetensors"
    dcp = "dcp"
    shardwell = "shardwell"
    deepspeed = "deepspeed"
    universal = "universal"


class ExportDtype(str, Enum):
    """The dtypes that weights are exported in."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class Quantization(str, Enum):
    """The codes that the weights of linear layers are exported in."""

    int8 = "int8"
    fp8 = "fp8"


_Out = Annotated[Path, typer.Argument(metavar="OUT", help="The directory to write; it must not exist, or be empty.")]
_Verify = Annotated[bool, typer.Option("--verify/--no-verify", help="Compare with the checksums first.")]
_FORMATS = (
    "safetensors: for from_pretrained; dcp: torch.distributed.checkpoint; shardwell: shardwell's own; deepspeed: the "
    "files of DeepSpeed's engine; universal: DeepSpeed's universal format."
)


def export(
    path: CheckpointPath,
    out: _Out,
    tag: CheckpointTag = None,
    form: Annotated[ExportFormat, typer.Option("--format", help=_FORMATS)] = ExportFormat.safetensors,
    dtype: Annotated[
        ExportDtype | None, typer.Option(help="Of floating tensors, for safetensors; without it, as stored.")
    ] = None,
    max_file_size: Annotated[str, typer.Option(help="Larger models are split over several files.")] = "5GB",
    check: _Verify = True,
    merge: Annotated[
        bool, typer.Option("--merge", help="Adapters of peft become a part of the base model's weights (safetensors).")
    ] = False,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="A folder with the tokenizer's files, for safetensors; else the base model's, if it is here."
        ),
    ] = None,
    quantize: Annotated[
        Quantization | None, typer.Option(help="Quantise the weights of linear layers for inference (safetensors).")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="For deepspeed: of so many ranks; else of the run's.")
    ] = None,
    stage: Annotated[
        int | None, typer.Option(min=1, max=3, help="For deepspeed: of this stage; else the run's.")
    ] = None,
) -> None:
    """Convert a checkpoint. In shardwell's own format it is FOLDER/TAG, and becomes the latest of the folder.

    Adapters of peft are written as peft reads them, without their base model, unless they are merged into it.
    """
    given = {"--dtype": dtype, "--merge": merge or None, "--tokenizer": tokenizer, "--quantize": quantize}
    _refuse(given, form, ExportFormat.safetensors)
    _refuse({"--ranks": ranks, "--stage": stage}, form, ExportFormat.deepspeed)
    if check:
        check_own(path, tag)
    if form is not ExportFormat.safetensors:
        _convert(path, tag, out, form, max_file_size, ranks, stage)
    else:
        _to_safetensors(path, tag, out, dtype, max_file_size, merge, tokenizer, quantize)
    console_of_stdout().print(shown(f"written: {out}"), soft_wrap=True)


def zero_to_fp32(
    checkpoint_dir: CheckpointPath,
    output_dir: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write to; it may hold other files.")],
    tag: Annotated[
        str | None, typer.Option("--tag", "-t", help="Which one of a folder; without it, the latest.")
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option("--max_shard_size", "--max-shard-size", help="Larger models are split over several files.")
    ] = "5GB",
    safe: Annotated[
        bool,
        typer.Option(
            "--safe_serialization", "--safe-serialization", help="model.safetensors instead of pytorch_model.bin."
        ),
    ] = False,
    exclude_frozen: Annotated[
        bool,
        typer.Option("--exclude_frozen_parameters", "--exclude-frozen-parameters", help="Leave frozen parameters out."),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", "-d", hidden=True)] = False,
) -> None:
    """Write the weights in fp32, as DeepSpeed's zero_to_fp32.py does, from a checkpoint of shardwell or DeepSpeed.

    pytorch_model.bin is a pickle by nature: torch.save writes it, of a dictionary of tensors.
    """
    import torch

    from shardwell.checkpoint.fp32_weights import fp32_weights, write_weights
    from shardwell.checkpoint.parsing import parse_byte_size
    from shardwell.checkpoint.sources import MODEL

    limit = parse_byte_size(max_shard_size, "--max_shard_size")
    with opened(checkpoint_dir, tag) as source, printing_warnings():
        weights = fp32_weights(source, exclude_frozen=exclude_frozen, dtype=torch.float32)
        with bar("zero-to-fp32", num_bytes(source, MODEL)) as told:
            files = write_weights(weights, output_dir, max_file_bytes=limit, as_safetensors=safe, progress=told)
    for file in files:
        console_of_stdout().print(shown(f"written: {file}"), soft_wrap=True)


def ds_to_universal(path: CheckpointPath, out: _Out, tag: CheckpointTag = None, check: _Verify = True) -> None:
    """Write DeepSpeed's universal format, from a checkpoint of shardwell or DeepSpeed.

    The file `latest_universal` beside OUT names it.
    """
    if check:
        check_own(path, tag)
    _convert(path, tag, out, ExportFormat.universal, "5GB", None, None)
    console_of_stdout().print(shown(f"written: {out}"), soft_wrap=True)


def _refuse(given: Mapping[str, object], form: ExportFormat, only: ExportFormat) -> None:
    found = [name for name, value in given.items() if value is not None]
    if found and form is not only:
        raise CheckpointError(f"{' and '.join(found)}: only for {only.value}, not for {form.value}")


def _convert(
    path: Path, tag: str | None, out: Path, form: ExportFormat, max_file_size: str, ranks: int | None, stage: int | None
) -> None:
    from shardwell.checkpoint.export import to_dcp, to_deepspeed, to_own, to_universal
    from shardwell.checkpoint.parsing import parse_byte_size

    limit = parse_byte_size(max_file_size, "--max-file-size")
    with opened(path, tag) as source, printing_warnings(), bar("export", num_bytes(source)) as told:
        if form is ExportFormat.dcp:
            to_dcp(source, out, told)
        elif form is ExportFormat.deepspeed:
            to_deepspeed(source, out, ranks, stage, told)
        elif form is ExportFormat.universal:
            to_universal(source, out, told)
        else:
            to_own(source, out.resolve().parent, out.resolve().name, limit, told)


def _to_safetensors(
    path: Path,
    tag: str | None,
    out: Path,
    dtype: ExportDtype | None,
    max_file_size: str,
    merge: bool,
    tokenizer: Path | None,
    quantize: Quantization | None,
) -> None:
    from shardwell.checkpoint.export import to_quantized, to_safetensors
    from shardwell.checkpoint.parsing import parse_byte_size
    from shardwell.checkpoint.sources import MODEL

    limit, kind = parse_byte_size(max_file_size, "--max-file-size"), _torch_dtype(dtype)
    with opened(path, tag) as source, printing_warnings(), bar("export", num_bytes(source, MODEL)) as told:
        if quantize is None:
            to_safetensors(source, out, kind, limit, told, merges=merge, tokenizer=tokenizer)
        else:
            codec: Quantizer = "int8" if quantize is Quantization.int8 else "fp8"
            to_quantized(source, out, codec, kind, limit, told, merges=merge, tokenizer=tokenizer)


def _torch_dtype(dtype: ExportDtype | None) -> torch.dtype | None:
    import torch

    dtypes = {ExportDtype.fp32: torch.float32, ExportDtype.bf16: torch.bfloat16, ExportDtype.fp16: torch.float16}
    return dtypes[dtype] if dtype is not None else None
