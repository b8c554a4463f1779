"""Small checkpoints, and sources that tell how they are read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwell.checkpoint import FilePiece, Folder, Manifest, TensorRecord, write
from shardwell.checkpoint.sources import Source, StoredTensor
from shardwell.checkpoint.sources.reading import read_full

VALUES: dict[str, Any] = {
    "counters": {"global_steps": 30, "micro_steps": 60, "skipped_steps": 1, "global_samples": 240},
    "world_size": 2,
    "config": {"zero_optimization": {"stage": 3}},
    "versions": {"shardwell": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
    "optimizer": {"kind": "AdamW", "param_groups": [{"lr": 0.25, "betas": [0.9, 0.99], "weight_decay": 0.5}]},
    "aliases": {"head.weight": "embed.weight"},
    "scalar/embed.weight/step": 30.0,
    "scalar/conv.weight/step": 30.0,
}


def tensors(seed: int = 0) -> dict[str, Tensor]:
    """A small model with its optimizer's state: bf16 and integers, a channels-last weight, a tied one, an empty one."""
    generator = torch.Generator().manual_seed(seed)
    embed = torch.randn(6, 4, generator=generator)
    conv = torch.randn(2, 3, 4, 5, generator=generator).to(memory_format=torch.channels_last)
    return {
        "model/embed.weight": embed,
        "model/conv.weight": conv,
        "model/half": torch.randn(7, generator=generator).bfloat16(),
        "model/count": torch.tensor(11),
        "model/mask": torch.tensor([True, False, True]),
        "model/empty": torch.empty(0, 4),
        "state/embed.weight/exp_avg": torch.randn(6, 4, generator=generator),
        "state/embed.weight/exp_avg_sq": torch.rand(6, 4, generator=generator),
        "state/conv.weight/exp_avg": torch.randn(2, 3, 4, 5, generator=generator),
        "state/conv.weight/exp_avg_sq": torch.rand(2, 3, 4, 5, generator=generator),
    }


def save_own(
    root: Path, tag: str, content: Mapping[str, Tensor], values: Mapping[str, Any] | None = None, num_files: int = 2
) -> Path:
    """A committed checkpoint, each tensor of it cut into stretches over the files, as ranks would do it."""
    folder = Folder(root)
    path = folder.begin(tag)
    flat = {name: _memory(tensor) for name, tensor in content.items()}
    pieces: dict[str, list[FilePiece]] = {name: [] for name in content}
    files = {}
    for number in range(num_files):
        file = f"rank-{number}.safetensors"
        stretches = {}
        for name, elements in flat.items():
            step = -(-len(elements) // num_files)
            stretch = elements[number * step : (number + 1) * step]
            if len(stretch):
                stretches[name] = stretch
                pieces[name].append(FilePiece(file, name, number * step, len(stretch)))
        files[file] = write(path / file, stretches)
    records = {
        name: TensorRecord(
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            "parameter" if name.startswith("model/") else f"state:{name.rpartition('/')[2]}",
            tuple(pieces[name]),
        )
        for name, tensor in content.items()
    }
    return folder.commit(path, tag, Manifest(records, files, values or {}))


def everything(source: Source) -> dict[str, Tensor]:
    return {name: read_full(source, name) for name in source.tensors}


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """The same names, dtypes, shapes and bits."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(found[name], tensor), name


def same_bits(found: Tensor, expected: Tensor) -> bool:
    """The same dtype, shape and bits, NaN among them."""
    return (
        found.dtype == expected.dtype
        and found.shape == expected.shape
        and torch.equal(
            found.contiguous().reshape(-1).view(torch.uint8), expected.contiguous().reshape(-1).view(torch.uint8)
        )
    )


class Counting:
    """A source in memory that writes down what is asked of it."""

    where = "memory"
    bytes_read = 0

    def __init__(self, content: Mapping[str, Tensor], values: Mapping[str, Any] | None = None) -> None:
        self.tensors = {name: StoredTensor(one.dtype, tuple(one.shape), one.stride()) for name, one in content.items()}
        self.values: Mapping[str, Any] = values or {}
        self.asked: list[tuple[str, int, int]] = []
        self._flat = {name: _memory(tensor) for name, tensor in content.items()}

    def read(self, name: str, start: int, stop: int) -> Tensor:
        self.asked.append((name, start, stop))
        return self._flat[name][start:stop].clone()

    def close(self) -> None:
        pass


def _memory(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,))
